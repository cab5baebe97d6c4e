"""Where the host tier finds the rows of a batch: those that earlier batches hold already, and the others."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel, pointer
from jrec.native.memory import get_i32, get_i64, put_i32, put_i64


@inlined
def _row(rows, i, wide):
    return get_i64(rows, i) if wide else np.int64(get_i32(rows, i))


@kernel(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64))
def match_rows(rows, count, held, held_count, base, source, wide):
    """Merges two ascending lists: rows without a source that are held get ``base`` plus their place; counts them.

    Rows are int32, or int64 if ``wide``.
    """
    matched, h = np.int64(0), np.int64(0)
    for i in range(count):
        row = _row(rows, i, wide)
        while (h < held_count) and (_row(held, h, wide) < row):
            h += 1
        # A source that is there already is a later batch's copy of the row, and stays.
        if (h < held_count) and (_row(held, h, wide) == row) and (get_i32(source, i) < 0):
            put_i32(source, i, np.int32(base + h))
            matched += 1
    return matched


@kernel(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64))
def take_missing(rows, count, source, missing, wide):
    """Lists the rows without a source, and makes their source ``-1 - place in the list``; returns how many."""
    taken = np.int64(0)
    for i in range(count):
        if get_i32(source, i) < 0:
            if wide:
                put_i64(missing, taken, get_i64(rows, i))
            else:
                put_i32(missing, taken, get_i32(rows, i))
            put_i32(source, i, np.int32(-1 - taken))
            taken += 1
    return taken


class RowSources:
    """Where each of a batch's unique rows comes from.

    Args:
      rows: (n,) int32 or int64, ascending.
      capacity: Length of ``source``, at least ``n``.

    Attributes:
      source: (capacity,) int32: a place among the rows that are held already, or ``-1 - i`` for entry ``i`` of
        ``missing()``; -1 in the padding. Complete once ``missing`` was called.
    """

    def __init__(self, rows: np.ndarray, capacity: int):
        self._rows = np.ascontiguousarray(rows)
        self._wide = self._rows.dtype == np.int64
        self.source = np.full(capacity, -1, np.int32)

    def match(self, held: np.ndarray, base: int) -> int:
        """Gives rows without a source that are in ``held`` the place ``base + index in it``.

        Args:
          held: (m,) rows of the same dtype, ascending.
          base: The place of the first of them.

        Returns:
          How many they are.
        """
        return match_rows.call(
            pointer(self._rows), self._rows.size, pointer(held), held.size, base, pointer(self.source), self._wide
        )

    def missing(self) -> np.ndarray:
        """The rows that are not held, (m,) of their dtype, ascending; call it once, after all of ``match``."""
        missing = np.empty(self._rows.size, self._rows.dtype)
        count = take_missing.call(
            pointer(self._rows), self._rows.size, pointer(self.source), pointer(missing), self._wide
        )
        return missing[:count].copy()
