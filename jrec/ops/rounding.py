"""Stochastic rounding of float32 to 16-bit floats, with explicit keys.

Small updates of a 16-bit table vanish when every sum is rounded to nearest; rounded up with a probability that equals
the remainder, they survive on average. The random bits are a hash of (key, row number, column), so they depend on
no order of execution: XLA, native and Pallas kernels that use the same key store the same bits for the same sums.
Take a fresh key for every step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.ops.doors import checked

_EXPONENT = 0x7F800000
_SIGN = 0x80000000
_HALF_NORMAL = 2.0**-14  # the smallest normal float16; below it the grid has a spacing of 2**-24


def stochastic_round(values: jax.Array, dtype: jnp.dtype | type, key: jax.Array, addresses: jax.Array) -> jax.Array:
    """Rounds rows to one of the two neighbours in ``dtype``, each with the probability that makes the mean right.

    Args:
      values: (n, dim) float32.
      dtype: bfloat16 or float16, or float32, which changes nothing.
      key: (2,) uint32, as ``jax.random.key_data`` gives; use it once.
      addresses: (n,) int32, the rows' numbers in their table.

    Returns:
      (n, dim) of ``dtype``. NaN and infinities stay what they are.

    Example:
      >>> import jax
      >>> key = jax.random.key_data(jax.random.key(0))
      >>> rounded = stochastic_round(jnp.full((4096, 1), 1 + 2**-10), jnp.bfloat16, key, jnp.arange(4096))
      >>> sorted(set(rounded.astype(jnp.float32).ravel().tolist()))
      [1.0, 1.0078125]
    """
    columns = jnp.broadcast_to(jnp.arange(values.shape[1], dtype=jnp.int32), values.shape)
    rows = jnp.broadcast_to(addresses[:, None], values.shape)
    return round_values(values, dtype, key[0], key[1], rows, columns).astype(dtype)


def round_values(
    values: jax.Array,
    dtype: jnp.dtype | type,
    key0: jax.Array,
    key1: jax.Array,
    addresses: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """Values on the grid of ``dtype``, still float32. Elementwise, so that kernels can use it on their registers.

    Args:
      values: float32.
      dtype: The grid's dtype.
      key0: uint32, the first word of the key.
      key1: uint32, the second.
      addresses: int32, each value's row.
      columns: int32, each value's column.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return values
    if dtype == jnp.bfloat16:
        return _round_bits(values, random_bits(key0, key1, addresses, columns), dropped=16)
    if dtype == jnp.float16:
        return _round_half(values, random_bits(key0, key1, addresses, columns))
    raise ValueError(f"stochastic rounding goes to bfloat16 or float16, not to {dtype}")


def check_key(key: jax.Array) -> None:
    """Raises ValueError where ``key`` is not (2,) uint32."""
    remedy = "; make it with jax.random.key_data(jax.random.key(seed, impl='threefry2x32'))"
    checked("a rounding key", key, (2,), ("uint32",), why=remedy)


def derived_key(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """The rounding key number ``number`` that follows from ``key``, (2,) uint32: for each table, for each step."""
    typed = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(typed, number))


def random_bits(key0: jax.Array, key1: jax.Array, addresses: jax.Array, columns: jax.Array) -> jax.Array:
    """32 random bits for every (address, column), uint32; integer hashes with murmur3's and lowbias32's finishers."""
    # The row is mixed before the column comes in: all columns of a row share this half.
    hashed = addresses.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + key0
    hashed = (hashed ^ _right(hashed, 16)) * jnp.uint32(0x85EBCA6B)
    hashed = (hashed ^ _right(hashed, 13)) * jnp.uint32(0xC2B2AE35)
    hashed = (hashed ^ _right(hashed, 16)) + columns.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F) + key1
    hashed = (hashed ^ _right(hashed, 16)) * jnp.uint32(0x7FEB352D)
    hashed = (hashed ^ _right(hashed, 15)) * jnp.uint32(0x846CA68B)
    return hashed ^ _right(hashed, 16)


def _round_bits(values: jax.Array, bits: jax.Array, dropped: int) -> jax.Array:
    """Adds random bits below the last kept one and cuts them off; a carry moves on into the exponent as it should."""
    raw = jax.lax.bitcast_convert_type(values, jnp.uint32)
    kept = jnp.uint32(2**32 - 2**dropped)
    # Uniform random bits carry into the last kept bit with a probability of the dropped part over that bit's value.
    rounded = (raw + _right(bits, 32 - dropped)) & kept
    finite = (raw & jnp.uint32(_EXPONENT)) != jnp.uint32(_EXPONENT)
    return jax.lax.bitcast_convert_type(jnp.where(finite, rounded, raw), jnp.float32)


def _round_half(values: jax.Array, bits: jax.Array) -> jax.Array:
    """To the grid of float16: 13 bits fall off a normal number; subnormal ones lie on multiples of 2**-24."""
    normal = _round_bits(values, bits, dropped=13)
    raw = jax.lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = jax.lax.bitcast_convert_type(raw & jnp.uint32(_SIGN - 1), jnp.float32)
    draw = (_right(bits, 19).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-13)  # in (0, 1)
    # Adding 1.5 * 2**23 rounds to an integer; with draw - 1/2 that is rounding down after adding the draw.
    shift = jnp.float32(1.5 * 2**23)
    quanta = (magnitude * jnp.float32(2.0**24) + (draw - jnp.float32(0.5))) + shift - shift
    small = jax.lax.bitcast_convert_type(quanta * jnp.float32(2.0**-24), jnp.uint32) | (raw & jnp.uint32(_SIGN))
    small = jax.lax.bitcast_convert_type(small, jnp.float32)
    return jnp.where(magnitude < jnp.float32(_HALF_NORMAL), small, normal)


def _right(bits: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_right_logical(bits, jnp.full_like(bits, by))
