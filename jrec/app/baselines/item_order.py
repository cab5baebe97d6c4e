"""Orders of items that need no training: by how often they came right after another item, then by how often at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """How often one item came right after another.

    Attributes:
      keys: (n,) int64 ascending, ``before * rows + after`` of each different pair.
      times: (n,) int64, how often it came.
    """

    keys: np.ndarray
    times: np.ndarray

    @classmethod
    def counted(cls, before: np.ndarray, after: np.ndarray, rows: int) -> Pairs:
        """Counts pairs.

        Args:
          before, after: (pairs,) integers from 0 to ``rows``.
          rows: How many items there are; at most 2^31.
        """
        keys, times = np.unique(before.astype(np.int64) * rows + after.astype(np.int64), return_counts=True)
        return cls(keys=keys, times=times)

    @classmethod
    def merged(cls, pieces: Iterable[Pairs]) -> Pairs:
        """The pairs of all pieces, with the sums of their times."""
        pieces = [cls(keys=np.empty(0, np.int64), times=np.empty(0, np.int64)), *pieces]
        keys, places = np.unique(np.concatenate([piece.keys for piece in pieces]), return_inverse=True)
        times = np.zeros(len(keys), np.int64)
        np.add.at(times, places, np.concatenate([piece.times for piece in pieces]))
        return cls(keys=keys, times=times)


class ItemOrder:
    """Items by how often they came right after a given one, items of equal times by how often they are there at all.

    Without pairs it is the order of popularity, the same for every user.

    Args:
      counts: (rows,) integers, how often training has each item.
      pairs: How often one came right after another; None for none.
      candidates: (rows,) bool, the items that are ranked; None for all.
    """

    def __init__(self, counts: np.ndarray, pairs: Pairs | None = None, *, candidates: np.ndarray | None = None):
        pairs = Pairs.merged([]) if pairs is None else pairs
        self._rows, self._pairs = len(counts), pairs
        self.candidates = np.ones(self._rows, bool) if candidates is None else candidates
        levels, self._level = np.unique(counts, return_inverse=True)
        self._levels = len(levels)
        self._ascending = np.sort(self._level[self.candidates])
        before, after = np.divmod(pairs.keys, self._rows)
        before, after = before[self.candidates[after]], after[self.candidates[after]]
        scores = self._scores(before, after)
        self._different = np.unique(scores)
        # The pairs of one ``before`` follow each other, ascending by score, or by level: a search counts those above.
        self._by_score = np.sort(before * len(self._different) + np.searchsorted(self._different, scores))
        self._by_level = np.sort(before * self._levels + self._level[after])

    def ranks(
        self, targets: np.ndarray, *, history: tuple[np.ndarray, np.ndarray], left_out: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """How many other items come before each example's target, or beside it: a tie counts against the target.

        Args:
          targets: (examples,) rows.
          history: Numbers of examples and rows, (n,) each, of an example in the order in which they came: its target
            came after the last one.
          left_out: Numbers of examples and rows, (n,) each: an example's item that is not ranked. A target is ranked
            whether it is among them or not.

        Returns:
          (examples,) int64.
        """
        last = np.full(len(targets), -1, np.int64)
        last[history[0]] = history[1]  # what is set last stays
        scores = self._scores(last, targets)
        above = len(self._ascending) - np.searchsorted(self._ascending, scores)
        # What came after ``last`` stands above all that did not, where its level alone would have put it lower.
        of_pairs = _count_above(self._by_score, last, np.searchsorted(self._different, scores), len(self._different))
        of_levels = _count_above(self._by_level, last, np.minimum(scores, self._levels), self._levels)
        above += of_pairs - of_levels - self.candidates[targets]
        example, item = different(left_out, self._rows)
        example, item = example[self.candidates[item]], item[self.candidates[item]]
        counted = (item != targets[example]) & (self._scores(last[example], item) >= scores[example])
        return above - np.bincount(example[counted], minlength=len(targets))

    def _scores(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """(n,) int64: first by the times of a pair, then by the level of ``after``."""
        keys = np.asarray(before, np.int64) * self._rows + after
        place = np.searchsorted(self._pairs.keys, keys)
        times = np.zeros(len(keys), np.int64)
        there = place < len(self._pairs.keys)
        there[there] = self._pairs.keys[place[there]] == keys[there]
        times[there] = self._pairs.times[place[there]]  # of no pair before the first item: its key is below 0
        return times * self._levels + self._level[after]


def different(pairs: tuple[np.ndarray, np.ndarray], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The different pairs of an example and one of ``rows`` rows, (n,) int64 each, ascending."""
    example, row = (np.asarray(numbers, np.int64) for numbers in pairs)
    keys = np.sort(example * rows + row)  # ten times as fast as ``unique``, and more than that of an axis
    example, row = np.divmod(keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]], rows)
    return example, row


def _count_above(keys: np.ndarray, group: np.ndarray, least: np.ndarray, size: int) -> np.ndarray:
    """How many of ``keys``, ascending ``group * size + value``, are of each group and have at least its ``least``."""
    begin = np.asarray(group, np.int64) * size
    return np.searchsorted(keys, begin + size) - np.searchsorted(keys, begin + least)
