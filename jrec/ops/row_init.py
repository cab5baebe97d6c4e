"""Initial rows of embedding tables, every element a function of (key, table, element number) alone.

So a row can be made when it is first wanted, on any machine, and be the same to the bit: random bits come from a
counter (Threefry), and the float from them by one exact conversion and one rounded product, which no compiler fuses.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jrec.ops.layout import TableConfig


def table_key(key: jax.Array, name: str) -> jax.Array:
    """The key of a table's initial rows: of its name, so that rows do not depend on what it is stacked with."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def init_rows(table: TableConfig, key: jax.Array) -> jax.Array:
    """Uniform in ±1/sqrt(rows), as in the reference DLRM; of a part, the rows that the whole table has there.

    Args:
      table: whose name chooses the key; not of tier "tt".
      key: of the model's tables.

    Returns:
      (rows, dim) of the table's dtype.
    """
    bits = jax.random.bits(table_key(key, table.name), (table.rows, table.dim), jnp.uint32)
    return _from_bits(bits, scale(table.table_rows), table.dtype)


def init_rows_at(
    tables: Sequence[TableConfig], bases: Sequence[int], key: jax.Array, addresses: jax.Array
) -> jax.Array:
    """Some rows of stacked tables, as ``init_rows`` makes them, without making the others.

    Args:
      tables: of one dim and dtype.
      bases: their first addresses, ascending from 0.
      key: of the model's tables, of Threefry.
      addresses: (n,) int32, in any order.

    Returns:
      (n, dim) of the tables' dtype.
    """
    dim = tables[0].dim
    starts = jnp.asarray(bases, jnp.int32)
    table = jnp.searchsorted(starts, addresses, side="right") - 1
    keys = jnp.stack([jax.random.key_data(_typed(table_key(key, t.name))) for t in tables])[table]
    scales = jnp.stack([scale(t.table_rows) for t in tables])[table]
    # The number of an element, row * dim + column, in two words: Threefry's counter.
    row, width = (addresses - starts[table]).astype(jnp.uint32), jnp.uint32(dim)
    upper, lower = (row >> 16) * width, (row & jnp.uint32(0xFFFF)) * width
    columns = jnp.arange(dim, dtype=jnp.uint32)[None, :]
    below = lower[:, None] + columns
    low = (upper << 16)[:, None] + below
    high = (upper >> 16)[:, None] + (low < below).astype(jnp.uint32)
    words = jax.vmap(threefry_2x32)(keys, jnp.concatenate([high, low], axis=1))
    return _from_bits(words[:, :dim] ^ words[:, dim:], scales[:, None], tables[0].dtype)


def _typed(key: jax.Array) -> jax.Array:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _from_bits(bits: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    odd = (bits >> 8).astype(jnp.int32) * jnp.int32(2) - jnp.int32(2**24 - 1)  # within ±2^24: exact in float32
    return (odd.astype(jnp.float32) * scales).astype(dtype)


def scale(rows: int) -> jax.Array:
    """What odd integers within ±2^24 are multiplied by, () float32."""
    return jnp.float32(rows**-0.5 * 2.0**-24)
