"""The tensor-train kernels on a GPU against float64: fresh random inputs, poisoned outputs, determinism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tt_reference
from gpu_cases import _has_gpu, _poison, _rng
from tt_kernel_cases import make_level

from benchmarks.workloads import zipf_ids
from jrec.ops.tt import TTShape, TTTraffic, tt_embedding_bag, tt_init
from jrec.pallas import tt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs an NVIDIA GPU that JAX can use")]

RANKS = (8, 16, 32, 64, 128)
SIZES = {"parents": 60, "slices": 70, "capacity": 1500, "bags": 400, "lookups": 3000}
FUSED = {"lookups": 1}
UNFUSED = {"lookups": 10**6}


def _close(got, want):
    got = np.asarray(got)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    scale = float(np.nanmax(np.abs(want), initial=1.0))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=4e-6 * scale)


def _twice(function, *arrays, poison, real=None):
    """The result of two runs into poisoned memory, which must be the same bits; of ``real`` entries alone."""
    compiled, runs = jax.jit(function), []
    for _ in range(2):
        for shape in poison:
            _poison(shape)
        out = compiled(*(jnp.asarray(a) for a in arrays))
        runs.append(jax.tree.map(lambda x: np.asarray(x)[:real], out))
    jax.tree.map(np.testing.assert_array_equal, *runs)
    return runs[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("height", "columns", "right_rank"), [(2, 4, 32), (4, 2, 16), (1, 8, 8), (4, 4, 1), (16, 8, 1)]
)
def test_products_and_gradients(height, columns, right_rank, rank, dtype):
    case = make_level(_rng(), height=height, columns=columns, right_rank=right_rank, rank=rank, dtype=dtype, **SIZES)
    level = (case.below, case.core, case.parents, case.digits, case.order)
    width = columns * right_rank
    out = _twice(tt.expand, *level, poison=[(1500 * height, width)], real=case.real)
    _close(out, case.products())
    poison = [(60 * height, rank), (70 * rank, width), (1500 * height, rank)]
    for got, want in zip(
        _twice(tt.expand_transpose, case.gradient, *level, poison=poison), case.gradients(), strict=True
    ):
        _close(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("height", "columns"), [(4, 4), (8, 4), (16, 8), (3, 5)])
def test_fused_bags(height, columns, rank, dtype):
    case = make_level(_rng(), height=height, columns=columns, rank=rank, dtype=dtype, past=True, **SIZES)
    arrays = (case.below, case.core, case.parents, case.digits, case.sources, case.offsets, case.weights)
    _close(_twice(tt.bags, *arrays, poison=[(400 * height, columns)]), case.bags())


@pytest.mark.parametrize("kind", ["power law", "identical", "all padding"])
def test_skewed_lookups(kind):
    """One bag of 100,000 lookups beside short ones, and rows that most lookups share."""
    rng = _rng()
    shape = TTShape.search(100_000, 32, ranks=16)
    cores = tt_init(shape, jax.random.key(int(rng.integers(2**31))))
    lookups = 120_000
    ids = zipf_ids(rng, shape.rows, lookups, 1.2)
    if kind == "identical":
        ids[:] = 77_777
    if kind == "all padding":
        ids[:] = -1
    offsets = np.concatenate([[0, 100_000], np.linspace(100_000, lookups, 500)]).astype(np.int32)
    gradient = rng.normal(size=(offsets.size - 1, shape.dim)).astype(np.float32)
    host = [np.asarray(core, np.float64) for core in cores]
    unique, inverse = np.unique(ids, return_inverse=True)
    rows = np.stack([tt_reference.row_of(host, int(i)) if i >= 0 else np.zeros(shape.dim) for i in unique])
    bags = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    want = np.zeros((offsets.size - 1, shape.dim))
    np.add.at(want, bags, rows[inverse])
    slopes = np.zeros(rows.shape)
    np.add.at(slopes, inverse, gradient[bags].astype(np.float64))
    want_gradients = [np.zeros(core.shape) for core in host]
    for i, slope in zip(unique, slopes, strict=True):
        if i >= 0:
            tt_reference.add_core_gradients(host, int(i), slope, want_gradients)
    for lookups_assumed in (FUSED, UNFUSED):
        traffic = TTTraffic(**lookups_assumed, entries=(1, 1), pairs=1)
        bag = functools.partial(tt_embedding_bag, shape=shape, traffic=traffic, implementation="pallas")

        def run(cores, ids, offsets, gradient, bag=bag):
            out, transpose = jax.vjp(lambda cores: bag(cores, ids=ids, offsets=offsets), cores)
            return out, transpose(gradient)[0]

        compiled = jax.jit(run)
        arguments = cores, jnp.asarray(ids), jnp.asarray(offsets), jnp.asarray(gradient)
        out, gradients = compiled(*arguments)
        jax.tree.map(np.testing.assert_array_equal, compiled(*arguments), (out, gradients))
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5 * max(1e-3, np.abs(want).max()))
        for got, wanted in zip(gradients, want_gradients, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5 * max(1e-3, np.abs(wanted).max()))


def test_a_level_past_32_bit_addresses():
    """A level below of 2**33 bytes: its last entries are read."""
    parents, height, rank = 1 << 20, 16, 128
    below = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.float32, (parents, height, rank), 0))()
    core = jnp.zeros((3, rank, 4, 1)).at[:, 0].set(1)
    wanted = np.array([0, 2**15, 2**17 + 1, parents - 1], np.int32)
    out = jax.jit(tt.bags)(
        below, core, jnp.asarray(wanted), jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)[:, None], None, None
    )
    np.testing.assert_array_equal(out, np.repeat(wanted[:, None].astype(np.float32), height * 4, axis=1))
