"""The tensor-train kernels in interpret mode against float64 NumPy, and through the ops."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tt_reference
from pallas_interpreter import race_free
from tt_kernel_cases import make_level

from jrec.ops.tt import TTShape, TTTraffic, tt_embedding_bag, tt_init
from jrec.ops.tt.cost import fuses_pooling
from jrec.pallas import tt
from jrec.pallas.interpret import interpreted
from jrec.pallas.tt.block import Block
from jrec.pallas.tt.product import grouped_products
from jrec.pallas.tt.reduce import Products, reduce_products
from jrec.pallas.tt.runs import bounds_of, runs_of
from jrec.pallas.tt.tuning import (
    ProductConfig,
    ReduceConfig,
    WgmmaConfig,
    check_int32,
    fits_wgmma,
    tune_product,
    tune_reduce,
    tune_wgmma,
)

# Heights, ranks, columns and right ranks of levels of 2 to 4 cores, of dims 16 to 128.
LEVELS = (
    {"height": 4, "rank": 8, "columns": 4},
    {"height": 2, "rank": 8, "columns": 2, "right_rank": 16, "capacity": 12},
    {"height": 3, "rank": 5, "columns": 3},
    {"height": 2, "rank": 6, "columns": 5, "right_rank": 7},
    {"height": 16, "rank": 16, "columns": 8, "dtype": "bfloat16"},
    {"height": 1, "rank": 32, "columns": 4, "right_rank": 8, "dtype": "bfloat16"},
)
LONG_LEVELS = (
    {"height": 2, "rank": 32, "columns": 4, "right_rank": 32, "parents": 11, "slices": 9, "capacity": 90},
    {"height": 4, "rank": 128, "columns": 2, "right_rank": 64, "dtype": "bfloat16", "capacity": 30},
    {"height": 8, "rank": 64, "columns": 16, "parents": 9, "slices": 14, "capacity": 120},
    {"height": 32, "rank": 16, "columns": 4, "right_rank": 1, "parents": 3, "slices": 40, "capacity": 119},
)


def _levels(cases, quick=()):
    """Cases, all slow but those numbered ``quick``: to interpret a kernel takes seconds."""
    return pytest.mark.parametrize(
        "level",
        [
            pytest.param(c, id="-".join(map(str, c.values())), marks=() if i in quick else pytest.mark.slow)
            for i, c in enumerate(cases)
        ],
    )


def _case(level, **others):
    return make_level(np.random.default_rng(len(level) + level["rank"]), **level, **others)


def _arrays(*arrays):
    return tuple(jnp.asarray(a) for a in arrays)


def _close(got, want):
    scale = max(1.0, float(np.nanmax(np.abs(want), initial=0)))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * scale)


def _check_products(case):
    with interpreted():
        got = tt.expand(*_arrays(case.below, case.core, case.parents, case.digits, case.order))
    assert got.dtype == jnp.float32
    _close(got[: case.real], case.products())


def _check_gradients(case):
    arguments = _arrays(case.gradient, case.below, case.core, case.parents, case.digits, case.order)
    with interpreted():
        of_below, of_core = tt.expand_transpose(*arguments)
    want_below, want_core = case.gradients()
    _close(of_below, want_below)
    _close(of_core, want_core)


def _check_bags(case):
    arguments = _arrays(case.below, case.core, case.parents, case.digits, case.sources, case.offsets, case.weights)
    with interpreted():
        got = tt.bags(*arguments)
    _close(got, case.bags())


@_levels(LEVELS)
def test_products(level):
    _check_products(_case(level))


@_levels(LEVELS, quick=(1,))
def test_gradients(level):
    _check_gradients(_case(level))


@_levels([level for level in LEVELS if "right_rank" not in level], quick=(0,))
def test_last_products_fused_with_pooling(level):
    _check_bags(_case(level, past=True))


@pytest.mark.parametrize("rank", [16, 144])
def test_bfloat16_slices_on_tensor_cores(rank):
    """Float32 left factors in three pieces: float32 accuracy, and only real entries written."""
    level = {"height": 3, "rank": rank, "columns": 2, "right_rank": 16}
    case = _case(level)
    case = dataclasses.replace(case, core=np.asarray(jnp.asarray(case.core, jnp.bfloat16)))
    assert fits_wgmma(height=3, terms=rank, width=32)
    _check_products(case)


@_levels(LONG_LEVELS)
def test_larger_levels(level):
    case = _case(level)
    _check_products(case)
    _check_gradients(case)
    if case.core.shape[3] == 1:
        _check_bags(case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no entries", "full", "one digit"])
def test_edges(kind):
    level = {"height": 2, "rank": 4, "columns": 2, "right_rank": 16}
    sizes = {"no entries": {"real": 0}, "full": {"real": 20}, "one digit": {"slices": 1, "parents": 18}}[kind]
    case = _case(level, **sizes)
    _check_products(case)
    _check_gradients(case)


def test_no_capacity():
    empty = jnp.zeros(0, jnp.int32)
    below, core = jnp.ones((3, 2, 4)), jnp.ones((5, 4, 2, 16))
    assert tt.expand(below, core, empty, empty, empty).shape == (0, 4, 16)
    of_below, of_core = tt.expand_transpose(jnp.ones((0, 4, 16)), below, core, empty, empty, empty)
    np.testing.assert_array_equal(of_below, jnp.zeros(below.shape))
    np.testing.assert_array_equal(of_core, jnp.zeros(core.shape))


def test_long_segments_are_split_without_races():
    """Several levels of pieces; the same bits in every geometry of the launch."""
    rng = np.random.default_rng(3)
    left, right = rng.normal(size=(9, 3, 4)).astype(np.float32), rng.normal(size=(8, 4, 5)).astype(np.float32)
    numbers = [rng.integers(0, n, 30).astype(np.int32) for n in (9, 8)]
    indices = rng.integers(-1, 30, 90).astype(np.int32)
    offsets = np.array([0, 0, 3, 80, 80, 90], np.int32)
    products = np.einsum("ehk,ekw->ehw", left[numbers[0]].astype(np.float64), right[numbers[1]])
    want = np.zeros((5, 3, 5))
    for s in range(5):
        for j in range(offsets[s], offsets[s + 1]):
            want[s] += products[indices[j]] * (indices[j] >= 0)
    outs = []
    for turned in (False, True):
        factors = np.ascontiguousarray(left.swapaxes(1, 2)) if turned else left
        block = Block.of(3, 5, down=1 + turned)
        config = ReduceConfig(block=block, split=4, blocks=2)
        with race_free():
            outs.append(
                reduce_products(
                    Products(*_arrays(factors, right, *numbers)), *_arrays(indices, offsets), transposed=turned,
                    config=config,
                )
            )  # fmt: skip
        _close(outs[-1], want)
    np.testing.assert_array_equal(*outs)


def test_runs_write_each_entry_once_without_races():
    case = _case({"height": 3, "rank": 4, "columns": 5, "right_rank": 1})
    bounds = bounds_of(jnp.asarray(case.digits[case.order]), 6)
    config = ProductConfig(block=Block.of(6, 5, down=2), entries=2, blocks=2)
    with race_free():
        got = grouped_products(*_arrays(case.below, case.core[..., 0], case.parents, case.order), bounds, config=config)
    _close(got[: case.real].reshape(case.real, -1, 1), case.products())
    assert np.isnan(got[case.real :]).all()  # padding is not written


@pytest.mark.parametrize("length", [1, 3, 50])
def test_runs_cover_every_entry_of_a_factor_once(length):
    digits = np.sort(np.random.default_rng(length).integers(0, 9, 40)).astype(np.int32)  # 8 is padding
    runs = runs_of(jnp.arange(40, dtype=jnp.int32), bounds_of(jnp.asarray(digits), 8), length)
    covered = []
    for run in range(int(runs.count[0])):
        begin, end = int(runs.begins[run]), int(runs.ends[run])
        assert 0 < end - begin <= length
        assert set(digits[begin:end]) == {int(runs.factors[run])}
        covered.extend(range(begin, end))
    assert covered == list(range(int(np.sum(digits < 8))))
    assert np.all(np.asarray(runs.factors[int(runs.count[0]) :]) == -1)


SHAPES = {
    2: TTShape(rows=35, dim=16, row_factors=(5, 7), dim_factors=(4, 4), ranks=(8,)),
    3: TTShape(rows=58, dim=16, row_factors=(3, 4, 5), dim_factors=(2, 4, 2), ranks=(6, 8)),
    4: TTShape(rows=53, dim=16, row_factors=(2, 3, 3, 3), dim_factors=(2, 2, 2, 2), ranks=(4, 8, 4)),
}


@pytest.mark.parametrize(
    ("num_cores", "dtype", "fused"),
    [
        (2, "float32", True),
        *(
            pytest.param(*variant, marks=pytest.mark.slow)
            for variant in itertools.product((3, 4), ("float32", "bfloat16"), (True, False))
        ),
    ],
)
def test_through_the_op(num_cores, dtype, fused):
    """Bags and core gradients of weighted, ragged lookups with repeated ids, padding and empty bags."""
    shape, rng = SHAPES[num_cores], np.random.default_rng(num_cores)
    cores = tuple(c.astype(dtype) for c in tt_init(shape, jax.random.key(num_cores)))
    ids = rng.choice(shape.rows, 20, replace=True).astype(np.int32)
    ids[[4, 11]] = -1
    offsets = np.array([0, 3, 3, 10, 17], np.int32)
    weights, gradient = (rng.normal(size=s).astype(np.float32) for s in (20, (4, shape.dim)))
    traffic = TTTraffic(lookups=1 if fused else 10**6, entries=(1,) * (num_cores - 1), pairs=1)
    assert fuses_pooling(shape, 20, traffic) == fused
    bag = functools.partial(tt_embedding_bag, shape=shape, ids=jnp.asarray(ids), offsets=jnp.asarray(offsets),
                            weights=jnp.asarray(weights), traffic=traffic, implementation="pallas")  # fmt: skip
    with interpreted():
        out, transpose = jax.vjp(bag, cores)
        (gradients,) = transpose(jnp.asarray(gradient))
    lookups = [
        [(j, int(ids[j]), float(weights[j])) for j in range(offsets[b], offsets[b + 1]) if ids[j] >= 0]
        for b in range(4)
    ]
    host = [np.asarray(core).astype(np.float64) for core in cores]
    want, want_gradients, _ = tt_reference.bags(host, lookups, gradient, "sum")
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        rtol = 1e-5 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=rtol, atol=1e-5 * np.abs(wanted).max())


def test_fusing_pays_where_few_lookups_share_a_row():
    shape = TTShape.search(10_131_227, 16)
    assert fuses_pooling(shape, 1000, TTTraffic(lookups=1000, entries=(900, 1000), pairs=1000))
    assert not fuses_pooling(shape, 100_000, TTTraffic(lookups=100_000, entries=(900, 1000), pairs=1000))


def test_every_geometry_covers_its_matrix_within_the_registers():
    for height in (1, 2, 3, 4, 8, 16, 33, 64, 1024):
        for width in (1, 2, 3, 4, 6, 8, 20, 32, 64, 100, 512, 1024):
            block = tune_reduce(height=height, width=width, positions=1).block
            assert block.columns * block.column_chunks >= width
            assert block.rows * (block.chunks // block.column_chunks) >= height
            product = tune_product(height=height, width=width)
            assert product.block.height == product.entries * height


def test_partial_sums_stay_bounded():
    assert tune_reduce(height=4, width=4, positions=1 << 20).split == 64
    config = tune_reduce(height=128, width=512, positions=1 << 20)
    assert (1 << 20) // config.split * 128 * 512 <= 1 << 24


def _wgmma(**changes):
    return WgmmaConfig(**{"entries": 1, "columns": 64, "depth": 64, "swizzle": 128, "shared_bytes": 1} | changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(height=4, width=6, vector=4, lanes=4, across=2, down=1), r"vector=4 must be .* self.width=6"),
        (lambda: Block(height=4, width=4, vector=4, lanes=3, across=1, down=1), "lanes=3 must be a power of two"),
        (lambda: Block(height=4, width=4, vector=4, lanes=2, across=4, down=1), "across=4 exceeds self.lanes=2"),
        (lambda: Block(height=4, width=4, vector=4, lanes=1, across=1, down=64), "down=64 .* need 784 registers"),
        (lambda: Block(height=0, width=4, vector=4, lanes=1, across=1, down=1), "height=0"),
        (lambda: ReduceConfig(block=Block.of(2, 4), split=3), "split=3 must be a power of two"),
        (lambda: ReduceConfig(block=Block.of(2, 4), blocks=0), "blocks=0"),
        (lambda: ProductConfig(block=Block.of(5, 4), entries=2), "entries=2 must .* divide the block's height=5"),
        (lambda: tune_wgmma(height=65, terms=16, width=32), "height=65, terms=16 and width=32 fit no tile"),
        (lambda: _wgmma(shared_bytes=2**18), "shared_bytes=262144 exceed"),
        (lambda: _wgmma(columns=48), "columns=48 must be a multiple"),
        (lambda: _wgmma(entries=65), "entries=65 must be from 1 to 64"),
        (lambda: _wgmma(depth=32), "depth=32 must be a multiple"),
    ],
)  # fmt: skip
def test_configs_that_no_chip_has_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_rows_than_int32_numbers_are_left_to_xla():
    with pytest.raises(NotImplementedError, match="2,147,483,648 rows are more than int32 numbers; use implement"):
        check_int32("rows", 2**31)


def test_ragged_bags_and_their_gradients_lower_for_a_gpu():
    """Long bags are written to a mutable array of the kernels' own, which the primitive must not show outside."""
    shape = TTShape.search(1000, 16, ranks=8)
    cores = tt_init(shape, jax.random.key(0))
    traffic = TTTraffic(lookups=1, entries=(1, 1), pairs=1)

    def gradients(cores, ids, offsets):
        bag = functools.partial(tt_embedding_bag, shape=shape, traffic=traffic, implementation="pallas")
        return jax.grad(lambda cores: jnp.sum(bag(cores, ids=ids, offsets=offsets)))(cores)

    ids, offsets = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (20_000, 9))
    lowered = jax.jit(gradients).trace(cores, ids, offsets).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
