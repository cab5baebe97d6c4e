"""Several labels, of which some are clicks and some are numbers: from a log to reports, predictions and answers."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare_weights import prepare as prepare_log
from test_prepare_weights import write
from train_command import check_goes_on, train_command

import jrec
import jrec.serving
from jrec import cli
from jrec.app import first_config, first_trials
from jrec.app.config import load_config
from jrec.app.dataset import open_data
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.report.ranking import evaluated_by_task
from jrec.batch import Batch
from jrec.data.blocks import ShardReader
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError
from jrec.metrics import Scores, evaluate_tasks
from jrec.nn import huber, multi_task_loss, of_numbers, poisson, squared_error
from jrec.regression import Numbers, NumberScores, rmse
from jrec.run.evaluation import collected
from jrec.serving.http import bodies
from jrec.serving.http.metadata import described_model

SCHEMA = """
[[labels]]
column = "click"
[[labels]]
column = "profit"
kind = "number"
[[labels]]
column = "views"
kind = "number"
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
top_mlp = [16, 1]
[model.multi_task.losses]
views = "poisson"
[optimizer]
name = "adam"
learning_rate = 0.01
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 20
baselines = "on"
importance = 1
[log]
tensorboard = false
"""
TASKS = ("click", "profit", "views")


def log(rows=1_500, seed=0):
    """A click, and what is known of clicks: a profit around 0, -1 among them, and how often somebody looked."""
    rng, tastes = np.random.default_rng(seed), np.random.default_rng(9)
    user, item, price = rng.integers(0, 20, rows), rng.integers(0, 12, rows), rng.random(rows).round(3)
    mean = tastes.normal(size=20)[user] + tastes.normal(size=12)[item] + price
    click = rng.random(rows) < 1 / (1 + np.exp(-mean))
    profit = np.where(rng.random(rows) < 0.1, -1, (100 * mean + rng.normal(0, 20, rows)).round(1))
    views = rng.poisson(np.exp(mean / 2))
    return {
        "click": [str(int(c)) for c in click],
        "profit": [str(p) if c else "" for p, c in zip(profit, click, strict=True)],
        "views": [str(v) if k % 7 else "" for k, v in enumerate(views)],
        "price": [*map(str, price)],
        "user": [f"u{n}" for n in user],
        "item": [f"i{n}" for n in item],
    }


def asked(columns):
    """What a request says of lines."""
    return {"user": columns["user"], "item": columns["item"], "price": [*map(float, columns["price"])]}


def prepare(folder, columns, out, *options, schema=SCHEMA):
    return prepare_log(folder, write(folder / f"{out}.csv", columns), out, *options, schema=schema)


def values(columns, name):
    """The labels of a column, NaN where it is blank."""
    return np.array([float(text) if text else np.nan for text in columns[name]], np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    assert prepare(folder, log(), "data") == 0
    (folder / "run.toml").write_text("[data]\npath = 'data'\n" + CONFIG.replace("[data]\n", "", 1))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return train_command(folder, folder / "data", "epochs=4", text=CONFIG)


@pytest.fixture(scope="module")
def content(run):
    return json.loads((run / "report" / "metrics.json").read_text())


def opened(folder, *overrides, data="data"):
    return open_data(load_config(str(folder / "run.toml"), [f"data.path={folder / data}", *overrides]))


def test_a_dataset_keeps_numbers_and_which_are_not_known(folder):
    schema, columns = Schema.load(folder / "data"), log()
    assert (schema.tasks, schema.numbers, list(schema.numbers_by_label)) == (TASKS, None, ["profit", "views"])
    train = values(columns, "profit")[: schema.splits["train"].examples].astype(np.float64)
    said = schema.numbers_by_label["profit"]
    assert said.mean == pytest.approx(np.nanmean(train))
    assert said.deviation == pytest.approx(np.nanstd(train))
    assert said.least == pytest.approx(np.nanmin(values(columns, "profit")))
    assert "labels click, profit, views (numbers: profit, views)" in repr(schema)
    readers = [ShardReader(folder / "data", shard) for shard in schema.splits["train"].shards]
    blocks = [reader.read(block) for reader in readers for block in range(len(reader))]
    stored = np.concatenate([block["profit"] for block in blocks])
    np.testing.assert_array_equal(stored, train.astype(np.float32))
    assert (stored == -1).any()  # which is a number as any other
    assert set(np.concatenate([block["label"] for block in blocks]).tolist()) == {0.0, 1.0}


def batch_of(labels, mask):
    first, *further = labels
    return Batch(
        dense=jnp.zeros((len(first), 0)), labels=jnp.asarray(first), mask=jnp.asarray(mask), bags={},
        extras=dict(zip(TASKS[1:], map(jnp.asarray, further), strict=True)),
    )  # fmt: skip


def drawn(examples=40, seed=0, members=()):
    rng = np.random.default_rng(seed)
    outputs = {task: rng.normal(size=(examples, *members)).astype(np.float32) for task in TASKS}
    numbers = [np.where(rng.random(examples) < 0.3, np.nan, rng.normal(3, 2, examples)) for _ in range(2)]
    labels = [rng.choice([-1, 0, 1], examples), numbers[0], np.abs(numbers[1]).round()]
    return outputs, [own.astype(np.float32) for own in labels], rng.choice([0.0, 0.5, 1.0], examples).astype(np.float32)


@pytest.mark.parametrize("members", [(), (3,)])
def test_the_loss_is_the_sum_over_known_labels(members):
    outputs, labels, mask = drawn(members=members)
    scale, weights = Numbers(location=3.0, scale=2.0), {"click": 1.0, "profit": 0.5, "views": 0.25}
    own = {"profit": of_numbers(huber(delta=0.7), scale), "views": poisson}
    loss = multi_task_loss(weights, label="click", number_losses=own)
    arrays = {task: jnp.asarray(own) for task, own in outputs.items()}
    found, gradients = jax.value_and_grad(loss)(arrays, batch_of(labels, mask))
    expected = 0.0
    for (task, weight), own_labels in zip(weights.items(), labels, strict=True):
        known = own_labels >= 0 if task == "click" else ~np.isnan(own_labels)
        y = own_labels[known].astype(np.float64).reshape(-1, *[1] * len(members))
        z = outputs[task][known].astype(np.float64)
        error = np.abs(z - (y - 3) / 2)
        losses = {
            "click": np.logaddexp(0, z) - y * z,
            "profit": np.where(error < 0.7, error**2 / 2, 0.7 * (error - 0.35)),
            "views": np.exp(z) - y * z,
        }[task]
        losses = losses.mean(axis=1) if members else losses
        expected += weight * np.average(losses, weights=mask[known])
        gradient = np.asarray(gradients[task])
        assert np.isfinite(gradient).all()
        assert (gradient[~known] == 0).all()
        assert (gradient[known & (mask > 0)] != 0).all()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_a_known_number_has_no_loss_of_it():
    outputs, labels, mask = drawn()
    labels[1][:] = np.nan
    loss = multi_task_loss({"click": 0.0, "profit": 1.0}, label="click", number_losses={"profit": squared_error})
    assert float(loss({task: jnp.asarray(own) for task, own in outputs.items()}, batch_of(labels, mask))) == 0


def test_losses_name_their_tasks():
    with pytest.raises(ValueError, match="number_losses has 'views', but the tasks are click"):
        multi_task_loss({"click": 1.0}, number_losses={"views": poisson})


def test_scores_are_of_known_labels():
    by_label = {"profit": Numbers(scale=2.0), "views": Numbers(link="log")}
    pieces = [drawn(seed=seed) for seed in range(3)]
    pairs = ((outputs, batch_of(labels, mask)) for outputs, labels, mask in pieces)
    scores = collected(pairs, tasks=TASKS, numbers=by_label)
    assert isinstance(scores, Scores)
    for k, (task, numbers) in enumerate(by_label.items(), 1):
        kept = [~np.isnan(labels[k]) & (mask > 0) for _, labels, mask in pieces]
        outputs = np.concatenate([own[task][keep] for (own, _, _), keep in zip(pieces, kept, strict=True)])
        labels = np.concatenate([own[k][keep] for (_, own, _), keep in zip(pieces, kept, strict=True)])
        weights = np.concatenate([own[keep] for (_, _, own), keep in zip(pieces, kept, strict=True)])
        own = scores.tasks[task]
        assert isinstance(own, NumberScores)
        np.testing.assert_array_equal(own.labels, labels)
        np.testing.assert_array_equal(own.predictions, numbers.predictions(outputs))
        found: Any = evaluate_tasks(scores)[task]
        assert found.rmse == pytest.approx(rmse(own.predictions, labels, weights=weights))


def test_losses_and_scales_come_from_the_dataset(folder):
    data = opened(folder)
    heads, said = data.config.model.multi_task, Schema.load(folder / "data").numbers_by_label
    assert heads.losses == {"profit": "squared", "views": "poisson"}
    assert heads.numbers["profit"].location == said["profit"].mean
    assert heads.numbers["profit"].scale == said["profit"].deviation
    assert (heads.numbers["views"].location, heads.numbers["views"].scale) == (0.0, said["views"].mean)
    assert open_data(data.config).config == data.config
    own = opened(folder, "model.multi_task.losses.profit=huber", "model.multi_task.numbers.profit.huber_delta=2.0")
    assert own.config.model.multi_task.losses["profit"] == "huber"
    assert own.config.model.multi_task.numbers["profit"].huber_delta == 2
    task = opened(folder, "evaluate.early_stopping.task=profit").config.evaluate.early_stopping
    assert (task.task, task.metric) == ("profit", "rmse")
    task = opened(folder, "evaluate.early_stopping.task=views", "evaluate.early_stopping.metric=mae")
    assert task.config.evaluate.early_stopping.metric == "mae"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.loss=huber", r"model.loss is set, but .* several labels; set model.multi_task.losses.click"),
        ("model.numbers.scale=2.0", r"model.numbers is set, but .* set model.multi_task.numbers.click"),
        ("model.multi_task.losses.click=squared", r"losses.click is 'squared', which is of numbers, but the labels of"),
        ("model.multi_task.losses.profit=poisson", r"losses.profit is 'poisson', which is of counts, but the least"),
        ("model.multi_task.losses.bought=squared", "losses names 'bought', but the tasks are click, profit, views"),
        ("model.multi_task.numbers.click.scale=2.0", r"numbers.click is set, but that label of .* is 0 and 1"),
        ("model.multi_task.numbers.profit.scale=0.0", "multi_task.numbers.profit.scale is 0.0; it must be above 0"),
        ("model.multi_task.numbers.views.location=1.0", r"numbers.views.location is 1, but .*losses.views 'poisson'"),
        ("evaluate.early_stopping.metric=rmse", r"metric is 'rmse', which the label 'click' of .* does not have"),
        ("model.multi_task.losses.profit=log_loss", r"log_loss"),
    ],
)
def test_what_does_not_go_with_the_labels(folder, override, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder, override)


def test_a_run_learns_all_of_them(content):
    tasks = content["tasks"]
    assert list(tasks) == list(TASKS)
    assert tasks["click"]["splits"]["test"]["auc"] > 0.65
    assert tasks["profit"]["splits"]["test"]["r2"] > 0.5
    assert tasks["views"]["splits"]["test"]["r2"] > 0.2
    assert tasks["views"]["splits"]["test"]["poisson_deviance"] > 0
    assert content["splits"]["test"] == tasks["click"]["splits"]["test"]
    assert "residuals" in tasks["profit"]
    assert "residuals" not in tasks["click"]
    assert "logistic_regression" in content["baselines"]
    importance = content["importance"]["tasks"]
    assert list(importance["profit"]["columns"]) == ["rmse", "mae"]
    assert list(importance["click"]["columns"]) == ["log_loss", "auc"]
    assert {line["feature"] for line in importance["profit"]["features"]} == {"user", "item", "price"}


def test_a_run_goes_on_by_the_same_command(folder):
    """What the dataset settled at its start, such as scales of numbers, is no difference."""
    check_goes_on(folder, folder / "data", text=CONFIG)


def test_the_report_has_a_table_of_each_kind(run):
    page = (run / "report" / "report.html").read_text()
    assert "Tasks on the test split" in page
    assert "Tasks that are numbers, on the test split" in page
    assert "Residuals on test, profit" in page
    assert "Calibration on test" in page
    assert "Importance of features on test, views" in page


def test_predictions_of_a_log(folder, run, tmp_path):
    later = log(200, seed=5)
    write(tmp_path / "later.csv", later)
    out = tmp_path / "scores.parquet"
    assert cli.main(["predict", str(run), str(tmp_path / "later.csv"), "--out", str(out), "--quiet", "--why", "1"]) == 0
    scores = pq.read_table(out)
    assert [name for name in scores.column_names if not name.startswith("why")] == [
        "row", "label_click", "label_profit", "label_views", "score_click", "prediction_profit", "prediction_views",
        "logit_click",
    ]  # fmt: skip
    raw, loaded = asked(later), jrec.load_run(run)
    found = loaded.predict(raw)
    assert list(found) == list(TASKS)
    for task in TASKS[1:]:
        labels = [None if text == "" else float(np.float32(text)) for text in later[task]]
        assert scores[f"label_{task}"].to_pylist() == labels
        np.testing.assert_allclose(scores[f"prediction_{task}"].to_numpy(), found[task], rtol=1e-5)
    assert (found["views"] > 0).all()
    assert found["profit"].std() > 20
    reasons = loaded.why(raw, 1)
    (feature, change), *_ = reasons["profit"][0]
    assert feature in raw
    assert np.isfinite(change)
    assert scores["why_1_profit"].to_pylist()[0] == feature


def test_answers_of_the_served_export(folder, run, tmp_path):
    assert cli.main(["export", str(run), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    columns = asked(log(50, seed=6))
    model, expected = jrec.serving.load(tmp_path / "export"), jrec.load_run(run).predict(columns)
    found = model(columns)
    for task in TASKS:
        np.testing.assert_allclose(found[task], expected[task], rtol=1e-5)
    assert {output["name"] for output in described_model(model)["outputs"]} == {
        "score_click", "prediction_profit", "prediction_views",
    }  # fmt: skip
    scored = model.scored(columns)
    body = json.loads(bodies.answer(scored, "1", bodies.JSON))
    assert list(body["scores"]) == ["click"]
    assert sorted(body["predictions"]) == ["profit", "views"]
    assert body["predictions"]["profit"] == pytest.approx(found["profit"].tolist())
    arrow = pa.ipc.open_stream(bodies.answer(scored, "1", bodies.ARROW)).read_all()
    assert sorted(arrow.column_names) == ["prediction_profit", "prediction_views", "score_click"]
    assert scored.of_rows(slice(0, 3), 1).predictions()[2]["profit"] == pytest.approx(float(found["profit"][2]))


def test_eval_has_the_metrics_of_each(folder, run, content, capsys):
    assert cli.main(["eval", str(run), str(folder / "data"), "--split", "test"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for task in TASKS:
        of_report = content["tasks"][task]["splits"]["test"]
        assert {key: printed["tasks"][task][key] for key in of_report} == of_report


def test_evaluate_of_a_program(folder, run):
    loaded, columns = jrec.load_run(run), log(300, seed=7)
    restored = loaded.restored
    encoded = loaded.encoder.columns(asked(columns))
    batches = [encoded.by_name() | {"label": values(columns, "click")} | {n: values(columns, n) for n in TASKS[1:]}]
    by_label = restored.config.model.numbers_by_label
    found: Any = restored.run.evaluate(batches, dense=["price"], extras=TASKS[1:], numbers=by_label)
    predicted, profit = loaded.predict(asked(columns))["profit"], values(columns, "profit")
    known = ~np.isnan(profit)
    assert found["profit"].examples == known.sum()
    assert found["profit"].rmse == pytest.approx(rmse(predicted[known], profit[known]), rel=1e-5)
    assert 0 < found["click"].auc < 1
    with pytest.raises(ValueError, match="numbers are of label '', but the model's outputs are of click"):
        restored.run.evaluate(batches, dense=["price"], extras=TASKS[1:], numbers=Numbers())


def test_a_run_is_not_scored_by_labels_of_another_kind(folder, run, tmp_path):
    clicks = {**log(60), "profit": ["1"] * 60}
    schema = SCHEMA.replace('column = "profit"\nkind = "number"', 'column = "profit"')
    assert prepare(tmp_path, clicks, "clicks", "--vocabulary-from", str(folder / "data"), schema=schema) == 0
    with pytest.raises(DatasetError, match=r"label 'profit' of .* is a click where the run was trained with a number"):
        evaluate_checkpoint(run, tmp_path / "clicks", split="test")


@pytest.fixture(scope="module")
def number_first(folder):
    """A run whose first label is the profit."""
    first, second, rest = SCHEMA.split("[[labels]]")[1:]
    schema = "".join(f"[[labels]]{part}" for part in (second, first, rest))
    assert prepare(folder, log(), "first", schema=schema) == 0
    options = ("epochs=3", "mesh.devices=2", "data.micro_batches=2", "evaluate.group=user")
    return train_command(folder, folder / "first", *options, out="first_run", text=CONFIG)


def test_the_first_label_may_be_a_number(folder, number_first, capsys):
    content = json.loads((number_first / "report" / "metrics.json").read_text())
    assert list(content["tasks"]) == ["profit", "click", "views"]
    assert content["splits"]["test"] == content["tasks"]["profit"]["splits"]["test"]
    assert content["splits"]["test"]["r2"] > 0.4
    assert content["numbers"]["loss"] == "squared"
    assert 0.5 < content["groups"]["splits"]["test"]["xgauc"] < 1
    assert content["baselines"]["mean"]["splits"]["test"]["rmse"] > content["splits"]["test"]["rmse"]
    assert "Tasks on the test split" in (number_first / "report" / "report.html").read_text()
    records = [json.loads(line) for line in (number_first / "metrics.jsonl").read_text().splitlines()]
    assert {record["split"] for record in records} >= {"valid", "valid/click", "valid/views"}
    capsys.readouterr()
    assert cli.main(["eval", str(number_first), str(folder / "first"), "--split", "valid"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]["click"]["auc"] > 0.6


def test_the_terminal_shows_all(run, number_first, content):
    from jrec.app.report.terminal import summary

    lines = summary(content).splitlines()
    assert re.match(r"split +AUC", lines[0])
    assert any(re.match(r"test, profit +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +- *$", line) for line in lines)
    assert any(line.startswith("test, baselines: logistic regression") for line in lines)
    first = summary(json.loads((number_first / "report" / "metrics.json").read_text())).splitlines()
    assert any(line.startswith("test, click") for line in first)
    assert any(line.startswith("  the mean, test") for line in first)


def test_target_means_of_a_number_that_is_not_always_known(tmp_path):
    means = '[[target_mean]]\nof = ["item"]\nlabel = "profit"\nfolds = 0\nsmoothing = 1.0\n'
    columns = log(300)
    assert prepare(tmp_path, columns, "data", schema=SCHEMA + means) == 0
    schema = Schema.load(tmp_path / "data")
    statistic = next(feature.statistic for feature in schema.dense if feature.statistic is not None)
    profit = values(columns, "profit")[: schema.splits["train"].examples].astype(np.float64)
    assert statistic.prior == pytest.approx(np.nanmean(profit), rel=1e-6)


def test_a_number_that_training_never_knows(tmp_path, capsys):
    columns = log(100)
    columns["views"] = [""] * 100
    assert prepare(tmp_path, columns, "data") == 2
    assert "label 'views' is known of none of the 80 training examples" in capsys.readouterr().err


def test_a_later_log_that_does_not_know_a_number_yet(folder, run, tmp_path):
    columns = {**log(60, seed=8), "views": [""] * 60}
    options = ["--vocabulary-from", str(folder / "data"), "--split", "0,0,1"]
    assert prepare(tmp_path, columns, "later", *options) == 0
    known = [Schema.load(path).numbers_by_label["views"] for path in (tmp_path / "later", folder / "data")]
    assert known[0] == known[1]
    scored = evaluate_checkpoint(run, tmp_path / "later", split="test").scores
    assert list(evaluated_by_task(scored)) == ["click", "profit"]


@pytest.mark.parametrize("value", ["1e39", "good"])
def test_bad_numbers_are_bad_lines(tmp_path, capsys, value):
    columns = log(40)
    columns["profit"] = [*columns["profit"][:5], value, *columns["profit"][6:]]
    assert prepare(tmp_path, columns, "data") == 2
    assert "data.csv:7: field 'profit'" in capsys.readouterr().err


def test_loads_as_a_dataset_without_numbers_did(folder):
    """What older datasets lack is not written where nothing is said."""
    written = json.loads((folder / "data" / "schema.json").read_text())
    assert "numbers" not in written
    assert list(written["further_numbers"]) == ["profit", "views"]
    with pytest.raises(DatasetError, match="numbers of 'click', which is none of its further labels"):
        dataclasses.replace(
            schema := Schema.load(folder / "data"), further_numbers={"click": schema.numbers_by_label["profit"]}
        )


def test_init_tries_models_of_several_labels(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_trials, "STEPS", 60)
    candidates = first_config.candidates
    monkeypatch.setattr(first_config, "candidates", lambda facts: candidates(facts)[:2])
    out = tmp_path / "init.toml"
    assert cli.main(["init", str(folder / "data"), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("valid log loss ") == 2
    assert "four experts with a gate for each label" in said
    assert "Of the labels click, profit, views the first decides." in out.read_text()
    config = load_config(out)
    assert not config.model.calibrate
    assert open_data(config).config.model.multi_task.tasks == TASKS


def test_rules_for_several_labels(number_first, folder):
    schema = Schema.load(folder / "first")
    facts = first_config.facts_of(folder / "first", schema)
    found = facts.candidates()
    assert facts.metric.key == "rmse"
    assert all(candidate.top for candidate in found)
    assert [candidate.experts for candidate in found[:3]] == [1, 4, 1]
    assert any(candidate.experts == 8 for candidate in found[1].variants())
    keys = {key.name: key.value for key in facts.config("data", found[1])}
    assert keys["experts"] == 4
    assert "calibrate" not in keys
    one = dataclasses.replace(facts, tasks=())
    assert [candidate for candidate in one.candidates() if not candidate.top]
    assert all(candidate.experts == 1 for candidate in one.candidates())


def test_fit_takes_several_labels(tmp_path):
    columns = log(900)
    rows = pd.DataFrame({**asked(columns), **{name: values(columns, name) for name in TASKS}})
    own = {"model.members": 1, "log.tensorboard": False}
    numbers = list(TASKS[1:])
    model = jrec.fit(rows, label=list(TASKS), numeric=numbers, quick=True, quiet=True, epochs=3, config=own)
    found = model.predict(rows.drop(columns=list(TASKS)))
    assert list(found) == list(TASKS)
    assert ((found["click"] > 0) & (found["click"] < 1)).all()
    assert abs(found["profit"].mean() - rows.profit.mean()) < 60
    measured = model.evaluate(rows)
    assert measured["auc"] == measured["tasks"]["click"]["auc"] > 0.6
    profit = values(columns, "profit")
    known = ~np.isnan(profit)
    assert measured["tasks"]["profit"]["examples"] == known.sum()
    assert measured["tasks"]["profit"]["rmse"] == pytest.approx(rmse(found["profit"][known], profit[known]), rel=1e-5)
    assert list(model.metrics["test"]["tasks"]) == list(TASKS)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    of_file = model.predict(str(tmp_path / "rows.csv"))
    np.testing.assert_allclose(of_file["views"], found["views"], rtol=1e-5)
    assert model.evaluate(rows.drop(columns="views"))["tasks"].keys() == {"click", "profit"}
    with pytest.raises(ConfigError, match="numeric names 'seconds', but the labels are click"):
        jrec.fit(rows, label="click", numeric=["seconds"], quick=True, quiet=True)
