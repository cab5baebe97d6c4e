"""EASE (Steck 2019, arXiv 1905.03375): a linear model of a user's items, by inverting how often items share users."""

from __future__ import annotations

import numpy as np

from jrec.app.baselines.item_order import different
from jrec.kernel_cache import compiled

MOST_ITEMS = 5_000
"""Items from which there is no EASE: its matrix and the inverse take 8 bytes an item squared each."""
RIDGES = (50.0, 200.0, 800.0)
"""What may be added to the diagonal; the best on the valid split is taken."""
_PIECE = 256  # examples that are counted at a time


class Ease:
    """Items by the sum of their weights for the items of a user's history.

    Args:
      shared: (rows, rows), symmetric: how many users have two items, on the diagonal how many have one.
      ridge: What is added to the diagonal, greater than 0.
      candidates: (rows,) bool, the items that are ranked.
    """

    def __init__(self, shared: np.ndarray, ridge: float, *, candidates: np.ndarray):
        matrix = np.where(candidates[:, None] & candidates, shared, 0).astype(np.float64)
        matrix[np.diag_indices_from(matrix)] += ridge
        # The weights that tell each item from all others best, with squares penalized by ``ridge`` and none for itself
        # (Algorithm 1).
        inverse = np.linalg.inv(matrix)
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        self.candidates, self._weights = candidates, weights.astype(np.float32)

    def ranks(
        self, targets: np.ndarray, *, history: tuple[np.ndarray, np.ndarray], left_out: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """How many other items come before each example's target, or beside it; see ``ItemOrder.ranks``."""
        above = np.empty(len(targets), np.int64)
        own, out = (self._each_once(pairs, len(targets)) for pairs in (history, left_out))
        _count_above(self._weights, self.candidates, targets, own[0], own[1], out[0], out[1], above)
        return above

    def _each_once(self, pairs: tuple[np.ndarray, np.ndarray], examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each example's rows begin, and the different rows of each, one example's after the other's."""
        example, row = different(pairs, len(self.candidates))
        return np.searchsorted(example, np.arange(examples + 1)), row


@compiled
def _count_above(weights, candidates, targets, offsets, rows, out_offsets, out_rows, above):
    """``Ease.ranks`` of lists without repetitions: a history is short beside the items, so that no matrix is needed."""
    scores = np.empty(len(candidates), np.float32)
    for i in range(len(targets)):
        scores[:] = 0
        for k in range(offsets[i], offsets[i + 1]):
            scores += weights[rows[k]]
        own = scores[targets[i]]
        count = -1 if candidates[targets[i]] else 0  # the target itself
        for item in range(len(candidates)):
            count += candidates[item] and scores[item] >= own
        for k in range(out_offsets[i], out_offsets[i + 1]):
            item = out_rows[k]
            count -= item != targets[i] and candidates[item] and scores[item] >= own
        above[i] = count


class SharedUsers:
    """Counts how many users have two items, from training examples.

    Args:
      rows: How many items there are.
      whole: Whether each example is all of a user: its history and its item. Else it is an item that joins a history,
        whose own pairs other examples have.
    """

    def __init__(self, rows: int, *, whole: bool):
        self.counts, self._whole = np.zeros((rows, rows), np.float32), whole

    def add(self, history: tuple[np.ndarray, np.ndarray], items: np.ndarray) -> None:
        """Counts examples.

        Args:
          history: Numbers of examples and rows, (n,) each.
          items: (examples,) rows.
        """
        rows = len(self.counts)
        if self._whole:
            for begin in range(0, len(items), _PIECE):
                own = items[begin : begin + _PIECE]
                there = _ones(history, begin, len(own), rows)
                there[np.arange(len(own)), own] = 1
                self.counts += there.T @ there
            return
        example, row = different(history, rows)
        new = np.ones(len(items), bool)
        new[example[row == items[example]]] = False  # what is there already has its pairs
        own, other = items[example[new[example]]], row[new[example]]
        # ``add.at`` counts each line: by plain indexing an item of several lines would count once.
        for pairs in ((own, other), (other, own), (items[new], items[new])):
            np.add.at(self.counts, pairs, 1)


def _ones(pairs: tuple[np.ndarray, np.ndarray], begin: int, count: int, rows: int) -> np.ndarray:
    """(count, rows) float32, 1 at the rows of each example from ``begin`` on."""
    example, row = pairs
    inside = (example >= begin) & (example < begin + count)
    ones = np.zeros((count, rows), np.float32)
    ones[example[inside] - begin, row[inside]] = 1
    return ones
