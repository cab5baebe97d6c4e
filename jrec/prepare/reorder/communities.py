"""Communities of an index graph: groups of rows that are read together, by modularity, with igraph."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal, get_args

import numpy as np

from jrec.errors import JrecError
from jrec.optional_packages import remedy
from jrec.prepare.reorder.graph import Edges

Method = Literal["leiden", "louvain"]
METHODS: tuple[str, ...] = get_args(Method)


class MissingIgraphError(JrecError):
    """igraph is not installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communities:
    """Which vertices belong together.

    Attributes:
      of_vertex: (vertices,) int64, the community of every vertex that has an edge, -1 for the others.
      count: How many communities there are.
      modularity: The modularity of this division of the graph.
    """

    of_vertex: np.ndarray
    count: int
    modularity: float


def communities(edges: Edges, vertices: int, *, method: Method, seed: int) -> Communities:
    """Divides the graph so that the modularity is high: the same way for the same arguments and version of igraph.

    Args:
      edges: The graph's edges.
      vertices: How many vertices there are.
      method: "leiden" or "louvain".
      seed: The seed of the order in which vertices are visited.

    Raises:
      MissingIgraphError: If igraph is not installed.
    """
    of_vertex = np.full(vertices, -1, np.int64)
    if not len(edges):
        return Communities(of_vertex=of_vertex, count=0, modularity=0.0)
    touched = np.zeros(vertices, bool)
    touched[edges.low] = True
    touched[edges.high] = True
    members = np.flatnonzero(touched)
    number = np.cumsum(touched) - 1
    graph = _igraph().Graph(len(members), np.stack([number[edges.low], number[edges.high]], axis=1))
    of_vertex[members] = _divide(graph, edges.weights, method, seed)
    count = int(of_vertex.max()) + 1
    return Communities(of_vertex=of_vertex, count=count, modularity=modularity(edges, of_vertex))


def _divide(graph, weights: np.ndarray, method: Method, seed: int) -> np.ndarray:
    igraph = _igraph()
    graph.es["weight"] = weights
    igraph.set_random_number_generator(random.Random(seed))
    try:
        if method == "louvain":
            clustering = graph.community_multilevel(weights="weight")
        else:
            clustering = graph.community_leiden(objective_function="modularity", weights="weight", n_iterations=4)
    finally:
        igraph.set_random_number_generator(random)
    return np.asarray(clustering.membership, np.int64)


def modularity(edges: Edges, of_vertex: np.ndarray) -> float:
    """EL-Rec's Q: the share of the edges' weight within communities, less that expected of random edges.

    Args:
      edges: The graph's edges.
      of_vertex: (vertices,) the community of every vertex with an edge.
    """
    total = float(edges.weights.sum())
    if not total:
        return 0.0
    low, high = of_vertex[edges.low], of_vertex[edges.high]
    within = float(edges.weights[low == high].sum()) / total
    degrees = np.bincount(low, edges.weights) if len(low) else np.zeros(1)
    degrees = np.pad(degrees, (0, max(0, int(high.max()) + 1 - len(degrees))))
    degrees += np.bincount(high, edges.weights, minlength=len(degrees))
    return within - float(np.sum((degrees / (2 * total)) ** 2))


def _igraph():
    try:
        import igraph
    except ImportError as error:
        raise MissingIgraphError(
            f"reordering finds communities with igraph, which is not installed: {remedy('reorder')}"
        ) from error
    return igraph
