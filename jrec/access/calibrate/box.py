"""FAE's Rand-Em Box: how many rows of a table are hot, estimated from some of its rows (FAE, §III-A3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jrec.access.profile import TableProfile
from jrec.errors import ConfigError

CHUNKS, CHUNK_ROWS = 35, 1024
FEW_HITS = 200  # fewer hot rows among those drawn, and the bound is exact: normal tails do not hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of how many rows of a table are hot.

    Attributes:
      rows: The estimate.
      bound: No more rows than this are hot, at the confidence asked for.
      how: "counted" (both are the truth), "t" (Equation 5) or "clopper-pearson".
    """

    rows: float
    bound: float
    how: str


class RandEmBox:
    """Counts rows at or above a cutoff among ``chunks`` chunks of ``chunk_rows`` rows each.

    Equations 2 to 5 of the paper with two changes. A chunk is ``chunk_rows`` rows drawn at random, none twice, where
    the paper takes neighbours: rows descend by frequency, and a chunk of neighbours is hot or cold as a whole. And the
    finite population correction counts the rows drawn, ``(N - n m) / N``; the printed ``(N - n) / N`` takes each of
    the ``n`` chunks for one row. The bound is one-sided, as the paper's 3.340 is. Where few of the drawn rows are hot,
    it is Clopper and Pearson's, which holds for rows drawn without repetition too: the t-interval of 35 zeros is zero.

    A table with fewer rows than the chunks together is counted.

    Args:
      profile: The accesses of the table's rows.
      confidence: The confidence of bounds, such as 0.999.
      seed: The seed with which rows are drawn.
      chunks, chunk_rows: The paper's n and m.
      exact: Count all tables.
    """

    def __init__(
        self,
        profile: TableProfile,
        *,
        confidence: float = 0.999,
        seed: int | Sequence[int] = 0,
        chunks: int = CHUNKS,
        chunk_rows: int = CHUNK_ROWS,
        exact: bool = False,
    ):
        if chunks < 2 or chunk_rows < 1:
            raise ConfigError(f"{chunks} chunks of {chunk_rows} rows: there must be at least 2 of at least 1 row")
        if not 0.5 <= confidence < 1:
            raise ConfigError(f"the confidence is {confidence}; it must be at least 0.5 and below 1")
        self.profile, self.confidence = profile, confidence
        self.drawn = chunks * chunk_rows
        self.counted = exact or profile.rows < self.drawn
        if not self.counted:
            rows = np.random.default_rng(seed).choice(profile.rows, self.drawn, replace=False)
            # Ascending within a chunk, so that a cutoff is found by bisection.
            self._accesses = np.sort(profile.count_of(rows).reshape(chunks, chunk_rows), axis=1)

    def estimate(self, cutoff: float) -> Estimate:
        """The rows that are accessed at least ``cutoff`` times; all rows for a cutoff of 0."""
        rows = self.profile.rows
        if self.counted or cutoff <= 0:
            hot = float(hot_rows(self.profile, cutoff))
            return Estimate(rows=hot, bound=hot, how="counted")
        hits = np.array([len(chunk) - chunk.searchsorted(cutoff) for chunk in self._accesses])
        total = int(hits.sum())
        estimate = rows * total / self.drawn
        if min(total, self.drawn - total) < FEW_HITS:
            bound, method = rows * self._most(total), "clopper-pearson"
        else:
            bound, method = self._t_bound(hits), "t"
        # The drawn rows below the cutoff are known not to be hot.
        return Estimate(rows=estimate, bound=min(bound, rows - (self.drawn - total)), how=method)

    def _t_bound(self, hits: np.ndarray) -> float:
        """Equation 5's upper end, for the whole table."""
        from scipy.special import stdtrit  # quantiles of t; scipy.stats takes a second to import

        chunks = len(hits)
        left = (self.profile.rows - self.drawn) / self.profile.rows
        margin = stdtrit(chunks - 1, self.confidence) * np.sqrt(left * hits.var(ddof=1) / chunks)
        return float((hits.mean() + margin) * chunks / self.drawn * self.profile.rows)

    def _most(self, total: int) -> float:
        """The greatest share of hot rows with which ``total`` or fewer among the drawn have 1 - confidence."""
        from scipy.special import betaincinv

        return 1.0 if total == self.drawn else float(betaincinv(total + 1, self.drawn - total, self.confidence))


def hot_rows(profile: TableProfile, cutoff: float) -> int:
    """How many rows are accessed at least ``cutoff`` times: the truth that the box estimates."""
    return int(np.diff(profile.starts)[profile.counts >= cutoff].sum())
