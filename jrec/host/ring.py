"""The cache of updated rows on the device: a ring of the last batches' rows and slots (EL-Rec, section V-B).

Batch ``b`` writes its updated unique rows to entry ``b mod length``, so a row lives for ``length`` batches after the
last one that used it (the paper's life cycle) and then is evicted by being overwritten. The host knows which rows are
there, since a batch's rows follow from only its ids. So the host says beforehand where the device finds each row
(``RingIndex``), the device searches no index, and rows that it holds never travel.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.native.row_plan import RowSources

LEAST_BUCKET = 32  # rows; below that a transfer costs the same whatever its size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows with their optimizer slots, NumPy or JAX arrays.

    Attributes:
      values: (n, dim) of the table's dtype.
      slots: float32 by name, (n, dim) or (n,).
    """

    values: Any
    slots: dict[str, Any]


def bucket(count: int, capacity: int) -> int:
    """The static size in which ``count`` rows travel: a power of two or one and a half, at most ``capacity``.

    So a run compiles two programs per doubling, and at most a third of what travels is padding.
    """
    size = LEAST_BUCKET
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, capacity)


class RingIndex:
    """The host's knowledge of one stack's ring.

    Args:
      length: Batches whose rows the device keeps; 0 for none.
      most: The most unique rows that a batch can have.

    Attributes:
      capacity: Rows of an entry, and of the small table that a step works on: a bucket with some room above the most
        unique rows of a batch so far, since a step is compiled for each capacity.
    """

    def __init__(self, *, length: int, most: int):
        if length * most >= 2**31:
            raise ValueError(
                f"{length} batches of up to {most:,} unique rows exceed the {2**31 - 1:,} rows that int32 can number;"
                " keep fewer batches on the device, or use smaller ones"
            )
        self.capacity = min(LEAST_BUCKET, most)
        self._length, self._most = length, most
        self._held: collections.deque[tuple[int, np.ndarray]] = collections.deque(maxlen=length)

    def next(self, batch: int, rows: np.ndarray, most: int, room: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Plans the next batch; call it once for each, in order.

        Args:
          batch: The batch's number, counted from 0.
          rows: (n,) int32 or int64, ascending: the batch's unique rows. All batches have one dtype.
          most: The largest possible ``n``; the same for all batches.
          room: The capacity, no smaller than before; None for a bucket that grows with the batches.

        Returns:
          ``source``, (capacity,) int32: for each row its place in the ring of ``length * capacity`` rows, or ``-1 - i``
          for row ``i`` of ``missing``, or -1 for padding; and ``missing``, (m,) of the rows' dtype, ascending, the rows
          to fetch from the host.

        Raises:
          ValueError: On a batch of another static size.
        """
        if most != self._most:
            raise ValueError(
                f"batch {batch} may have {most:,} unique rows, but those before it {self._most:,}; the batches of a"
                " pipeline have one static size"
            )
        if room is not None:
            # Never smaller than before: entries keep their rows when they grow, and places count from an entry's begin.
            self.capacity = room
        elif rows.size > self.capacity:
            # Each capacity compiles the step anew: an eighth of room lets the next batches be a little larger.
            self.capacity = bucket(rows.size + rows.size // 8, most)
        sources = RowSources(rows, self.capacity)
        for number, held in reversed(self._held):  # the latest copy of a row is the one that counts
            sources.match(held, (number % self._length) * self.capacity)
        missing = sources.missing()
        # ``maxlen`` drops the batch whose entry this one overwrites: the index forgets as the ring does.
        self._held.append((batch, rows))
        return sources.source, missing


class DeviceRing:
    """The ring on the device: the rows of one stack's last batches.

    Args:
      length: Batches that it holds; 0 for none.
    """

    def __init__(self, *, length: int):
        self._length = length
        self._kept: Rows | None = None

    def assemble(self, source: jax.Array, fetched: Rows) -> Rows:
        """The current values of a batch's unique rows, (capacity, ...), from the ring and from the fetched rows.

        A larger ``source`` than before is a larger capacity: entries grow, and rows keep their places in them.
        """
        capacity = source.shape[0]
        if self._length == 0:
            # No ring: every row was fetched, and the sources are negative.
            return _merge(source, fetched)
        if self._kept is None:
            # Made at the first batch, whose rows tell the dtype and the slots' shapes.
            space = self._length * capacity
            self._kept = jax.tree.map(lambda array: jnp.zeros((space, *array.shape[1:]), array.dtype), fetched)
        elif self._kept.values.shape[0] != self._length * capacity:
            self._kept = _grown(self._kept, self._length, capacity)
        return _assemble(source, fetched, self._kept)

    def push(self, batch: int, updated: Rows) -> None:
        """Writes the updated rows of a batch over the rows of batch ``batch - length``."""
        if self._kept is not None:
            # Behind the step in the device's queue, as whatever reads the ring next is behind this: one stream, in one
            # order.
            self._kept = _write(self._kept, updated, (batch % self._length) * updated.values.shape[0])


@functools.partial(jax.jit, static_argnums=1)
def head(rows: Rows, size: int) -> Rows:
    """The first ``size`` rows."""
    return jax.tree.map(lambda array: array[:size], rows)


@jax.jit
def _merge(source: jax.Array, fetched: Rows) -> Rows:
    return jax.tree.map(lambda new: new.at[-1 - source].get(mode="clip"), fetched)


@jax.jit
def _assemble(source: jax.Array, fetched: Rows, kept: Rows) -> Rows:
    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        from_ring = jnp.expand_dims(source >= 0, tuple(range(1, new.ndim)))
        # Both reads take place for every row and one is dropped; the other index is then 0, which is in bounds.
        old_rows = old.at[jnp.maximum(source, 0)].get(mode="promise_in_bounds")
        return jnp.where(from_ring, old_rows, new.at[jnp.maximum(-1 - source, 0)].get(mode="promise_in_bounds"))

    return jax.tree.map(pick, fetched, kept)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _grown(kept: Rows, length: int, capacity: int) -> Rows:
    def grow(array: jax.Array) -> jax.Array:
        # Entry by entry: places count from the begin of an entry, so each grows at its own end.
        entries = array.reshape(length, -1, *array.shape[1:])
        room = [(0, 0), (0, capacity - entries.shape[1]), *[(0, 0)] * (array.ndim - 1)]
        return jnp.pad(entries, room).reshape(length * capacity, *array.shape[1:])

    return jax.tree.map(grow, kept)


@functools.partial(jax.jit, donate_argnums=0)
def _write(kept: Rows, updated: Rows, start: jax.Array) -> Rows:
    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=0)

    return jax.tree.map(write, kept, updated)
