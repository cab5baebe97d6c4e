"""The k best rows of a served table for some vectors, exactly, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 65_536
SCORES = 1 << 22
"""Scores that are held at once: 16 MB, and as much again while the best of them are found."""


def nearest(
    rows_of: Callable[[int, int], np.ndarray],
    rows: int,
    queries: np.ndarray,
    k: int,
    *,
    left_out: np.ndarray | None = None,
    unit: bool = False,
    block: int = BLOCK,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the k best rows of each query, and their numbers; see ``Model.top_k``.

    Args:
      rows_of: (n, dim) float32 rows from the first number to below the second.
      rows: How many there are.
      queries: (queries, dim) float32.
      k: How many are wanted.
      left_out: (queries, length) integers, rows that a query leaves out; negative ones are absent.
      unit: Whether rows are scaled to length one.
      block: Rows at a time.
    """
    best = np.full((len(queries), k), -np.inf, np.float32)
    numbers = np.full((len(queries), k), -1, np.int64)
    at_once = max(1, SCORES // min(block, max(rows, 1)))
    for begin in range(0, rows, block):
        values = rows_of(begin, min(begin + block, rows))
        if unit:
            values = of_unit_length(values)
        for first in range(0, len(queries), at_once):
            some = slice(first, first + at_once)
            scores = queries[some] @ values.T
            if left_out is not None:
                of_query, place = np.nonzero((left_out[some] >= begin) & (left_out[some] < begin + len(values)))
                scores[of_query, left_out[some][of_query, place] - begin] = -np.inf
            _merge(scores, begin, best[some], numbers[some])
    return best, np.where(np.isneginf(best), -1, numbers)


def of_unit_length(vectors: np.ndarray) -> np.ndarray:
    """(n, dim) float32 vectors scaled to length one; zeros stay zeros."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-6))


def _merge(scores: np.ndarray, begin: int, best: np.ndarray, numbers: np.ndarray) -> None:
    """Takes the scores of some rows, (queries, n) from ``begin`` on, into the k best of each query, in place."""
    k = best.shape[1]
    # Below the k-th best so far, or of this block, a score is in no ranking: so nearly all rows are dropped unsorted.
    least = best[:, -1:]
    if scores.shape[1] > k:
        least = np.maximum(least, np.partition(scores, scores.shape[1] - k, axis=1)[:, -k, None])
    for query, fits in enumerate(scores >= least):
        here = np.flatnonzero(fits)
        candidates = np.concatenate([best[query], scores[query, here]])
        held = np.concatenate([numbers[query], begin + here])
        # Rows stand in the order of their numbers, so that of equal scores the lower number comes first.
        order = np.argsort(-candidates, kind="stable")[:k]
        best[query], numbers[query] = candidates[order], held[order]
