"""The cast's kernels on a GPU against NumPy: fresh random inputs, poisoned outputs, equal bits in every run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cast_cases import FIELDS, KINDS, MORE_SHAPES, SHAPES, Shape, _assert_identical, _draw
from gpu_cases import _has_gpu, _rng

from benchmarks.workloads import zipf_ids
from jrec import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs an NVIDIA GPU that JAX can use")]

# CUB sorts from a few hundred (16 bits) or about 20,000 keys (32 bits) on; below, XLA's own sort does.
LARGE = (
    Shape(bags=40_000, length=3, rows=50_000),
    Shape(bags=40_000, length=3, rows=5_000_000, unique=70_000),
    Shape(bags=9_000, capacity=150_001, rows=1_000_000),
    Shape(bags=30_000, length=1, rows=200),
)


def _poison(shape):
    """Leaves numbers that no cast holds in the memory that its results are made in."""
    for size in (shape.unique_capacity, shape.unique_capacity + 1, shape.size, shape.size, 1):
        jnp.full(size, 2**31 - 7, jnp.int32).block_until_ready().delete()


@functools.partial(jax.jit, static_argnames=("num_rows", "unique_capacity", "implementation"))
def _cast(ids, offsets, **options):
    return ops.tensor_cast(ids, offsets, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES + LARGE, ids=str)
def test_equals_reference(shape, kind):
    ids, offsets = _draw(shape, _rng(), kind)
    options = {"num_rows": shape.rows, "unique_capacity": shape.unique_capacity}
    want = reference.tensor_cast(ids, offsets, shape.rows, shape.unique_capacity)
    for implementation in ("pallas", "xla"):
        _poison(shape)
        _assert_identical(_cast(ids, offsets, **options, implementation=implementation), want)


def test_millions_of_lookups_of_a_power_law():
    """Runs of several trips; checked by NumPy's stable sort, whole arrays at a time."""
    rows, bags, length = 30_000_000, 100_000, 80
    ids = zipf_ids(_rng(), rows, bags * length, 1.05)
    got = _cast(jnp.asarray(ids.reshape(bags, length)), None, num_rows=rows, implementation="pallas")
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    np.testing.assert_array_equal(got.positions, order)
    np.testing.assert_array_equal(got.sources, order // length)
    assert int(got.num_unique) == unique.size
    np.testing.assert_array_equal(got.rows[: unique.size], unique)
    np.testing.assert_array_equal(got.offsets[: unique.size], starts)
    assert np.all(np.asarray(got.rows[unique.size :]) == rows)
    assert np.all(np.asarray(got.offsets[unique.size :]) == ids.size)


def test_runs_have_equal_bits():
    shape = LARGE[1]
    ids, offsets = _draw(shape, _rng(), "power law")
    options = {"num_rows": shape.rows, "unique_capacity": shape.unique_capacity, "implementation": "pallas"}
    first = _cast(ids, offsets, **options)
    for _ in range(20):
        again = _cast(ids, offsets, **options)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(again, name), getattr(first, name), err_msg=name)
