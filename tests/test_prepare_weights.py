"""Weights of examples from a raw log to reports, by the command and by jrec.fit."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import task_logs
from train_command import train_command

import jrec
from jrec import cli, metrics
from jrec.app.comparisons import comparison_sections
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.sklearn import JrecClassifier
from jrec.data.blocks import EXAMPLE_WEIGHT, ShardReader
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError
from jrec.metrics import Scores

SCHEMA = """
[label]
column = "click"
[weight]
column = "w"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
CONFIG = """
[data]
batch_size = 64
eval_batch_size = 128
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [8, 1]
calibrate = true
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 5
group = "user"
baselines = "on"
early_stopping = {metric = "log_loss"}
[log]
tensorboard = false
"""


def log(rows=800, seed=0):
    """Clicks that depend on user and item, and weights, some of them 0."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 20, rows), rng.integers(0, 12, rows)
    click = rng.random(rows) < np.where((user + item) % 3 == 0, 0.7, 0.2)
    weights = rng.choice([0.0, 0.25, 1.0, 3.0], rows)
    return {
        "click": click.astype(int), "w": weights, "price": rng.random(rows).round(3),
        "user": [f"u{n}" for n in user], "item": [f"i{n}" for n in item],
    }  # fmt: skip


def write(path, columns):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        pyarrow.feather.write_feather(table, str(path), compression="uncompressed")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join([",".join(columns), *rows]) + "\n")
    return path


def prepare(folder, path, out, *options, schema=SCHEMA):
    (folder / "columns.toml").write_text(schema)
    arguments = ["--schema", str(folder / "columns.toml"), "--input", str(path), "--out", str(folder / out)]
    least = [] if "--vocabulary-from" in options else ["--min-count", "1"]
    return cli.main(["prepare", "csv", *arguments, *least, "--quiet", *options])


def column(folder, split, name):
    schema = Schema.load(folder)
    readers = [ShardReader(folder, shard) for shard in schema.splits[split].shards]
    return np.concatenate([reader.read(block)[name] for reader in readers for block in range(len(reader))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for ending in ("csv", "jsonl", "parquet", "arrow"):
        write(folder / f"log.{ending}", log())
    assert prepare(folder, folder / "log.csv", "data") == 0
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return train_command(folder, folder / "data", text=CONFIG)


def test_every_kind_of_file_keeps_weights(folder):
    weights = log()["w"].astype(np.float32)
    schema = Schema.load(folder / "data")
    assert schema.weighted
    assert "weighted" in repr(schema)
    for ending in ("jsonl", "parquet", "arrow"):
        assert prepare(folder, folder / f"log.{ending}", ending) == 0
        assert Schema.load(folder / ending).identity.examples == schema.identity.examples
    stored = np.concatenate([column(folder / "data", split, EXAMPLE_WEIGHT) for split in ("train", "valid", "test")])
    assert stored.dtype == np.float32
    assert stored.tolist() == weights.tolist()


def test_datasets_without_weights_say_nothing_of_them(folder):
    text = SCHEMA.replace('[weight]\ncolumn = "w"\n', "")
    assert prepare(folder, folder / "log.csv", "plain", schema=text) == 0
    content = json.loads((folder / "plain" / "schema.json").read_text())
    assert "weighted" not in content
    assert "weight" not in content["provenance"]["format_options"]["schema"]
    assert not Schema.load(folder / "plain").weighted
    assert Schema.load(folder / "plain").identity.rows == Schema.load(folder / "data").identity.rows


@pytest.mark.parametrize(("value", "reason"), [
    ("-0.5", "holds '-0.5', which is no weight, a finite number of at least 0"),
    ("nan", "'w' holds 'nan'"), ("", "'w'"), ("1e39", "is no weight, a finite number"), ("many", "'w' holds 'many'"),
])  # fmt: skip
def test_bad_weights_are_bad_lines(folder, tmp_path, capsys, value, reason):
    columns = log(60)
    columns["w"] = [*map(str, columns["w"][:5]), value, *map(str, columns["w"][6:])]
    path = write(tmp_path / "log.csv", columns)
    assert prepare(tmp_path, path, "data") == 2
    error = capsys.readouterr().err
    assert f"{path}:7: field" in error
    assert reason in error
    assert prepare(tmp_path, path, "data", "--on-bad-line", "skip") == 0
    assert sum(split.examples for split in Schema.load(tmp_path / "data").splits.values()) == 59


def test_bad_weights_of_tables(tmp_path, capsys):
    columns = log(60)
    columns["w"] = [1.0] * 4 + [None] + [1.0] * 55
    assert prepare(tmp_path, write(tmp_path / "log.parquet", columns), "data") == 2
    assert "field 'w'" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [
    (SCHEMA.replace('[label]\ncolumn = "click"\n', ""), "there is a .weight., but no .label."),
    (SCHEMA.replace('column = "w"', 'column = "price"'), "price are used more than once"),
])  # fmt: skip
def test_schemas_that_do_not_fit(folder, capsys, text, message):
    import re

    assert prepare(folder, folder / "log.csv", "none", schema=text) == 2
    assert re.search(message, capsys.readouterr().err)


def test_scores_and_reports_are_weighted(folder, run):
    scored = evaluate_checkpoint(run, folder / "data", split="test")
    scores, weights = scored.scores, column(folder / "data", "test", EXAMPLE_WEIGHT)
    assert isinstance(scores, Scores)
    kept = weights > 0
    assert scores.weights is not None
    assert scores.weights.tolist() == weights[kept].tolist()
    labels = column(folder / "data", "test", "label")[kept]
    z = scores.logits.astype(np.float64)
    loss = np.average(np.logaddexp(0, z) - labels * z, weights=weights[kept])
    content = json.loads((run / "report" / "metrics.json").read_text())
    found = content["splits"]["test"]
    assert found["log_loss"] == pytest.approx(loss)
    assert found["weight"] == pytest.approx(weights.sum())
    assert found["auc"] == pytest.approx(metrics.auc(scores.logits, labels, weights=weights[kept]))
    bins = content["reliability"]["test"]
    expected = metrics.reliability_bins(metrics.sigmoid(z), labels, weights=weights[kept])
    assert bins["weights"] == pytest.approx(expected.weights.tolist())
    assert sum(bins["counts"]) == kept.sum()
    assert "sum of weights" in (run / "report" / "report.html").read_text()
    config = load_config(str(folder / "tiny.toml"), [f"data.path={folder / 'data'}"])
    sections = comparison_sections(config, Schema.load(folder / "data"), {"test": scores})
    assert sum(entry["examples"] for entry in sections["slices"]["slices"] if entry["feature"] == "item") == kept.sum()


def test_training_is_that_of_repeated_lines(tmp_path):
    """The same steps: a log with whole weights, and one with as many copies of each line, a batch an epoch."""
    text = CONFIG.replace("calibrate = true", "").replace("batch_size = 64", "batch_size = 2048") + (
        "[checkpoint]\nkeep = 1\n"
    )
    losses, popularity = [], []
    for weighted in (True, False):
        columns = log(300)
        rng = np.random.default_rng(3)
        columns["w"] = rng.integers(1, 4, 300)
        if not weighted:
            columns = {name: np.repeat(np.asarray(values), columns["w"]) for name, values in columns.items()}
            columns["w"] = np.ones(len(columns["click"]), int)
        name = f"data{weighted}"
        # All lines train: splits by their number would cut the two logs at different lines. Values have the same rows.
        options = ["--split", "1,0,0", *([] if weighted else ["--vocabulary-from", str(tmp_path / "dataTrue")])]
        assert prepare(tmp_path, write(tmp_path / "log.csv", columns), name, *options) == 0
        run = train_command(
            tmp_path, tmp_path / name, "epochs=4", "evaluate.every_steps=0", "evaluate.final_splits=['train']",
            "evaluate.splits=[]", "log.every_steps=1", out=f"run{weighted}", text=text,
        )  # fmt: skip
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
        content = json.loads((run / "report" / "metrics.json").read_text())
        popularity.append(content["baselines"]["popularity"]["splits"]["train"])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert popularity[0] == pytest.approx(popularity[1], rel=1e-6)


def test_lines_of_weight_0_are_predicted(folder, run, tmp_path):
    assert cli.main(["predict", str(run), str(folder / "data"), "--out", str(tmp_path / "split.csv")]) == 0
    assert len(pd.read_csv(tmp_path / "split.csv")) == 800
    columns = log()
    del columns["w"], columns["click"]
    path = write(tmp_path / "new.csv", columns)
    assert cli.main(["predict", str(run), str(path), "--out", str(tmp_path / "new_scores.csv")]) == 0
    np.testing.assert_allclose(
        pd.read_csv(tmp_path / "new_scores.csv")["score"], pd.read_csv(tmp_path / "split.csv")["score"], rtol=1e-5
    )


def test_files_without_a_header_may_lack_label_and_weight(run, tmp_path):
    columns = log(300)
    schema = f"columns = {json.dumps(list(columns))}\n{SCHEMA}"
    (tmp_path / "columns.toml").write_text(schema)
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    assert prepare(tmp_path, tmp_path / "log.csv", "data", schema=schema) == 0
    trained = train_command(tmp_path, tmp_path / "data", "max_steps=2", "evaluate.baselines=off", text=CONFIG)
    scores = []
    for number in (0, 1, 2):
        short = [line.split(",", number)[-1] for line in lines]
        (tmp_path / f"new{number}.csv").write_text("\n".join(short) + "\n")
        path, out = tmp_path / f"new{number}.csv", tmp_path / f"scores{number}.csv"
        assert cli.main(["predict", str(trained), str(path), "--out", str(out)]) == 0
        scores.append(pd.read_csv(out)["score"])
    assert scores[0].tolist() == scores[1].tolist() == scores[2].tolist()


def test_growing_tables_train_by_weights(folder, tmp_path):
    """A weight of 1 is none, also where keys get their rows between reading and packing."""
    losses = []
    for name, weights in (("ones", np.ones(800)), ("none", None), ("drawn", log()["w"])):
        schema = SCHEMA if weights is not None else SCHEMA.replace('[weight]\ncolumn = "w"\n', "")
        columns = log() if weights is None else {**log(), "w": weights}
        path = write(tmp_path / f"{name}.csv", columns)
        assert prepare(tmp_path, path, name, "--growing", "user", schema=schema) == 0
        overrides = ["max_steps=4", "evaluate.baselines=off", "evaluate.group="]
        trained = train_command(
            tmp_path, tmp_path / name, *overrides, "log.every_steps=1", out=f"run_{name}", text=CONFIG
        )
        records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
        content = json.loads((trained / "report" / "metrics.json").read_text())
        assert ("weight" in content["splits"]["test"]) == (name == "drawn")
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_kinds_without_weights_refuse_them(folder):
    config = folder / "rank.toml"
    config.write_text(
        f'[data]\npath = "{folder / "data"}"\n[model]\nkind = "two_tower"\n'
        '[model.two_tower]\nuser = ["user"]\nitem = ["item"]\nid = "item"\n'
    )
    from jrec.app.dataset import open_data

    with pytest.raises(ConfigError, match=r"has weights of examples, which model.kind 'two_tower' does not take"):
        open_data(load_config(str(config), []))


def test_several_labels_have_one_weight(tmp_path):
    columns = task_logs.columns(400)
    columns["w"] = np.random.default_rng(0).choice([0.5, 2.0], 400)
    path = task_logs.write_log(tmp_path / "log.csv", columns)
    schema = task_logs.SCHEMA + '[weight]\ncolumn = "w"\n'
    assert prepare(tmp_path, path, "data", schema=schema) == 0
    run = train_command(tmp_path, tmp_path / "data", "max_steps=2", text=task_logs.CONFIG)
    content = json.loads((run / "report" / "metrics.json").read_text())
    for task in ("click", "purchase"):
        assert 0 < content["tasks"][task]["splits"]["test"]["weight"] < 80


def test_fit_takes_a_column_of_weights(tmp_path):
    rows = pd.DataFrame(log())
    little = {"epochs": 1, "quick": True, "quiet": True, "config": {"model.members": 1, "log.tensorboard": False}}
    model = jrec.fit(rows, label="click", weight="w", folder=tmp_path / "fit", **little)
    assert "weight" in model.metrics["test"]
    found = model.evaluate(rows)
    kept = rows[rows["w"] > 0]
    logits = np.log(p := model.predict(kept).astype(np.float64)) - np.log1p(-p)
    assert found["log_loss"] == pytest.approx(metrics.log_loss(logits, kept["click"], weights=kept["w"]), rel=1e-4)
    assert "weight" not in model.evaluate(rows.drop(columns="w"))
    with pytest.raises(ConfigError, match=r"weight is 'w', but the schema"):
        jrec.fit(rows, schema="columns.toml", weight="w")
    with pytest.raises(DatasetError, match=r"there is no column 'ww'; did you mean 'w'"):
        jrec.fit(rows, label="click", weight="ww", **little)


def test_the_estimator_takes_sample_weight():
    rows = pd.DataFrame(log(400))
    x, y = rows[["price", "user", "item"]], rows["click"]
    settings = {"quick": True, "epochs": 1, "config": {"model.members": 1, "log.tensorboard": False}}
    fitted = JrecClassifier(**settings).fit(x, y, sample_weight=rows["w"])
    assert "weight" in fitted.model_.metrics["test"]
    assert fitted.n_features_in_ == 3
    with pytest.raises(DatasetError, match=r"X has 400 rows, but sample_weight has 3"):
        JrecClassifier(**settings).fit(x, y, sample_weight=[1, 2, 3])
