"""The tensor-train kernels compile for an H200 over ranks, dims and dtypes; their code and memory are checked."""

import functools
import re

import aot
import jax.numpy as jnp
import numpy as np
import pytest
from grids import some_of
from tt_kernel_cases import make_level

from jrec.ops.tt import TTShape, TTTraffic, tt_core_gradients, tt_lookup
from jrec.ops.types import Bags
from jrec.pallas import tt
from jrec.pallas.tt.tuning import WIDE, fits_wgmma, tune_wgmma
from jrec.pallas.tt.wgmma import wgmma_products

pytestmark = [pytest.mark.aot, aot.needs_environment()]

ROWS, LOOKUPS = 10_131_227, 8192


def _forward_and_backward(shape, traffic, cores, ids, offsets, weights, gradient):
    bags = Bags(ids=ids, offsets=offsets, weights=weights)
    ways = {"traffic": traffic, "implementation": "pallas"}
    out, residuals = tt_lookup(cores, shape, bags, **ways)
    return out, tt_core_gradients(cores, shape, residuals, gradient, **ways)


VARIANTS = [
    *((rank, dim, "float32") for rank, dim in ((8, 16), (16, 64), (32, 128), (64, 32), (128, 128))),
    *((rank, dim, "bfloat16") for rank, dim in ((8, 128), (32, 32), (64, 64), (128, 16))),
]
# Products that are narrow, wide ones of either dtype without tensor cores, and those of tensor cores.
SOME_LEVELS = (
    *((8, 16, "float32"), (64, 32, "float32"), (128, 128, "float32")),
    *((8, 128, "bfloat16"), (64, 64, "bfloat16")),
)


def _checked(name, modules):
    for entry, module in modules.items():
        if entry == "tt_wgmma_products":
            assert "wgmma.mma_async" in module, name
        elif entry.startswith("tt_"):
            assert "fma.rn.f32" in module, name
            assert re.search(r"ld\.global\.v[248]", module), name


@pytest.mark.parametrize(("rank", "dim", "dtype"), some_of(VARIANTS, *SOME_LEVELS))
def test_levels(rank, dim, dtype):
    """Products, gradients and fused bags of a table's levels: the second core's, and the last one's."""
    shape = TTShape.search(ROWS, dim, ranks=rank)
    n1, n2, n3 = shape.dim_factors
    m1, m2, m3 = shape.row_factors
    index, name = aot.shape((LOOKUPS,), jnp.int32), f"rank {rank} dim {dim} {dtype}"
    below, core = aot.shape((m1, n1, rank)), aot.shape((m2, rank, n2, rank), dtype)
    last_below, last = aot.shape((LOOKUPS, n1 * n2, rank)), aot.shape((m3, rank, n3, 1), dtype)
    compiled, modules = aot.compile_checked(name, tt.expand, below, core, index, index, index)
    _checked(name, modules)
    wide = n2 * rank >= WIDE
    tensor_cores = dtype == "bfloat16" and fits_wgmma(height=n1, terms=rank, width=n2 * rank)
    assert ("tt_wgmma_products" in modules) == (wide and tensor_cores)
    assert ("tt_products" in modules) == (wide and not tensor_cores)
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * (LOOKUPS + 1000)  # index work alone
    _, modules = aot.compile_checked(name, _bags_of_level, last_below, last, index, index, index)
    _checked(name, modules)
    gradient = aot.shape((LOOKUPS, n1 * n2, rank))
    _, modules = aot.compile_checked(name, tt.expand_transpose, gradient, below, core, index, index, index)
    _checked(name, modules)
    if rank != dim:
        gradient = aot.shape((LOOKUPS, dim, 1))
        _, modules = aot.compile_checked(name, tt.expand_transpose, gradient, last_below, last, index, index, index)
        _checked(name, modules)


@pytest.mark.parametrize("num_cores", [2, 4])
def test_through_the_op(num_cores):
    shape = TTShape.search(100_000, 32, ranks=8, num_cores=num_cores)
    traffic = TTTraffic(lookups=1, entries=(1,) * (num_cores - 1), pairs=1)  # so that pooling is fused
    compiled, modules = aot.compile_checked(
        f"{num_cores} cores",
        functools.partial(_forward_and_backward, shape, traffic),
        tuple(aot.shape(s) for s in shape.core_shapes),
        aot.shape((LOOKUPS,), jnp.int32),
        aot.shape((101,), jnp.int32),
        aot.shape((LOOKUPS,)),
        aot.shape((100, 32)),
    )
    assert {"tt_reduce_short", "tt_reduce_pieces", "tt_reduce_long"} <= set(modules)
    # Products and gradients of levels, partial sums, index work: a few rows a lookup, and no slice a lookup.
    assert compiled.memory_analysis().temp_size_in_bytes <= 40 * 4 * LOOKUPS * 32 * num_cores


# The widest tile, and others at the greatest depth: about a third of all (terms, columns) that there are.
WGMMA_TILES = [
    *((terms, 128, "float32") for terms in (16, 112, 128, 144, 176, 192, 208, 240, 256)),
    *((256, columns, "float32") for columns in (32, 64)),
    *((terms, 128, "bfloat16") for terms in (128, 240)),
]


SOME_TILES = [(terms, 128, "float32") for terms in (16, 128, 192, 256)] + [(256, 32, "float32"), (240, 128, "bfloat16")]


@pytest.mark.parametrize(("terms", "columns", "left"), some_of(WGMMA_TILES, *SOME_TILES))
def test_tiles_of_the_tensor_cores_keep_within_the_registers(terms, columns, left):
    rows, right = aot.shape((300, 7, terms), left), aot.shape((200, terms, columns), jnp.bfloat16)
    index, bounds = aot.shape((1024,), jnp.int32), aot.shape((201,), jnp.int32)
    run = functools.partial(wgmma_products, interpret=None)
    (kernel,) = aot.check_program("wgmma", run, rows, right, index, index, bounds).kernels
    steps = -(-terms // tune_wgmma(height=7, terms=terms, width=columns).depth)
    assert kernel.ptx.count("wgmma.commit_group") == steps * (3 if left == "float32" else 1)
    assert terms * columns * 2 <= kernel.shared_bytes <= terms * columns * 2 + 1024


def _bags_of_level(below, core, parents, digits, sources):
    return tt.bags(below, core, parents, digits, sources[:, None], None, None)


def test_rows_that_lie_past_4_gigabytes_have_64_bit_addresses():
    """below is 2**31 elements: a row's byte offset is a widening product."""
    below = aot.shape((1 << 20, 16, 128))
    level = [aot.shape((LOOKUPS,), jnp.int32)] * 3
    _, modules = aot.compile_checked("addresses", _bags_of_level, below, aot.shape((250, 128, 8, 1)), *level)
    module = modules["tt_reduce_short"]
    assert not re.findall(r"ld\.global\S* \s*[^\[]*\[%r\d", module)
    assert re.findall(r"mul\.wide\.[su]32 \s*%rd\d+, %r\d+, 512;|shl\.b64 \s*%rd\d+, %rd\d+, 9;", module)


LEVELS = (
    {"height": 4, "rank": 8, "columns": 4, "lookups": 40},
    {"height": 3, "rank": 6, "columns": 5, "lookups": 40, "dtype": "bfloat16"},
    {"height": 2, "rank": 12, "columns": 2, "right_rank": 20},
    {"height": 2, "rank": 7, "columns": 3, "right_rank": 16, "dtype": "bfloat16"},
)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: "-".join(map(str, level.values())))
def test_numbers_of_the_compiled_code(level):
    """The PTX that was generated for an H200, run thread by thread on the PTX machine, against float64."""
    case = make_level(np.random.default_rng(level["rank"]), **level)
    arrays = [jnp.asarray(a) for a in (case.below, case.core, case.parents, case.digits)]
    order = jnp.asarray(case.order)
    with aot.ptx_machine_launches() as modules:
        out = tt.expand(*arrays, order)
        of_below, of_core = tt.expand_transpose(jnp.asarray(case.gradient), *arrays, order)
        if "right_rank" not in level:
            pooled = tt.bags(*arrays, *(jnp.asarray(a) for a in (case.sources, case.offsets, case.weights)))
            np.testing.assert_allclose(pooled, case.bags(), rtol=1e-4, atol=1e-4)
    assert modules
    np.testing.assert_allclose(out[: case.real], case.products(), rtol=1e-4, atol=1e-5)
    for got, want in zip((of_below, of_core), case.gradients(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
