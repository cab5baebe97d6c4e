"""Importance of features of models that rank items, and of several labels, against their own predictions."""

import json

import fae_cases
import numpy as np
import pytest
import shop_logs
import task_logs
import test_train_sequences as sequences
import test_train_two_towers as towers
from prepare_reference import read_dataset, read_vocabulary

import jrec
from jrec import cli
from jrec.app.importance import _SEED
from jrec.app.models import rank_items
from jrec.data.packing_kernels import permutation
from jrec.data.schema import Schema

FEW = ["evaluate.every_steps=0", "checkpoint.keep_best=false", "evaluate.baselines=off"]


def prepared(folder, schema, log, *options):
    (folder / "log.toml").write_text(schema)
    arguments = ["prepare", "csv", "--schema", str(folder / "log.toml"), "--input", str(log), "--quiet"]
    assert cli.main([*arguments, "--out", str(folder / "data"), *options]) == 0


def trained(folder, config, *overrides):
    (folder / "run.toml").write_text(config)
    arguments = ["train", str(folder / "run.toml"), f"data.path={folder / 'data'}", f"out={folder / 'run'}"]
    assert cli.main([*arguments, "log.progress=off", *overrides]) == 0
    return jrec.load_run(folder / "run")


def values_of(folder, name, count):
    """The raw values of a column of the last examples, lists of them for a list."""
    _, columns = read_dataset(folder / "data")
    schema = Schema.load(folder / "data")
    table = schema.table(next(f.table for f in schema.categorical if f.name == name))
    values, _ = read_vocabulary(folder / "data", table)
    return [
        [values[row] for row in np.atleast_1d(np.asarray(rows)).astype(int)] if np.ndim(rows) else values[int(rows)]
        for rows in columns[name][-count:]
    ]


def hit_rate(run, columns, targets, k):
    _, items = run.best(columns, k=k)
    return np.mean([target in best for target, best in zip(targets, items, strict=True)])


def test_the_history_is_what_a_model_of_sequences_reads(tmp_path):
    sequences.write_log(tmp_path / "log.csv")
    schema = sequences.SCHEMA.replace("length = 8}", 'length = 8, ages = "ages"}')  # which SASRec does not read
    prepared(tmp_path, schema, tmp_path / "log.csv", "--no-labels", "--split-by", "leave-one-out")
    text = sequences.CONFIG.format(data=tmp_path / "data", kind="sasrec")
    run = trained(tmp_path, text, *FEW, "max_steps=40", "evaluate.at=[2]", "evaluate.importance=1")
    section = run.importance(repeats=2)
    count = section["examples"]
    targets, histories = values_of(tmp_path, "item", count), values_of(tmp_path, "history", count)

    def hits(histories):
        return hit_rate(run, {"history": histories, "ages": [[0.0] * len(own) for own in histories]}, targets, 2)

    before = hits(histories)
    falls = []
    for repeat in range(2):
        moved = [histories[at] for at in permutation(count, _SEED, repeat)]
        falls.append(before - hits(moved))
    (line,) = section["features"]
    assert (line["feature"], line["kind"]) == ("history", "list")
    assert line["hr@2"] == pytest.approx(np.mean(falls), abs=1e-6)
    assert line["hr@2_deviation"] == pytest.approx(np.std(falls, ddof=1), abs=1e-6)
    assert line["hr@2"] > 0.05
    assert list(section["columns"]) == ["ndcg@2", "hr@2"]
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "NDCG@2 falls by" in page


def test_only_the_users_side_of_two_towers_is_permuted(tmp_path, monkeypatch):
    lines = towers.write_log(tmp_path / "log.csv")
    prepared(tmp_path, towers.SCHEMA, tmp_path / "log.csv")
    run = trained(tmp_path, towers.CONFIG.format(data=tmp_path / "data"), *FEW, "max_steps=60", "evaluate.at=[5]")
    make, made = rank_items.item_vectors, []

    def counted(reading):
        made.append(reading)
        return make(reading)

    monkeypatch.setattr(rank_items, "item_vectors", counted)
    section = run.importance(repeats=1)
    assert len(made) == 1  # items do not change between permutations
    assert {line["feature"] for line in section["features"]} == {"age", "user", "home", "past"}
    count = section["examples"]
    clicked = np.array([line[-1] for line in lines[-count:]]) == 1
    targets = np.array([line[3] for line in lines[-count:]])[clicked]
    columns = {"user": [line[0] for line in lines[-count:]], "home": [line[1] for line in lines[-count:]]}
    columns |= {"age": [line[2] for line in lines[-count:]], "past": values_of(tmp_path, "past", count)}
    columns = {"country" if name == "home" else name: column for name, column in columns.items()}

    def hits(columns):
        chosen = {name: [column[at] for at in np.flatnonzero(clicked)] for name, column in columns.items()}
        return hit_rate(run, chosen, targets, 5)

    before, order = hits(columns), permutation(count, _SEED, 0)
    assert section["metrics"]["hr@5"] == pytest.approx(before, abs=1e-6)
    for line in section["features"]:
        name = "country" if line["feature"] == "home" else line["feature"]
        after = hits({**columns, name: [columns[name][at] for at in order]})
        assert line["hr@5"] == pytest.approx(before - after, abs=1e-6)


def test_each_of_several_labels_has_its_own(tmp_path, capsys, monkeypatch):
    log = task_logs.columns(2_000)
    prepared(tmp_path, task_logs.SCHEMA, task_logs.write_log(tmp_path / "log.csv", log))
    run = trained(tmp_path, task_logs.CONFIG, *FEW, "epochs=2")
    section = run.importance(repeats=2)
    assert list(section["tasks"]) == ["click", "purchase"]
    assert section["tasks"]["click"]["features"] == section["features"]
    rows = {name: column[-200:] for name, column in log.items()}
    raw = {name: [f"{name}{value}" for value in rows[name]] for name in ("user", "item")} | {"price": rows["price"]}
    for task, column in (("click", "click"), ("purchase", "bought")):
        known = rows[column] >= 0

        def loss(columns, task=task, column=column, known=known):
            z = run.logits(columns)[task][known].astype(np.float64)
            return np.mean(np.logaddexp(0, np.where(rows[column][known] == 1, -z, z)))

        for line in section["tasks"][task]["features"]:
            name = line["feature"]
            rises = []
            for repeat in range(2):
                order = permutation(200, _SEED, repeat)
                rises.append(loss({**raw, name: [raw[name][at] for at in order]}) - loss(raw))
            assert line["log_loss"] == pytest.approx(np.mean(rises), abs=1e-6)
    assert section["tasks"]["purchase"]["features"][0]["feature"] != section["features"][0]["feature"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), str(tmp_path / "data"), "--importance", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "importance on test, click: all 200 examples, 1 permutation each" in shown
    assert "importance on test, purchase: all 200 examples" in shown


def test_keys_of_growing_tables_are_permuted(tmp_path):
    lines = shop_logs.write_log(tmp_path / "log.csv", 900)
    prepared(tmp_path, shop_logs.SCHEMA, tmp_path / "log.csv", "--growing", "user,item")
    run = trained(tmp_path, shop_logs.CONFIG, "evaluate.baselines=off")
    section = run.importance(repeats=1)
    shown = lines[-section["examples"] :]
    labels = np.array([line["click"] == "1" for line in shown])
    raw = {name: [line[name] for line in shown] for name in ("user", "item")}
    raw["price"] = [float(line["price"]) if line["price"] else None for line in shown]
    raw["history"] = [line["history"].split("|") if line["history"] else [] for line in shown]
    raw["strengths"] = [[float(s) for s in line["strengths"].split("|") if s] for line in shown]
    order = permutation(len(shown), _SEED, 0)

    def loss(moved):
        z = run.logits({**raw, **{name: [raw[name][at] for at in order] for name in moved}}).astype(np.float64)
        return np.mean(np.logaddexp(0, np.where(labels, -z, z)))

    for line in section["features"]:
        moved = ["history", "strengths"] if line["feature"] == "history" else [line["feature"]]
        assert line["log_loss"] == pytest.approx(loss(moved) - loss([]), abs=1e-6)


def test_a_run_of_hot_and_cold_batches_reports_it(tmp_path):
    source = fae_cases.write_dataset(tmp_path / "source", bijection=True)
    packed = fae_cases.packed(source, tmp_path / "data", lambda table: 0.3)
    keys = ["schedule=fae", "evaluate.final_splits=['valid']", "evaluate.importance=2", "evaluate.baselines=off"]
    text = shop_logs.CONFIG.replace("seed = 5", "seed = 5\nepochs = 1")
    (tmp_path / "run.toml").write_text(text)
    arguments = ["train", str(tmp_path / "run.toml"), f"data.path={packed}", f"out={tmp_path / 'run'}", *keys]
    assert cli.main(arguments) == 0
    reported = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())["importance"]
    measured = jrec.load_run(tmp_path / "run", source).importance("valid", repeats=2)
    assert {**reported, "seconds": 0.0} == {**measured, "seconds": 0.0}
    assert {line["feature"]: line["kind"] for line in measured["features"]} == {
        "price": "number", "item": "value", "user": "value", "history": "list",
    }  # fmt: skip
