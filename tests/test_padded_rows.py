"""Rows padded in storage: the same bits as without, padding that stays as it was, and none of it in results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from grids import some_of
from pallas_interpreter import interpreted

import jrec
from jrec import ops
from jrec.app.build import parameter_counts
from jrec.checkpoint import Checkpoints, DeviceRows
from jrec.native import host
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, train_step
from jrec.ops.storage import ALIGNMENT, pad, padded_dim, strip
from jrec.pallas import tile
from jrec.row_optimizers import ROW_OPTIMIZERS
from jrec.run.checkpoint import StateRows, dense_arrays, restore_state

COMMON = {"learning_rate": lambda step: 0.5 / (step + 1), "weight_decay": 0.01, "max_row_norm": 1.5}
OPTIMIZERS = [reference.made(kind, **COMMON) for kind in ROW_OPTIMIZERS.values()]
KEY = jax.random.key_data(jax.random.key(5))
ROWS, BAGS = 40, 30


def _same(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def _case(dim, dtype):
    rng = np.random.default_rng(dim)
    table = jnp.asarray(rng.normal(size=(ROWS, dim)), dtype)
    ids = jnp.asarray(rng.integers(0, ROWS, (BAGS, 3)), jnp.int32)
    return table, ids, jnp.asarray(rng.normal(size=(BAGS, dim)), jnp.float32)


def _steps(optimizer, table, ids, gradients, *, dim=None, implementation):
    """Two steps from the bags' gradients and one from rows' own."""
    slots, key = optimizer.init(table), None if table.dtype == jnp.float32 else KEY
    options = {"dim": dim, "rounding_key": key, "gradient_scale": 0.5, "implementation": implementation}
    cast = ops.tensor_cast(ids, num_rows=ROWS, implementation="xla")
    for step in range(2):
        table, slots = ops.casted_update(optimizer, table, slots, cast, gradients, step=step, **options)
    rows = jnp.arange(0, 2 * BAGS, 2)  # the last ones are padding
    return ops.row_update(optimizer, table, slots, rows, gradients, step=2, **options)


@pytest.mark.parametrize(
    ("implementation", "dim", "dtype"),
    some_of(
        [(way, *case) for way in ("xla", "native") for case in ((5, "float32"), (33, "bfloat16"), (12, "float16"))],
        *(("native", 5, "float32"), ("xla", 33, "bfloat16"), ("native", 12, "float16")),
    ),
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_updates_of_padded_rows_are_those_of_plain_rows(optimizer, implementation, dim, dtype):
    table, ids, gradients = _case(dim, dtype)
    want = _steps(optimizer, table, ids, gradients, implementation=implementation)
    wide = pad(table)
    assert wide.shape[1] == padded_dim(dim, table.dtype.itemsize) > dim
    got = _steps(optimizer, wide, ids, gradients, dim=dim, implementation=implementation)
    _same(strip(got[0], dim), want[0])
    assert not np.any(np.asarray(got[0])[:, dim:])
    for name, slot in optimizer.init(wide).items():
        _same(got[1][name] if slot.ndim == 1 else strip(got[1][name], dim), want[1][name])
        if slot.ndim == 2:
            _same(got[1][name][:, dim:], slot[:, dim:])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_updates_of_padded_host_arrays_are_those_of_plain_ones(optimizer):
    table, ids, gradients = _case(5, "float32")
    cast = host.tensor_cast(np.asarray(ids), num_rows=ROWS)
    results = []
    for start, dim in ((table, None), (pad(table), 5)):
        new, slots = np.array(start), {name: np.array(slot) for name, slot in optimizer.init(start).items()}
        host.casted_update(optimizer, new, slots, cast, np.asarray(gradients), dim=dim)
        rows = np.arange(BAGS, dtype=np.int32)
        host.row_update(optimizer, new, slots, rows, np.asarray(gradients), step=1, dim=dim)
        results.append((new, slots))
    (want, want_slots), (got, got_slots) = results
    _same(np.ascontiguousarray(got[:, :5]), want)
    assert not np.any(got[:, 5:])
    for name, slot in got_slots.items():
        _same(np.ascontiguousarray(slot[:, :5]) if slot.ndim == 2 else slot, want_slots[name])


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[3], pytest.param(OPTIMIZERS[5], marks=pytest.mark.slow)])
def test_pallas_kernels_leave_the_padding_out(optimizer):
    table, ids, gradients = _case(5, "float32")
    want = _steps(optimizer, table, ids, gradients, implementation="xla")
    with interpreted():
        got = _steps(optimizer, pad(table), ids, gradients, dim=5, implementation="pallas")
    np.testing.assert_allclose(strip(got[0], 5), want[0], rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(got[0])[:, 5:])
    assert tile.ACCESS_BYTES == ALIGNMENT


def _trained(implementation, pad_rows, optimizer):
    """A DLRM of two stacks after three steps: its losses, its stacks, and its parameter counts."""
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="a", rows=30, dim=5), jrec.TableConfig(name="b", rows=9, dim=6, dtype="bfloat16")],
        [
            jrec.FeatureConfig(name="a", table="a", max_length=2, pooling="max", fixed_length=True),
            jrec.FeatureConfig(name="b", table="b", fixed_length=True),
        ],
    )
    config = DLRMConfig(num_dense=3, bottom_mlp=(4,), top_mlp=(4, 1), interaction="concat")
    model = DLRM(config, layout, implementation=implementation, pad_rows=pad_rows, rngs=nnx.Rngs(1))
    sparse = SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=optimizer, rounding_seed=2)
    rng, losses = np.random.default_rng(0), []
    step = nnx.jit(train_step)
    for _ in range(3):
        ids = {"d5_float32": rng.integers(0, 30, (32, 1)), "d6_bfloat16": rng.integers(0, 9, (16, 1))}
        batch = jrec.Batch(
            dense=jnp.asarray(rng.normal(size=(16, 3)), jnp.float32),
            labels=jnp.asarray(rng.integers(0, 2, 16), jnp.float32),
            mask=jnp.ones(16),
            bags={name: jrec.Bags(ids=jnp.asarray(some, jnp.int32)) for name, some in ids.items()},
        )
        losses.append(step(model, sparse, batch)[0])
    return losses, model.embeddings, parameter_counts(model)


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "native"])
def test_training_does_not_see_the_padding(implementation):
    losses, plain, counts = _trained(implementation, None, ops.RowWiseAdagrad(learning_rate=0.1))
    padded_losses, padded, padded_counts = _trained(implementation, True, ops.RowWiseAdagrad(learning_rate=0.1))
    np.testing.assert_array_equal(padded_losses, losses)
    assert {name: rows.shape[1] for name, rows in plain.arrays().items()} == plain.dims
    assert {name: rows.shape[1] for name, rows in padded.arrays().items()} == {"d5_float32": 8, "d6_bfloat16": 8}
    for name, rows in padded.arrays().items():
        _same(strip(rows, padded.dims[name]), plain.arrays()[name])
        assert not np.any(np.asarray(rows)[:, padded.dims[name] :])
        assert padded_counts[name]["parameters"] == counts[name]["parameters"]


def test_rows_are_padded_by_default_for_pallas_kernels_alone():
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="a", rows=3, dim=5)], [jrec.FeatureConfig(name="a", table="a", fixed_length=True)]
    )
    for implementation, width in ((None, 5), ("xla", 5), ("native", 5), ("pallas", 8)):
        collection = jrec.nn.EmbeddingCollection(layout, implementation=implementation, rngs=nnx.Rngs(0))
        assert collection.arrays()["d5_float32"].shape == (3, width)
    unpadded = jrec.nn.EmbeddingCollection(layout, implementation="pallas", pad_rows=False, rngs=nnx.Rngs(0))
    assert unpadded.arrays()["d5_float32"].shape == (3, 5)


@pytest.mark.parametrize("dim", [0, 9])
def test_dims_that_rows_do_not_have_are_refused(dim):
    table, row = jnp.ones((3, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=f"dim is {dim}, but rows hold 8 elements"):
        ops.row_update(OPTIMIZERS[0], table, {}, row, jnp.ones((1, 8)), dim=dim)
    with pytest.raises(ValueError, match=r"gradients must be float32 of shape \(1, 5\), but is float32\[1, 8\]"):
        ops.row_update(OPTIMIZERS[0], table, {}, row, jnp.ones((1, 8)), dim=5)
    with pytest.raises(ValueError, match="the names must agree"):
        ops.apply_gradients(OPTIMIZERS[0], {}, {}, {}, {}, dims={"t": 4})


def test_checkpoints_of_padded_and_plain_rows_are_the_same(tmp_path):
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="a", rows=3, dim=5)], [jrec.FeatureConfig(name="a", table="a", fixed_length=True)]
    )
    padded, plain = (jrec.nn.EmbeddingCollection(layout, pad_rows=pad, rngs=nnx.Rngs(0)) for pad in (True, False))
    optimizer = ops.Momentum(learning_rate=0.1)

    def state(collection):
        model = nnx.Module()
        model.embeddings = collection
        slots = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=optimizer)
        slots.slots["d5_float32"]["trace"][...] = collection.arrays()["d5_float32"] * 2
        return nnx.state((model, slots))

    for first, second in ((padded, plain), (plain, padded)):
        folder = tmp_path / f"{first.pad_rows}"
        rows = StateRows(layout, lambda first=first: state(first))
        sources = [DeviceRows(s, optimizer.slots, functools.partial(rows.of, s.name)) for s in layout.members]
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, arrays=dense_arrays(state(first), {}, layout), sources=sources)
        restored, _ = restore_state(checkpoints.open(), state(second), layout)
        jax.tree.map(np.testing.assert_array_equal, restored, state(second))
