"""Dropout, BatchNorm, counters, streams of random numbers: kept, equal on all devices, left alone by predictions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_state import final_arrays
from distribute_cases import DENSE, columns, layout_of, mesh_of, tables_apart, three_tiers
from flax import nnx
from grids import some_of
from run_cases import CONFIG, configuring, quickstart

import jrec
from jrec import nn, ops
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train as train_run
from jrec.errors import CheckpointError, ConfigError
from jrec.nn.batch_norm import BatchNorm
from jrec.run.options import HostOptions

STEPS, WIDTH = 4, 8
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


class Steps(nnx.Variable):
    """A count of a model's own type."""


class Average(nnx.Variable):
    """A moving average of a model's own type."""


class Counter(nnx.Module):
    def __init__(self):
        self.steps, self.mean = Steps({"taken": jnp.int32(0)}), Average(jnp.zeros(WIDTH))
        self.use_running_average = False

    def __call__(self, x, *, mask):
        before = self.mean[...]
        if not self.use_running_average:
            self.steps["taken"] += 1
            self.mean[...] = 0.5 * before + 0.5 * jnp.sum(x * mask, axis=0) / jnp.maximum(jnp.sum(mask), 1)
        return x - before[None]


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.rngs, self.deterministic = nnx.Rngs(noise=rngs.params()), False

    def __call__(self, x):
        return x if self.deterministic else x + jax.random.normal(self.rngs.noise(), x.shape)


LAYERS = {
    "dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "batch norm": lambda rngs: nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs),
    "counter": lambda rngs: Counter(),
    "stream": Noise,
    "spectral norm": lambda rngs: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
}


class Model(nnx.Module):
    def __init__(self, layout, layer, *, rngs):
        self.embeddings = nn.EmbeddingCollection(layout, rngs=rngs)
        self.hidden, self.out = nnx.Linear(2 + 3 * 8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.layer = layer(rngs)

    def logits(self, dense, activations, bags, mask):
        features = self.embeddings.features(activations, bags)
        x = nnx.relu(self.hidden(jnp.concatenate([dense, *features.values()], axis=1)))
        if isinstance(self.layer, nnx.BatchNorm):
            return self.out(self.layer(x, mask=mask[:, None] > 0))[:, 0]
        more = {"mask": mask[:, None]} if isinstance(self.layer, Counter) else {}
        return self.out(self.layer(x, **more))[:, 0]


def modules(layer, *, layout=None, change=lambda model: None):
    layer = LAYERS[layer] if isinstance(layer, str) else layer
    model = Model(layout_of() if layout is None else layout, layer, rngs=nnx.Rngs(0))
    change(model)
    row = ops.Adagrad(learning_rate=0.1)
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=row)


def placed(name, layer, *, abstract=False, **options):
    """A run of a model with the layer, in a placement."""
    hosted = layout_of(tiers=[("user", "host")]) if name.startswith("host") else None
    make = functools.partial(modules, layer, layout=hosted, **options)
    model, optimizer = nnx.eval_shape(make) if abstract else make()
    options = {"key": nnx.Rngs(0).params()}
    if hosted is not None:
        options["host"] = HostOptions(pipeline="on" if name == "host pipeline" else "auto")
    elif name != "device":
        options["mesh"] = mesh_of(1 if name == "mesh of one" else 4)
    if name == "mesh, host rows":
        options["plan"] = three_tiers(4, layout_of())
    elif name == "tables apart":
        options["plan"] = tables_apart(layout_of())
    return jrec.distribute(model, optimizer, **options)


PLACEMENTS = ("device", "host", "host pipeline", "mesh", "mesh, host rows", "tables apart")


def train(run, begin=0, stop=STEPS, *, size=16, batch_size=16):
    """The logits of each step."""
    step, items = run.compile(), (columns(n, size) for n in range(begin, stop))
    return [np.asarray(step(batch)[1].logits) for batch in run.feed(items, dense=DENSE, batch_size=batch_size)]


def state(run):
    """All of the model's state that is not rows, keys as their words, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(run.modules()[0]))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {
        name: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for name, leaf in named.items()
        if not name.startswith("embeddings.")
    }


def same(one, other, **limits):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], err_msg=name, **(limits or {"rtol": 0, "atol": 0}))


def on_every_device(run):
    """Asserts that all devices have the same state."""
    for leaf in jax.tree.leaves(run._state.state):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("layer", "placement"),
    some_of(
        itertools.product(LAYERS, PLACEMENTS),
        *(("stream", "mesh"), ("spectral norm", "mesh"), ("dropout", "mesh"), ("counter", "mesh, host rows")),
        *(("batch norm", name) for name in ("host pipeline", "mesh, host rows", "tables apart")),
    ),
)
def test_state_is_trained_kept_and_restored_and_predictions_leave_it_alone(layer, placement, tmp_path):
    half = STEPS // 2
    with placed(placement, layer) as run:
        first = state(run)
        train(run, 0, half)
        run.save(tmp_path / "c")
        scores = run.predict(columns(99), dense=DENSE)
        np.testing.assert_allclose(scores, run.predict(columns(99), dense=DENSE, batch_size=4), **CLOSE)
        train(run, half)
        whole, tables = state(run), run.table("user")
        on_every_device(run)
    changed = {name for name in first if (first[name] != whole[name]).any() and name.startswith("layer.")}
    assert changed - {"layer.scale.value", "layer.bias.value"}, "the layer's state did not change"
    with placed(placement, layer, abstract=True) as run:
        run.restore(tmp_path / "c")
        np.testing.assert_array_equal(scores, run.predict(columns(99), dense=DENSE))
        train(run, half)
        same(state(run), whole)
        np.testing.assert_array_equal(run.table("user"), tables)


@pytest.mark.parametrize(
    ("layer", "placement"),
    some_of(
        itertools.product(("batch norm", "counter", "spectral norm"), PLACEMENTS[1:]),
        *(("batch norm", "mesh, host rows"), ("batch norm", "tables apart"), ("batch norm", "host pipeline")),
        *(("counter", "mesh"), ("spectral norm", "tables apart")),
    ),
)
def test_statistics_are_those_of_the_whole_batch(layer, placement):
    """The last device of a mesh has padding alone, and one a part of it."""
    examples = 16 if layer == "spectral norm" else 10
    with placed("device", layer) as device, placed(placement, layer) as run:
        expected = train(device, size=examples)
        for found, other in zip(train(run, size=examples), expected, strict=True):
            np.testing.assert_allclose(found[:examples], other[:examples], **CLOSE)
        same(state(run), state(device), **CLOSE)


def test_batch_norm_leaves_padding_out():
    with placed("device", "batch norm") as padded, placed("device", "batch norm") as whole:
        found, expected = train(padded, size=10, batch_size=16), train(whole, size=10, batch_size=10)
        np.testing.assert_allclose(found[-1][:10], expected[-1], **CLOSE)
        same(state(padded), state(whole), **CLOSE)


def test_a_batch_of_padding_alone_leaves_statistics_as_they_are():
    layer = BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    out = layer(jnp.ones((3, WIDTH)), mask=jnp.zeros((3, 1), bool))
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(layer.var[...], jnp.ones(WIDTH))
    np.testing.assert_array_equal(layer.mean[...], jnp.zeros(WIDTH))


@pytest.mark.parametrize("layer", ["dropout", "stream"])
def test_devices_draw_different_numbers_and_one_device_those_of_no_mesh(layer):
    def alike(number, size=16):  # all examples are one
        return {name: np.repeat(values[:1], size, axis=0) for name, values in columns(number).items()}

    drawn = {}
    for placement in ("device", "mesh of one", "mesh", "tables apart"):
        with placed(placement, layer) as run:
            batches = run.feed((alike(n) for n in range(2)), dense=DENSE)
            step = run.compile()
            drawn[placement] = np.stack([np.asarray(step(batch)[1].logits) for batch in batches])
    np.testing.assert_array_equal(drawn["device"], drawn["mesh of one"])
    for placement, parts in (("mesh", 4), ("tables apart", 2)):
        by_device = drawn[placement].reshape(2, parts, -1)
        assert len({part.tobytes() for part in by_device.reshape(2 * parts, -1)}) == 2 * parts


def test_the_step_runs_in_the_mode_that_the_model_was_given_in():
    with placed("device", "batch norm", change=lambda model: model.layer.eval()) as run:
        before = state(run)
        train(run)
        after = state(run)
    np.testing.assert_array_equal(after["layer.mean.value"], before["layer.mean.value"])
    assert (after["layer.scale.value"] != before["layer.scale.value"]).any()


def test_predictions_are_those_of_the_model_in_eval_mode():
    with placed("device", "dropout") as run:
        train(run)
        scores = run.predict(columns(99), dense=DENSE)
        model, _ = run.modules()
        assert not model.layer.deterministic
        model.eval()
        batch = jrec.data.pack_batch(layout_of(), columns(99), dense=DENSE)
        activations, _ = model.embeddings.lookup(batch.bags)
        np.testing.assert_allclose(scores, model.logits(batch.dense, activations, batch.bags, batch.mask), **CLOSE)


class Examples(nnx.Module):
    """Counts examples in a type of number that devices cannot average."""

    def __init__(self, rngs):
        del rngs
        self.examples = Steps(jnp.int32(0))

    def __call__(self, x):
        self.examples[...] += jnp.sum(x[:, 0] > 0, dtype=jnp.int32)
        return x


class Rekeyed(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs.fork()

    def __call__(self, x):
        self.rngs.params.key[...] = jax.random.split(self.rngs.params.key[...])[0]
        return x


class Summed(nnx.Module):
    def __init__(self, rngs):
        del rngs

    def __call__(self, x):
        return x + jax.lax.psum(x, "devices")


class Late(nnx.Module):
    def __init__(self, rngs):
        del rngs

    def __call__(self, x):
        self.last = Steps(x)
        return x


@pytest.mark.parametrize(
    ("layer", "placement", "message"),
    [
        (Examples, "mesh", r"layer\.examples.*int32.*depends on the batch.*float32"),
        (lambda rngs: Rekeyed(nnx.Rngs(params=1)), "mesh", r"logits changed the key layer\.rngs\.params\.key"),
        (Summed, "tables apart", r"a collective \(psum.*over all devices, but by the plan some only keep tables"),
        (Late, "device", r"logits made.*layer\.last.*__init__"),
    ],
)
def test_state_that_devices_cannot_share_is_refused(layer, placement, message):
    with placed(placement, layer) as run, pytest.raises(ConfigError, match=message):
        train(run)


def test_a_step_of_ones_own_keeps_state_too():
    model, optimizer = modules("counter")
    step = nnx.jit(nn.train_step)
    for number in range(3):
        step(model, optimizer, jrec.data.pack_batch(layout_of(), columns(number), dense=DENSE))
    assert int(model.layer.steps["taken"]) == 3
    assert (model.layer.mean[...] != 0).any()


def test_a_checkpoint_of_other_random_numbers_is_refused(tmp_path):
    with placed("device", "dropout") as run:
        run.save(tmp_path / "c")

    def other(rngs):
        return nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=jax.random.key(0, impl="rbg")))

    with placed("device", other) as run, pytest.raises(CheckpointError, match=r"layer\.rngs\.key.*rbg"):
        run.restore(tmp_path / "c")


@pytest.mark.parametrize("kind", ["dlrm", "tbsm"])
def test_dropout_and_batch_norm_are_off_unless_asked_for(kind):
    """Parameters, paths and draws of a model without them are those of one with a dropout stream that nothing draws."""
    plain, dropped = (small_model(kind, dropout=rate) for rate in (0.0, 0.25))
    normed = small_model(kind, batch_norm=True)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(plain))}
    assert not any("drop" in path or "norm" in path for path in paths)
    same(parameters(plain), parameters(dropped))
    assert parameters(normed).keys() > parameters(plain).keys()


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def small_model(kind, **options):
    rngs = nnx.Rngs(params=0, dropout=1)
    if kind == "dlrm":
        return nn.DLRM(
            nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1), **options), layout_of(), rngs=rngs
        )
    tables = [jrec.TableConfig(name="item", rows=30, dim=8)]
    item = jrec.FeatureConfig(name="item", table="item")
    seen = jrec.FeatureConfig(name="seen", table="item", max_length=5, pooling="none")
    layout = jrec.EmbeddingLayout.build(tables, [item, seen])
    config = nn.TBSMConfig(histories=(("item", "seen"),), bottom_mlp=(12, 8), top_mlp=(16, 1), num_dense=2, **options)
    return nn.TBSM(config, layout, rngs=rngs)


def history_batch(model, size, room):
    rng = np.random.default_rng(3)
    seen = np.where(np.arange(5) < rng.integers(0, 6, (size, 1)), rng.integers(0, 30, (size, 5)), -1)
    values = {"label": np.ones(size, np.float32), "item": rng.integers(0, 30, size), "seen": seen}
    values |= {name: rng.normal(size=size).astype(np.float32) for name in DENSE}
    return jrec.data.pack_batch(model.embeddings.layout, values, dense=DENSE, batch_size=room)


def test_a_tbsm_with_batch_norm_leaves_padded_examples_and_steps_out():
    @nnx.jit
    def logits_of(model, batch):
        activations, _ = model.embeddings.lookup(batch.bags)
        return model.logits(batch.dense, activations, batch.bags, mask=batch.mask)

    found = []
    for room in (6, 9):
        model = small_model("tbsm", batch_norm=True)
        batch = history_batch(model, 6, room)
        logits = logits_of(model, batch)
        found.append(
            (np.asarray(logits)[:6], [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.BatchStat))])
        )
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), *found)
    assert len(found[0][1]) == 4, "the statistics of one hidden layer in the bottom MLP, and one in the top MLP"


REGULARIZED = (
    "model.dropout=0.2",
    "model.batch_norm=true",
    "max_steps=7",
    "evaluate.every_steps=0",
    "log.every_steps=7",
)


@pytest.mark.parametrize("placement", [pytest.param((), marks=pytest.mark.slow), ("mesh.devices=4",)])
def test_a_training_run_goes_on_and_is_evaluated_by_the_same_bits(placement, tmp_path):
    dataset = quickstart(tmp_path, 3000)
    configure = configuring(tmp_path, dataset, CONFIG)
    whole = train_run(configure(*REGULARIZED, *placement, out="whole"))
    train_run(configure(*REGULARIZED, *placement, "max_steps=3", out="parts"))
    small = "data.eval_batch_size=64"
    resumed = train_run(configure(*REGULARIZED, *placement, small, out="parts"), resume=True)
    assert final_arrays(resumed.folder)[:2] == final_arrays(whole.folder)[:2]
    scores = whole.scores["test"].logits
    np.testing.assert_allclose(resumed.scores["test"].logits, scores, **CLOSE)
    again = evaluate_checkpoint(whole.folder, str(dataset), split="test")
    np.testing.assert_allclose(again.scores.logits, scores, **CLOSE)
