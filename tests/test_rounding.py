"""Stochastic rounding: neighbours only, right on average, the same bits for the same key."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jrec.ops.rounding import random_bits, stochastic_round

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
