"""One table's reordering: frequencies, index graph, communities, order."""

from __future__ import annotations

import dataclasses
import math
import os
import time

import numpy as np

from jrec.data.schema import Schema
from jrec.prepare.reorder.communities import communities
from jrec.prepare.reorder.graph import Edges, GraphBuilder, affordable_degree
from jrec.prepare.reorder.log import Reading, batches, frequencies
from jrec.prepare.reorder.options import ReorderOptions
from jrec.progress import Progress


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOrder:
    """A table's new order and how it was found.

    Attributes:
      table: The table's name.
      order: (rows,) uint32, the new row of every stored one.
      frequency_order: (rows,) uint32, the order by frequency, for comparison.
      hot, accessed: How many rows stay on top, and how many the training log reads.
      degree: Partners drawn, after the bound on edges.
      edges, drawn: How many edges the index graph has, merged and as they were drawn.
      communities, modularity: How many communities the graph was divided into, and the division's modularity.
      graph_seconds, community_seconds: How long the graph and the communities took.
    """

    table: str
    order: np.ndarray
    frequency_order: np.ndarray
    hot: int
    accessed: int
    degree: float
    edges: int
    drawn: int
    communities: int
    modularity: float
    graph_seconds: float
    community_seconds: float

    def figures(self) -> dict[str, float | int | str | None]:
        """All but the orders, for the report; an infinite degree, of all pairs, is "all"."""
        left_out = ("table", "order", "frequency_order")
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return {**figures, "rows": len(self.order), "degree": "all" if math.isinf(self.degree) else self.degree}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexGraph:
    """A table's index graph.

    Attributes:
      table: The table's name.
      ranking: Its rows by frequency; vertices are the ranks after the hot ones.
      degree: Partners drawn, after the bound on edges.
      edges: The edges.
      seconds: How long it took.
    """

    table: str
    ranking: Ranking
    degree: float
    edges: Edges
    seconds: float

    @property
    def vertices(self) -> int:
        """How many vertices there are."""
        return self.ranking.accessed - self.ranking.hot


def index_graph(
    folder: str | os.PathLike[str], schema: Schema, table: str, options: ReorderOptions, progress: Progress
) -> IndexGraph:
    """Reads a table's index graph from the training split, as it is stored (EL-Rec, Algorithm 2).

    Args:
      folder: The dataset's folder.
      schema: Its description, without bijections.
      table: The table's name.
      options: How to reorder.
      progress: Shows how far it is.

    Raises:
      DatasetError: If the log cannot be read, or all pairs exceed ``max_edges``.
    """
    reading = Reading(
        batch_size=options.batch_size,
        window_blocks=options.window_blocks,
        seed=options.seed,
        workers=options.threads,
    )
    start = time.perf_counter()
    ranking = rank_rows(frequencies(folder, schema, table, reading, progress=progress), options.hot_ratio)
    degree = options.degree
    if math.isfinite(degree):
        degree = affordable_degree(degree, ranking.appearances, options.max_edges)
    builder = GraphBuilder(
        vertices=ranking.accessed - ranking.hot,
        degree=degree,
        max_edges=options.max_edges,
        seed=options.seed,
        table=table,
    )
    for batch in batches(folder, schema, "train", [table], reading, progress=progress, title=f"{table}: graph"):
        builder.add(vertices_of(ranking, batch[table]))
    edges = builder.edges()
    return IndexGraph(table=table, ranking=ranking, degree=degree, edges=edges, seconds=time.perf_counter() - start)


def table_order(graph: IndexGraph, options: ReorderOptions, progress: Progress) -> TableOrder:
    """The order of a table's rows, by communities of its index graph.

    Raises:
      MissingIgraphError: If igraph is not installed.
    """
    start = time.perf_counter()
    with progress.stage(f"{graph.table}: communities", 1):
        division = communities(graph.edges, graph.vertices, method=options.method, seed=options.seed)
    return TableOrder(
        table=graph.table,
        order=order_rows(graph.ranking, division.of_vertex),
        frequency_order=graph.ranking.rank_of_row.astype(np.uint32),
        hot=graph.ranking.hot,
        accessed=graph.ranking.accessed,
        degree=graph.degree,
        edges=len(graph.edges),
        drawn=graph.edges.drawn,
        communities=division.count,
        modularity=division.modularity,
        graph_seconds=graph.seconds,
        community_seconds=time.perf_counter() - start,
    )
