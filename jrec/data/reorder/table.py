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
      table: its name.
      order: (rows,) uint32, the new row of every stored one.
      frequency_order: (rows,) uint32, that of frequency alone, for comparison.
      hot, seen: rows that stay on top, and rows that the training log reads.
      degree: partners drawn, after the bound on edges.
      edges, drawn: of the index graph, merged and as they came.
      communities, modularity: of the graph's division.
      graph_seconds, community_seconds: what it took.
    """

    table: str
    order: np.ndarray
    frequency_order: np.ndarray
    hot: int
    seen: int
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
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return {**found, "rows": len(self.order), "degree": "all" if math.isinf(self.degree) else self.degree}


def reorder_table(
    folder: str | os.PathLike[str], schema: Schema, table: str, options: ReorderOptions, progress: Progress
) -> TableOrder:
    """Finds a table's order from the training split, as it is stored.

    Args:
      folder: of the dataset.
      schema: its description, without bijections.
      table: which one.
      options: how.
      progress: shows how far it is.

    Raises:
      DatasetError: if the log cannot be read, or all pairs exceed ``max_edges``.
      MissingIgraphError: if igraph is not installed.
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
    vertices = ranking.seen - ranking.hot
    builder = GraphBuilder(
        vertices=vertices, degree=degree, max_edges=options.max_edges, seed=options.seed, table=table
    )
    for batch in batches(folder, schema, "train", [table], reading, progress=progress, title=f"{table}: graph"):
        builder.add(vertices_of(ranking, batch[table]))
    edges = builder.edges()
    built = time.perf_counter()
    with progress.stage(f"{table}: communities", 1):
        found = communities(edges, vertices, method=options.method, seed=options.seed)
    return TableOrder(
        table=table,
        order=order_rows(ranking, found.of),
        frequency_order=ranking.rank_of_row.astype(np.uint32),
        hot=ranking.hot,
        seen=ranking.seen,
        degree=degree,
        edges=len(edges),
        drawn=edges.drawn,
        communities=found.count,
        modularity=found.modularity,
        graph_seconds=built - start,
        community_seconds=time.perf_counter() - built,
    )
