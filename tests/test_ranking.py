"""Exact ranks and top-k over all rows, against a full sort in NumPy; on one device and on several."""

import jax
import numpy as np
import pytest

from jrec.app.report.ranking import findings
from jrec.nn import ranking_metrics, ranks, top_k


def mesh_of(devices):
    return None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])


def case(seed, *, ties=False):
    rng = np.random.default_rng(seed)
    queries, rows = rng.normal(size=(9, 6)).astype(np.float32), rng.normal(size=(103, 6)).astype(np.float32)
    if ties:  # whole numbers, so that equal scores are equal to the bit
        queries, rows = queries.round(), rows.round()
    seen = rng.integers(-1, 103, (9, 12))
    seen[:, 3] = seen[:, 4]  # an item read twice is left out once
    return queries, rows, rng.integers(0, 103, 9), seen


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize(("block", "ties"), [(7, False), (500, True)])
def test_ranks_are_those_of_a_full_sort(devices, block, ties):
    queries, rows, targets, seen = case(devices, ties=ties)
    scores = queries.astype(np.float64) @ rows.T
    for left_out in (None, seen):
        want = []
        for query, target in enumerate(targets):
            others = np.delete(np.arange(103), target)
            if left_out is not None:
                others = np.setdiff1d(others, left_out[query])
            want.append(np.sum(scores[query, others] >= scores[query, target]))
        got = ranks(queries, rows, targets, left_out=left_out, block=block, mesh=mesh_of(devices))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("block", [7, 500])
def test_the_best_rows_are_those_of_a_stable_sort(devices, block):
    queries, rows, _, seen = case(devices, ties=True)
    scores = queries @ rows.T
    for query in range(9):
        scores[query, seen[query][seen[query] >= 0]] = -np.inf
    want = np.argsort(-scores, axis=1, kind="stable")[:, :95]
    got, numbers = top_k(queries, rows, 95, left_out=seen, block=block, mesh=mesh_of(devices))
    best = np.take_along_axis(scores, want, axis=1)
    np.testing.assert_array_equal(got, best)
    np.testing.assert_array_equal(numbers, np.where(np.isinf(best), -1, want))
    assert np.isinf(best).any()


def test_metrics():
    found = ranking_metrics(np.array([0, 1, 9, 10]), at=(1, 10))
    assert found["hr@1"] == 0.25
    assert found["hr@10"] == 0.75
    assert found["ndcg@10"] == pytest.approx((1 + 1 / np.log2(3) + 1 / np.log2(11)) / 4)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)


def test_equal_scores_find_nothing():
    found = ranks(np.zeros((2, 3)), np.ones((50, 3)), np.array([0, 49]))
    np.testing.assert_array_equal(found, [49, 49])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.array([0, 5])}, "target 5 is none of 5 rows"),
        ({"targets": np.array([0, -1])}, "target -1 is none of 5 rows"),
        ({"targets": np.array([0.0, 1.0])}, "targets must be integers for 2 queries"),
        ({"rows": np.ones((5, 4))}, "of one dim"),
        ({"left_out": np.zeros((3, 1), int)}, r"left_out must be integers of shape \(2, length\)"),
        ({"queries": np.full((2, 3), np.nan)}, "score of query 0 and its target is NaN"),
        ({"block": 0}, "block=0 must be at least 1"),
    ],
)
def test_bad_arguments(change, message):
    good = {"queries": np.ones((2, 3)), "rows": np.ones((5, 3)), "targets": np.array([0, 1])}
    with pytest.raises(ValueError, match=message):
        ranks(**{**good, **change})
    with pytest.raises(ValueError, match="k=6 must be between 1 and the 5 rows"):
        top_k(good["queries"], good["rows"], 6)
    with pytest.raises(ValueError, match="ranks must be integers from 0"):
        ranking_metrics(np.array([], int))


def test_a_k_beyond_the_items_is_named():
    metrics = {"hr@2": 0.5, "ndcg@2": 0.4, "hr@7": 0.9, "ndcg@7": 0.6, "mrr": 0.3}
    content = {
        "ranking": {"at": [2, 7], "candidates": 7},
        "splits": {"test": {**metrics, "examples": 10, "unknown_items": 0, "repeated_items": 0}},
        "baselines": {"popularity": {"splits": {"test": {**metrics, "hr@2": 0.1, "ndcg@2": 0.1, "mrr": 0.1}}}},
    }
    worse, beyond = findings(content)["warnings"]
    assert worse.endswith("no better than their popularity does: NDCG@7 0.6000 against 0.6000")
    assert beyond.startswith("evaluate.at has 7, but only 7 items are ranked")
    content["ranking"]["candidates"] = 8
    assert findings(content)["warnings"] == [worse.replace(": NDCG", ": HR@7 0.9000 against 0.9000, NDCG")]
