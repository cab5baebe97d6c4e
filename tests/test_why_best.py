"""Why an item is the best one: the changes of its cosine, against the cosines of other requests."""

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import test_train_sequences as sequences
import test_train_two_towers as towers
from test_importance_kinds import FEW, prepared, trained

import jrec
from jrec import cli
from jrec.errors import ConfigError

USERS = {
    "user": ["u1", "u2", "u3", "nobody"],
    "age": [21.0, 22.0, None, 40.0],
    "country": ["y", "z", "x", "?"],
    "past": [["item 1", "item 7"], ["item 2", "item 8", "item 2"], [], ["item 5", "never seen", "item 5", "new"]],
}
HISTORIES = {
    "history": [["item 3", "item 4", "item 3"], [], ["new", "item 9"], ["item 1"] * 8],
    "ages": [[900.0, 90.0, 30.0], [], [5400.0, 5.0], [*range(80, 0, -10)]],
}


@pytest.fixture(scope="module")
def two_towers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    towers.write_log(folder / "log.csv")
    prepared(folder, towers.SCHEMA, folder / "log.csv", "--block-size", "512")
    return folder, trained(folder, towers.CONFIG.format(data=folder / "data"), *FEW, "max_steps=60")


@pytest.fixture(scope="module")
def next_item(tmp_path_factory):
    """A model that reads how long ago each item was."""
    folder = tmp_path_factory.mktemp("next")
    sequences.write_timed_log(folder / "log.csv")
    schema = sequences.SCHEMA.replace("length = 8}", 'length = 8, ages = "ages"}')
    prepared(folder, schema, folder / "log.csv", "--no-labels", "--split-by", "leave-one-out")
    config = sequences.CONFIG.format(data=folder / "data", kind="hstu")
    return folder, trained(folder, config, *FEW, "max_steps=60")


def cosines(run, columns):
    """By example the cosine of each item, but of those that are left out of its ranking."""
    ranked = run.best(columns, k=run._predictor._ranker.candidates)
    return [dict(zip(items, scores.tolist(), strict=True)) for scores, items in zip(*ranked, strict=True)]


def expected(run, columns, history, beside, known):
    """By example the changes of its best item's cosine, by what is left out."""
    whole, found = cosines(run, columns), []
    for at, by_item in enumerate(whole):
        request = {name: column[at : at + 1] for name, column in columns.items()}
        best, score = next(iter(by_item.items()))
        of_features = {"home" if name == "country" else name: name for name in request}
        without = {f: {name: [None]} for f, name in of_features.items() if name not in (history, *beside)}
        named = {item if item in known else "?": [] for item in columns[history][at]}
        for name in named:
            keep = [k for k, item in enumerate(columns[history][at]) if (item if item in known else "?") != name]
            without[f"{history}={name}"] = {n: [[columns[n][at][k] for k in keep]] for n in (history, *beside)}
        changes = {name: score - cosines(run, {**request, **change})[0][best] for name, change in without.items()}
        found.append(changes)
    return found


@pytest.mark.parametrize("kind", ["two_towers", "next_item"])
def test_they_are_the_changes_of_the_best_item_s_cosine(request, kind, monkeypatch):
    _, run = request.getfixturevalue(kind)
    columns, history, beside = (USERS, "past", ()) if kind == "two_towers" else (HISTORIES, "history", ("ages",))
    changes = expected(run, columns, history, beside, {f"item {n}" for n in range(towers.ITEMS)})
    reasons = run.why(columns, k=4)
    for pairs, own in zip(reasons, changes, strict=True):
        assert len(pairs) == min(4, len(own))
        sizes = [abs(change) for _, change in pairs]
        assert sizes == sorted(sizes, reverse=True)
        for name, change in pairs:
            assert change == pytest.approx(own[name], abs=1e-5)
        unsaid = [abs(change) for name, change in own.items() if name not in dict(pairs)]
        assert max(unsaid, default=0) <= sizes[-1] + 1e-5 if pairs else not own
    assert run.why(columns, k=2) == [pairs[:2] for pairs in reasons]
    assert max(abs(change) for pairs in reasons for _, change in pairs) > 0.02
    monkeypatch.setattr(type(run), "batch_size", 3)
    for few, pairs in zip(run.why(columns, k=4), reasons, strict=True):
        assert dict(few) == pytest.approx(dict(pairs), abs=1e-5)


@pytest.mark.parametrize("kind", ["two_towers", "next_item"])
def test_the_command_writes_them_beside_each_item(request, kind, tmp_path, monkeypatch):
    folder, run = request.getfixturevalue(kind)
    out = tmp_path / "why.parquet"
    arguments = ["predict", str(folder / "run"), str(folder / "data"), "--split", "test", "--k", "3", "--why", "2"]
    assert cli.main([*arguments, "--out", str(out), "--quiet"]) == 0
    table = pq.read_table(out)
    reasons = ["why_1", "why_1_change", "why_2", "why_2_change"]
    assert table.column_names == ["split", "row", "rank", "item", "score", *reasons]
    plain = pq.read_table(written(folder, tmp_path / "plain.parquet"))
    assert table.select(plain.column_names).equals(plain)
    lines = table.to_pylist()
    assert {line["rank"] for line in lines} == {1, 2, 3}
    assert any(abs(line["why_1_change"]) > 0.01 for line in lines)
    assert all(abs(line["why_1_change"]) >= abs(line["why_2_change"] or 0) for line in lines)
    (piece,) = [piece for piece in run.of_dataset(["test"], k=3, why=2) if piece.first == 0]
    assert piece.reasons.at((slice(None), 0)).pairs() == [
        [(line[f"why_{n}"], line[f"why_{n}_change"]) for n in (1, 2) if line[f"why_{n}"] is not None]
        for line in lines[: 3 * piece.examples : 3]
    ]
    # As many users and items of histories at a time as there are, or a few: the same.
    monkeypatch.setattr(type(run), "batch_size", 7)
    few = np.concatenate([one.reasons.changes for one in run.of_dataset(["test"], k=3, why=2)])
    changes = few[: piece.examples]
    np.testing.assert_allclose(changes, piece.reasons.changes, atol=1e-5)


def written(folder, out):
    arguments = ["predict", str(folder / "run"), str(folder / "data"), "--split", "test", "--k", "3"]
    assert cli.main([*arguments, "--out", str(out), "--quiet"]) == 0
    return out


def test_a_file_of_requests_without_an_item_left(next_item, tmp_path):
    import pyarrow as pa

    folder, run = next_item
    pq.write_table(pa.table(HISTORIES), tmp_path / "in.parquet")
    arguments = ["predict", str(folder / "run"), str(tmp_path / "in.parquet"), "--k", "1", "--why", "3", "--quiet"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out.csv")]) == 0
    lines = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    for line, pairs in zip(lines, run.why(HISTORIES, k=3), strict=True):
        told = [(line[f"why_{n}"], float(line[f"why_{n}_change"])) for n in (1, 2, 3) if line[f"why_{n}"]]
        assert [name for name, _ in told] == [name for name, _ in pairs]
        np.testing.assert_allclose([change for _, change in told], [change for _, change in pairs], atol=1e-6)
    assert run.why({"history": [[]], "ages": [[]]}) == [[]]
    assert run.why({"history": [], "ages": []}) == []
    pq.write_table(pa.table(HISTORIES).slice(0, 0), tmp_path / "none.parquet")
    arguments[2] = str(tmp_path / "none.parquet")
    assert cli.main([*arguments, "--out", str(tmp_path / "none.csv")]) == 0
    assert (tmp_path / "none.csv").read_text().count("\n") == 1


def test_what_has_no_reasons(two_towers):
    _, run = two_towers
    with pytest.raises(ConfigError, match="the 0 features"):
        run.why(USERS, k=0)
    assert jrec.load_run(run.restored.folder).why(USERS, k=30)[0]
