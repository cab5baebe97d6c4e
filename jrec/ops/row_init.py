"""Initial rows of embedding tables, every element a function of (key, table, element number) alone.

So a row can be made when it is first wanted, on any machine, and be the same to the bit: random bits come from a
counter (Threefry), and the float from them by one exact conversion and one rounded product, which no compiler fuses.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp

from jrec.ops.layout import TableConfig


def table_key(key: jax.Array, name: str) -> jax.Array:
    """The key of a table's initial rows: of its name, so that rows do not depend on what it is stacked with."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def init_rows(table: TableConfig, key: jax.Array) -> jax.Array:
    """Uniform in ±1/sqrt(rows), as in the reference DLRM.

    Args:
      table: whose name chooses the key.
      key: of the model's tables.

    Returns:
      (rows, dim) of the table's dtype.
    """
    bits = jax.random.bits(table_key(key, table.name), (table.rows, table.dim), jnp.uint32)
    odd = (bits >> 8).astype(jnp.int32) * jnp.int32(2) - jnp.int32(2**24 - 1)  # within ±2^24: exact in float32
    return (odd.astype(jnp.float32) * scale(table.rows)).astype(table.dtype)


def scale(rows: int) -> jax.Array:
    """What odd integers within ±2^24 are multiplied by, () float32."""
    return jnp.float32(rows**-0.5 * 2.0**-24)
