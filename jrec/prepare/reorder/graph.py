"""The index graph of EL-Rec's Algorithm 2: rows that one batch reads together are joined by an edge.

All pairs of a batch's n rows are n (n - 1) / 2 edges, 8 million of 4,096. So a batch with many rows is sampled: each of
its rows draws ``degree`` partners among the others, uniformly and with repetition, and an edge weighs as much as it is
unlikely: (n - 1) / (2 degree). A pair is drawn from either end with probability degree / (n - 1) each, so that its
expected weight is 1, as if all pairs were taken. Rows, not pairs, are the strata: no row of a batch is left without an
edge unless ``degree`` is below 1, when a row draws with that probability. Batches of up to 2 degree + 1 rows are taken
whole.

Frequent ("hot") rows are no vertices. The paper's listing maps them all onto vertex 0, whose edges join everything.
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from jrec.data.schema import DatasetError

_PAIRS_AT_ONCE = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edges:
    """Merged edges, in ascending order of (low, high).

    Attributes:
      low, high: (edges,) int64 vertices, low < high.
      weights: (edges,) float64.
      drawn: Edges before equal ones were merged.
    """

    low: np.ndarray
    high: np.ndarray
    weights: np.ndarray
    drawn: int

    def __len__(self) -> int:
        return len(self.weights)


def affordable_degree(degree: float, appearances: int, max_edges: int) -> float:
    """The partners that a row of a batch can draw, at most ``degree``, so that ``max_edges`` suffice for the log.

    Args:
      degree: The wish.
      appearances: How often the log reads non-hot rows; a bound on the sum of batches' vertices.
      max_edges: Edges to keep at most.
    """
    return min(degree, max_edges / max(appearances, 1))


class GraphBuilder:
    """Collects the edges of one table's batches in bounded memory: 32 bytes an edge of ``max_edges``, 80 while merging.

    Args:
      vertices: How many there are; vertex numbers are below.
      degree: Partners that each row of a batch draws; fractions count in expectation, infinity takes all pairs.
      max_edges: Distinct edges to hold at most.
      seed, table: The random numbers depend only on these and the batch's number.
    """

    def __init__(self, *, vertices: int, degree: float, max_edges: int, seed: int, table: str):
        if degree <= 0:
            raise ValueError(f"degree is {degree}; a row must draw some partners")
        self._vertices, self._degree, self._max_edges = vertices, degree, max_edges
        self._seed = (seed, zlib.crc32(table.encode()))
        self._table = table
        self._keys: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._held = self._merged = self._drawn = self._batch = 0

    def add(self, rows: np.ndarray) -> None:
        """Adds a batch of the log.

        Args:
          rows: (n,) int64 vertices, distinct and ascending.

        Raises:
          DatasetError: If the graph has more than ``max_edges`` edges.
        """
        n, self._batch = len(rows), self._batch + 1
        if n < 2:
            return
        if self._degree >= (n - 1) / 2:
            self._add_all_pairs(rows)
        else:
            first, second = self._draw(n)
            low, high = rows[np.minimum(first, second)], rows[np.maximum(first, second)]
            self._append(low * self._vertices + high, (n - 1) / (2 * self._degree))

    def edges(self) -> Edges:
        """All edges so far, merged."""
        self._merge()
        keys = self._keys[0] if self._keys else np.empty(0, np.int64)
        weights = self._weights[0] if self._weights else np.empty(0)
        low, high = np.divmod(keys, max(self._vertices, 1))
        return Edges(low=low, high=high, weights=weights, drawn=self._drawn)

    def _draw(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the rows that draw and of those that they draw."""
        # A generator of the batch's own: the graph does not depend on which tables are read beside it.
        rng = np.random.Generator(np.random.PCG64([*self._seed, self._batch]))
        whole = int(self._degree)
        draws = whole + (rng.random(n) < self._degree - whole)
        first = np.repeat(np.arange(n), draws)
        # 1 to n - 1 places further, around: any other row with the same probability, and never itself.
        step = 1 + (rng.random(len(first)) * (n - 1)).astype(np.int64)
        return first, (first + step) % n

    def _add_all_pairs(self, rows: np.ndarray) -> None:
        n = len(rows)
        step = max(1, _PAIRS_AT_ONCE // n)
        for begin in range(0, n - 1, step):
            first = np.arange(begin, min(begin + step, n - 1))
            partners = n - 1 - first
            before = np.cumsum(partners) - partners
            second = np.arange(partners.sum()) + np.repeat(first + 1 - before, partners)
            self._append(np.repeat(rows[first] * self._vertices, partners) + rows[second], 1.0)

    def _append(self, keys: np.ndarray, weight: float) -> None:
        # Merging sorts all that is held: it pays once as many new edges wait as may stay.
        if self._held + len(keys) > self._merged + self._max_edges:
            self._merge()
        self._keys.append(keys)
        self._weights.append(np.full(len(keys), weight))
        self._held += len(keys)
        self._drawn += len(keys)

    def _merge(self) -> None:
        """Sorts the edges and adds up the weights of equal ones, in the order of the batches."""
        if len(self._keys) > 1 or self._held > self._merged:
            keys, weights = np.concatenate(self._keys), np.concatenate(self._weights)
            self._keys, self._weights = [], []
            order = np.argsort(keys, kind="stable")
            keys, weights = keys[order], weights[order]
            del order
            first = np.concatenate([[True], keys[1:] != keys[:-1]])
            # bincount adds one after the other, so that the sums do not depend on when edges were merged.
            self._keys, self._weights = [keys[first]], [np.bincount(np.cumsum(first) - 1, weights)]
            self._held = self._merged = len(self._keys[0])
        if self._held > self._max_edges:
            raise DatasetError(
                f"the index graph of table {self._table!r} has more than {self._max_edges:,} edges after"
                f" {self._batch:,} batches; give it room (--max-edges), or draw fewer (--degree)"
            )
