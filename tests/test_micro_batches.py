"""Steps whose dense model sees the examples in slices, one after another, against steps that take them at once."""

import functools

import distribute_cases
import growing_cases
import jax
import numpy as np
import optax
import pytest
import test_accumulation
from checkpoint_state import latest
from distribute_cases import DENSE, layout_of, mesh_of, tables_apart, three_tiers
from flax import nnx
from grids import some_of
from test_flax_state import LAYERS, history_batch, on_every_device, small_model, state
from test_flax_state import modules as modules_with
from test_flax_state import placed as placed_with

import jrec
from jrec import nn, ops
from jrec.errors import ConfigError
from jrec.nn.micro_batches import MicroBatches
from jrec.nn.step import train_step_on
from jrec.run.options import HostOptions
from jrec.run.step import StepBatch, compile_run

CLOSE = {"rtol": 2e-4, "atol": 2e-6}
STEPS, SLICES, SIZE = 3, 4, 16


def placed(name):
    """A run in a placement, and the columns of its batches."""
    if name == "tensor trains":
        return jrec.distribute(*test_accumulation.modules(max_global_norm=0.5)), test_accumulation.columns
    if name == "growing":
        layout = growing_cases.layout_of()
        options = {"growing": growing_cases.growing(), "mesh": mesh_of(4), "plan": growing_cases.three_tiers(4, layout)}
        return jrec.distribute(*growing_cases.modules(layout), **options), growing_cases.columns
    options, tiers = {}, [("user", "host")] if name.startswith("host") else []
    if tiers:
        options["host"] = HostOptions(pipeline="on" if name == "host pipeline" else "auto")
    elif name != "device":
        options["mesh"] = mesh_of(4)
    if name == "mesh, host rows":
        options["plan"] = three_tiers(4, layout_of())
    elif name == "tables apart":
        options["plan"] = tables_apart(layout_of())
    return jrec.distribute(*distribute_cases.modules(layout_of(tiers=tiers)), **options), distribute_cases.columns


def trained(name, folder, **options):
    """Losses and logits of some steps, and what a checkpoint after them has: dense arrays, rows and slots."""
    run, columns = placed(name)
    dense, size = (("price",), 8) if name == "tensor trains" else (DENSE, SIZE)
    with run:
        step = run.compile(**options)
        items = (columns(number, size - 3) for number in range(STEPS))
        found = [step(batch) for batch in run.feed(items, dense=dense, batch_size=size)]
        found = [(np.asarray(loss), np.asarray(outputs.logits)) for loss, outputs in found]
        run.save(folder / "checkpoints")
    saved = latest(folder)
    arrays = dict(saved.arrays())
    for table, record in saved.manifest.tables.items():
        rows = np.arange(record.shape.rows)
        arrays |= {f"{table}/{n}": saved.table(table).read(n, rows) for n in ("values", *record.shape.slots)}
    return found, arrays


PLACEMENTS = (
    "device", "host", "host pipeline", "mesh", "mesh, host rows", "tables apart", "tensor trains", "growing",
)  # fmt: skip


@pytest.mark.parametrize(
    "placement",
    some_of(PLACEMENTS, "mesh, host rows", "tables apart", "tensor trains", "growing"),
)
def test_slices_take_the_step_of_the_whole_batch(placement, tmp_path):
    count = 2 if placement == "growing" else SLICES
    (found, arrays), (expected, whole) = (trained(placement, tmp_path / str(n), micro_batches=n) for n in (count, 1))
    for (loss, logits), (other_loss, other) in zip(found, expected, strict=True):
        np.testing.assert_allclose(loss, other_loss, **CLOSE)
        np.testing.assert_allclose(logits, other, **CLOSE)
    assert arrays.keys() == whole.keys()
    for name, array in arrays.items():
        # The first steps of Adagrad and Adam do not depend on a gradient's size, so that its rounding counts.
        np.testing.assert_allclose(array, whole[name], err_msg=name, rtol=2e-4, atol=1e-4)
    assert any("slots" in name or name.endswith("/sum") for name in arrays)


@functools.partial(nnx.jit, static_argnames="micro_batches")
def step(model, optimizer, batch, micro_batches):
    outputs = train_step_on(model, optimizer, {}, batch, micro_batches=micro_batches)
    return outputs.loss, outputs.logits


def test_histories_are_sliced_with_their_examples():
    """A TBSM reads from the bags which positions hold a step."""
    found = []
    for count in (1, 3):
        model = small_model("tbsm")
        optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.Adagrad(learning_rate=0.1))
        loss, logits = step(model, optimizer, history_batch(model, 10, 12), count)
        found.append([loss, logits, *jax.tree.leaves(nnx.state((model, optimizer)))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("layer", some_of(LAYERS, "dropout", "batch norm", "counter"))
def test_state_goes_from_slice_to_slice_as_from_micro_batch_to_micro_batch(layer):
    columns = distribute_cases.columns(0)
    parts = [{name: values[begin : begin + 4] for name, values in columns.items()} for begin in range(0, SIZE, 4)]
    pack = functools.partial(jrec.data.pack_batch, layout_of(), dense=DENSE)
    sliced, accumulated = modules_with(layer), modules_with(layer)
    loss, logits = step(*sliced, pack(columns), SLICES)
    other_loss, others = nnx.jit(nn.accumulated_step)(*accumulated, [pack(part) for part in parts])
    np.testing.assert_allclose(loss, other_loss, **CLOSE)
    np.testing.assert_allclose(logits, np.concatenate(others), **CLOSE)
    for one, other in zip(*(jax.tree.leaves(nnx.state(modules)) for modules in (sliced, accumulated)), strict=True):
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("placement", ["mesh", "tables apart"])
def test_slices_of_devices_share_state(placement):
    """The sums of BatchNorm lie in the loop over the slices: all devices have to enter it."""
    with placed_with(placement, "batch norm") as run:
        before = state(run)["layer.mean.value"]
        step = run.compile(micro_batches=2)
        for batch in run.feed(map(distribute_cases.columns, range(2)), dense=DENSE):
            assert np.isfinite(step(batch)[0])
        assert (state(run)["layer.mean.value"] != before).all()
        on_every_device(run)


def test_a_batch_that_cannot_be_cut_is_refused_and_leaves_the_run_as_it_is():
    run, columns = placed("mesh")
    with run:
        before = run.table("user")
        feed = run.feed([columns(0)], dense=DENSE)
        step = run.compile(micro_batches=3)
        with pytest.raises(ConfigError, match="of 4 examples cannot be cut into micro_batches = 3"):
            step(next(feed))
        np.testing.assert_array_equal(run.table("user"), before)


@pytest.mark.parametrize("placement", ["device", "mesh"])
def test_a_loss_of_the_whole_batch_is_refused(placement):
    """Its negatives, or the share of what counts, would be those of a slice."""

    def loss(logits, batch):
        return nn.masked_mean((logits - nn.all_examples(logits).mean()) ** 2, batch.mask)

    run, columns = placed(placement)
    with run:
        before = run.table("user")
        feed = run.feed([columns(0), columns(1)], dense=DENSE)
        run.compile(loss=loss)(next(feed))
        step = run.compile(loss=loss, micro_batches=2)
        with pytest.raises(ConfigError, match=r"asks for all examples .* leave micro_batches out"):
            step(next(feed))
        assert (run.table("user") != before).any()  # by the step of the whole batch


def test_sums_over_the_slices_do_not_run_the_model_twice():
    """What a loss asks of the whole batch is summed in a loop of its own, of which only masks and labels are left."""
    texts = []
    for loss in (nn.binary_cross_entropy, mean_of_clicks):
        model, optimizer = distribute_cases.modules(layout_of())
        batch = jrec.data.pack_batch(layout_of(), distribute_cases.columns(0), dense=DENSE)
        take = nnx.jit(lambda m, o, b, loss=loss: train_step_on(m, o, {}, b, loss=loss, micro_batches=2).loss)
        texts.append(take.lower(model, optimizer, jax.tree.map(jax.numpy.asarray, batch)).compile().as_text())
    assert texts[0].count("dot") > 0
    assert texts[1].count("dot") == texts[0].count("dot")
    assert texts[1].count(" while(") > texts[0].count(" while(")


def mean_of_clicks(logits, batch):
    losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
    return nn.mean_of_positions(losses[:, None], batch.labels[:, None] > 0, batch.mask)


def test_slices_have_the_ids_and_weights_of_their_examples():
    """For models that read the bags themselves, in either form."""
    layout, count, size = test_accumulation.LAYOUT, 3, 12
    batch = jrec.data.pack_batch(layout, test_accumulation.columns(0, size), dense=["price"])
    activations = {name: np.zeros((bags.num_bags, 1), np.float32) for name, bags in batch.bags.items()}
    batch = jax.tree.map(jax.numpy.asarray, batch)
    slices = MicroBatches(layout, batch, jax.tree.map(jax.numpy.asarray, activations), count)
    forms = set()
    for number in range(count):
        _, cut = slices.of(jax.tree.map(lambda array, n=number: array[n], slices.slices))
        for name, bags in batch.bags.items():
            order = slices._orders[name][number]
            assert lookups(cut.bags[name]) == [lookups(bags)[bag] for bag in order]
            forms.add((bags.offsets is None, bags.weights is None))
    assert (False, False) in forms


def lookups(bags):
    """The ids and weights of each bag."""
    ids, weights = (None if of is None else np.asarray(of) for of in (bags.ids, bags.weights))
    if bags.offsets is None:
        cut = [slice(number, number + 1) for number in range(len(ids))]
    else:
        cut = [slice(*ends) for ends in np.stack([bags.offsets[:-1], bags.offsets[1:]], axis=1)]
    return [(ids[of].tolist(), None if weights is None else weights[of].tolist()) for of in cut]


def test_slices_take_the_memory_of_one():
    config = nn.DLRMConfig(num_dense=2, bottom_mlp=(512, 256, 8), top_mlp=(512, 256, 1))
    model = nn.DLRM(config, layout_of(), rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    batch = jrec.data.pack_batch(layout_of(), distribute_cases.columns(0, 4096), dense=DENSE)
    first, compiled = compile_run(model, optimizer)
    sizes = []
    for count in (1, 8):
        lowered = compiled.with_loss(nn.binary_cross_entropy, count).lower(first, {}, {}, StepBatch(batch=batch))
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 0.4 * sizes[0], sizes
