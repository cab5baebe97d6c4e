"""The paper's way to a threshold: a sample of the inputs, a log of its accesses, and the Rand-Em Box (FAE, §III-A).

The sparse input sampler draws some blocks of the training split and reads no others, the embedding logger counts their
accesses, and the Rand-Em Box bounds how many rows are hot from some rows of each table. The paper's names: ``x`` the
sampled fraction, ``S_I`` the inputs counted, ``t`` the threshold, ``H_zt = t S_I`` the cutoff.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jrec.access.count import Block, block_examples, count_blocks, sample_blocks
from jrec.access.profile import AccessProfile, TableProfile
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.progress import Progress

FEW_HITS = 200  # fewer hot rows among those drawn, and the bound is exact: normal tails do not hold
_LEAST_BLOCKS = 10  # fewer would tell more of these blocks than of the dataset
_HELD_OUT, _LEAST_HELD_OUT = 0.1, 2  # of the sample, and blocks: their spread tells the error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How to sample.

    Attributes:
      rate: The share of the training blocks that is read, the paper's x.
      confidence: The one-sided confidence that a table's hot rows are no more than their bound.
      seed: The seed with which blocks and the Rand-Em Box's rows are drawn.
      chunks, chunk_rows: The Rand-Em Box's n and m.
    """

    rate: float = 0.05
    confidence: float = 0.999
    seed: int = 0
    chunks: int = 35
    chunk_rows: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"the sampled share is {self.rate}; give one above 0, up to 1")
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"the confidence is {self.confidence}; it must be at least 0.5 and below 1")
        if self.chunks < 2 or self.chunk_rows < 1 or self.seed < 0:
            raise ConfigError(
                f"{self.chunks} chunks of {self.chunk_rows} rows, seed {self.seed}: give at least 2 chunks of at least"
                " 1 row, and no negative seed"
            )


def sample_accesses(
    folder: str | os.PathLike[str], schema: Schema, options: SampleOptions, *, smooth: bool, progress: Progress
) -> tuple[AccessProfile, list[Block]]:
    """The sampler and the logger.

    Args:
      folder, schema: The dataset.
      options: How to sample.
      smooth: Average the counts of rarely sampled rows, see ``TableProfile.smoothed``.
      progress: Shows how far the counting is.

    Returns:
      The accesses in the sample, and blocks of it that were not counted: rows that a counted input reads look hotter
      just because it was counted.

    Raises:
      ConfigError: If the sample has too few blocks.
    """
    blocks = sample_blocks(schema, "train", fraction=options.rate, seed=options.seed)
    if len(blocks) < _LEAST_BLOCKS:
        raise ConfigError(
            f"a sample of {100 * options.rate:g} % is {len(blocks)} block(s), too few to tell of the dataset; sample"
            " more, or leave --sample out to take exact counts"
        )
    shuffled = [blocks[i] for i in np.random.default_rng((options.seed, 1)).permutation(len(blocks))]
    aside = max(_LEAST_HELD_OUT, round(_HELD_OUT * len(blocks)))
    used = sorted(shuffled[aside:])
    inputs = sum(block_examples(schema, "train", block) for block in used)
    profile = AccessProfile(
        tables=count_blocks(folder, schema, "train", used, smooth=smooth, progress=progress),
        examples=inputs,
        source=f"{inputs:,} of {schema.splits['train'].examples:,} inputs, in {len(used):,} blocks drawn with seed"
        f" {options.seed}",
        dataset=schema.identity,
    )
    return profile, sorted(shuffled[:aside])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of how many rows of a table are hot.

    Attributes:
      rows: The estimate.
      bound: No more rows than this are hot, at the confidence asked for.
      method: "counted" (both are the truth), "t" (Equation 5) or "clopper-pearson".
    """

    rows: float
    bound: float
    method: str


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
      options: How many rows are drawn, with which seed, and the confidence of bounds.
      number: The table's number in the dataset: each draws others.
    """

    def __init__(self, profile: TableProfile, options: SampleOptions, *, number: int = 0):
        self.profile, self.confidence = profile, options.confidence
        self.drawn = options.chunks * options.chunk_rows
        self.counted = profile.rows < self.drawn
        if not self.counted:
            rows = np.random.default_rng((options.seed, number)).choice(profile.rows, self.drawn, replace=False)
            # Ascending within a chunk, so that a cutoff is found by bisection.
            self._accesses = np.sort(profile.count_of(rows).reshape(options.chunks, options.chunk_rows), axis=1)

    def estimate(self, cutoff: float) -> Estimate:
        """The rows that are accessed at least ``cutoff`` times; all rows for a cutoff of 0."""
        rows = self.profile.rows
        if self.counted or cutoff <= 0:
            hot = float(hot_rows(self.profile, cutoff))
            return Estimate(rows=hot, bound=hot, method="counted")
        hits = np.array([len(chunk) - chunk.searchsorted(cutoff) for chunk in self._accesses])
        total = int(hits.sum())
        estimate = rows * total / self.drawn
        if min(total, self.drawn - total) < FEW_HITS:
            bound, method = rows * self._most(total), "clopper-pearson"
        else:
            bound, method = self._t_bound(hits), "t"
        # The drawn rows below the cutoff are known not to be hot.
        return Estimate(rows=estimate, bound=min(bound, rows - (self.drawn - total)), method=method)

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
