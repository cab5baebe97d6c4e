"""One table's reordering: frequencies, index graph, communities, order."""

from __future__ import annotations

import dataclasses
import math
import os
import time

import numpy as np

from jrec.data.reorder.communities import communities
from jrec.data.reorder.graph import Edges, GraphBuilder, affordable_degree
from jrec.data.reorder.log import Reading, batches, frequencies
from jrec.data.reorder.options import ReorderOptions
from jrec.data.reorder.order import Ranking, order_rows, rank_rows, vertices_of
from jrec.data.schema import Schema
from jrec.progress import Progress


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


def reorder_table(
    folder: str | os.PathLike[str], schema: Schema, table: str, options: ReorderOptions, progress: Progress
) -> TableOrder:
    """Finds a table's order; see ``index_graph`` and ``table_order``."""
    return table_order(index_graph(folder, schema, table, options, progress), options, progress)
