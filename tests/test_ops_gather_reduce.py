"""Gather-reduce of every implementation against float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings

from jrec import ops

IMPLEMENTATIONS = ("xla", "native")


@functools.partial(jax.jit, static_argnames="implementation")
def _gather_reduce(source, indices, offsets, weights, *, implementation):
    return ops.gather_reduce(source, indices, offsets, weights=weights, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=reference.cases(past=True))
@settings(max_examples=150)
def test_equals_reference(implementation, case):
    got = _gather_reduce(case.table, case.ids, case.offsets, case.weights, implementation=implementation)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [4, 64, 190])
def test_long_segments_are_summed_right_and_alike_each_time(implementation, dtype, dim):
    rng = np.random.default_rng(dim)
    size = 50_000
    source = jnp.asarray(rng.normal(size=(97, dim)), dtype)
    indices = rng.integers(0, 97, size).astype(np.int32)
    offsets = np.array([0, 1, 1, 4097, 8193, 8193, 40_000, 40_002, 49_990], np.int32)
    got = _gather_reduce(source, indices, offsets, None, implementation=implementation)
    exact = np.asarray(source, np.float64)
    want = [exact[indices[a:b]].sum(0) for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-3)
    again = _gather_reduce(source, indices, offsets, None, implementation=implementation)
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 16), ("bfloat16", 64), ("float16", 3), ("float32", 190)])
def test_short_segments_of_many_chunks(dtype, dim, long, weighted):
    rng = np.random.default_rng(dim + long)
    lengths = rng.choice([0, 1, 1, 2, 3, 5], 9000)
    lengths[[0, 5000, 8999]] = 0
    if long:
        lengths[[2500, 7000]] = 5000, 20
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    size = int(offsets[-1])
    source = jnp.asarray(rng.normal(size=(997, dim)), dtype)
    indices = rng.integers(-20, 997, size).astype(np.int32)
    indices[[size // 3, size - 1]] = 997, 2**31 - 1  # past the table
    weights = rng.normal(size=size).astype(np.float32) if weighted else None
    got = _gather_reduce(source, indices, offsets, weights, implementation="native")
    rows = np.vstack([np.asarray(source, np.float64), np.full((1, dim), np.nan), np.zeros((1, dim))])
    rows = rows[np.where(indices < 0, 998, np.minimum(indices, 997))]
    if weights is not None:
        rows = np.where((indices < 0)[:, None], 0, rows * weights[:, None])
    sums = np.add.reduceat(np.vstack([rows, np.zeros(dim)]), offsets[:-1])
    want = np.where((lengths > 0)[:, None], sums, 0)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-3 if long else 2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_no_lookups(implementation, shape):
    got = ops.gather_reduce(jnp.ones((5, 6)), jnp.zeros(shape, jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(got, np.zeros((shape[0], 6)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bags_of_one_id_are_weighted(implementation):
    source, weights = jnp.arange(8.0).reshape(4, 2), jnp.asarray([[0.5], [2.0], [3.0]], jnp.float32)
    got = ops.gather_reduce(
        source, jnp.asarray([[1], [3], [-1]], jnp.int32), weights=weights, implementation=implementation
    )
    np.testing.assert_array_equal(got, [[1.0, 1.5], [12.0, 14.0], [0.0, 0.0]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_ragged_lookups(implementation):
    ids, offsets = jnp.zeros(0, jnp.int32), jnp.zeros(4, jnp.int32)
    got = ops.gather_reduce(jnp.ones((5, 6)), ids, offsets, implementation=implementation)
    np.testing.assert_array_equal(got, np.zeros((3, 6)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_past_the_last_offset_is_read(implementation):
    ids = jnp.array([1, 2, 99, -5], jnp.int32)
    source = jnp.arange(8.0).reshape(4, 2)
    got = ops.gather_reduce(source, ids, jnp.array([0, 2], jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(got, [[6.0, 8.0]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value_is_widened_exactly(implementation, dtype):
    source = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16).reshape(-1, 64), dtype)
    indices = jnp.arange(source.shape[0], dtype=jnp.int32)[:, None]
    got = np.asarray(ops.gather_reduce(source, indices, implementation=implementation))
    want = np.asarray(source).astype(np.float32)
    normal = ~(np.abs(want) < np.finfo(np.float32).tiny)  # XLA's CPU threads flush float32 subnormals to zero
    np.testing.assert_array_equal(got[normal], want[normal])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": jnp.zeros((2, 3), jnp.int16)}, "must be int32, but are int16"),
        ({"indices": jnp.zeros(3, jnp.int32)}, r"\(num_bags, length\)"),
        ({"indices": jnp.zeros((2, 3), jnp.int32), "offsets": jnp.zeros(3, jnp.int32)}, r"\(capacity,\) beside"),
        ({"indices": jnp.zeros(3, jnp.int32), "offsets": jnp.zeros(3, jnp.float32)}, "offsets must be"),
        ({"weights": jnp.zeros((3, 2))}, "weights must be float32 of the indices' shape"),
        ({"source": jnp.zeros((4, 2), jnp.int32)}, "source must be float32, bfloat16 or"),
        ({"implementation": "fast"}, "implementation='fast' is unknown"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"source": jnp.zeros((4, 2)), "indices": jnp.zeros((2, 3), jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        ops.gather_reduce(**arguments)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_other_dtypes_are_refused(implementation):
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match=r"bfloat16 or float16 of shape \(rows, dim\), but is float64\[4, 2\]"):
            ops.gather_reduce(jnp.zeros((4, 2), "float64"), jnp.zeros((2, 3), jnp.int32), implementation=implementation)
    finally:
        jax.config.update("jax_enable_x64", False)
