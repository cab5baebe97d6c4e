import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec.ops.tt import TTShape, tt_init, tt_to_dense

# TT-Rec, Table 2: rows, row factors, parameters at ranks 16, 32 and 64; dim 16 as 2 x 2 x 4.
TABLE_2 = (
    (10131227, (200, 220, 250), (135040, 495360, 1891840)),
    (8351593, (200, 200, 209), (122176, 449152, 1717504)),
    (7046547, (200, 200, 200), (121600, 448000, 1715200)),
    (5461306, (166, 175, 188), (106944, 393088, 1502976)),
    (2202608, (125, 130, 136), (79264, 291648, 1115776)),
    (286181, (53, 72, 75), (43360, 160448, 615808)),
    (142572, (50, 52, 55), (31744, 116736, 446464)),
)


@pytest.mark.parametrize(("rows", "factors", "parameters"), TABLE_2)
def test_table_2_of_tt_rec(rows, factors, parameters):
    for rank, want in zip((16, 32, 64), parameters, strict=True):
        shape = TTShape(rows=rows, dim=16, row_factors=factors, dim_factors=(2, 2, 4), ranks=(rank, rank))
        assert shape.num_parameters == want
        assert shape.compression == pytest.approx(rows * 16 / want)


@given(st.integers(1, 2**31 - 1), st.sampled_from([1, 2, 7, 16, 24, 64, 128]), st.sampled_from([2, 3]))
@settings(max_examples=50)
def test_search_holds_the_table_and_is_balanced(rows, dim, cores):
    shape = TTShape.search(rows, dim, num_cores=cores, ranks=1)
    assert shape.capacity >= rows
    assert math.prod(shape.dim_factors) == dim
    assert list(shape.row_factors) == sorted(shape.row_factors)
    assert shape.row_factors[-1] <= max(1.5 * shape.row_factors[0], shape.row_factors[0] + 1)


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_search_pads_least_of_all_balanced_shapes(cores):
    for rows in (1, 2, 3, 5, 17, 100, 997, 4096, 12345):
        shape = TTShape.search(rows, 8, num_cores=cores, ranks=1)
        top = math.ceil(1.5 * rows ** (1 / cores)) + 2
        allowed = [
            factors
            for factors in itertools.combinations_with_replacement(range(1, top + 1), cores)
            if math.prod(factors) >= rows and factors[-1] <= max(1.5 * factors[0], factors[0] + 1)
        ]
        least = min(math.prod(factors) for factors in allowed)
        assert shape.capacity == least
        spreads = [factors[-1] - factors[0] for factors in allowed if math.prod(factors) == least]
        assert shape.row_factors[-1] - shape.row_factors[0] == min(spreads)


def test_search_splits_dims_evenly():
    for dim, want in ((16, (2, 2, 4)), (64, (4, 4, 4)), (128, (4, 4, 8)), (7, (1, 1, 7)), (12, (2, 2, 3))):
        assert TTShape.search(1000, dim, ranks=1).dim_factors == want


def test_ranks_a_bond():
    shape = TTShape.search(10_000, 16, ranks=(4, 12))
    assert shape.ranks == (4, 12)
    assert [core[1::2] for core in shape.core_shapes] == [(1, 4), (4, 12), (12, 1)]
    assert shape.with_ranks(3).ranks == (3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_factors": (10, 10, 9)}, "hold 900 rows, but the table has 1,000"),
        ({"dim_factors": (2, 2, 2)}, "multiply to 8, but the table's dim is 16"),
        ({"ranks": (21, 8)}, r"ranks\[0\] is 21, but 20 already"),
        ({"ranks": (8, 41)}, r"ranks\[1\] is 41, but 40 already"),
        ({"ranks": (8,)}, "3 row_factors need 3 dim_factors and 2 ranks"),
        ({"ranks": (8, 0)}, "must all be at least 1"),
        ({"row_factors": (1000,), "dim_factors": (16,), "ranks": ()}, "at least 2"),
        ({"rows": 0}, "a table of 0 rows"),
        ({"rows": 2**31}, "a table of 2147483648 rows"),
        ({"dim": 0}, "dim is 0"),
    ],
)
def test_impossible_shapes_raise(change, message):
    fields = {"rows": 1000, "dim": 16, "row_factors": (10, 10, 10), "dim_factors": (2, 2, 4), "ranks": (8, 8)}
    with pytest.raises(ValueError, match=message):
        TTShape(**{**fields, **change})


def test_search_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="num_cores is 5"):
        TTShape.search(1000, 16, num_cores=5)
    with pytest.raises(ValueError, match=r"imbalance is 0\.5"):
        TTShape.search(1000, 16, imbalance=0.5)
    with pytest.raises(ValueError, match="give a rank a bond"):
        TTShape.search(10, 4, ranks=32)


@pytest.mark.parametrize("initializer", ["sampled_gaussian", "gaussian", "uniform"])
@pytest.mark.parametrize(("cores", "ranks"), [(2, 16), (3, 8), (3, (4, 32)), (4, 8)])
def test_the_product_has_the_wanted_variance(initializer, cores, ranks):
    shape = TTShape.search(20_000, 16, num_cores=cores, ranks=ranks)
    tables = [
        tt_to_dense(tt_init(shape, jax.random.key(seed), initializer=initializer), shape).ravel() for seed in range(8)
    ]
    variances = [np.mean(table.astype(np.float64) ** 2) * 3 * shape.rows for table in tables]
    assert np.mean(variances) == pytest.approx(1, abs=0.08)
    assert np.mean(np.concatenate(tables)) == pytest.approx(0, abs=0.02 / np.sqrt(3 * shape.rows))


def test_products_of_sampled_gaussian_cores_are_nearer_to_normal_than_of_gaussian_ones():
    """TT-Rec, Figure 3: at low rank the products of plain normal variables pile up at zero."""
    from scipy import stats

    shape = TTShape.search(20_000, 16, ranks=2)
    distance = {}
    for initializer in ("sampled_gaussian", "gaussian"):
        tables = [
            tt_to_dense(tt_init(shape, jax.random.key(seed), initializer=initializer), shape).ravel()
            for seed in range(8)
        ]
        values = np.concatenate(tables)[::37]
        distance[initializer] = stats.kstest(values, stats.norm(0, (3 * shape.rows) ** -0.5).cdf).statistic
    assert distance["sampled_gaussian"] < 0.8 * distance["gaussian"]
    high = TTShape.search(20_000, 16, ranks=32)
    values = tt_to_dense(tt_init(high, jax.random.key(0)), high).ravel()[::37]
    assert stats.kstest(values, stats.norm(0, (3 * high.rows) ** -0.5).cdf).statistic < 0.03


def test_sampled_gaussian_leaves_out_the_middle():
    shape = TTShape.search(1000, 16, ranks=8)
    for core in tt_init(shape, jax.random.key(1)):
        magnitude = np.abs(np.asarray(core))
        # Conditioned on magnitude above 2, a normal variable has standard deviation 2.397.
        assert magnitude.min() > 0
        assert magnitude.min() / np.sqrt(np.mean(magnitude**2)) > 0.8


def test_init_takes_variance_and_dtype_and_refuses_others():
    shape = TTShape.search(1000, 16, ranks=8)
    cores = tt_init(shape, jax.random.key(0), variance=4.0, dtype="bfloat16")
    assert {core.dtype.name for core in cores} == {"bfloat16"}
    assert np.var(tt_to_dense(cores, shape)) == pytest.approx(4, rel=0.25)
    with pytest.raises(ValueError, match="initializer 'xavier' is unknown"):
        tt_init(shape, jax.random.key(0), initializer="xavier")
    with pytest.raises(ValueError, match="variance is 0"):
        tt_init(shape, jax.random.key(0), variance=0)
