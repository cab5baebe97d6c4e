"""``Run.export``: a user's own model, trained by the library, gives the run's scores when it is served."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_model
import pytest
import shop_logs
from distribute_cases import DENSE, ROWS, columns, mesh_of, three_tiers
from export_cases import SIZES, reseal
from flax import nnx
from grids import some_of
from growing_cases import columns as growing_columns
from growing_cases import growing
from growing_cases import layout_of as growing_layout

import jrec
from jrec import nn, ops, serving
from jrec.data.schema import DatasetError, Schema

PLAIN = {"dropout": 0.0, "batch_norm": False}
STATEFUL = {"dropout": 0.5, "batch_norm": True}


def layout_of(*, tiers=(), planned=False, dtype="float32"):
    """Pooled, unpooled, weighted features and one of maxima; two read one table, which may be a tensor train."""
    tables = [
        jrec.TableConfig(name=n, rows=r, dim=8, tier=dict(tiers).get(n, "sharded"), dtype=dtype)
        for n, r in ROWS.items()
    ]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="item", table="item", weighted=True),
        jrec.FeatureConfig(name="tags", table="tag", max_length=4, pooling="mean"),
        jrec.FeatureConfig(name="seen", table="tag", max_length=4, pooling="none"),
        jrec.FeatureConfig(name="most", table="item", max_length=3, pooling="max"),
    ]
    return jrec.EmbeddingLayout.build(tables, features, planned=planned)


def examples(step, size=16):
    found, rng = columns(step, size), np.random.default_rng(step + 100)
    found |= {"item:weight": rng.random(size, np.float32), "seen": found["tags"][:, ::-1].copy()}
    return found | {"most": [rng.integers(0, ROWS["item"], n).tolist() for n in rng.integers(0, 4, size)]}


def modules(layout, model_of=own_model.make, **options):
    rngs = nnx.Rngs(0)
    model = model_of(nn.EmbeddingCollection(layout, rngs=rngs), num_dense=len(DENSE), rngs=rngs, **options)
    rows = ops.Adagrad(learning_rate=0.1)
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=rows)


def trained(run, steps=3, batches=examples, first=0):
    step = run.compile()
    for batch in run.feed((batches(first + n) for n in range(steps)), dense=DENSE):
        step(batch)
    return run


PLACES = {
    "device": (PLAIN, lambda made: jrec.distribute(*made(layout_of()))),
    "host": (PLAIN, lambda made: jrec.distribute(*made(layout_of(tiers=[("user", "host")])))),
    "mesh": (PLAIN, lambda made: jrec.distribute(*made(layout_of()), mesh=mesh_of(4))),
    "three tiers": (
        PLAIN, lambda made: jrec.distribute(*made(layout_of()), mesh=mesh_of(4), plan=three_tiers(4, layout_of()))
    ),
    "bfloat16": (PLAIN, lambda made: jrec.distribute(*made(layout_of(dtype="bfloat16")))),
}  # fmt: skip
PLACES |= {f"{place}, stateful": (STATEFUL, PLACES[place][1]) for place in ("device", "host", "three tiers")}


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", some_of(PLACES, "device, stateful", "host, stateful", "three tiers", "bfloat16"))
def test_an_export_gives_the_scores_of_the_run_wherever_its_rows_are(place, tmp_path):
    options, distribute = PLACES[place]
    asked = {k: v for k, v in examples(50, 33).items() if k != "label"}
    with trained(distribute(lambda layout: modules(layout, **options))) as run:
        manifest = run.export(tmp_path / "whole", dense=DENSE)
        want = run.predict(asked, dense=DENSE)
        trained(run, first=10)
        delta = run.export(tmp_path / "delta", dense=DENSE, since=str(tmp_path / "whole"))
        after = run.predict(asked, dense=DENSE)
    assert (manifest.run, manifest.step, delta.step, delta.parent) == ("DeepFM", 3, 6, manifest.id)
    model = serving.load(tmp_path / "whole", batch_sizes=SIZES)
    close(model.logits(asked), want)
    close(model(asked), 1 / (1 + np.exp(-want)))
    assert not np.allclose(want, after, rtol=1e-4)
    model.apply(tmp_path / "delta")
    close(model.logits(asked), after)
    assert (tmp_path / "delta" / "tables" / "user.changed.npy").exists()


def evaluated(run, asked):
    """Logits of a copy of the run's model on one device in evaluation mode, which the export must equal."""
    model = nnx.clone(run.modules()[0])
    model.eval()
    batch = jax.tree.map(jnp.asarray, jrec.data.pack_batch(run.layout, asked, dense=DENSE, label=None))
    activations, _ = model.embeddings.lookup(batch.bags)
    return np.asarray(model.logits(batch.dense, activations, batch.bags))


def test_dropout_and_batch_statistics_are_those_of_evaluation_and_the_run_goes_on(tmp_path):
    asked = examples(50, 33)
    with trained(jrec.distribute(*modules(layout_of(), **STATEFUL)), steps=4) as run:
        want, before = evaluated(run, asked), jax.tree.map(np.array, _without_keys(run))
        run.export(tmp_path / "export", dense=DENSE)
        assert not run.modules()[0].tower.dropout.deterministic
        jax.tree.map(np.testing.assert_array_equal, _without_keys(run), before)
        assert np.abs(run.modules()[0].tower.norms[0].mean[...]).max() > 0
        trained(run, first=4)
    close(serving.load(tmp_path / "export", batch_sizes=SIZES).logits(asked), want)


def _without_keys(run):
    return [x for x in jax.tree.leaves(nnx.state(run.modules())) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def test_tensor_trains_and_quantized_rows(tmp_path):
    shape = ops.TTShape.search(280, 8, ranks=2)
    tables = [
        jrec.TableConfig(name="user", rows=20, dim=8, of_rows=300),
        jrec.TableConfig(name="user", rows=280, dim=8, of_rows=300, first_row=20, tier="tt", tt_shape=shape),
    ]
    features = [jrec.FeatureConfig(name="user", table="user")]
    layout, asked = jrec.EmbeddingLayout.build(tables, features), examples(50, 300)
    asked["user"] = np.arange(300)
    with trained(jrec.distribute(*modules(layout))) as run:
        want = run.predict(asked, dense=DENSE)
        for dtype in ("float32", "int8"):
            run.export(tmp_path / dtype, dense=DENSE, dtype=dtype)
    close(serving.load(tmp_path / "float32", batch_sizes=SIZES).logits(asked), want)
    got = serving.load(tmp_path / "int8", batch_sizes=SIZES).logits(asked)
    assert 0 < np.abs(got[:20] - want[:20]).max() < 1e-2
    close(got[20:], want[20:])


@pytest.mark.filterwarnings("ignore::jrec.data.unknown.UnknownValuesWarning")  # most values asked for are new
def test_values_of_growing_tables_have_the_rows_that_the_run_gives_them(tmp_path):
    asked = growing_columns(50, 33)
    batches = {"batches": growing_columns}
    with jrec.distribute(*modules(growing_layout()), growing=growing()) as run:
        trained(run, **batches).export(tmp_path / "whole", dense=DENSE)
        want = run.predict(asked, dense=DENSE)
        trained(run, first=20, **batches).export(tmp_path / "delta", dense=DENSE, since=[tmp_path / "whole"])
        after = run.predict(asked, dense=DENSE)
    model = serving.load(tmp_path / "whole", batch_sizes=SIZES)
    close(model.logits(asked), want)
    model.apply(tmp_path / "delta")
    close(model.logits(asked), after)
    assert not np.allclose(want, after)
    assert set(np.load(tmp_path / "delta" / "keys" / "tag.npy")) != set(
        np.load(tmp_path / "whole" / "keys" / "tag.npy")
    )


class Towers(own_model.DeepFM):
    """Several outputs, of which one is a vector; ``logits`` has a mask, calls its class's own, and counts calls."""

    def __init__(self, embeddings, **options):
        super().__init__(embeddings, **options)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def logits(self, dense, activations, bags, *, mask):
        self.calls[...] += 1
        click = super().logits(dense, activations, bags) * mask
        vectors = self.embeddings.features(activations, bags)
        return {
            "click": click,
            "towers": (vectors["user"].astype(jnp.bfloat16), [jnp.argmax(vectors["item"], 1)]),
        }


class Joined(nnx.Module):
    """Reads vectors and masks in the order in which its embeddings have them."""

    def __init__(self, embeddings, *, num_dense, rngs):
        self.embeddings = embeddings
        sizes = [f.vectors * (dim + (f.pooling == "none")) for f, dim in embeddings.layout.features]
        self.out = nnx.Linear(num_dense + sum(sizes), 1, rngs=rngs)

    def logits(self, dense, activations, bags):
        vectors = self.embeddings.features(activations, bags).values()
        masks = self.embeddings.masks(bags).values()
        joined = [jnp.float32(x.reshape(x.shape[0], math.prod(x.shape[1:]))) for x in (*vectors, *masks)]
        return self.out(jnp.concatenate([dense, *joined], axis=1))[:, 0]


def test_features_and_masks_come_in_the_order_of_training(tmp_path):
    tables = [jrec.TableConfig(name=name, rows=rows, dim=8) for name, rows in ROWS.items()]
    features = [
        jrec.FeatureConfig(name=name, table=table, max_length=4, pooling=pooling)
        for name, table, pooling in (("z", "user", "sum"), ("y", "item", "none"), ("x", "tag", "none"))
    ]
    draw = np.random.default_rng(0)
    asked = {f.name: draw.integers(-1, ROWS[f.table], (33, 4)) for f in features}
    asked |= {name: draw.random(33, np.float32) for name in DENSE}
    with jrec.distribute(*modules(jrec.EmbeddingLayout.build(tables, features), Joined)) as run:
        want = run.predict(asked, dense=DENSE)
        run.export(tmp_path / "export", dense=DENSE)
    close(serving.load(tmp_path / "export", batch_sizes=SIZES).logits(asked), want)


def other_model(kind):
    """A factory of DeepFM of another class."""

    def make(embeddings, **options):
        return kind(embeddings, hidden=(4,), dropout=0.0, batch_norm=False, **options)

    return make


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    with jrec.distribute(*modules(layout_of(), other_model(Towers))) as run:
        run.export(folder / "export", dense=DENSE)
        table = run.table("user")
    return folder / "export", serving.load(folder / "export", batch_sizes=SIZES), table


def test_what_logits_returns_may_be_a_tree(towers):
    _, model, table = towers
    asked = examples(50, 70)
    got = model.logits(asked)
    assert (got["click"].shape, got["towers"][0].dtype, got["towers"][1][0].dtype) == ((70,), np.float32, np.int32)
    np.testing.assert_array_equal(got["towers"][0], table[asked["user"]].astype(jnp.bfloat16).astype(np.float32))
    empty = model.logits({name: column[:0] for name, column in asked.items()})
    assert jax.tree.map(np.shape, empty) == {"click": (0,), "towers": ((0, 8), [(0,)])}
    for part in (slice(0, 1), slice(3, 40)):
        some = model.logits({name: column[part] for name, column in asked.items()})
        jax.tree.map(lambda a, b, part=part: close(a, b[part]), some, got)
    with pytest.raises(
        ValueError, match=r"does not return one logit an example, or one a task, but .*click.*; call Model.logits"
    ):
        model(asked)


BAD_COLUMNS = {
    "past the table": ({"user": np.full(16, 300)}, ValueError, r"feature 'user' has id 300, but table 'user' has 300"),
    "past int32": ({"user": np.full(16, 2**40 + 3)}, ValueError, r"'user' has id 1,099,511,627,779, but"),
    "past int64": ({"user": np.full(16, 2**64 - 1, np.uint64)}, ValueError, r"'user' has id 9,223,372,036,854,775,807"),
    "negative": ({"most": [[1, -2]] * 16}, ValueError, r"feature 'most' has id -2"),
    "too many": ({"seen": np.zeros((16, 5), int)}, ValueError, r"'seen' has 5 ids in an example, but at most 4 fit"),
    "texts": ({"user": ["u1"] * 16}, DatasetError, r"'user' holds texts, but the model was exported without a schema"),
    "floats": ({"user": np.ones(16)}, ValueError, r"ids of 'user' must be integers"),
    "not finite": ({"price": np.full(16, np.nan)}, ValueError, r"dense feature 'price' is nan"),
    "unequal": ({"price": np.ones(3)}, ValueError, r"columns must be equally long"),
    "weights": ({"item:weight": np.full(16, np.inf, np.float32)}, ValueError, r"'item' has weight inf"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_bad_row_numbers_are_refused(name, towers):
    change, error, message = BAD_COLUMNS[name]
    with pytest.raises(error, match=message):
        towers[1].logits(examples(1) | change)
    with pytest.raises(DatasetError, match=r"column.s. user are missing"):
        towers[1].logits({k: v for k, v in examples(1).items() if k != "user"})


def test_what_a_caller_writes_to_its_columns_changes_nothing(towers):
    asked = examples(7)
    dense, ids = towers[1].encode(asked)
    want = towers[1].logits_of(dense, ids)
    for column in asked.values():
        if isinstance(column, np.ndarray):
            column[...] = 0
    jax.tree.map(np.testing.assert_array_equal, towers[1].logits_of(dense, ids), want)


class Scalar(own_model.DeepFM):
    def logits(self, dense, activations, bags):
        return jnp.sum(super().logits(dense, activations, bags))


class InBatch(own_model.DeepFM):
    def logits(self, dense, activations, bags):
        user = self.embeddings.features(activations, bags)["user"]
        return user @ user.T


class Activations(own_model.DeepFM):
    def logits(self, dense, activations, bags):
        return sum(rows.sum() for rows in activations.values()) + dense[:, 0]


class Nothing(own_model.DeepFM):
    def logits(self, dense, activations, bags):
        return {}


class NeedsSize(own_model.DeepFM):
    def logits(self, dense, activations, bags):
        return jnp.stack([dense[number, 0] for number in range(int(dense.shape[0]))])


REFUSED = {
    "scalar": (Scalar, {}, r"Scalar.logits returns an array of shape \(\); what is served is \(batch, ...\)"),
    "in batch": (InBatch, {}, r"InBatch.logits returns an array of shape \(batch, batch\)"),
    "activations": (Activations, {}, r"reads activations or bags itself.*self.embeddings.features"),
    "nothing": (Nothing, {}, r"Nothing.logits returns no array"),
    "size": (NeedsSize, {}, r"NeedsSize.logits cannot be exported for 2 dense features and batches of any size"),
    "dense": (own_model.DeepFM, {"dense": ["price"]}, r"DeepFM.logits cannot be exported for 1 dense features"),
    "names": (own_model.DeepFM, {"dense": ["price", "user"]}, r"served: feature 'user' is there more than once"),
    "dtype": (own_model.DeepFM, {"dtype": "int7"}, r"dtype is 'int7'; choose one of float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name, tmp_path):
    kind, options, message = REFUSED[name]
    with (
        jrec.distribute(*modules(layout_of(), other_model(kind))) as run,
        pytest.raises(serving.ExportError, match=message),
    ):
        run.export(tmp_path / "export", **{"dense": DENSE, **options})
    assert not list(tmp_path.glob("export*"))


def test_names_of_tables_that_are_no_files_and_several_processes_are_refused(tmp_path, monkeypatch):
    table = jrec.TableConfig(name="../user", rows=20, dim=8)
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="user", table="../user")])
    with jrec.distribute(*modules(layout)) as run:
        with pytest.raises(serving.ExportError, match=r"table '../user' cannot have a file of its name"):
            run.export(tmp_path / "export", dense=DENSE)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(serving.ExportError, match=r"the run has 2 processes, but one writes an export; save"):
            run.export(tmp_path / "export", dense=DENSE)


def test_deltas_are_of_the_same_tables(towers, tmp_path):
    """An export without a schema knows its tables by their rows: those of other ones are no delta of it."""
    layout = layout_of()
    fewer = dataclasses.replace(layout.members[0].tables[0], rows=20)
    tables = [fewer if t.name == fewer.name else t for s in layout.members for t in s.tables]
    layout = jrec.EmbeddingLayout.build(tables, [feature for feature, _ in layout.features])
    with (
        jrec.distribute(*modules(layout, other_model(Towers))) as run,
        pytest.raises(serving.ExportError, match="rows mean other values"),
    ):
        run.export(tmp_path / "delta", dense=DENSE, since=[towers[0]])


def test_a_damaged_list_of_tables_that_grow_is_refused(towers, tmp_path):
    copied = shutil.copytree(towers[0], tmp_path / "export")
    content = json.loads((copied / "ids.json").read_text())
    (copied / "ids.json").write_text(json.dumps(content | {"key_seeds": {"nobody": 0}}))
    with pytest.raises(serving.ExportError, match=r"ids.json is damaged"):
        serving.load(copied)
    reseal(copied, files=["ids.json"])
    with pytest.raises(serving.ExportError, match=r"key_seeds names table 'nobody', which is not there"):
        serving.load(copied)


def test_with_a_schema_requests_have_raw_values(tmp_path):
    lines = shop_logs.write_log(tmp_path / "log.csv", 300)
    schema = Schema.load(shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data"))
    tables = [jrec.TableConfig(name=t.name, rows=t.rows, dim=8) for t in schema.tables]
    features = [
        jrec.FeatureConfig(name=f.name, table=f.table, max_length=f.max_length, weighted=f.weighted)
        for f in schema.categorical
    ]
    asked = {name: [line[name] for line in lines] for name in lines[0]} | {"user": ["nobody"] * len(lines)}
    rngs = nnx.Rngs(0)
    embeddings = nn.EmbeddingCollection(jrec.EmbeddingLayout.build(tables, features), rngs=rngs)
    model = own_model.make(embeddings, num_dense=1, rngs=rngs)
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    with jrec.distribute(model, optimizer) as run:
        manifest = run.export(tmp_path / "export", schema=schema)
        want = run.predict(jrec.data.Encoder(schema).columns(asked).by_name(), dense=["price"])
        with pytest.raises(serving.ExportError, match=r"its schema: dense features are \['price'\], but the model has"):
            run.export(tmp_path / "other", schema=schema, dense=["weight"])
    assert manifest.rows == schema.identity.rows
    close(serving.load(tmp_path / "export", batch_sizes=SIZES).logits(asked), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning")  # of jax2onnx, in Flax
@pytest.mark.parametrize("kind", [own_model.DeepFM, Towers])
def test_onnxruntime_gives_the_same_outputs(kind, tmp_path):
    pytest.importorskip("jax2onnx", reason="jax2onnx, of jrec[onnx], is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime, of jrec[onnx], is not installed")
    tables = [jrec.TableConfig(name=name, rows=ROWS[name], dim=8) for name in ("user", "item", "tag")]
    features = [jrec.FeatureConfig(name=name, table=name) for name in ("user", "item", "tag")]
    layout = jrec.EmbeddingLayout.build(tables, features)
    with jrec.distribute(*modules(layout, other_model(kind))) as run:
        run.export(tmp_path / "export", dense=DENSE, onnx=True)
    model = serving.load(tmp_path / "export", batch_sizes=SIZES)
    dense, ids = model.encode(examples(5) | {"tag": np.arange(16)})
    session = onnxruntime.InferenceSession(tmp_path / "export" / "model.onnx")
    got = session.run(None, {"dense": dense, **model.vectors(ids)})
    want = model.logits_of(dense, ids)
    assert [x.name for x in session.get_outputs()] == (["logits"] if kind is own_model.DeepFM else NAMES)
    jax.tree.map(close, got, jax.tree.leaves(want))


NAMES = ["click", "towers.0", "towers.1.0"]
