"""Initial rows of embedding tables, every element a function of nothing but (key, table, element number).

So a row can be made when it is first wanted, on any machine, and be the same to the bit: random bits come from a
counter (Threefry), and the float from them by one exact conversion and one rounded product, which no compiler fuses.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from jrec.ops.layout import TableConfig
from jrec.ops.row_fill import filled


def table_key(key: jax.Array, name: str) -> jax.Array:
    """The key of a table's initial rows: of its name, so that rows do not depend on what it is stacked with."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def table_keys(key: jax.Array, names: Sequence[str]) -> jax.Array:
    """The two words of ``table_key`` of every table, (tables, 2) uint32.

    Raises:
      ValueError: If the key is not one of Threefry.
    """
    key = _typed(key)
    if not is_threefry(key):
        raise ValueError(
            f"initial rows are made one by one with Threefry, but the key is of {jax.random.key_impl(key)}; use"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    numbers = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
    return jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(key, number)))(numbers)


def key_words(key: jax.Array) -> np.ndarray:
    """The two words of a key of Threefry, (2,) uint32.

    Raises:
      ValueError: If it is of another generator.
    """
    table_keys(key, [])
    return np.array(jax.random.key_data(_typed(key)))


def is_threefry(key: jax.Array) -> bool:
    """Whether rows can be made one by one with this key."""
    return str(jax.random.key_impl(_typed(key))) == "threefry2x32"


def init_rows(table: TableConfig, key: jax.Array) -> jax.Array:
    """Uniform in ±``table.bound``; of a part, the rows that the whole table has there.

    Makes the random bits of the whole table at once; ``init_stack_rows`` gives the same rows in less memory.

    Args:
      table: Its name chooses the key. Not of tier "tt".
      key: The key of the model's tables.

    Returns:
      (rows, dim) of the table's dtype.
    """
    bits = jax.random.bits(table_key(key, table.name), (table.rows, table.dim), jnp.uint32)
    return _from_bits(bits, scale(table), table.dtype)


def init_stack_rows(
    tables: Sequence[TableConfig],
    bases: Sequence[int],
    key: jax.Array,
    lines: int,
    addresses: Callable[[jax.Array, int], jax.Array] | None = None,
    *,
    width: int | None = None,
) -> jax.Array:
    """Rows of stacked tables as ``init_rows`` makes them, a few megabytes at a time; for use inside jit.

    Args:
      tables: Tables of one dim and dtype.
      bases: Their first addresses, ascending from 0.
      key: The key of the model's tables, of Threefry.
      lines: How many rows to make.
      addresses: ``first line () int32, number of lines -> (number of lines,) int32`` addresses; None where line ``i``
        has address ``i``.
      width: Elements of a stored row, zeros behind the row's own. None for no zeros.

    Returns:
      (lines, width) of the tables' dtype.
    """
    dim = tables[0].dim
    width = dim if width is None else width

    def piece(begin: jax.Array, count: int) -> jax.Array:
        at = begin + jnp.arange(count, dtype=jnp.int32) if addresses is None else addresses(begin, count)
        rows = init_rows_at(tables, bases, key, at)
        return rows if width == dim else jnp.pad(rows, ((0, 0), (0, width - dim)))

    return filled(lines, width, tables[0].dtype, piece)


def init_rows_at(
    tables: Sequence[TableConfig], bases: Sequence[int], key: jax.Array, addresses: jax.Array
) -> jax.Array:
    """Some rows of stacked tables, as ``init_rows`` makes them, without making the others.

    Args:
      tables: Tables of one dim and dtype.
      bases: Their first addresses, ascending from 0.
      key: The key of the model's tables, of Threefry.
      addresses: (n,) int32, in any order; of a single table of 2^31 rows or more modulo 2^32.

    Returns:
      (n, dim) of the tables' dtype.
    """
    dim = tables[0].dim
    starts = jnp.asarray(bases, jnp.int32)
    # A single table is not searched for: the addresses of one of 2^31 rows or more would seem to lie before it.
    table = jnp.searchsorted(starts, addresses, side="right") - 1 if len(tables) > 1 else jnp.zeros_like(addresses)
    keys = table_keys(key, [t.name for t in tables])[table]
    scales = jnp.asarray([_scale(t) for t in tables], jnp.float32)[table]
    # The number of an element, row * dim + column, in two words: Threefry's counter.
    row, width = (addresses - starts[table]).astype(jnp.uint32), jnp.uint32(dim)
    # Schoolbook multiplication by halves of 16 bits: JAX has no 64 bits, and products of a row and dim do not fit 32.
    upper, lower = (row >> 16) * width, (row & jnp.uint32(0xFFFF)) * width
    columns = jnp.arange(dim, dtype=jnp.uint32)[None, :]
    below = lower[:, None] + columns
    low = (upper << 16)[:, None] + below
    high = (upper >> 16)[:, None] + (low < below).astype(jnp.uint32)
    words = jax.vmap(threefry_2x32)(keys, jnp.concatenate([high, low], axis=1))
    return _from_bits(words[:, :dim] ^ words[:, dim:], scales[:, None], tables[0].dtype)


def init_rows_of_keys(tables: Sequence[TableConfig], key: jax.Array, numbers: jax.Array, words: jax.Array) -> jax.Array:
    """First values of rows that belong to 64-bit keys, a function of nothing but (key, table, 64-bit key, column).

    A key thus has the same first values in whatever row of a growing table it comes to lie.

    Args:
      tables: Tables of one dim and dtype.
      key: The words of the key of the model's tables (``key_words``).
      numbers: (n,) int32, which of the tables each row is of.
      words: (n, 2) uint32, upper and lower half of each 64-bit key.

    Returns:
      (n, dim) of the tables' dtype, uniform in ± their tables' ``bound``.
    """
    dim = tables[0].dim
    of_tables = table_keys(jax.random.wrap_key_data(key, impl="threefry2x32"), [t.name for t in tables])[numbers]
    # A key of its own for each 64-bit key, by a block of Threefry; columns count within it.
    own = jax.vmap(threefry_2x32)(of_tables, words)
    scales = jnp.asarray([_scale(t) for t in tables], jnp.float32)[numbers]
    counter = jnp.concatenate([jnp.zeros(dim, jnp.uint32), jnp.arange(dim, dtype=jnp.uint32)])
    bits = jax.vmap(threefry_2x32, in_axes=(0, None))(own, counter)
    return _from_bits(bits[:, :dim] ^ bits[:, dim:], scales[:, None], tables[0].dtype)


def _typed(key: jax.Array) -> jax.Array:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _from_bits(bits: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    odd = (bits >> 8).astype(jnp.int32) * jnp.int32(2) - jnp.int32(2**24 - 1)  # within ±2^24: exact in float32
    return (odd.astype(jnp.float32) * scales).astype(dtype)


def scale(table: TableConfig) -> jax.Array:
    """What odd integers within ±2^24 are multiplied by, () float32."""
    return jnp.float32(_scale(table))


def _scale(table: TableConfig) -> float:
    return table.bound * 2.0**-24
