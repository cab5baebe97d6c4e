"""One table's reordering: frequencies, index graph, communities, order."""

from __future__ import annotations

import dataclasses
import math
import os
import time

import numpy as np

from jrec.data.reorder.communities import communities
from jrec.data.reorder.graph import GraphBuilder, affordable_degree
from jrec.data.reorder.log import Reading, batches, frequencies
from jrec.data.reorder.options import ReorderOptions
from jrec.data.reorder.order import order_rows, rank_rows, vertices_of
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


def reorder_table(
    folder: str | os.PathLike[str], schema: Schema, table: str, options: ReorderOptions, progress: Progress
) -> TableOrder:
    """Finds a table's order from the training split, as it is stored.

    Args:
      folder: The dataset's folder.
      schema: Its description, without bijections.
      table: The table's name.
      options: How to reorder.
      progress: Shows how far it is.

    Raises:
      DatasetError: If the log cannot be read, or all pairs exceed ``max_edges``.
      MissingIgraphError: If igraph is not installed.
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
    vertices = ranking.accessed - ranking.hot
    builder = GraphBuilder(
        vertices=vertices, degree=degree, max_edges=options.max_edges, seed=options.seed, table=table
    )
    for batch in batches(folder, schema, "train", [table], reading, progress=progress, title=f"{table}: graph"):
        builder.add(vertices_of(ranking, batch[table]))
    edges = builder.edges()
    built = time.perf_counter()
    with progress.stage(f"{table}: communities", 1):
        division = communities(edges, vertices, method=options.method, seed=options.seed)
    return TableOrder(
        table=table,
        order=order_rows(ranking, division.of_vertex),
        frequency_order=ranking.rank_of_row.astype(np.uint32),
        hot=ranking.hot,
        accessed=ranking.accessed,
        degree=degree,
        edges=len(edges),
        drawn=edges.drawn,
        communities=division.count,
        modularity=division.modularity,
        graph_seconds=built - start,
        community_seconds=time.perf_counter() - built,
    )
