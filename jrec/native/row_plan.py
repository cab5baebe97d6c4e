"""Where the host tier finds the rows of a batch: those that earlier batches hold already, and the others."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native.compile import kernel, pointer
from jrec.native.memory import get_i32, put_i32


@kernel(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64))
def match_rows(rows, count, held, held_count, base, source):
    """Merges two ascending lists: rows without a source that are held get ``base`` plus their place; counts them."""
    matched, h = np.int64(0), np.int64(0)
    for i in range(count):
        row = get_i32(rows, i)
        while (h < held_count) and (get_i32(held, h) < row):
            h += 1
        if (h < held_count) and (get_i32(held, h) == row) and (get_i32(source, i) < 0):
            put_i32(source, i, np.int32(base + h))
            matched += 1
    return matched


@kernel(types.int64(types.int64, types.int64, types.int64, types.int64))
def take_missing(rows, count, source, missing):
    """Lists the rows without a source, and makes their source ``-1 - place in the list``; returns how many."""
    taken = np.int64(0)
    for i in range(count):
        if get_i32(source, i) < 0:
            put_i32(missing, taken, get_i32(rows, i))
            put_i32(source, i, np.int32(-1 - taken))
            taken += 1
    return taken


class RowSources:
    """Where each of a batch's unique rows comes from.

    Args:
      rows: (n,) int32, ascending.
      capacity: Length of ``source``, at least ``n``.
      elsewhere: (m,) int32, places of rows that need no source; they get -1, as padding.

    Attributes:
      source: (capacity,) int32: a place among the rows that are held already, or ``-1 - i`` for entry ``i`` of
        ``missing()``; -1 in the padding. Complete once ``missing`` was called.
    """

    def __init__(self, rows: np.ndarray, capacity: int, elsewhere: np.ndarray | None = None):
        self._rows, self._elsewhere = np.ascontiguousarray(rows), elsewhere
        self.source = np.full(capacity, -1, np.int32)
        if elsewhere is not None:
            self.source[elsewhere] = 0  # so that nobody looks for them

    def match(self, held: np.ndarray, base: int) -> int:
        """Gives rows without a source that are in ``held``, (m,) int32 ascending, the place ``base + index in it``.

        Returns:
          How many they are.
        """
        return match_rows.call(
            pointer(self._rows), self._rows.size, pointer(held), held.size, base, pointer(self.source)
        )

    def missing(self) -> np.ndarray:
        """The rows that are not held, (m,) int32 ascending; call it once, after all of ``match``."""
        missing = np.empty(self._rows.size, np.int32)
        count = take_missing.call(pointer(self._rows), self._rows.size, pointer(self.source), pointer(missing))
        if self._elsewhere is not None:
            self.source[self._elsewhere] = -1
        return missing[:count].copy()
