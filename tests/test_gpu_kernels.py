"""The Pallas kernels on a GPU against float64: fresh random inputs, poisoned outputs, determinism, 64-bit addresses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from gpu_cases import _has_gpu, _poison, _rng
from update_cases import OPTIMIZERS, SCALE, STEP, _assert_close, _expected, _slots

from benchmarks.workloads import zipf_ids
from jrec import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs an NVIDIA GPU that JAX can use")]
DIMS = (4, 16, 20, 64, 100, 128, 256, 1024)


def _shapes(dtype, dim):
    common = {"rows": 1000, "dim": dim, "dtype": dtype}
    return (
        reference.Shape(bags=500, length=1, **common),
        reference.Shape(bags=300, length=7, weighted=True, **common),
        reference.Shape(bags=70, capacity=3000, weighted=True, **common),
        reference.Shape(bags=3, capacity=9000, **common),
    )


@functools.partial(jax.jit, static_argnames="implementation")
def _gather_reduce(source, indices, offsets, weights, *, implementation="pallas"):
    return ops.gather_reduce(source, indices, offsets, weights=weights, implementation=implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
def test_gather_reduce(dim, dtype):
    rng = _rng()
    for shape in _shapes(dtype, dim):
        case = reference.make_case(shape, rng, kind="power law", past=True)
        _poison((shape.bags, dim))
        got = _gather_reduce(case.table, case.ids, case.offsets, case.weights)
        want = reference.gather_reduce(case)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        scale = np.nanmax(np.abs(want), initial=1.0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_casted_update(optimizer, dim):
    rng = _rng()
    for kind in ("uniform", "power law", "identical"):
        case = reference.make_case(reference.Shape(rows=300, dim=dim, bags=400, length=3), rng, kind=kind)
        slots = _slots(optimizer, case.table)
        cast = ops.tensor_cast(jnp.asarray(case.ids), num_rows=300)
        arguments = jnp.asarray(case.table), slots, cast, jnp.asarray(case.bag_gradients)
        update = jax.jit(functools.partial(ops.casted_update, optimizer, step=STEP, gradient_scale=SCALE,
                                           implementation="pallas"))  # fmt: skip
        got = update(*arguments)
        _assert_close(got, _expected(optimizer, case, slots), rtol=1e-4, atol=1e-4)
        jax.tree.map(np.testing.assert_array_equal, update(*arguments), got)


@pytest.mark.parametrize("exponent", [1.05, 1.2, 2.0, None])
def test_skewed_backward_is_right_and_bit_equal(exponent):
    rng = _rng()
    lookups, rows, dim = 1_000_000, 300_000, 64
    ids = np.zeros(lookups, np.int32) if exponent is None else zipf_ids(rng, rows, lookups, exponent)
    gradients = rng.normal(size=(lookups, dim)).astype(np.float32)
    cast = ops.tensor_cast(jnp.asarray(ids[:, None]), num_rows=rows)
    runs = [np.asarray(_gather_reduce(gradients, cast.sources, cast.offsets, None)) for _ in range(2)]
    np.testing.assert_array_equal(*runs)
    unique = np.unique(ids)
    exact = np.zeros((rows, dim))
    np.add.at(exact, ids, gradients.astype(np.float64))
    counts = np.bincount(ids, minlength=rows)[unique, None]
    assert np.all(np.abs(runs[0][: unique.size] - exact[unique]) <= 1e-5 * np.sqrt(counts) + 1e-5)


@pytest.mark.parametrize("dim", [64, 128])
def test_addresses_past_32_bits(dim):
    """A table past 2**31 elements and 2**33 bytes: the last rows are read and written, and no others."""
    rows = 2**31 // dim + 1000
    table = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.int32, (rows, dim), 0).astype(jnp.float32))()
    ids = jnp.array([[0], [rows - 1], [2**30 // dim], [rows - 500]], jnp.int32)
    got = _gather_reduce(table, ids, None, None)
    np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(ids, np.float32), (4, dim)))
    cast = ops.tensor_cast(ids, num_rows=rows)
    update = jax.jit(
        functools.partial(ops.casted_update, ops.SGD(learning_rate=1.0), implementation="pallas"), donate_argnums=0
    )
    table, _ = update(table, {}, cast, jnp.full((4, dim), 2.0**10))
    changed = jnp.flatnonzero(table[:, dim - 1] != jnp.arange(rows, dtype=jnp.float32), size=10, fill_value=-1)
    assert sorted(set(changed.tolist()) - {-1}) == sorted(ids[:, 0].tolist())
