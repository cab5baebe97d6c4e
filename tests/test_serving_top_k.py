"""The best rows of an export: those of a full sort, of float, quantized and tensor-train rows, and after a delta."""

import types

import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.serving import nearest
from jrec.serving.answers import Best, CandidateScores

ITEMS, DIM, LENGTH = 120, 8, 5


@pytest.fixture(scope="module")
def run():
    layout = jrec.nn.next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=2)
    model = jrec.nn.NextItem(layout, jrec.nn.SequenceConfig(dropout=0.0), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    with jrec.distribute(model, optimizer) as run:
        yield run


def histories(count=6):
    history = np.random.default_rng(0).integers(0, ITEMS, (count, LENGTH))
    nothing = np.full((count, 1), -1)
    return {"history": history, "next": nothing, "sampled": nothing}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_best_items_are_those_of_a_full_sort(run, tmp_path, dtype):
    run.export(tmp_path / "export", dtype=dtype)
    model = jrec.serving.load(tmp_path / "export")
    columns = histories()
    users = model.logits(columns)["user"]
    scores, items = model.top_k(users, "item", 7, left_out=columns["history"], unit=True)
    rows = run.table("item") / np.linalg.norm(run.table("item"), axis=1, keepdims=True)
    want = users @ rows.T
    np.put_along_axis(want, columns["history"], -np.inf, axis=1)
    best = np.argsort(-want, axis=1)[:, :7]
    tolerance = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(scores, np.take_along_axis(want, best, axis=1), atol=tolerance)
    np.testing.assert_allclose(np.take_along_axis(want, items, axis=1), scores, atol=tolerance)
    if dtype == "float32":
        np.testing.assert_array_equal(items, best)
    everything, numbers = model.top_k(users, "item", ITEMS, left_out=columns["history"])
    assert np.isneginf(everything[:, -1]).all()
    assert (numbers[:, -1] == -1).all()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_and_ties(seed, monkeypatch):
    """Of equal scores the lower row comes first, whatever the blocks and however many queries are ranked at once."""
    rng = np.random.default_rng(seed)
    k, block, scores_at_once = int(rng.integers(1, 30)), int(rng.integers(1, 120)), int(rng.integers(1, 300))
    monkeypatch.setattr(nearest, "SCORES", scores_at_once)
    rows = rng.integers(-2, 3, (100, 3)).astype(np.float32)
    queries = rng.integers(-1, 3, (9, 3)).astype(np.float32)
    seen = rng.integers(-1, 100, (9, 20))
    scores, numbers = nearest.nearest(lambda a, b: rows[a:b], 100, queries, k, block=block, left_out=seen)
    want = queries @ rows.T
    for line, left_out in zip(want, seen, strict=True):
        line[left_out[left_out >= 0]] = -np.inf
    order = np.argsort(-want, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(scores, np.take_along_axis(want, order, axis=1))
    np.testing.assert_array_equal(numbers, np.where(np.isneginf(scores), -1, order))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": "user"}, "there is no table 'user'; there are item"),
        ({"k": 0}, "k=0 must be between 1 and the 120 rows"),
        ({"queries": np.zeros((2, 3))}, r"of shape \(queries, 8\), but are of shape \(2, 3\)"),
        ({"queries": np.full((2, DIM), np.nan)}, "must be finite"),
        ({"left_out": np.zeros((1, 4), int)}, r"left_out must be integers of shape \(2, length\)"),
    ],
)
def test_bad_arguments(run, tmp_path, change, message):
    run.export(tmp_path / "export")
    model = jrec.serving.load(tmp_path / "export")
    with pytest.raises(ValueError, match=message):
        model.top_k(**{"queries": np.zeros((2, DIM)), "table": "item", "k": 3, **change})


def test_answers_print_short():
    manifest = types.SimpleNamespace(id="a")
    best = Best([[0.25, -1.0]] * 12, [["i1", 7]] * 12, manifest)
    lines = repr(best).splitlines()
    assert lines[0].startswith("Best of 12 examples by namespace(")
    assert (lines[1], len(lines), lines[-1]) == ("  i1 0.2500, 7 -1.0000", 12, "  and 2 more")
    assert repr(CandidateScores([[0.5, None]], manifest)).splitlines()[1:] == ["  0.5000, None"]
    assert len(repr(Best([[0.5] * 1000], [["i"] * 1000], manifest))) < 300
