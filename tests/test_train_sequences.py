"""Models of sequences by the command, from a log to a served request."""

import collections
import csv
import dataclasses
import itertools
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary
from serve_cases import stream
from test_serve import ARROW, ask, running

import jrec
from jrec import cli
from jrec.app.baselines import popular_items
from jrec.app.config import DataConfig, ModelConfig, TrainConfig, load_config
from jrec.app.export import export_run
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError
from jrec.serving.checks import faults, load_manifest
from jrec.serving.format import ExportError

SCHEMA = """
[time]
column = "at"

[[categorical]]
column = "user"

[[categorical]]
column = "item"

[[categorical]]
column = "history"
history = {by = "user", of = "item", length = 8}
"""
CONFIG = """
epochs = 12
[data]
path = "{data}"
batch_size = 32
workers = 0
[model]
kind = "{kind}"
embedding_dim = 32
[model.sequence]
sampled = 4
[optimizer]
learning_rate = 0.003
[optimizer.embedding]
name = "adam"
learning_rate = 0.01
[evaluate]
at = [2, 10]
every_steps = 50
[log]
every_steps = 10
tensorboard = false
progress = "off"
"""
ITEMS, USERS = 40, 240


def onward(item, draw):
    """Users go on from item i to i + 1 or i + 7, nearly always."""
    return (item + draw.choice([1, 7])) % ITEMS if draw.random() < 0.9 else draw.randrange(ITEMS)


def write_log(path):
    draw, lines = random.Random(0), []
    for user in range(USERS):
        item, at = draw.randrange(ITEMS), draw.randrange(1000)
        for _ in range(draw.randrange(5, 13)):
            lines.append((f"u{user}", f"item {item}", at))
            item, at = onward(item, draw), at + draw.randrange(1, 50)
    draw.shuffle(lines)
    path.write_text("user,item,at\n" + "".join(f"{u},{i},{t}\n" for u, i, t in lines))
    return lines


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A log, and the dataset of its users' last lines."""
    folder = tmp_path_factory.mktemp("sequences")
    lines = write_log(folder / "log.csv")
    (folder / "log.toml").write_text(SCHEMA)
    arguments = ["prepare", "csv", "--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv")]
    arguments += ["--no-labels", "--split-by", "leave-one-out", "--out", str(folder / "data"), "--quiet"]
    assert cli.main(arguments) == 0
    return folder, lines


def train(folder, name, *overrides, kind="hstu"):
    """Trains; returns the report and the records of the log."""
    config = folder / "next.toml"
    config.write_text(CONFIG.format(data=folder / "data", kind=kind))
    out = folder / name
    assert cli.main(["train", str(config), f"out={out}", *overrides]) == 0
    report = json.loads((out / "report" / "metrics.json").read_text())
    return report, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(prepared):
    folder, lines = prepared
    return (*train(folder, "run"), folder, lines)


@pytest.mark.parametrize("split_by", ["leave-one-out", "time"])
def test_transitions_are_counted_of_what_is_trained(split_by, prepared, tmp_path):
    """Of users' last lines all neighbours; of all lines, whose histories repeat each other, only what came last."""
    folder, _ = prepared
    arguments = ["prepare", "csv", "--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv"), "--quiet"]
    assert cli.main([*arguments, "--no-labels", "--split-by", split_by, "--out", str(tmp_path / "data")]) == 0
    schema, wanted = Schema.load(tmp_path / "data"), collections.Counter()
    _, columns = read_dataset(tmp_path / "data")
    trained = schema.splits["train"].examples
    for history, item in list(zip(columns["history"], columns["item"], strict=True))[:trained]:
        pairs = list(itertools.pairwise([*map(int, history), int(item)]))
        wanted.update(pairs if split_by == "leave-one-out" else pairs[-1:])
    config = TrainConfig(data=DataConfig(path="data"), model=ModelConfig(kind="sasrec"))
    kind, table = config.model.of_kind, schema.table("item")
    counted = popular_items.transitions(config, kind.schema(config.model, schema), table)
    pairs = zip(*(numbers.tolist() for numbers in np.divmod(counted.keys, table.rows)), strict=True)
    assert dict(zip(pairs, counted.times.tolist(), strict=True)) == wanted
    assert counted.times.max() > 2


@pytest.mark.slow
def test_a_trained_model_beats_popularity(trained, capsys, monkeypatch):
    report, records, folder, _ = trained
    test, baselines = report["splits"]["test"], report["baselines"]
    popular, transitions = (baselines[name]["splits"]["test"] for name in ("popularity", "transitions"))
    assert test["hr@2"] > 0.6  # 0.9 is the upper bound
    assert popular["hr@2"] < 0.2
    assert transitions["hr@2"] > 0.6  # the log has nothing else to find
    said = "the model ranks test's items no better than their transitions do"
    assert [line.split(":")[0] for line in report["judgement"]["warnings"]] == [said] * (
        any(test[key] <= transitions[key] for key in ("hr@2", "ndcg@2", "hr@10", "ndcg@10", "mrr"))
    )
    assert report["ranking"] == {"at": [2, 10], "candidates": ITEMS, "history_left_out": True}
    evaluations = [record for record in records if record["split"] == "valid"]
    assert [record["step"] for record in evaluations] == [50]
    assert 0 < evaluations[0]["ndcg@2"] < test["ndcg@2"] + 0.3
    page = (folder / "run" / "report" / "report.html").read_text()
    assert "NDCG@2 by step" in page
    assert "test HR@2" in page
    assert "popularity of item" in page
    assert "transitions of item" in page
    assert "AUC" not in page.split("<h2>Configuration")[0]
    capsys.readouterr()
    assert cli.main(["eval", str(folder / "run"), str(folder / "data")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {key: printed[key] for key in test} == test
    assert printed["baselines"]["popularity"]["splits"]["test"] == popular
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["eval", str(folder / "run"), str(folder / "data")]) == 0
    head, tested, *_ = capsys.readouterr().out.splitlines()
    assert (head.split()[:2], tested.split()[0]) == (["split", "HR@2"], "test")
    assert printed["baselines"]["transitions"]["splits"]["test"] == transitions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("hstu", []),
        ("sasrec", []),
        ("hstu", ["negatives=all", "sampled=8", "normalize=length"]),
        ("sasrec", ["negatives=position", "sampled=12"]),
    ],
)
def test_two_devices_train_the_model_of_one(prepared, kind, own):
    folder, _ = prepared
    steps = ["max_steps=20", "evaluate.every_steps=0", "evaluate.baselines=off"]
    steps += [f"model.sequence.{key}" for key in own]
    name = f"{kind}-{len(own)}"
    one, of_one = train(folder, f"one-{name}", *steps, kind=kind)
    two, of_two = train(folder, f"two-{name}", *steps, "mesh.devices=2", kind=kind)
    losses = [[record["loss"] for record in records if record["split"] == "train"] for records in (of_one, of_two)]
    assert len(losses[0]) == 2
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    for split in ("valid", "test"):
        np.testing.assert_allclose(one["splits"][split]["ndcg@10"], two["splits"][split]["ndcg@10"], atol=0.01)


@pytest.mark.slow
def test_a_resumed_run_computes_the_same(trained):
    report, records, folder, _ = trained
    train(folder, "resumed", "max_steps=30", "evaluate.every_steps=0", "model.dropout=0.0")
    again, of_again = train(folder, "resumed", "--resume", "evaluate.every_steps=50")
    assert again["splits"] == report["splits"]
    losses = [[r["loss"] for r in of if r["split"] == "train"] for of in (records, of_again)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_predictions_are_the_best_items(trained, capsys):
    report, _, folder, _ = trained
    run, out = str(folder / "run"), folder / "best.parquet"
    arguments = ["predict", run, str(folder / "data"), "--split", "test", "--k", "10", "--out", str(out), "--quiet"]
    assert cli.main(arguments) == 0
    found = pq.read_table(out).to_pydict()
    assert set(found["split"]) == {"test"}
    assert found["rank"] == [*range(1, 11)] * USERS
    _, columns = read_dataset(folder / "data")
    schema = Schema.load(folder / "data")
    values, _ = read_vocabulary(folder / "data", schema.table("item"))
    targets = [values[row] for row in columns["item"][-USERS:]]
    histories = [[values[row] for row in one] for one in columns["history"][-USERS:]]
    best = [found["item"][10 * k : 10 * (k + 1)] for k in range(USERS)]
    assert np.mean([target in ten for target, ten in zip(targets, best, strict=True)]) == pytest.approx(
        report["splits"]["test"]["hr@10"]
    )
    assert not any(set(ten) & set(history) for ten, history in zip(best, histories, strict=True))
    assert all(np.all(np.diff(found["score"][10 * k : 10 * (k + 1)]) <= 0) for k in range(USERS))

    given = folder / "histories.parquet"
    pq.write_table(pa.table({"history": [["item 9"] * 5 + histories[0], histories[1], [], ["unseen"]]}), given)
    assert cli.main(["predict", run, str(given), "--k", "2", "--out", str(folder / "best.csv"), "--quiet"]) == 0
    rows = list(csv.DictReader((folder / "best.csv").read_text().splitlines()))
    assert [(row["row"], row["rank"]) for row in rows] == [(str(k), str(rank)) for k in range(4) for rank in (1, 2)]
    assert [row["item"] for row in rows[2:4]] == best[1][:2]
    loaded = jrec.load_run(run)
    scores, items = loaded.best({"history": [histories[1]]}, k=2)
    assert items == [best[1][:2]]
    np.testing.assert_allclose(scores[0], found["score"][10:12], rtol=1e-4)
    assert loaded.best({"history": [histories[1]]})[0].shape == (1, 10)
    loaded._predictor._k = ITEMS + 1  # as where there are fewer than 10 items
    assert loaded.best({"history": [histories[1]]})[0].shape == (1, ITEMS)
    with pytest.raises(ConfigError, match="k is 41, but must be between 1 and the 40 items"):
        loaded.best({"history": [[]]}, k=ITEMS + 1)
    with pytest.raises(ConfigError, match="'hstu', which has no probabilities"):
        loaded.predict({"history": [[]]})
    assert cli.main(["init", str(folder / "data"), "--quick", "--out", str(folder / "init.toml")]) == 0
    assert load_config(folder / "init.toml").model.kind == "hstu"
    planned = ["plan", str(folder / "data"), "--hardware", "h200x8", "--devices", "2", "--out", str(folder / "plan")]
    assert cli.main([*planned, "--config", str(folder / "next.toml")]) != 0
    assert "has model.kind 'hstu', whose lookups no profile counts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_model_is_compressed(trained, tmp_path, capsys):
    report, _, folder, _ = trained
    run, small = str(folder / "run"), tmp_path / "small"
    assert cli.main(["compress", run, "--rank", "6", "--tables", "item", "--out", str(small), "--quiet"]) == 0
    printed, content = capsys.readouterr().out, json.loads((small / "report" / "compression.json").read_text())
    assert content["before"] == {split: report["splits"][split] for split in ("valid", "test")}
    assert content["tables"]["item"]["compression"] > 1
    after = content["after"]["test"]
    assert 0 < after["hr@10"] != content["before"]["test"]["hr@10"]
    assert "HR@10 before" in printed
    assert f"{after['ndcg@2']:.4f}" in printed
    assert cli.main(["eval", str(small), str(folder / "data"), "--split", "test", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert {key: scored[key] for key in after} == after
    assert len(jrec.load_run(small).best({"history": [["item 9"]]}, k=3)[1][0]) == 3
    assert cli.main(["train", str(small / "config.toml"), "epochs=14", "--resume"]) == 0
    assert json.loads((small / "report" / "metrics.json").read_text())["splits"]["test"]["hr@10"] > 0.5


@pytest.mark.slow
def test_an_export_serves_the_best_items(trained, tmp_path):
    _, _, folder, _ = trained
    run, whole = folder / "run", tmp_path / "whole"
    assert cli.main(["export", str(run), "--out", str(whole), "--quiet"]) == 0
    model, loaded = jrec.serving.load(whole, batch_sizes=[1, 4]), jrec.load_run(run)
    histories = {"history": [["item 3", "item 4"], ["unseen"], ["item 9"] * 12 + ["item 1"]]}
    scores, items = loaded.best(histories, k=5)
    found = model.best(histories, k=5)
    assert model.raw_columns == ("history",)
    assert found.items == items
    np.testing.assert_allclose(found.scores, scores, rtol=1e-4)
    keeping = jrec.serving.load(whole, history_cache=1 << 20)
    for length in (1, 3, 13):
        begun = {"history": [line[:length] for line in histories["history"]]}
        found, again = model.best(begun, k=5), keeping.best(begun, k=5)
        assert again.items == found.items
        np.testing.assert_allclose(again.scores, found.scores, atol=1e-5)
    assert keeping.history_cache is not None
    assert keeping.history_cache.kept == 3
    for more in (1, 2, 1000):
        few = model.best(histories, k=ITEMS + more)
        assert [len(line) for line in few.items] == [ITEMS - 2, ITEMS, ITEMS - 2]
    with pytest.raises(ValueError, match=f"k=0 must be between 1 and the {ITEMS + 1} rows"):
        model.best(histories, k=0)
    with pytest.raises(ValueError, match=r"the model ranks items, and has no probabilities; call Model\.best"):
        model(histories)
    with running(whole) as served:
        status, _, body = ask(served.port, "/predict?k=5", {"columns": histories})
        assert (status, json.loads(body)["items"]) == (200, items)
        status, _, body = ask(served.port, "/predict?k=1000", {"columns": histories})
        assert (status, json.loads(body)["items"]) == (200, few.items)
        status, _, body = ask(served.port, "/predict?k=5", stream(pa.table(histories)), ARROW)
        assert pa.ipc.open_stream(body).read_all()["item"].to_pylist() == items
        assert [len(line) for line in json.loads(ask(served.port, content={"columns": histories})[2])["items"]] == [
            10
        ] * 3
        assert ask(served.port, "/predict?k=0", {"columns": histories})[0] == 422
        assert ask(served.port, content={"columns": {"user": ["u1"]}})[0] == 422

    train(folder, "later", f"init_from={run}", "max_steps=3", "evaluate.baselines=off", "seed=1")
    arguments = ["export", str(folder / "later"), "--since", str(whole), "--out", str(tmp_path / "delta"), "--quiet"]
    assert cli.main(arguments) == 0
    model.apply(tmp_path / "delta")
    scores, items = jrec.load_run(folder / "later").best(histories, k=5)
    np.testing.assert_allclose(model.best(histories, k=5).scores, scores, rtol=1e-4)
    with pytest.raises(ExportError, match="ranks items by a user's vector"):
        export_run(run, tmp_path / "onnx", onnx=True)

    manifest = load_manifest(whole)
    assert manifest.retrieval is not None
    for change, message in (
        ({"history": "other"}, "has history 'other', which is no feature of table 'item'"),
        ({"table": "other"}, "which is no feature of table 'other'"),
        ({"left_out_row": ITEMS + 1}, f"leaves out row {ITEMS + 1} of table 'item', which has {ITEMS + 1} rows"),
    ):
        bad = dataclasses.replace(manifest, retrieval=dataclasses.replace(manifest.retrieval, **change))
        assert any(message in fault for fault in faults(whole, bad))


def write_timed_log(path):
    """Users go on from item i to i + 1 within a minute, and to i + 7 after an hour or more."""
    draw, lines = random.Random(1), []
    for user in range(USERS):
        item, at = draw.randrange(ITEMS), draw.randrange(10**6)
        for _ in range(draw.randrange(5, 13)):
            lines.append((f"u{user}", f"item {item}", at))
            soon = draw.random() < 0.5
            item, at = (item + (1 if soon else 7)) % ITEMS, at + draw.randrange(*((1, 60) if soon else (3600, 7200)))
    path.write_text("user,item,at\n" + "".join(f"{u},{i},{t}\n" for u, i, t in lines))


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A run on a dataset with ages."""
    folder = tmp_path_factory.mktemp("timed")
    write_timed_log(folder / "log.csv")
    (folder / "log.toml").write_text(SCHEMA.replace("length = 8}", 'length = 8, ages = "ages"}'))
    arguments = ["prepare", "csv", "--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv")]
    arguments += ["--no-labels", "--split-by", "leave-one-out", "--out", str(folder / "data"), "--quiet"]
    assert cli.main(arguments) == 0
    return folder, train(folder, "run", "evaluate.at=[1]", "epochs=60", "evaluate.baselines=off")[0]


@pytest.mark.slow
def test_ages_tell_what_comes_next(timed):
    folder, report = timed
    without, _ = train(
        folder, "without", "evaluate.at=[1]", "epochs=60", "evaluate.baselines=off", "model.sequence.ages=false"
    )
    assert report["splits"]["test"]["hr@1"] > 0.85
    assert without["splits"]["test"]["hr@1"] < 0.6


@pytest.mark.slow
def test_requests_give_the_ages_of_histories(timed, tmp_path):
    folder, _ = timed
    run = str(folder / "run")
    request = {
        "history": [["item 3", "item 4"]] * 2 + [[], ["item 9"] * 12],
        "ages": [[90, 30], [9000, 5400], [], [5.5] * 12],
    }
    loaded = jrec.load_run(run)
    scores, items = loaded.best(request, k=3)
    read = [0, 1, 3]  # to an empty history all items are alike
    assert [one[0] for one in items[:2]] == ["item 5", "item 11"]
    with pytest.raises(DatasetError, match=r"column\(s\) ages are missing"):
        loaded.best({"history": [["item 3"]]}, k=3)
    with pytest.raises(DatasetError, match="'ages' of example 0 is not one weight for each value of 'history'"):
        loaded.best({"history": [["item 3"]], "ages": [[1, 2]]}, k=3)
    pq.write_table(pa.table(request), tmp_path / "new.parquet")
    arguments = ["predict", run, str(tmp_path / "new.parquet"), "--k", "3", "--quiet", "--out"]
    assert cli.main([*arguments, str(tmp_path / "best.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "best.csv").read_text().splitlines()))
    assert [row["item"] for row in rows[:6]] == [*items[0], *items[1]]
    assert cli.main(["export", run, "--out", str(tmp_path / "export"), "--quiet"]) == 0
    model = jrec.serving.load(tmp_path / "export", batch_sizes=[1, 4])
    model.warm_up()
    assert model.raw_columns == ("history", "ages")
    found = model.best(request, k=3)
    assert [found.items[k] for k in read] == [items[k] for k in read]
    np.testing.assert_allclose(found.scores, scores, rtol=1e-4)
    keeping = jrec.serving.load(tmp_path / "export", history_cache=1 << 20)
    for length in (1, 2, 8):
        begun = {name: [line[:length] for line in lines] for name, lines in request.items()}
        found, again = model.best(begun, k=3), keeping.best(begun, k=3)
        assert [again.items[k] for k in read] == [found.items[k] for k in read]
        np.testing.assert_allclose(again.scores, found.scores, atol=1e-5)
    assert keeping.history_cache is not None
    assert keeping.history_cache.kept > 0
    found = model.best(request, k=3)
    assert load_manifest(tmp_path / "export").widths == {"history:weight": 8}
    with running(tmp_path / "export") as served:
        status, _, body = ask(served.port, "/predict?k=3", {"columns": request})
        assert (status, json.loads(body)["items"]) == (200, found.items)
        assert ask(served.port, content={"columns": {"history": [["item 3"]]}})[0] == 422
    out = ["--out", str(tmp_path / "test.csv"), "--split", "test", "--k", "1", "--quiet"]
    assert cli.main(["predict", run, str(folder / "data"), *out]) == 0
    assert len((tmp_path / "test.csv").read_text().splitlines()) == USERS + 1


@pytest.mark.slow
def test_ages_scale_no_row_of_other_models(tmp_path, monkeypatch):
    """A DLRM on a dataset with ages, and its baselines, are those on the same one without."""
    monkeypatch.setenv("JREC_CACHE", str(tmp_path / "cache"))  # which keeps baselines by dataset
    write_timed_log(tmp_path / "log.csv")
    lines = (tmp_path / "log.csv").read_text().splitlines()
    labelled = [lines[0] + ",label", *(f"{line},{k % 2}" for k, line in enumerate(lines[1:]))]
    (tmp_path / "log.csv").write_text("\n".join(labelled) + "\n")
    (tmp_path / "dlrm.toml").write_text('[data]\npath = "data"\nbatch_size = 64\n[log]\ntensorboard = false\n')
    reports = []
    for name, ages in (("plain", ""), ("aged", ', ages = "ages"')):
        schema = SCHEMA.replace("length = 8}", f"length = 8{ages}}}") + '[label]\ncolumn = "label"\n'
        (tmp_path / f"{name}.toml").write_text(schema)
        prepared = ["--schema", str(tmp_path / f"{name}.toml"), "--input", str(tmp_path / "log.csv"), "--quiet"]
        assert cli.main(["prepare", "csv", *prepared, "--out", str(tmp_path / name)]) == 0
        run = [f"out={tmp_path / name}-run", f"data.path={tmp_path / name}", "max_steps=5"]
        assert cli.main(["train", str(tmp_path / "dlrm.toml"), *run]) == 0
        report = json.loads((tmp_path / f"{name}-run" / "report" / "metrics.json").read_text())
        scores = {n: found["splits"] for n, found in report["baselines"].items() if isinstance(found, dict)}
        reports.append((report["splits"], scores))
    assert reports[0] == reports[1]
