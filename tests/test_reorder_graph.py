"""The index graph against all pairs, its sampling in expectation, communities against igraph, and orders of rows."""

import collections
import itertools
import math
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.data.schema import DatasetError
from jrec.prepare.reorder.communities import MissingIgraphError, communities, modularity
from jrec.prepare.reorder.graph import GraphBuilder, affordable_degree
from jrec.prepare.reorder.table import order_rows, rank_rows, vertices_of

VERTICES = 40
LOGS = st.lists(st.sets(st.integers(0, VERTICES - 1)).map(sorted), max_size=8)


def build(log, *, degree=math.inf, max_edges=10_000, seed=0, vertices=VERTICES, table="t"):
    builder = GraphBuilder(vertices=vertices, degree=degree, max_edges=max_edges, seed=seed, table=table)
    for batch in log:
        builder.add(np.array(batch, np.int64))
    return builder.edges()


def as_dict(edges):
    return dict(zip(zip(edges.low.tolist(), edges.high.tolist(), strict=True), edges.weights.tolist(), strict=True))


@hypothesis.given(log=LOGS, max_edges=st.integers(VERTICES**2, 2 * VERTICES**2))
def test_all_pairs_are_counted_once_for_every_batch_that_reads_both(log, max_edges):
    expected = collections.Counter(pair for batch in log for pair in itertools.combinations(batch, 2))
    edges = build(log, max_edges=max_edges)
    assert as_dict(edges) == expected
    assert edges.drawn == sum(expected.values())


def test_all_pairs_of_a_large_batch_are_there_whatever_is_made_at_once():
    rows = np.arange(1201) * 3
    edges = build([rows], vertices=3 * 1201, max_edges=1 << 20)
    low, high = np.triu_indices(len(rows), 1)
    np.testing.assert_array_equal(edges.low, rows[low])
    np.testing.assert_array_equal(edges.high, rows[high])


@pytest.mark.parametrize("degree", [0.4, 1, 2.5, 6])
def test_sampled_weights_are_those_of_all_pairs_in_expectation(degree):
    log = [range(30), range(20, 40), [1, 2], [3]]
    runs = 800
    sums, squares = np.zeros((VERTICES, VERTICES)), np.zeros((VERTICES, VERTICES))
    for seed in range(runs):
        edges = build(log, degree=degree, seed=seed)
        sums[edges.low, edges.high] += edges.weights
        squares[edges.low, edges.high] += edges.weights**2
    means = sums / runs
    errors = np.sqrt(np.maximum(squares / runs - means**2, 1e-3) / runs)
    for pair in itertools.combinations(range(VERTICES), 2):
        both = sum(set(pair) <= set(batch) for batch in log)
        assert abs(means[pair] - both) < 5 * errors[pair], pair
        assert both or not means[pair]


def test_every_row_of_a_batch_draws_and_the_total_weight_is_that_of_all_pairs():
    edges = build([range(VERTICES)], degree=3)
    assert set(edges.low) | set(edges.high) == set(range(VERTICES))
    assert edges.drawn == 3 * VERTICES
    assert edges.weights.sum() == pytest.approx(VERTICES * (VERTICES - 1) / 2)
    assert (edges.low < edges.high).all()


def test_a_graph_is_a_function_of_seed_table_and_batches_whenever_it_is_merged():
    rng = np.random.default_rng(0)
    log = [np.unique(rng.integers(0, VERTICES, 30)) for _ in range(20)]
    one, often = build(log, degree=3), build(log, degree=3, max_edges=800)
    assert as_dict(one) == as_dict(often)
    assert as_dict(one) != as_dict(build(log, degree=3, seed=1))
    assert as_dict(one) != as_dict(build(log, degree=3, table="other"))


def test_edges_beyond_the_bound_are_refused_and_the_affordable_degree_stays_below():
    log = [range(VERTICES)] * 3
    with pytest.raises(DatasetError, match=r"table 't' has more than 700 edges.*--max-edges"):
        build(log, max_edges=700)
    degree = affordable_degree(16, appearances=3 * VERTICES, max_edges=700)
    assert build(log, degree=degree, max_edges=700).drawn <= 3 * VERTICES * math.ceil(degree)
    assert affordable_degree(16, appearances=3, max_edges=700) == 16
    with pytest.raises(ValueError, match="degree is 0"):
        GraphBuilder(vertices=3, degree=0, max_edges=1, seed=0, table="t")


@pytest.mark.parametrize("method", ["leiden", "louvain"])
@pytest.mark.parametrize("degree", [3, math.inf])
def test_communities_are_the_planted_groups(method, degree):
    rng = np.random.default_rng(0)
    groups = rng.permutation(VERTICES).reshape(4, 10)
    log = [np.sort(rng.choice(group, 9, replace=False)) for _ in range(30) for group in groups]
    edges = build(log, degree=degree, vertices=VERTICES + 1)
    found = communities(edges, VERTICES + 1, method=method, seed=0)
    assert found.count == 4
    assert found.of_vertex[VERTICES] == -1  # never read together with another
    assert {frozenset(np.flatnonzero(found.of_vertex == c)) for c in range(4)} == {frozenset(g) for g in groups}
    assert found.modularity == pytest.approx(0.75)
    np.testing.assert_array_equal(found.of_vertex, communities(edges, VERTICES + 1, method=method, seed=0).of_vertex)


@hypothesis.given(log=LOGS, of=st.lists(st.integers(0, 3), min_size=VERTICES, max_size=VERTICES))
def test_modularity_is_that_of_igraph(log, of):
    import igraph

    edges = build(log)
    graph = igraph.Graph(VERTICES, np.stack([edges.low, edges.high], axis=1))
    expected = graph.modularity(of, weights=edges.weights) if len(edges) else 0
    assert modularity(edges, np.array(of)) == pytest.approx(expected, abs=1e-12)


def test_no_edges_are_no_communities_and_no_igraph_is_said_plainly(monkeypatch):
    empty = communities(build([[1], [2]]), VERTICES, method="leiden", seed=0)
    assert (empty.count, empty.modularity, set(empty.of_vertex)) == (0, 0.0, {-1})
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(MissingIgraphError, match=r"igraph, which is not installed: pip install 'jrec\[reorder\]'"):
        communities(build([[1, 2]]), VERTICES, method="leiden", seed=0)


@hypothesis.given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=30), hot_ratio=st.floats(0, 0.99), data=st.data()
)
def test_orders_keep_hot_rows_on_top_and_unseen_rows_behind(counts, hot_ratio, data):
    counts = np.array(counts)
    ranking = rank_rows(counts, hot_ratio)
    size = ranking.accessed - ranking.hot
    of = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size)), np.int64)
    order = order_rows(ranking, of).astype(np.int64)
    assert sorted(order) == list(range(len(counts)))
    rows = np.argsort(order)  # by new place
    by_frequency = sorted(range(len(counts)), key=lambda row: -counts[row])
    assert list(rows[: ranking.hot]) == by_frequency[: ranking.hot]
    assert list(rows[ranking.accessed :]) == [row for row in range(len(counts)) if not counts[row]]
    middle = of[ranking.rank_of_row[rows[ranking.hot : ranking.accessed]] - ranking.hot]
    runs = [community for community, _ in itertools.groupby(middle) if community >= 0]
    assert len(runs) == len(set(runs)), "a community lies in one piece"
    for community in set(runs):
        inside = counts[rows[ranking.hot : ranking.accessed]][middle == community]
        assert (np.diff(inside) <= 0).all()


@hypothesis.given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=30), one=st.booleans())
def test_without_structure_the_order_is_that_of_frequency(counts, one):
    ranking = rank_rows(np.array(counts), 0.2)
    of = np.full(ranking.accessed - ranking.hot, 0 if one else -1)
    np.testing.assert_array_equal(order_rows(ranking, of), ranking.rank_of_row)


def test_vertices_are_the_distinct_rows_that_are_not_hot():
    ranking = rank_rows(np.array([1, 9, 0, 5, 2]), 0.2)
    assert (ranking.hot, ranking.accessed, ranking.appearances) == (1, 4, 8)
    assert list(vertices_of(ranking, np.array([0, 1, 3, 3, 1, 0]))) == [0, 2]
