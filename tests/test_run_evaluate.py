"""``Run.evaluate``: the metrics of what ``Run.predict`` gives, wherever rows live, whatever the batches."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distribute_cases import DENSE, ROWS, columns, layout_of, mesh_of, modules, three_tiers
from flax import nnx

import jrec
from jrec import metrics
from jrec.data.packing import pack_batch
from jrec.data.schema import DatasetError


def distributed(place):
    layout = layout_of(tiers=[("user", "host")] if place == "host" else [])
    options = {"mesh": mesh_of(4), "plan": three_tiers(4, layout)} if place == "three tiers" else {}
    run = jrec.distribute(*modules(layout), **options)
    step = run.compile()
    for batch in run.feed(map(columns, range(5)), dense=DENSE):
        step(batch)
    return run


def joined(parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("place", ["device", "host", "three tiers"])
def test_metrics_are_those_of_predictions(place):
    parts = [columns(step, size) for step, size in ((20, 16), (21, 16), (22, 7))]
    together = joined(parts)
    with distributed(place) as run:
        logits = run.predict(together, dense=DENSE)
        want = metrics.evaluate(metrics.Scores(logits=logits, labels=together["label"] == 1)).to_dict()
        assert 0 < want["auc"] < 1
        none = {name: column[:0] for name, column in together.items()}
        packed = [pack_batch(run.layout, part, dense=DENSE, batch_size=24) for part in parts]  # with padding
        for batches, size in ((parts, None), ([together], 16), (iter(packed), None), ([together, none], 10)):
            found = run.evaluate(batches, dense=DENSE, batch_size=size)
            assert found.to_dict() == pytest.approx(want, rel=1e-6)
        assert run.steps == 5


class Two(nnx.Module):
    """Logits by label, made of a model's one."""

    def __init__(self, model, **scales):
        self.model, self.embeddings, self.scales = model, model.embeddings, scales

    def logits(self, dense, activations, bags):
        logits = self.model.logits(dense, activations, bags)
        return {name: jnp.float32(scale) * logits for name, scale in self.scales.items()}


def stepped(model):
    return jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))


def test_several_labels_of_which_some_are_not_known():
    model, _ = modules(layout_of())
    two = Two(model, watch=1.0, buy=-2.0)
    run = jrec.distribute(two, stepped(two))
    given = columns(3, 40)
    given["buy"] = np.random.default_rng(3).integers(-1, 2, 40).astype(np.float32)
    found = run.evaluate([given], dense=DENSE, batch_size=16, extras=["buy"])
    logits, known = run.predict(given, dense=DENSE), given["buy"] >= 0
    assert found.keys() == {"watch", "buy"}
    assert found["watch"].auc == metrics.auc(logits["watch"], given["label"])
    assert found["buy"].auc == metrics.auc(logits["buy"][known], given["buy"][known])
    assert found["buy"].examples == known.sum() < 40
    with pytest.raises(ValueError, match=r"of buy and watch neither is among the extras .*extras=\['watch'\]"):
        run.evaluate([given], dense=DENSE)
    assert found["buy"].log_loss == pytest.approx(metrics.log_loss(logits["buy"][known], given["buy"][known]))


def test_values_without_a_row_are_counted():
    layout = layout_of()
    run = jrec.distribute(*modules(layout))
    options = {
        "vocabularies": {"item": {i: i for i in range(1, 10)} | {0: 0}},
        "oov_rows": {name: rows - 1 for name, rows in ROWS.items()},
    }
    found = run.evaluate([columns(1, 64)], dense=DENSE, on_bad_id="oov", **options)
    assert found.examples == 64
    share = np.mean(columns(1, 64)["item"] >= 10)
    assert run.unknown.to_dict()["item"]["share"] == pytest.approx(share)
    with pytest.raises(DatasetError, match="item"):
        run.evaluate([columns(1, 64)], dense=DENSE, on_bad_id="oov", max_unknown=0.1, **options)


def test_what_cannot_be_scored_is_refused():
    run = jrec.distribute(*modules(layout_of()))
    with pytest.raises(DatasetError, match="there are no examples"):
        run.evaluate([], dense=DENSE)
    bad = columns(1) | {"label": np.full(16, 3.0, np.float32)}
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        run.evaluate([bad], dense=DENSE)
    unlabelled = {name: column for name, column in columns(1).items() if name != "label"}
    with pytest.raises(DatasetError, match="label are missing"):
        run.evaluate([unlabelled], dense=DENSE)
    model, _ = modules(layout_of())
    wide = Two(model, a=1.0)
    wide.logits = lambda dense, activations, bags: jnp.zeros((dense.shape[0], 3))
    run = jrec.distribute(wide, stepped(wide))
    with pytest.raises(ValueError, match=r"have shapes \(16, 3\) for 16 examples; use run.predict"):
        run.evaluate([columns(1)], dense=DENSE)
