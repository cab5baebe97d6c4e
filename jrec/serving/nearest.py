"""The k best rows of a served table for some vectors, exactly, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 65_536


def nearest(
    rows_of: Callable[[int, int], np.ndarray],
    rows: int,
    queries: np.ndarray,
    k: int,
    *,
    seen: np.ndarray | None = None,
    unit: bool = False,
    block: int = BLOCK,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the k best rows of each query, and their numbers; see ``Model.top_k``.

    Args:
      rows_of: (n, dim) float32 rows from the first number to below the second.
      rows: How many there are.
      queries: (queries, dim) float32.
      k: How many are wanted.
      seen: (queries, length) integers, rows that a query leaves out; negative ones are absent.
      unit: Whether rows are scaled to length one.
      block: Rows at a time.
    """
    best = np.full((len(queries), k), -np.inf, np.float32)
    numbers = np.full((len(queries), k), -1, np.int64)
    line = np.arange(len(queries))[:, None]
    for begin in range(0, rows, block):
        values = rows_of(begin, min(begin + block, rows))
        if unit:
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-6))
        scores = queries @ values.T
        if seen is not None:
            of_query, place = np.nonzero((seen >= begin) & (seen < begin + len(values)))
            scores[of_query, seen[of_query, place] - begin] = -np.inf
        scores = np.concatenate([best, scores], axis=1)
        here = np.broadcast_to(np.arange(begin, begin + len(values)), (len(queries), len(values)))
        held = np.concatenate([numbers, here], axis=1)
        # In order of numbers before the stable sort, so that of equal scores the lower number comes first.
        chosen = np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1)
        order = np.argsort(-scores[line, chosen], axis=1, kind="stable")
        chosen = chosen[line, order]
        best, numbers = scores[line, chosen], held[line, chosen]
    return best, np.where(np.isneginf(best), -1, numbers)
