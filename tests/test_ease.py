"""EASE beside plain float64 NumPy: weights, ranks, and the counts that they come from."""

import numpy as np
import pytest
import test_train_sequences as sequences
from test_importance_kinds import prepared
from test_next_items import columns_of, configured, plain_rank

from jrec.app.baselines import popular_items
from jrec.app.baselines.ease import RIDGES, Ease, SharedUsers
from jrec.app.config import load_config
from jrec.app.report.ranking import NEVER
from jrec.data.schema import Schema

ROWS = 9


def users(seed, count=40):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, ROWS, n).tolist() for n in draw.integers(2, 8, count)]


def shared_by(users):
    matrix = np.zeros((ROWS, ROWS))
    for items in users:
        for one in {*items}:
            for other in {*items}:
                matrix[one, other] += 1
    return matrix


def added(shared, lists, items):
    columns = columns_of(lists, items)
    shared.add(popular_items._pairs(columns["history"]), columns["item"].astype(np.int64))


def test_items_of_one_user_are_counted_once(monkeypatch):
    monkeypatch.setattr("jrec.app.baselines.ease._PIECE", 7)
    people = users(0)
    whole = SharedUsers(ROWS, whole=True)
    added(whole, [items[:-1] for items in people], [items[-1] for items in people])
    np.testing.assert_array_equal(whole.counts, shared_by(people))
    # Line by line the same pairs are met, each when its later item came.
    by_line = SharedUsers(ROWS, whole=False)
    lines = [(items[:k], items[k]) for items in people for k in range(len(items))]
    added(by_line, [before for before, _ in lines], [item for _, item in lines])
    np.testing.assert_array_equal(by_line.counts, shared_by(people))


@pytest.mark.parametrize("leave_out", [True, False])
def test_ranks_are_those_of_the_closed_form(leave_out, monkeypatch):
    monkeypatch.setattr("jrec.app.baselines.ease._PIECE", 7)
    candidates, draw, lists = np.arange(ROWS) != 2, np.random.default_rng(1), [*users(2), []]
    items, shared = draw.integers(0, ROWS, len(lists)), shared_by(users(3))
    order = Ease(shared, 0.7, candidates=candidates)
    ranks = popular_items._ranks(configured(leave_out_history=leave_out), order, columns_of(lists, items))
    known = np.flatnonzero(candidates)
    weights, inverse = np.zeros((ROWS, ROWS)), np.linalg.inv(shared[np.ix_(known, known)] + 0.7 * np.eye(len(known)))
    for column, item in enumerate(known):
        weights[known, item] = -inverse[:, column] / inverse[column, column]
        weights[item, item] = 0
    for rank, past, item in zip(ranks, lists, items, strict=True):
        scores = np.round(weights[sorted({*past})].sum(axis=0), 9)
        out = {*(past if leave_out else ()), 2}
        assert rank == (NEVER if item == 2 else plain_rank(scores, item, out))


def test_the_ridge_is_the_one_that_valid_ranks_best_by(tmp_path, monkeypatch):
    sequences.write_log(tmp_path / "log.csv")
    prepared(tmp_path, sequences.SCHEMA, tmp_path / "log.csv", "--no-labels", "--split-by", "leave-one-out")
    (tmp_path / "run.toml").write_text(sequences.CONFIG.format(data=tmp_path / "data", kind="sasrec"))
    config = load_config(tmp_path / "run.toml")
    schema = config.model.of_kind.schema(config.model, Schema.load(tmp_path / "data"))
    sections = popular_items.popular_items(config, schema, ["valid", "test"])
    assert set(sections) == {"popularity", "transitions", "ease", "seconds", "cached"}
    metric, best = f"ndcg@{config.evaluate.at[0]}", {}
    chosen = float(sections["ease"]["ranked_by"].rpartition(" ")[2])
    for ridge in RIDGES:
        monkeypatch.setattr(popular_items, "RIDGES", (ridge,))
        again = popular_items.popular_items(config, schema, ["valid"])["ease"]
        best[ridge] = again["splits"]["valid"][metric]
    assert best[chosen] == max(best.values()) == sections["ease"]["splits"]["valid"][metric]
    assert sections["ease"]["splits"]["test"]["hr@10"] > sections["popularity"]["splits"]["test"]["hr@10"]
    for limit in ("MOST_ITEMS", "_RANKED"):
        with monkeypatch.context() as limited:
            limited.setattr(popular_items, limit, 1)
            assert "ease" not in popular_items.popular_items(config, schema, ["test"])


def test_a_ridge_is_chosen_by_some_of_many_examples(tmp_path, monkeypatch):
    sequences.write_log(tmp_path / "log.csv")
    prepared(tmp_path, sequences.SCHEMA, tmp_path / "log.csv", "--no-labels", "--block-size", "8")
    (tmp_path / "run.toml").write_text(sequences.CONFIG.format(data=tmp_path / "data", kind="sasrec"))
    config = load_config(tmp_path / "run.toml")
    schema = config.model.of_kind.schema(config.model, Schema.load(tmp_path / "data"))
    ranked, rank = [], popular_items._ranks
    monkeypatch.setattr(popular_items, "_ranks", lambda *arguments: ranked.append(1) or rank(*arguments))
    rows = config.model.of_kind.item_table(config.model, schema).rows
    length = next(feature.max_length for feature in schema.categorical if feature.name == "history")
    monkeypatch.setattr(popular_items, "_RANKED", 3 * 9 * rows * length)
    popular_items._ease(config, schema, np.ones(rows, bool))
    assert len(ranked) == 3 * 2  # of each ridge the blocks that have the first nine examples
