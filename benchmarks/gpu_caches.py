"""How many lookups of rows a cache serves, from how often each row is looked up."""

from __future__ import annotations

import math

import numpy as np


def misses(counts: np.ndarray, *, capacity: float) -> float:
    """Expected misses of a cache that replaces the least recently used row, in Che's approximation.

    Args:
      counts: (rows,) lookups of each distinct row; they come in random order.
      capacity: Rows that the cache holds; it begins without any of them.
    """
    return misses_of_each(counts, caches=1, capacity=capacity)


def misses_of_each(counts: np.ndarray, *, caches: int, capacity: float) -> float:
    """Expected misses of several such caches together, where each lookup goes to any of them.

    Args:
      counts: See ``misses``.
      caches: How many there are.
      capacity: Rows that each holds.
    """
    # Chance that a cache meets a row at all, and so misses it once.
    first = -np.expm1(counts * math.log1p(-1 / caches)) if caches > 1 else np.ones(counts.size)
    if first.sum() <= capacity:
        return float(caches * first.sum())
    rates = counts / counts.sum()
    gone = np.exp(-rates * _lookups_that_fill(rates, capacity))
    return float(caches * np.sum(first + np.maximum(0, counts / caches - first) * gone))


def _lookups_that_fill(rates: np.ndarray, capacity: float) -> float:
    """After how many lookups ``capacity`` different rows were looked up; ``rates`` are the rows' shares of lookups."""
    low, high = 0.0, 1.0
    while _different(rates, high) < capacity:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _different(rates, middle) < capacity else (low, middle)
    return high


def _different(rates: np.ndarray, lookups: float) -> float:
    return float(np.sum(-np.expm1(-rates * lookups)))
