"""From frequencies and communities to the order of a table's rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """A table's rows by how often the log reads them.

    Attributes:
      row_of_rank: (rows,) int64, descending in frequency, ties in stored order; rows never read keep it, at the end.
      rank_of_row: Its inverse.
      counts: (rows,) int64 by rank.
      hot: How many ranks keep their place.
      accessed: How many ranks the log reads.
    """

    row_of_rank: np.ndarray
    rank_of_row: np.ndarray
    counts: np.ndarray
    hot: int
    accessed: int

    @property
    def appearances(self) -> int:
        """How often the log reads rows that are not hot."""
        return int(self.counts[self.hot : self.accessed].sum())


def rank_rows(counts: np.ndarray, hot_ratio: float) -> Ranking:
    """Ranks rows by frequency; the first ``hot_ratio`` of the table are hot, as far as the log reads them."""
    row_of_rank = np.argsort(-counts, kind="stable")
    rank_of_row = np.empty_like(row_of_rank)
    rank_of_row[row_of_rank] = np.arange(len(row_of_rank))
    accessed = int(np.count_nonzero(counts))
    hot = min(math.ceil(len(counts) * hot_ratio), accessed)
    return Ranking(
        row_of_rank=row_of_rank, rank_of_row=rank_of_row, counts=counts[row_of_rank], hot=hot, accessed=accessed
    )


def vertices_of(ranking: Ranking, rows: np.ndarray) -> np.ndarray:
    """The vertices of a batch: ascending distinct ranks of its rows that are not hot, counted from the first such."""
    ranks = np.unique(ranking.rank_of_row[rows])
    return ranks[(ranks >= ranking.hot) & (ranks < ranking.accessed)] - ranking.hot


def order_rows(ranking: Ranking, community_of: np.ndarray) -> np.ndarray:
    """The bijection: hot rows by frequency, communities, rows never read.

    Communities descend in the mean frequency of their rows, and rows within one in their own; a row of no community
    is one by itself. So where the graph has no structure, rows are ordered by frequency.

    Args:
      ranking: The rows' ranking.
      community_of: (accessed - hot,) by vertex, -1 for no community.

    Returns:
      (rows,) uint32, the new row of every stored one.
    """
    vertices = np.arange(ranking.accessed - ranking.hot)
    counts = ranking.counts[ranking.hot : ranking.accessed].astype(np.float64)
    alone = community_of < 0
    group = np.where(alone, (int(community_of.max(initial=-1)) + 1) + np.cumsum(alone), community_of)
    sizes = np.bincount(group)
    means = np.bincount(group, counts) / np.maximum(sizes, 1)
    first = np.full(len(sizes), len(vertices))
    np.minimum.at(first, group, vertices)
    by_place = np.lexsort((vertices, first[group], -means[group]))
    new_rank = np.arange(len(ranking.row_of_rank))
    new_rank[ranking.hot + by_place] = ranking.hot + vertices
    order = np.empty(len(new_rank), np.uint32)
    order[ranking.row_of_rank] = new_rank
    return order
