"""What benchmarks.sequences ranks beside a user's last item, and the baseline without training."""

import types

import jax
import numpy as np
import pytest

from benchmarks import sequences
from benchmarks.sequences import BATCH, LAST, LENGTH, NEAR, POPULAR, Test, User, Variant, transitions, wide_transitions

Test.__test__ = False  # the benchmark's, no class of tests


def users_of(*rows):
    return [User(items=np.array(row), times=None) for row in rows]


@pytest.mark.parametrize(("protocol", "kept"), [("history", range(100, 300)), ("all", range(300))])
def test_the_published_protocol_leaves_out_the_last_200_items(protocol, kept):
    test = Test.of(users_of(range(301), [5, 7, 2]), protocol)
    assert test.targets.tolist() == [300, 2]
    assert sorted(test.seen[0][test.seen[0] >= 0]) == list(kept)
    assert sorted(test.seen[1][test.seen[1] >= 0]) == [5, 7]


def test_items_seen_long_ago_are_ranked():
    """One item scores higher than the target: as one of the last 200 it is left out, before them it is not."""
    items, queries = 400, np.ones((1, 1), np.float32)
    rows = np.zeros((items, 1), np.float32)
    rows[[0, 399]] = [[2.0], [1.0]]
    for history, hit in (([*range(1, LENGTH), 0], 1.0), (range(LENGTH + 1), 0.0)):
        test = Test.of(users_of([*history, 399]), "history")
        found = sequences.jrec.nn.ranks(queries, rows, test.targets, left_out=test.seen)
        assert (found[0] == 0) == bool(hit)


def test_transitions_rank_by_what_followed_the_last_item_then_by_counts():
    users = users_of([0, 1, 2, 3, 9], [0, 1, 2, 4, 3], [5, 1, 2, 7, 8], [6, 2, 7])
    # 3, 4 and 7, the last of the first three histories, are followed by nothing in training: of what these users have
    # not seen, 4 to 7 are there once, 3 once, 0 twice, and 8 and 9 never. After 2 came 3, 4 and 7 once each: ties count
    # against the target, and 0 and 1, which are there more often, come behind.
    ranks = [5, 3, 5, 2]
    found = transitions(users, 10, Test.of(users, "history"))
    assert found["mrr"] == pytest.approx(np.mean([1 / (1 + rank) for rank in ranks]))


def test_wide_transitions_are_those_of_loops():
    draw = np.random.default_rng(0)
    users, items = users_of(*(draw.integers(0, 9, n) for n in (2, 3, 7, 30, 40))), 9
    found, trained = wide_transitions(users, items), [user.items[:-1].tolist() for user in users]
    counts = np.bincount(np.concatenate(trained), minlength=items)
    for line, row in zip(found, trained, strict=True):
        want = np.zeros(items)
        for back, item in enumerate(row[::-1][:LAST], 1):
            for other in trained:
                for i, before in enumerate(other):
                    for apart, after in enumerate(other[i + 1 : i + 1 + NEAR], 1):
                        want[after] += (before == item) / apart / back / counts[after] ** POPULAR
        np.testing.assert_allclose(line, want, rtol=1e-5)


@pytest.mark.parametrize(("negatives", "each"), [("batch", 8), ("position", 128 * LENGTH), ("all", 3)])
def test_batches_have_the_negatives_of_their_variant(negatives, each):
    """A full batch and a short one of the last user, whose histories of two leave one position to train."""
    variant, items = Variant(negatives=negatives), 2 * BATCH + 1
    users = users_of(*([k, k + 1, k + 2] for k in range(BATCH + 1)))
    for batch, count in zip(sequences.batches(users, items, 0, 1, variant), (BATCH, 1), strict=True):
        assert batch["weight"].sum() == count
        assert ((batch["history"] >= 0).sum(axis=1) == batch["weight"]).all()
        assert batch["sampled"].shape[1] == variant.sampled(items) == each
        if negatives == "all":
            assert batch["sampled"].reshape(-1)[:items].tolist() == [*range(items)]
            assert (batch["sampled"].reshape(-1)[items:] == -1).all()
        else:
            assert len(batch["sampled"]) == count


def test_cases_say_what_differs():
    assert Variant().shown == ""
    every = Variant(negatives="all", normalize="length", rows="normal")
    assert every.shown == ", all items, by length, normal rows"
    model, _ = sequences.modules("hstu", 500, 0, every)
    (rows,) = model.embeddings.arrays().values()
    assert abs(float(rows.std()) - 0.0176) < 0.0005
    assert float(abs(rows).max()) <= 0.04


def test_a_training_that_was_cut_off_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "LENGTH", 6)
    monkeypatch.setattr(sequences, "BATCH", 16)
    draw, notes = np.random.default_rng(0), []
    users = users_of(*(draw.integers(0, 30, 9) for _ in range(24)))
    tests = {"history": Test.of(users, "history")}

    def note(text):
        notes.append(text)
        if "cut off" in notes[0] and "epoch 20" in text:
            raise KeyboardInterrupt

    report = types.SimpleNamespace(note=note)

    def evaluate(folder):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam
            return sequences.evaluate(report, "a case", "sasrec", Variant(), users, 30, tests, 0, 21, tmp_path / folder)

    want = evaluate("whole")
    notes[:] = ["to be cut off"]
    with pytest.raises(KeyboardInterrupt):
        evaluate("cut off")
    notes[:] = ["again"]
    assert evaluate("cut off")["history"] == want["history"]
    assert "a case: goes on after epoch 20" in notes
