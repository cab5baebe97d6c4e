"""Labels that are numbers by the command: from a log to reports, predictions, an export and answers."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from test_prepare_weights import prepare as prepare_log
from test_prepare_weights import write
from train_command import check_goes_on, train_command

import jrec
import jrec.serving
from jrec import cli, regression
from jrec.app import first_config, first_trials
from jrec.app.config import load_config
from jrec.app.dataset import open_data
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.export import export_run
from jrec.app.watch import BestStep
from jrec.data.schema import DatasetError, LabelNumbers, Schema
from jrec.errors import ConfigError
from jrec.regression import NumberScores
from jrec.serving.http import bodies
from jrec.serving.http.metadata import described_model

SCHEMA = """
[label]
column = "rating"
kind = "number"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
WEIGHTED = SCHEMA + '[weight]\ncolumn = "w"\n'
CONFIG = """
[data]
batch_size = 64
eval_batch_size = 128
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [8, 1]
[optimizer]
name = "adam"
learning_rate = 0.01
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 20
baselines = "on"
[checkpoint]
keep_best = true
[log]
tensorboard = false
"""


def log(rows=1_500, seed=0, counts=False):
    rng, tastes = np.random.default_rng(seed), np.random.default_rng(9)
    user, item, price = rng.integers(0, 20, rows), rng.integers(0, 12, rows), rng.random(rows).round(3)
    mean = tastes.normal(size=20)[user] + tastes.normal(size=12)[item] + price
    rating = rng.poisson(np.exp(mean / 2)) if counts else (1000 + 100 * mean + rng.normal(0, 20, rows)).round(2)
    return {
        "rating": rating, "w": rng.choice([0.0, 0.5, 1.0, 2.0], rows), "price": price,
        "user": [f"u{n}" for n in user], "item": [f"i{n}" for n in item],
    }  # fmt: skip


def prepare(folder, columns, out, *options, schema=SCHEMA):
    return prepare_log(folder, write(folder / f"{out}.csv", columns), out, *options, schema=schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    assert prepare(folder, log(), "data", schema=WEIGHTED) == 0
    assert prepare(folder, log(counts=True), "counts") == 0
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return train_command(folder, folder / "data", "epochs=6", text=CONFIG)


@pytest.fixture(scope="module")
def counts(folder):
    return train_command(folder, folder / "counts", "epochs=4", "model.loss=poisson", out="poisson", text=CONFIG)


def test_the_dataset_says_what_its_labels_are(folder):
    schema, ratings = Schema.load(folder / "data"), np.asarray(log()["rating"], np.float32).astype(np.float64)
    train = ratings[: schema.splits["train"].examples]
    assert schema.numbers is not None
    assert schema.numbers.least == ratings.min()
    assert schema.numbers.mean == pytest.approx(train.mean())
    assert schema.numbers.deviation == pytest.approx(train.std())
    assert "labels are numbers, weighted" in repr(schema)
    assert Schema.load(folder / "counts").numbers.least == 0


def test_groups_of_numbers_are_reported(folder, tmp_path, capsys):
    options = ("evaluate.group=user", "evaluate.early_stopping.metric=xauc", "epochs=2")
    run = train_command(tmp_path, folder / "data", *options, text=CONFIG)
    content, printed = json.loads((run / "report" / "metrics.json").read_text()), capsys.readouterr().out
    of_test = content["groups"]["splits"]["test"]
    scored = evaluate_checkpoint(run, folder / "data", split="test").scores
    assert isinstance(scored, NumberScores)
    assert content["splits"]["test"]["xauc"] == pytest.approx(regression.evaluate_numbers(scored).xauc)
    assert 0.5 < of_test["xgauc"] < 1
    assert f"test, by user: XGAUC {of_test['xgauc']:.4f} of {of_test['groups']} groups with unlike labels" in printed
    most = max(row["xauc"] for row in of_test["best"])
    best = f"{of_test['best'][0]['group']} {most:.3f}"
    assert f"only groups of 10 examples or more, XAUC (examples): {best} (" in printed
    page = (run / "report" / "report.html").read_text()
    for text in (
        "XAUC within groups by user",
        f"XGAUC {of_test['xgauc']:.4f}",
        "mean label",
        of_test["best"][0]["group"],
    ):
        assert text in page
    values = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["xauc"] for record in values if record["split"] == "valid"}
    assert content["training"].get("scored_step", 38) == max(by_step, key=by_step.__getitem__)
    assert cli.main(["eval", str(run), str(folder / "data"), "--group", "item"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"]["splits"]["test"]["groups"] == 12  # the items


def test_statistics_of_many_labels_in_pieces(monkeypatch):
    from jrec.prepare import splits

    values = np.random.default_rng(0).normal(50, 3, 1000).astype(np.float32)

    class Column:
        rows = 1000

        def read(self, start, stop):
            return values[start:stop]

    monkeypatch.setattr(splits, "_READ_ROWS", 64)
    found = splits.label_numbers(Column(), 700)
    exact = values.astype(np.float64)
    assert found == LabelNumbers(
        least=exact.min(), mean=pytest.approx(exact[:700].mean()), deviation=pytest.approx(exact[:700].std())
    )


def test_a_run_learns_and_reports(folder, run):
    content = json.loads((run / "report" / "metrics.json").read_text())
    config = json.loads((run / "report" / "metrics.json").read_text())["config"]["model"]
    numbers = Schema.load(folder / "data").numbers
    assert numbers is not None
    assert config["loss"] == "squared"
    assert config["numbers"]["location"] == pytest.approx(numbers.mean)
    assert config["numbers"]["scale"] == pytest.approx(numbers.deviation)
    found = content["splits"]["test"]
    assert found["r2"] > 0.5
    assert 900 < found["mean_prediction"] < 1100
    assert found["rmse"] < content["baselines"]["value_mean"]["splits"]["test"]["rmse"]
    scored = evaluate_checkpoint(run, folder / "data", split="test").scores
    assert isinstance(scored, NumberScores)
    assert scored.weights is not None
    p, y, w = (np.asarray(a, np.float64) for a in (scored.predictions, scored.labels, scored.weights))
    assert found["rmse"] == pytest.approx(np.sqrt(np.average((p - y) ** 2, weights=w)), rel=1e-5)
    assert found["mae"] == pytest.approx(np.average(np.abs(p - y), weights=w), rel=1e-5)
    kept = regression.residual_bins(scored).to_dict()
    assert content["residuals"]["test"]["mean_label"] == pytest.approx(kept["mean_label"], rel=1e-5)
    page = (run / "report" / "report.html").read_text()
    for text in ("Residuals on test", "RMSE by step", "mean by value", "Poisson deviance"):
        assert text in page
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    watched = [(record["rmse"], record["step"]) for record in records if "rmse" in record]
    assert content["training"].get("scored_step", content["training"]["steps"]) == min(watched)[1]


def test_every_placement_trains_alike(folder):
    """Numbers with weights: on one device, on a mesh, in host memory, in slices, several steps in one dispatch."""
    losses = []
    for number, overrides in enumerate((
        [], ["mesh.devices=4"], ["tables.tier=host"], ["data.micro_batches=4"], ["data.steps_per_dispatch=3"],
    )):  # fmt: skip
        short = ["max_steps=6", "evaluate.every_steps=0", "evaluate.final_splits=[]", "log.every_steps=1"]
        text = CONFIG.replace("keep_best = true", "keep_best = false")
        out = train_command(folder, folder / "data", *short, *overrides, out=f"place{number}", text=text)
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 6
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=2e-3)


def test_a_run_goes_on_by_the_same_command(folder):
    """What the dataset settled at its start, such as scales of numbers, is no difference."""
    check_goes_on(folder, folder / "data", text=CONFIG)


def test_baselines_are_the_mean_and_the_mean_by_value(folder, run):
    content = json.loads((run / "report" / "metrics.json").read_text())
    columns, examples = log(), Schema.load(folder / "data").splits
    train, test = slice(0, examples["train"].examples), slice(-examples["test"].examples, None)
    label, w = np.asarray(columns["rating"], np.float32).astype(np.float64), np.asarray(columns["w"])
    mean = np.average(label[train], weights=w[train])
    baselines = content["baselines"]
    assert baselines["mean"]["splits"]["test"]["rmse"] == pytest.approx(
        np.sqrt(np.average((label[test] - mean) ** 2, weights=w[test])), rel=1e-5
    )
    values = np.asarray(columns[baselines["value_mean"]["feature"]])
    means = {}
    for value in set(values):
        own = values[train] == value
        means[value] = (np.sum(label[train][own] * w[train][own]) + 20 * mean) / (w[train][own].sum() + 20)
    predicted = np.array([means[value] for value in values[test]])
    assert baselines["value_mean"]["splits"]["test"]["rmse"] == pytest.approx(
        np.sqrt(np.average((label[test] - predicted) ** 2, weights=w[test])), rel=1e-5
    )


def test_predictions_are_numbers(folder, run, tmp_path, capsys):
    assert cli.main(["predict", str(run), str(folder / "data.csv"), "--out", str(tmp_path / "log.csv")]) == 0
    assert cli.main(["predict", str(run), str(folder / "data"), "--out", str(tmp_path / "split.parquet")]) == 0
    scores, split = pd.read_csv(tmp_path / "log.csv"), pd.read_parquet(tmp_path / "split.parquet")
    assert list(scores.columns) == ["row", "label", "prediction"]
    np.testing.assert_allclose(scores["prediction"], split["prediction"], rtol=1e-4)
    assert scores["label"].corr(scores["prediction"]) > 0.7
    columns = {name: values[:5] for name, values in log().items() if name in ("price", "user", "item")}
    loaded = jrec.load_run(run)
    np.testing.assert_allclose(loaded.predict(columns), scores["prediction"][:5], rtol=1e-4)
    model_folder = tmp_path / "export"
    export_run(run, model_folder)
    model = jrec.serving.load(model_folder)
    np.testing.assert_allclose(model(columns), scores["prediction"][:5], rtol=1e-4)
    assert described_model(model)["outputs"] == [{"name": "prediction", "datatype": "FP32", "shape": [-1]}]
    scored = model.scored(columns)
    body = json.loads(bodies.answer(scored, "1", bodies.JSON))
    assert body["predictions"] == pytest.approx(scored.scores.tolist())
    arrow = pa.ipc.open_stream(bodies.answer(scored, "1", bodies.ARROW)).read_all()
    assert arrow.column_names == ["prediction"]
    assert cli.main(["eval", str(run), str(folder / "data"), "--split", "test"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rmse"] > 0


def test_counts_are_exponentials(folder, counts):
    content = json.loads((counts / "report" / "metrics.json").read_text())
    found = content["splits"]["test"]
    assert found["poisson_deviance"] < content["baselines"]["mean"]["splits"]["test"]["poisson_deviance"]
    columns = {name: values[:50] for name, values in log(counts=True).items() if name in ("price", "user", "item")}
    loaded = jrec.load_run(counts)
    numbers = Schema.load(folder / "counts").numbers
    assert numbers is not None
    predictions = loaded.predict(columns)
    assert (predictions > 0).all()
    np.testing.assert_allclose(predictions, numbers.mean * np.exp(loaded.logits(columns)), rtol=1e-5)


@pytest.mark.parametrize(("override", "message"), [
    ("model.loss=log_loss", "which is of clicks, but the label of .* is a number; choose one of squared"),
    ("model.calibrate=true", "model.calibrate is True, which is of clicks"),
    ("model.label_smoothing=0.1", "model.label_smoothing is 0.1, which is of clicks"),
    ("evaluate.early_stopping.metric=log_loss", "metric is 'log_loss', which the label of .* does not have"),
    ("model.numbers.scale=0.0", "model.numbers.scale is 0.0; it must be above 0"),
    ("model.kind=two_tower", "two_tower"),
])  # fmt: skip
def test_what_does_not_go_with_numbers(folder, override, message):
    (folder / "plain.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=message):
        open_data(load_config(str(folder / "plain.toml"), [f"data.path={folder / 'data'}", override]))


def test_losses_that_do_not_go_with_the_labels(folder, tmp_path):
    def opened(path, *overrides):
        (tmp_path / "run.toml").write_text(CONFIG)
        return open_data(load_config(str(tmp_path / "run.toml"), [f"data.path={path}", *overrides]))

    columns = {**log(60), "rating": [k % 2 for k in range(60)]}
    assert prepare(tmp_path, columns, "clicks", schema=SCHEMA.replace('kind = "number"\n', "")) == 0
    with pytest.raises(
        ConfigError, match=r"model.loss is 'squared', which is of numbers, but the labels of .* are 0 and 1"
    ):
        opened(tmp_path / "clicks", "model.loss=squared")
    with pytest.raises(ConfigError, match=r"metric is 'rmse', which the label of .* choose one of auc, log_loss"):
        opened(tmp_path / "clicks", "evaluate.early_stopping.metric=rmse")
    assert opened(tmp_path / "clicks").config.model.loss == "auto"  # as configurations of clicks always were
    columns["rating"] = [k - 3.0 for k in range(60)]
    assert prepare(tmp_path, columns, "negative") == 0
    with pytest.raises(
        ConfigError, match=r"model.loss is 'poisson', which is of counts, but the least label of .* is -3"
    ):
        opened(tmp_path / "negative", "model.loss=poisson")
    with pytest.raises(ConfigError, match=r"location is 2, but model.loss 'poisson' has none"):
        opened(folder / "counts", "model.loss=poisson", "model.numbers.location=2.0")
    config = opened(folder / "counts", "model.loss=huber", "model.numbers.scale=3.0").config
    assert (config.model.loss, config.model.numbers.scale) == ("huber", 3.0)
    assert config.evaluate.early_stopping.metric == "rmse"
    assert opened(folder / "counts").config == open_data(opened(folder / "counts").config).config


def test_a_run_is_not_scored_by_labels_of_another_kind(folder, run, tmp_path):
    columns = {**log(60), "rating": [k % 2 for k in range(60)]}
    schema = WEIGHTED.replace('kind = "number"\n', "")
    (tmp_path / "columns.toml").write_text(schema)
    path = write(tmp_path / "log.csv", columns)
    arguments = ["--schema", str(tmp_path / "columns.toml"), "--input", str(path), "--out", str(tmp_path / "clicks")]
    assert cli.main(["prepare", "csv", *arguments, "--quiet", "--vocabulary-from", str(folder / "data")]) == 0
    with pytest.raises(DatasetError, match=r"the label of .* is a click where the run was trained with a number"):
        evaluate_checkpoint(run, tmp_path / "clicks", split="test")


@pytest.mark.parametrize(("text", "message"), [
    (SCHEMA.replace('"number"', '"numbers"'), "kind of label 'rating' is 'numbers'; choose one of binary, number"),
    (SCHEMA.replace("[[dense]]", "positive_at_least = 4\n[[dense]]", 1), "leave positive_values and positive_at"),
])  # fmt: skip
def test_schemas_that_do_not_fit(folder, capsys, text, message):
    import re

    assert prepare(folder, log(30), "none", schema=text) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("value", ["", "nan", "inf", "1e39", "good"])
def test_bad_numbers_are_bad_lines(tmp_path, capsys, value):
    columns = log(40)
    columns["rating"] = [*map(str, columns["rating"][:5]), value, *map(str, columns["rating"][6:])]
    assert prepare(tmp_path, columns, "data") == 2
    assert "data.csv:7: field 'rating'" in capsys.readouterr().err


def test_init_tries_models_by_rmse(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_trials, "STEPS", 60)
    candidates = first_config.candidates
    monkeypatch.setattr(first_config, "candidates", lambda facts: candidates(facts)[:2])
    out = tmp_path / "init.toml"
    assert cli.main(["init", str(folder / "data"), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("valid RMSE ") == 2
    assert "log loss" not in said + out.read_text()
    config = load_config(out)
    assert config.evaluate.early_stopping.metric == "rmse"
    assert not config.model.calibrate
    assert "valid RMSE" in (page := out.with_suffix(".html").read_text())
    assert "unit of the label" in page
    arguments = [str(out), f"out={tmp_path / 'run'}", "epochs=2", "max_steps=60", "log.progress=off"]
    assert cli.main(["train", *arguments]) == 0
    metrics = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())["splits"]["test"]
    assert metrics["r2"] > 0


def test_fit_takes_a_number_and_predicts_numbers():
    rows = pd.DataFrame(log())
    own = {"model.members": 1, "log.tensorboard": False}
    model = jrec.fit(rows, label="rating", numeric=True, weight="w", quick=True, quiet=True, epochs=5, config=own)
    assert model.metrics["test"]["r2"] > 0.2
    predictions = model.predict(rows)
    assert abs(predictions.mean() - rows.rating.mean()) < 50
    metrics, counted = model.evaluate(rows), rows[rows.w > 0]
    error = np.average((model.predict(counted) - counted.rating) ** 2, weights=counted.w) ** 0.5
    assert metrics["rmse"] == pytest.approx(error, rel=1e-4)
    assert "RMSE" in repr(model)
    assert "R2" in model._repr_html_()
    with pytest.raises(DatasetError, match=r"has a label of two, or say|numeric=True of jrec\.fit"):
        jrec.fit(rows, label="rating", quick=True, quiet=True)
    with pytest.raises(DatasetError, match="is no number in all lines"):
        jrec.fit(rows.assign(rating="good"), label="rating", numeric=True, quick=True, quiet=True)
    with pytest.raises(ConfigError, match="numeric is True, but the schema"):
        jrec.fit(rows, schema="columns.toml", numeric=True)


def test_compression_compares_rmse(folder, run, tmp_path, capsys):
    small = tmp_path / "small"
    assert cli.main(["compress", str(run), "--tables", "user", "--rank", "1", "--cores", "2", "--out", str(small)]) == 0
    content, printed = json.loads((small / "report" / "compression.json").read_text()), capsys.readouterr().out
    for key, checkpoint in (("before", run), ("after", small)):
        rmse = regression.evaluate_numbers(evaluate_checkpoint(checkpoint, folder / "data", split="test").scores).rmse
        assert content[key]["test"]["rmse"] == pytest.approx(rmse)
        assert f"{rmse:.4f}" in printed
    assert content["after"]["test"]["rmse"] > content["before"]["test"]["rmse"] * 1.01
    assert "RMSE before" in printed
    assert " AUC" not in printed


def test_hot_and_cold_batches_are_scheduled_by_rmse(folder, tmp_path):
    """Rates follow the RMSE after each schedule, and the model is as good as one of plain batches, or nearly."""
    fae = ["fae", "pack", str(folder / "data"), "--budget", "500B", "--dim", "4", "--small", "0", "--quiet"]
    assert cli.main([*fae, "--out", str(tmp_path / "fae")]) == 0
    overrides = ["schedule=fae", "epochs=6", "evaluate.baselines=auto", "fae.batches=0"]
    out = train_command(tmp_path, tmp_path / "fae", *overrides, out="run", text=CONFIG)
    content = json.loads((out / "report" / "metrics.json").read_text())
    assert content["splits"]["test"]["r2"] > 0.5
    assert content["fae"]["hot_examples"] * content["fae"]["cold_examples"] > 0
    assert "baselines" not in content
    rmse = content["fae"]["test_losses"]
    assert all(10 < loss < 1_000 for loss in rmse)
    assert rmse[-1] < rmse[0]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record["rmse"] for record in records if record["split"] == "valid" and "rmse" in record}
    decided = {record["step"]: record["test_loss"] for record in records if record["split"] == "schedule"}
    assert list(decided.values()) == rmse
    assert any(decided[step] == pytest.approx(by_step[step]) for step in by_step.keys() & decided.keys())
    assert "RMSE by schedule" in (out / "report" / "report.html").read_text()


def test_less_error_is_better():
    best = BestStep("rmse", 2)
    evaluations = [
        regression.evaluate_numbers(NumberScores(predictions=np.array([p, 0.0]), labels=np.array([1.0, 0.0])))
        for p in (0.5, 0.9, 0.6)
    ]
    assert [best.observe(step, one) for step, one in enumerate(evaluations)] == [True, True, False]
    assert best.step == 1


def test_what_matters_to_a_number_and_why_it_is_what_it_is(folder, run, tmp_path, capsys):
    loaded = jrec.load_run(run)
    scores = evaluate_checkpoint(run, folder / "data", split="test").scores
    importance = loaded.importance("test", repeats=2)
    assert importance["metrics"]["rmse"] == pytest.approx(regression.evaluate_numbers(scores).rmse)  # by weights
    assert importance["columns"]["rmse"] == ["RMSE rises by", "unit of the label"]
    rises = {line["feature"]: line["rmse"] for line in importance["features"]}
    assert min(rises["user"], rises["item"]) > max(10, 2 * rises["price"])
    columns = {name: column[:20] for name, column in log().items() if name in ("price", "user", "item")}
    whole = loaded.predict(columns)
    changes = whole - loaded.predict({**columns, "user": [None] * 20})
    for own, change in zip(loaded.why(columns, k=3), changes, strict=True):
        assert dict(own)["user"] == pytest.approx(change, rel=1e-4, abs=0.01)  # in units of the label, hundreds of them
    assert cli.main(["eval", str(run), str(folder / "data"), "--importance", "--repeats", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["importance"]["features"][0]["rmse"] > 10
    out = tmp_path / "why.csv"
    assert cli.main(["predict", str(run), str(folder / "data.csv"), "--why", "1", "--out", str(out), "--quiet"]) == 0
    assert out.read_text().splitlines()[0] == '"row","label","prediction","why_1","why_1_change"'
