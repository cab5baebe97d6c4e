"""Access- and memory-aware partitioning (OPER §4.1)."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from jrec.sharding.pieces import Pieces
from jrec.sharding.problem import Problem, Ranked

_SLACK = 1e-9  # keeps a run whose rows divide the threshold evenly from losing one to rounding


def whole(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """First rank and the end of ranks of every table, (tables,) int64 each."""
    rows = np.array([t.rows for t in problem.tables], np.int64)
    return np.zeros_like(rows), rows


def span(problem: Problem, first: np.ndarray, last: np.ndarray) -> Pieces:
    """One piece a table, of ranks ``first`` to ``last``, where there are any."""
    table = np.flatnonzero(last > first)
    return Pieces.of(problem, table, first[table], last[table])


def partition(problem: Problem, threshold: float, first: np.ndarray, last: np.ndarray) -> Pieces:
    """Cuts ranks of all tables, from most to least accessed, whenever a piece reaches a threshold.

    Args:
      problem: Tables and accesses.
      threshold: The share of these ranks' memory, and of their accesses, that a piece may have; a single row may have
        more.
      first, last: (tables,) int64, the ranks of each table that are to be cut.

    Returns:
      The pieces, by table and rank.
    """
    all_of = span(problem, first, last)
    max_memory = threshold * float(all_of.memory.sum())
    max_fetched = threshold * float(all_of.fetched.sum())
    tables, starts, stops = [], [], []
    for t, low, high in zip(all_of.table, all_of.start, all_of.stop, strict=True):
        bounds = cut(
            problem.ranked[t],
            int(low),
            int(high),
            max_rows=max(1, int(max_memory / problem.memory_bytes[t])),
            max_mass=max_fetched / float(problem.row_bytes[t]),
        )
        tables.append(np.full(len(bounds) - 1, t, np.int32))
        starts.append(bounds[:-1])
        stops.append(bounds[1:])
    if not tables:
        return Pieces.of(problem, np.empty(0), np.empty(0), np.empty(0))
    return Pieces.of(problem, np.concatenate(tables), np.concatenate(starts), np.concatenate(stops))


def cut(ranked: Ranked, first: int, last: int, *, max_rows: int, max_mass: float) -> np.ndarray:
    """Bounds (pieces + 1,) int64 of the longest pieces within ``max_rows`` and ``max_mass``, one row at least."""
    mass, starts, access = ranked.mass.tolist(), ranked.starts.tolist(), ranked.access.tolist()
    runs = len(access)
    bounds, at = [first], first
    while at < last:
        run = bisect_right(starts, at) - 1
        # By runs of equally accessed rows and bisection: a table of a billion rows has some thousand runs.
        limit = mass[run] + (at - starts[run]) * access[run] + max_mass * (1 + _SLACK)
        end = min(bisect_right(mass, limit) - 1, runs)
        if end < runs:
            stop = starts[end] + int((limit - mass[end]) / access[end] * (1 + _SLACK)) if access[end] > 0 else last
        else:
            stop = last
        # At least one row, even where that passes the threshold by itself: rows are not cut.
        at = max(at + 1, min(stop, at + max_rows, last))
        bounds.append(at)
    return np.array(bounds, np.int64)


def access_bound(pieces: Pieces) -> np.ndarray:
    """(pieces,) bool: those whose share of the accesses is greater than their share of the memory."""
    memory, fetched = pieces.memory.sum(), pieces.fetched.sum()
    return pieces.fetched * memory > pieces.memory * fetched
