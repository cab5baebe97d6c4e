"""EASE (Steck 2019, arXiv 1905.03375): a linear model of a user's items, by inverting how often items share users."""

from __future__ import annotations

import numpy as np

MOST_ITEMS = 5_000
"""Items from which there is no EASE: its matrix and the inverse take 8 bytes an item squared each."""
RIDGES = (50.0, 200.0, 800.0)
"""What may be added to the diagonal; the best on the valid split is taken."""
_PIECE = 256  # examples that are scored at a time


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
        for begin in range(0, len(targets), _PIECE):
            own = targets[begin : begin + _PIECE]
            scores = _ones(history, begin, len(own), len(self.candidates)) @ self._weights
            counted = scores >= scores[np.arange(len(own)), own][:, None]
            counted &= self.candidates & (_ones(left_out, begin, len(own), len(self.candidates)) == 0)
            counted[np.arange(len(own)), own] = False
            above[begin : begin + len(own)] = counted.sum(axis=1)
        return above


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
        for begin in range(0, len(items), _PIECE):
            own = items[begin : begin + _PIECE]
            there, line = _ones(history, begin, len(own), len(self.counts)), np.arange(len(own))
            if self._whole:
                there[line, own] = 1
                self.counts += there.T @ there
            else:
                new = there[line, own] == 0  # what is there already has its pairs
                there, own = there[new], own[new]
                # ``add.at`` counts each line of a piece: by plain indexing an item of several lines would count once.
                np.add.at(self.counts, own, there)
                np.add.at(self.counts.T, own, there)
                np.add.at(self.counts, (own, own), 1)


def _ones(pairs: tuple[np.ndarray, np.ndarray], begin: int, count: int, rows: int) -> np.ndarray:
    """(count, rows) float32, 1 at the rows of each example from ``begin`` on."""
    example, row = pairs
    inside = (example >= begin) & (example < begin + count)
    ones = np.zeros((count, rows), np.float32)
    ones[example[inside] - begin, row[inside]] = 1
    return ones
