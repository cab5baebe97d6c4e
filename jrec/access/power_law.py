"""Access profiles of a power law, for planning before there is data, and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jrec.access.profile import AccessProfile, TableProfile

_EXACT = 1 << 16  # ranks whose shares are added one by one; the rest is an integral
DEFAULT_EXPONENT = 1.05  # of the published click logs' largest tables, about


def power_law_profile(
    rows: Mapping[str, int],
    *,
    examples: int,
    exponent: float = DEFAULT_EXPONENT,
    ids_per_example: Mapping[str, float] | None = None,
) -> AccessProfile:
    """The expected counts, rounded, of ids whose rank ``k`` has probability proportional to ``k ** -exponent``.

    Rows that nobody would expect to see are counted once: they exist because somebody saw them.

    Args:
      rows: How many rows each table has.
      examples: How many examples the log has.
      exponent: The law's exponent.
      ids_per_example: Accesses of each table per example; 1 for tables that are not listed.

    Raises:
      ValueError: On a negative exponent or a table without rows.

    Example:
      >>> profile = power_law_profile({"item": 1_000_000}, examples=10_000_000)
      >>> len(profile.tables[0].counts) < 5000
      True
    """
    if exponent < 0:
        raise ValueError(f"exponent is {exponent}; it must not be negative")
    ids = ids_per_example or {}
    tables = tuple(_table(name, n, examples * ids.get(name, 1.0), exponent) for name, n in rows.items())
    return AccessProfile(tables=tables, examples=examples, source=f"power law of exponent {exponent:g}")


def _table(name: str, rows: int, accesses: float, exponent: float) -> TableProfile:
    if rows < 1:
        raise ValueError(f"table {name!r} has {rows} rows; a table needs at least one")
    scale = accesses / _total(rows, exponent)

    def expected(ranks: np.ndarray) -> np.ndarray:
        return scale * ranks.astype(np.float64) ** -exponent

    # Successive counts differ by about exponent * count / rank: below this rank by more than one, above it by less.
    head = rows if exponent == 0 else int((exponent * scale) ** (1 / (1 + exponent))) + 1
    head = min(rows, head) if exponent else 1
    ranks = np.arange(1, head + 1)
    counts = np.maximum(np.rint(expected(ranks)), 1.0)
    starts = ranks - 1
    if head < rows and exponent > 0:
        # A count of v ends at the rank where the expectation falls below v - 1/2.
        # Below the head a run for each count, not a row for each rank: a billion rows take some thousand runs.
        values = np.arange(int(counts[-1]), 1, -1)
        ends = np.floor((scale / (values - 0.5)) ** (1 / exponent)).astype(np.int64)
        ends = np.clip(ends, head, rows)
        starts = np.concatenate([starts, ends])
        counts = np.concatenate([counts, values - 1.0])
    starts = np.append(starts, rows)
    real = np.diff(starts) > 0
    bounds = np.append(starts[:-1][real], rows)
    return TableProfile(name=name, starts=bounds, counts=counts[real])


def _total(rows: int, exponent: float) -> float:
    head = float((np.arange(1, min(rows, _EXACT) + 1, dtype=np.float64) ** -exponent).sum())
    if rows <= _EXACT:
        return head
    # The midpoint rule backwards: an integral over [k - 1/2, k + 1/2] for each rank k.
    low, high = _EXACT + 0.5, rows + 0.5
    if exponent == 1:
        return head + float(np.log(high / low))
    return head + (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
