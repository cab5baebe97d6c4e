"""A checkpoint's record of a model is a configuration that makes the same model again."""

import pytest
from flax import nnx

import jrec
from jrec.app.config.model import ModelConfig
from jrec.run.record import record_of

OPTIONS = {"dropout": 0.1, "batch_norm": True, "calibrated": True, "dense_boundaries": ((0.0, 1.0), ())}


def model_of(kind, **options):
    features = [jrec.FeatureConfig(name="item", table="item")]
    if kind == "tbsm":
        features.append(jrec.FeatureConfig(name="history", table="item", max_length=3, pooling="none"))
    layout = jrec.EmbeddingLayout.build([jrec.TableConfig(name="item", rows=9, dim=4)], features)
    sizes = {"num_dense": 2, "bottom_mlp": (4,), "top_mlp": (3, 1)} | options
    if kind == "tbsm":
        config = jrec.nn.TBSMConfig(histories=(("item", "history"),), tower_mlp=(4,), **sizes)
        return jrec.nn.TBSM(config, layout, rngs=nnx.Rngs(0, dropout=1))
    return jrec.nn.DLRM(jrec.nn.DLRMConfig(**sizes), layout, rngs=nnx.Rngs(0, dropout=1))


@pytest.mark.parametrize("kind", ["dlrm", "tbsm"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
def test_a_record_is_a_configuration_of_the_model(kind, options):
    model = model_of(kind, **options)
    record = record_of(model, model.embeddings.table_key()).of(("age", "price"), None)
    found = ModelConfig.from_dict(record.model)
    assert (found.kind, found.dropout, found.batch_norm) == (
        kind,
        *(options.get(k, 0) for k in ("dropout", "batch_norm")),
    )
    assert found.calibrate == options.get("calibrated", False)
    assert dict(found.dense_boundaries) == ({"age": (0.0, 1.0)} if options else {})
    assert record.of((), None) == record
    assert record.dense == ("age", "price")


def test_members_and_heads_are_in_the_record():
    model = model_of("dlrm", members=2, wide=True, interaction="concat")
    found = ModelConfig.from_dict(record_of(model, model.embeddings.table_key()).of(("age", "price"), None).model)
    assert (found.members, found.embedding_dim, found.table_dim) == (2, 1, 4)
    for own in ({}, {"dropout": 0.1}):
        heads = jrec.nn.MultiTaskConfig(tasks=("click", "purchase"), experts=2, expert_mlp=(5,), tower_mlp=(), **own)
        model = model_of("dlrm", top_mlp=(), multi_task=heads)
        record = record_of(model, model.embeddings.table_key())
        if own:  # a dropout of the heads alone, which no configuration has
            assert record is None
        else:
            found = ModelConfig.from_dict(record.of(("age", "price"), None).model)
            assert (found.top_mlp, found.multi_task.tasks) == ((5, 1), ("click", "purchase"))
            assert (found.multi_task.experts, found.multi_task.tower_mlp) == (2, ())
