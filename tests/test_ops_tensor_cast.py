"""Casts of every implementation, on device and host, are bit-identical."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings

from jrec import ops
from jrec.native import host

IMPLEMENTATIONS = ("xla", "native", "host")
S = reference.SHAPES
CAPACITIES = {S[0]: None, S[2]: 3, S[4]: None, S[7]: 0, S[8]: 3, S[10]: None, S[11]: None}  # XLA's sort compiles slowly
FIELDS = ("rows", "offsets", "sources", "positions", "num_unique")


@functools.partial(jax.jit, static_argnames=("num_rows", "unique_capacity", "implementation"))
def _on_device(ids, offsets, **options):
    return ops.tensor_cast(ids, offsets, **options)


def _tensor_cast(implementation, ids, offsets, *, num_rows, unique_capacity):
    options = {"num_rows": num_rows, "unique_capacity": unique_capacity}
    if implementation == "host":
        return host.tensor_cast(ids, offsets, **options)
    return _on_device(ids, offsets, **options, implementation=implementation)


def _assert_identical(got, want):
    for name in FIELDS:
        field = np.asarray(getattr(got, name))
        assert field.dtype == np.int32
        np.testing.assert_array_equal(field, want[name], err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(case=reference.cases(tuple(CAPACITIES), past=True))
@settings(max_examples=120)
def test_equals_reference(implementation, case):
    rows, capacity = case.shape.rows, CAPACITIES[case.shape]
    unique_capacity = min(case.ids.size, rows) if capacity is None else capacity
    want = reference.tensor_cast(case.ids, case.offsets, rows, unique_capacity)
    got = _tensor_cast(implementation, case.ids, case.offsets, num_rows=rows, unique_capacity=unique_capacity)
    _assert_identical(got, want)


@pytest.mark.parametrize("implementation", ["native", "host"])
@pytest.mark.parametrize("num_rows", [1, 255, 256, 2**20, 2**31 - 1])
def test_big_batches_sort_alike(implementation, num_rows):
    rng = np.random.default_rng(num_rows)
    ids = np.minimum(rng.zipf(1.2, (30_000, 4)), num_rows).astype(np.int64) - 1
    ids[rng.random(ids.shape) < 0.05] = -1
    spread = rng.random(ids.shape) < 0.5
    ids[spread] = rng.integers(0, num_rows, spread.sum())
    ids = ids.astype(np.int32)
    want = _tensor_cast("xla", ids, None, num_rows=num_rows, unique_capacity=1000)
    got = _tensor_cast(implementation, ids, None, num_rows=num_rows, unique_capacity=1000)
    _assert_identical(got, {name: getattr(want, name) for name in FIELDS})


@pytest.mark.parametrize("implementation", ["native", "host"])
def test_big_ragged_batches_sort_alike(implementation):
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, 70_000, 100_000).astype(np.int32)
    offsets = np.sort(rng.integers(0, 99_000, 9001)).astype(np.int32)
    offsets[0] = 0
    want = _tensor_cast("xla", ids, offsets, num_rows=69_000, unique_capacity=69_000)
    got = _tensor_cast(implementation, ids, offsets, num_rows=69_000, unique_capacity=69_000)
    _assert_identical(got, {name: getattr(want, name) for name in FIELDS})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_no_lookups(implementation, shape):
    ids = np.zeros(shape, np.int32)
    got = _tensor_cast(implementation, ids, None, num_rows=9, unique_capacity=2)
    _assert_identical(got, reference.tensor_cast(ids, None, 9, 2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_too_small_a_capacity_shows_in_num_unique(implementation):
    ids = np.arange(10, dtype=np.int32).reshape(5, 2)
    got = _tensor_cast(implementation, ids, None, num_rows=10, unique_capacity=4)
    assert int(got.num_unique) == 10 > got.rows.shape[0]


def test_every_bag_number_is_exact_for_any_length():
    for length in (1, 3, 7, 10, 63, 1000, 12_345):
        ids = np.zeros((70_000 // length, length), np.int32)
        got = host.tensor_cast(ids, num_rows=1)
        np.testing.assert_array_equal(got.sources, np.arange(ids.size) // length)


def test_default_capacity_always_suffices():
    cast = ops.tensor_cast(jnp.array([[5, 5], [0, -1]], jnp.int32), num_rows=3, implementation="xla")
    assert cast.rows.shape == (3,)
    cast = ops.tensor_cast(jnp.array([[5, 5], [0, -1]], jnp.int32), num_rows=300, implementation="xla")
    assert cast.rows.shape == (4,)


@pytest.mark.parametrize("length", [3, 49, 98, 103, 107, 161])
def test_bags_of_lengths_whose_reciprocal_is_rounded_down(length):
    """49 * (1 / 49) is less than 1 in float64, by which the native cast divides."""
    ids = np.arange(4 * length, dtype=np.int32).reshape(4, length)
    cast = ops.tensor_cast(ids, num_rows=4 * length, implementation="native")
    np.testing.assert_array_equal(cast.sources, np.repeat(np.arange(4), length))
