"""Stochastic rounding: neighbours only, right on average, the same bits for the same key."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jrec import ops
from jrec.native import host
from jrec.ops.rounding import derived_key, random_bits, stochastic_round

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KEY = jax.random.key_data(jax.random.key(3))


def _neighbours(value: float, dtype: str) -> tuple[float, float]:
    """The greatest number of ``dtype`` not above ``value``, and the least not below."""
    kind = NUMPY[dtype]
    nearest = kind(value)
    low = nearest if float(nearest) <= value else np.nextafter(nearest, kind(-np.inf))
    high = nearest if float(nearest) >= value else np.nextafter(nearest, kind(np.inf))
    return float(low), float(high)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(value=st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32))
def test_rounds_to_a_neighbour_and_is_right_on_average(dtype, value):
    if abs(value) < 2.0**-126:  # XLA on CPU flushes subnormal float32 to zero
        value = 0.0
    draws = 2048
    rounded = stochastic_round(jnp.full((draws, 1), value, jnp.float32), dtype, KEY, jnp.arange(draws))
    rounded = np.asarray(rounded, np.float64)[:, 0]
    low, high = _neighbours(value, dtype)
    assert set(rounded) <= {low, high}
    # The mean of draws of a two-valued variable, within five standard errors.
    assert abs(rounded.mean() - value) <= (high - low) * (2.5 / np.sqrt(draws) + 2**-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_special_values_and_representable_ones_stay(dtype):
    largest = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    values = np.array([0, -0.0, 1, -2.5, np.inf, -np.inf, np.nan, largest, -largest, 2.0**-24], np.float32)
    rounded = stochastic_round(jnp.asarray(values)[:, None], dtype, KEY, jnp.arange(values.size))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32)[:, 0], values)
    assert np.signbit(np.asarray(rounded, np.float32)[1, 0])


def test_float32_changes_nothing():
    values = jnp.array([[1 + 2**-20, np.pi]], jnp.float32)
    np.testing.assert_array_equal(stochastic_round(values, jnp.float32, KEY, jnp.arange(1)), values)


def test_bits_depend_on_key_address_and_column_alone():
    rows, columns = jnp.arange(64), jnp.arange(32)
    address, column = jnp.broadcast_to(rows[:, None], (64, 32)), jnp.broadcast_to(columns, (64, 32))
    bits = np.asarray(random_bits(KEY[0], KEY[1], address, column))
    assert np.unique(bits).size == bits.size
    np.testing.assert_array_equal(random_bits(KEY[0], KEY[1], address[::-1], column)[::-1], bits)
    other = np.asarray(random_bits(KEY[0], KEY[1] + jnp.uint32(1), address, column))
    agreeing = np.unpackbits((~(bits ^ other)).view(np.uint8)).mean()
    assert abs(agreeing - 0.5) < 0.01
    per_bit = np.unpackbits(bits.reshape(-1, 1).view(np.uint8), axis=1).mean(axis=0)
    assert np.all(np.abs(per_bit - 0.5) < 0.06)


def test_known_bits():
    """Fixed for good: tables of a resumed run must round as they would have."""
    bits = random_bits(jnp.uint32(1), jnp.uint32(2), jnp.array([0, 7], jnp.int32), jnp.array([0, 5], jnp.int32))
    assert [hex(int(b)) for b in bits] == KNOWN


KNOWN = ["0xf345cafb", "0x4c037c71"]


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="goes to bfloat16 or float16, not to float8_e5m2"):
        stochastic_round(jnp.ones((1, 1)), jnp.float8_e5m2, KEY, jnp.arange(1))


SGD = ops.SGD(learning_rate=1.0)  # so that every sum is one float32 addition, the same in every implementation


def _values(rng, shape, dtype):
    """Numbers of every size that ``dtype`` has, subnormal ones, zeros and its largest ones among them."""
    kind = NUMPY[dtype]
    exponents = rng.uniform(-26, 16, shape) if dtype == "float16" else rng.uniform(-100, 127, shape)
    values = (rng.normal(size=shape) * np.exp2(exponents)).clip(
        float(ml_dtypes.finfo(kind).min), float(ml_dtypes.finfo(kind).max)
    )
    values[rng.random(shape) < 0.05] = 0
    return values.astype(kind)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("dim", [1, 33])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_native_kernels_store_the_bits_of_the_xla_implementation(dtype, dim, numbered):
    rng = np.random.default_rng(dim)
    num_rows = 70_000
    rows = np.sort(rng.choice(num_rows, 900, replace=False)).astype(np.int32)
    table = _values(rng, (num_rows, dim), dtype)
    gradients = (rng.normal(size=(900, dim)) * np.abs(table[rows].astype(np.float32)) * 0.1).astype(np.float32)
    gradients += (rng.normal(size=gradients.shape) * 2.0**-25).astype(np.float32)
    bags = rng.permutation(900)
    cast = ops.tensor_cast(jnp.asarray(rows[bags])[:, None], num_rows=num_rows, implementation="xla")
    args = SGD, jnp.asarray(table), {}
    numbers = rng.integers(-(2**31), 2**31, 900).astype(np.int32) if numbered else None

    def updated(implementation, key=KEY, numbers=numbers):
        options = {"rounding_key": key, "rounding_rows": numbers, "implementation": implementation}
        plain = ops.row_update(*args, jnp.asarray(rows), jnp.asarray(gradients), **options)[0]
        casted = ops.casted_update(*args, cast, jnp.asarray(gradients[bags]), **options)[0]
        return [np.asarray(new).view(np.uint16) for new in (plain, casted)]

    want, casted = updated("xla")
    np.testing.assert_array_equal(casted, want)
    assert np.mean(want != updated("xla", None)[0]) > 1e-3
    assert numbers is None or np.mean(want != updated("xla", numbers=None)[0]) > 1e-3
    on_host, key = [table.copy()], np.asarray(KEY)
    host.casted_update(SGD, on_host[0], {}, cast, gradients[bags], rounding_key=key, rounding_rows=numbers, threads=2)
    if numbers is None:
        on_host.append(table.copy())
        host.row_update(SGD, on_host[1], {}, rows, gradients, rounding_key=key)
    for got in (*updated("native"), *updated(None), *(new.view(np.uint16) for new in on_host)):
        np.testing.assert_array_equal(got, want)


def test_native_kernels_keep_special_values_and_float32_tables():
    for dtype in NUMPY:
        table = np.array([[0, -0.0, np.inf, -np.inf, np.nan, 1, -2.5]], NUMPY[dtype])
        new = table.copy()
        host.row_update(SGD, new, {}, np.zeros(1, np.int32), np.zeros((1, 7), np.float32), rounding_key=np.asarray(KEY))
        np.testing.assert_array_equal(new.astype(np.float32), table.astype(np.float32))
        assert list(np.signbit(new[0, :2])) == [False, True]
        largest = np.full((1, 64), ml_dtypes.finfo(NUMPY[dtype]).max)
        up = -largest.astype(np.float32) * np.float32(2.0**-13)  # a sum between the largest number and infinity
        host.row_update(SGD, largest, {}, np.zeros(1, np.int32), up, rounding_key=np.asarray(KEY))
        assert not np.isnan(largest).any()
        assert np.isinf(largest).any()
        assert np.isfinite(largest).any()
    table, gradients = np.ones((1, 7), np.float32), np.full((1, 7), 2.0**-20, np.float32)
    host.row_update(SGD, table, {}, np.zeros(1, np.int32), gradients, rounding_key=np.asarray(KEY))
    np.testing.assert_array_equal(table, np.full((1, 7), 1 - 2.0**-20, np.float32))


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_every_table_of_a_step_has_a_key_of_its_own(implementation):
    bags = ops.Bags(ids=jnp.arange(50, dtype=jnp.int32)[:, None])
    tables = {"b": jnp.ones((50, 8), jnp.bfloat16), "a": jnp.ones((50, 8), jnp.bfloat16), "c": jnp.ones((50, 8))}
    gradients = {name: jnp.full((50, 8), 2.0**-10) for name in tables}
    slots = ops.init_slots(SGD, tables)
    _, residuals = ops.lookup(tables, dict.fromkeys(tables, bags), implementation=implementation)
    new, _ = jax.jit(
        lambda key: ops.apply_gradients(
            SGD, tables, slots, residuals, gradients, rounding_key=key, implementation=implementation
        )
    )(KEY)
    for i, name in enumerate("ab"):
        want = stochastic_round(jnp.full((50, 8), 1 - 2.0**-10), jnp.bfloat16, derived_key(KEY, i), jnp.arange(50))
        np.testing.assert_array_equal(new[name], want)
    assert np.any(np.asarray(new["a"]) != np.asarray(new["b"]))
    np.testing.assert_array_equal(new["c"], np.full((50, 8), 1 - 2.0**-10, np.float32))


def test_numbers_that_are_not_of_the_rows_are_refused():
    table, row = jnp.ones((3, 4), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    cast = ops.tensor_cast(jnp.ones((5, 1), jnp.int32), num_rows=3)
    for bad in (jnp.zeros(2, jnp.int32), jnp.zeros(1, jnp.uint32)):
        with pytest.raises(ValueError, match=r"rounding_rows must be int32 of shape \(1,\), but is"):
            ops.row_update(SGD, table, {}, row, jnp.ones((1, 4)), rounding_key=KEY, rounding_rows=bad)
    on_host = np.ones((3, 4), ml_dtypes.bfloat16)
    for bad in (np.zeros(2, np.int32), np.zeros(1, np.int64)):
        with pytest.raises(ValueError, match=r"rounding_rows must be int32 of shape \(1,\), but is"):
            host.casted_update(
                SGD, on_host, {}, cast, np.ones((5, 4), np.float32), rounding_key=np.asarray(KEY), rounding_rows=bad
            )


def test_what_is_no_key_is_refused():
    table, row = jnp.ones((3, 4), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    for bad in (jnp.zeros(4, jnp.uint32), jnp.zeros(2, jnp.int32), jax.random.key(0)):
        with pytest.raises(ValueError, match=r"a rounding key must be uint32 of shape \(2,\)"):
            ops.row_update(SGD, table, {}, row, jnp.ones((1, 4)), rounding_key=bad)
        with pytest.raises(ValueError, match="a rounding key must be"):
            ops.apply_gradients(SGD, {}, {}, {}, {}, rounding_key=bad)
    with pytest.raises(ValueError, match="rounding_key must be uint32 of shape"):
        host.row_update(
            SGD,
            np.ones((3, 4), ml_dtypes.bfloat16),
            {},
            np.zeros(1, np.int32),
            np.ones((1, 4), np.float32),
            rounding_key=np.zeros(2, np.int32),
        )
