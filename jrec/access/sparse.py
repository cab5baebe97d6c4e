"""Counting ids in memory that grows with the number of distinct ones."""

from __future__ import annotations

import numpy as np

_PENDING = 1 << 22  # ids gathered before they are counted


class SparseCounter:
    """Counts of the ids it is given."""

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def add(self, ids: np.ndarray) -> None:
        """Counts (n,) ids."""
        self._pending.append(ids)
        self._waiting += ids.size
        if self._waiting >= max(_PENDING, len(self._ids)):
            self._merge()

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids, ascending, and how often each was given, int64 both."""
        self._merge()
        return self._ids, self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        ids, counts = _count(np.concatenate(self._pending))
        self._pending, self._waiting = [], 0
        if not len(self._ids):
            self._ids, self._counts = ids, counts
            return
        merged, place = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        total = np.zeros(len(merged), np.int64)
        total[place[: len(self._ids)]] = self._counts
        np.add.at(total, place[len(self._ids) :], counts)
        self._ids, self._counts = merged, total


def _count(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, ascending, and their counts, int64 both."""
    if ids.dtype in (np.uint8, np.uint16):  # a small table: counting beats sorting
        dense = np.bincount(ids)
        rows = np.flatnonzero(dense)
        return rows, dense[rows]
    rows, counts = np.unique(ids, return_counts=True)
    return rows.astype(np.int64), counts
