"""``jax.export`` of every op, for CPUs and CUDA at once, with a symbolic batch; what is exported runs on the CPU."""

import functools
import importlib.util
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops
from jrec.ops.segment_sums import level_sizes, segment_sums
from jrec.ops.tt.products import _segment_sums

ROWS, DIM, LENGTH = 50, 4, 3
OPTIMIZER = ops.Adam(learning_rate=0.1)
XLA = {"implementation": "xla"}
SHAPE = ops.TTShape.search(ROWS, DIM, ranks=2)
SLOW = pytest.mark.slow


def _arguments(num_bags, ragged):
    """Table, ids, offsets, weights and gradients of the bags."""
    rng = np.random.default_rng(num_bags)
    table, gradients = (jnp.asarray(rng.normal(size=(n, DIM)), jnp.float32) for n in (ROWS, num_bags))
    ids = jnp.asarray(rng.integers(-1, ROWS, (num_bags, LENGTH)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
    if not ragged:
        return table, ids, None, weights, gradients
    offsets = np.sort(rng.integers(0, ids.size + 1, num_bags + 1))
    offsets[0] = 0
    return table, ids.reshape(-1), jnp.asarray(offsets, jnp.int32), weights.reshape(-1), gradients


def _symbolic(ragged):
    """Shapes of ``_arguments`` for any number of bags and, of ragged ones, of ids."""
    bags, capacity = jax.export.symbolic_shape("b, c")
    ids = (capacity,) if ragged else (bags, LENGTH)
    of = jax.ShapeDtypeStruct
    offsets = of((bags + 1,), jnp.int32) if ragged else None
    return (
        of((ROWS, DIM), jnp.float32), of(ids, jnp.int32), offsets, of(ids, jnp.float32), of((bags, DIM), jnp.float32)
    )  # fmt: skip


def _bag(table, ids, offsets, weights, gradients, *, combiner="sum"):
    def pooled(table, weights):
        return ops.embedding_bag(table, ids, offsets, weights=weights, combiner=combiner, **XLA)

    out, pullback = jax.vjp(pooled, table, weights)
    return out, pullback(gradients), ops.gather_reduce(table, ids, offsets, weights=weights, **XLA)


def _step(table, ids, offsets, weights, gradients, *, capacity=None):
    tables, gradients = {"t": table}, {"t": gradients}
    bags = {"t": ops.Bags(ids=ids, offsets=offsets, weights=weights)}
    capacities = None if capacity is None else {"t": capacity}
    activations, residuals = ops.lookup(tables, bags, unique_capacities=capacities, **XLA)
    slots = ops.init_slots(OPTIMIZER, tables)
    norm = ops.squared_gradient_norm(residuals, gradients, **XLA)
    new = ops.apply_gradients(OPTIMIZER, tables, slots, residuals, gradients, step=1, **XLA)
    return activations, residuals, ops.rows_left_out(residuals), norm, new


def _cast_and_row_update(table, ids, offsets, weights, gradients):
    del weights
    rows = jnp.arange(gradients.shape[0], dtype=jnp.int32)
    return ops.tensor_cast(ids, offsets, num_rows=ROWS, **XLA), ops.row_update(
        OPTIMIZER, table, OPTIMIZER.init(table), rows, gradients, step=2, **XLA
    )


def _tt(table, ids, offsets, weights, gradients, *, contraction=None):
    del table
    cores = ops.tt_init(SHAPE, jax.random.key(0))
    bag = ops.tt_embedding_bag(cores, SHAPE, ids, offsets, weights=weights, contraction=contraction, **XLA)
    if contraction == "naive":
        return bag
    bags, slots = ops.Bags(ids=ids, offsets=offsets, weights=weights), ops.tt_init_slots(OPTIMIZER, cores)
    options = {"contraction": contraction, **XLA}
    pooled, residuals = ops.tt_lookup(cores, SHAPE, bags, **options)
    of_cores = ops.tt_core_gradients(cores, SHAPE, residuals, gradients, **options)
    new = ops.tt_apply_gradients(OPTIMIZER, cores, slots, SHAPE, residuals, gradients, step=1, **options)
    return bag, pooled, of_cores, new


def _tt_cached(table, ids, offsets, weights, gradients):
    del table
    cores, config = ops.tt_init(SHAPE, jax.random.key(0)), ops.TTCacheConfig(cache_rows=4, warmup_steps=1)
    cache, slots = ops.tt_cache_init(config, SHAPE, OPTIMIZER), ops.tt_init_slots(OPTIMIZER, cores)
    bags = ops.Bags(ids=ids, offsets=offsets, weights=weights)
    pooled, residuals = ops.tt_cached_lookup(cores, cache, SHAPE, bags, **XLA)
    arguments = OPTIMIZER, cores, slots, cache, SHAPE, residuals, gradients
    cores, slots, cache = ops.tt_cached_apply_gradients(*arguments, step=1, **XLA)
    step = ops.tt_cache_step(config, OPTIMIZER, cores, cache, SHAPE, residuals.cast, step=jnp.int32(0), **XLA)
    return pooled, slots, step


PROGRAMS = {
    "step": _step,
    "step with a capacity": functools.partial(_step, capacity=30),
    "cast and row update": _cast_and_row_update,
    **{f"bag {combiner}": functools.partial(_bag, combiner=combiner) for combiner in ("sum", "mean", "sqrtn", "max")},
    **{f"tt {way}": functools.partial(_tt, contraction=way) for way in (None, "unique", "dense", "sample", "naive")},
    "tt cached": _tt_cached,
}
QUICK = {("step", False), ("bag mean", True), ("cast and row update", True)}
CASES = [
    pytest.param(name, ragged, marks=() if (name, ragged) in QUICK else SLOW)
    for name in PROGRAMS
    for ragged in (False, True)
]


def _exported(program, shapes):
    exported = jax.export.export(jax.jit(program), platforms=("cpu", "cuda"))(*shapes)
    if importlib.util.find_spec("flatbuffers"):  # what jax.export writes with
        exported = jax.export.deserialize(exported.serialize())
    return exported


@pytest.mark.parametrize(("name", "ragged"), CASES)
def test_what_is_exported_equals_the_call(name, ragged):
    exported = _exported(PROGRAMS[name], _symbolic(ragged))
    assert exported.platforms == ("cpu", "cuda")
    for num_bags in (1, 40):
        arguments = _arguments(num_bags, ragged)
        got, want = exported.call(*arguments), jax.jit(PROGRAMS[name])(*arguments)
        # Leaves: the exported program's residuals do not know of how many bags they are.
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_sums_for_gpus_of_any_number_of_lookups():
    """The levels of the sums are as many as any capacity needs; those that a batch does not fill change nothing."""

    def sums(values, offsets):
        return segment_sums(lambda at: jnp.where(at[..., None] >= 0, values[at], 0), values.shape[0], offsets)

    def of_segments(values, segments):
        return _segment_sums(values, segments, 5)

    (capacity,) = jax.export.symbolic_shape("c", constraints=("c <= 2000",))
    values = jax.ShapeDtypeStruct((capacity, 2), jnp.float32)
    exported = _exported(sums, (values, jax.ShapeDtypeStruct((6,), jnp.int32)))
    by_segment = _exported(of_segments, (values, jax.ShapeDtypeStruct((capacity,), jnp.int32)))
    for size in (1, 31, 300, 2000):
        rng = np.random.default_rng(size)
        offsets = np.sort(rng.integers(0, size + 1, 6)).astype(np.int32)
        offsets[0] = 0
        array = rng.integers(-5, 5, (size, 2)).astype(np.float32)
        want = [array[low:high].sum(0) for low, high in itertools.pairwise(offsets)]
        np.testing.assert_array_equal(exported.call(array, offsets), want)
        segments = np.searchsorted(offsets[1:], np.arange(size), side="right").astype(np.int32)
        np.testing.assert_array_equal(by_segment.call(array, segments), want)


def test_fewer_levels_where_the_batch_is_bounded():
    def levels(capacity):
        return len(level_sizes(capacity))

    (free,), (bounded,) = jax.export.symbolic_shape("c"), jax.export.symbolic_shape("c", constraints=("c <= 100000",))
    assert [levels(31), levels(100_000), levels(2**31 - 1)] == [0, 4, 7]
    assert [levels(bounded), levels(free)] == [4, 7]


def test_the_default_exports_a_symbolic_batch_in_xla():
    def lookup(table, ids):
        return ops.gather_reduce(table, ids)

    exported = _exported(lookup, _symbolic(ragged=False)[:2])
    table, ids, *_ = _arguments(9, ragged=False)
    np.testing.assert_allclose(exported.call(table, ids), lookup(table, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["native", "pallas"])
def test_named_kernels_refuse_a_symbolic_batch(implementation):
    lookup = jax.jit(functools.partial(ops.gather_reduce, implementation=implementation))
    with pytest.raises(NotImplementedError, match=f"gather_reduce: {implementation} kernels need static shapes"):
        jax.export.export(lookup)(*_symbolic(ragged=False)[:2])


def test_native_kernels_are_not_exported():
    """They are addresses in this process; JAX names them and refuses."""
    table, ids, *_ = _arguments(9, ragged=False)
    with pytest.raises(ValueError, match="jrec_gather_reduce"):
        jax.export.export(jax.jit(ops.gather_reduce))(table, ids)
