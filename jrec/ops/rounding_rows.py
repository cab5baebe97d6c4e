"""The numbers of a stack's rows for stochastic rounding: functions of only the table's name and the row in the table.

So the random bits of a row depend neither on where it lives nor on what its table is stacked with, as its first values
do not (``jrec.ops.row_init``).
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.layout import Stack


def rounding_rows(stack: Stack, addresses: jax.Array) -> jax.Array:
    """The row's number in its table plus a hash of the table's name, modulo 2^32; see ``casted_update``.

    Two tables may share some numbers, whose rows then share random bits; each is still right on average.

    Args:
      stack: The stack.
      addresses: (n,) int32, in any order; of a single table of 2^31 rows or more modulo 2^32.

    Returns:
      (n,) int32.
    """
    offsets = _offsets(stack)
    if len(offsets) == 1:  # constants without elements, as below, end XLA's compiler inside of shard_map (jax 0.11)
        return addresses + offsets[0]
    # What the offset changes by, added for every table that has begun: one loop without a search or a gather, which XLA
    # fuses. The first table is not compared with: addresses of one of 2^31 rows or more would seem to lie before it.
    begun = addresses[None, :] >= jnp.asarray(stack.bases[1:], jnp.int32)[:, None]
    return addresses + offsets[0] + jnp.sum(jnp.where(begun, np.diff(offsets)[:, None], np.int32(0)), axis=0)


def host_rounding_rows(stack: Stack, addresses: np.ndarray) -> np.ndarray:
    """As ``rounding_rows``, of (n,) int32 or int64 addresses in NumPy."""
    table = np.searchsorted(stack.bases, addresses, side="right") - 1
    return addresses.astype(np.int32) + _offsets(stack)[table]


def _offsets(stack: Stack) -> np.ndarray:
    """(tables,) int32: the numbers of rows less their addresses, modulo 2^32."""
    places = zip(stack.tables, stack.bases, strict=True)
    return np.array([zlib.crc32(t.name.encode()) + t.first_row - base for t, base in places]).astype(np.int32)
