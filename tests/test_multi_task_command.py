"""Several labels by the command: training, evaluation and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from task_logs import CONFIG, SCHEMA, TASKS, columns, write_log

from jrec import cli
from jrec.app.config import load_config
from jrec.app.dataset import check_tasks, open_data
from jrec.app.preflight import check_start
from jrec.app.report.running_auc import RunningAuc
from jrec.app.reported_run import train_and_report
from jrec.batch import Batch
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError
from jrec.metrics import Scores, evaluate, evaluate_tasks
from jrec.nn import multi_task_loss
from jrec.run.evaluation import collected


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A prepared log of 2,000 lines, beside a configuration."""
    return prepared(tmp_path_factory.mktemp("tasks"), columns(2_000))


def prepared(folder, log):
    """A folder with a prepared log and a configuration."""
    (folder / "columns.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG)
    path = write_log(folder / "log.csv", log)
    arguments = ["--schema", str(folder / "columns.toml"), "--input", path, "--out", str(folder / "data")]
    assert cli.main(["prepare", "csv", *arguments, "--quiet"]) == 0
    return folder


def config_of(folder, *overrides):
    return load_config(str(folder / "run.toml"), [f"data.path={folder / 'data'}", f"out={folder / 'run'}", *overrides])


def auc(logits, labels):
    """By all pairs."""
    better = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    return np.mean((better > 0) + (better == 0) / 2)


def log_loss(logits, labels):
    z = logits.astype(np.float64)
    return np.mean(np.logaddexp(0, z) - labels * z)


def batch_of(labels, purchases, mask):
    return Batch(
        dense=jnp.zeros((len(labels), 0)), labels=jnp.asarray(labels), mask=jnp.asarray(mask), bags={},
        extras={"purchase": jnp.asarray(purchases)},
    )  # fmt: skip


def drawn(examples: int, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray], np.ndarray]:
    """Logits by task, and a batch of labels, some unknown, some padding."""
    rng = np.random.default_rng(seed)
    logits = {task: rng.normal(size=examples).astype(np.float32) for task in TASKS}
    labels = [rng.choice([-1, 0, 1], examples).astype(np.float32) for _ in TASKS]
    mask = (np.arange(examples) < examples - 3).astype(np.float32)
    return logits, labels, mask


def test_scores_are_of_known_labels():
    pieces = [drawn(40, seed) for seed in range(3)]
    scores = collected(((z, batch_of(labels[0], labels[1], mask)) for z, labels, mask in pieces), tasks=TASKS)
    for k, task in enumerate(TASKS):
        kept = [(labels[k] >= 0) & (mask == 1) for _, labels, mask in pieces]
        logits = np.concatenate([z[task][keep] for (z, _, _), keep in zip(pieces, kept, strict=True)])
        labels = np.concatenate([labels[k][keep] for (_, labels, _), keep in zip(pieces, kept, strict=True)])
        assert scores.tasks[task].logits.tolist() == logits.tolist()
        found = evaluate_tasks(scores)[task]
        assert found.examples == len(labels) < 111
        assert found.auc == pytest.approx(auc(logits, labels))
        assert found.log_loss == pytest.approx(log_loss(logits, labels))
    assert evaluate(scores) == evaluate_tasks(scores)["click"]


def test_a_task_without_known_labels_has_no_metrics():
    logits, (clicks, _), mask = drawn(20, 0)
    scores = collected([(logits, batch_of(clicks, np.full(20, -1, np.float32), mask))], tasks=TASKS)
    assert list(evaluate_tasks(scores)) == ["click"]


def test_running_auc_of_a_task():
    logits, (clicks, _), mask = drawn(400, 1)
    found = RunningAuc.empty(task="click").updated(
        {task: jnp.asarray(z) for task, z in logits.items()}, jnp.asarray(clicks), jnp.asarray(mask)
    )
    known = (clicks >= 0) & (mask == 1)
    assert found.value() == pytest.approx(auc(logits["click"][known], clicks[known]), abs=found.error_bound())
    assert np.asarray(found.histograms).sum() == known.sum()


def test_loss_with_the_first_label_among_the_labels():
    logits, (clicks, purchases), mask = drawn(50, 2)
    loss = multi_task_loss({"click": 1.0, "purchase": 0.25}, label="click")
    found = loss({task: jnp.asarray(z) for task, z in logits.items()}, batch_of(clicks, purchases, mask))
    expected = 0.0
    for weight, task, labels in ((1.0, "click", clicks), (0.25, "purchase", purchases)):
        known = (labels >= 0) & (mask == 1)
        expected += weight * log_loss(logits[task][known], labels[known])
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_tasks_come_from_the_dataset(dataset):
    data = open_data(config_of(dataset))
    assert data.config.model.multi_task.tasks == TASKS
    assert data.config.model.multi_task.weight_by_task == {"click": 1.0, "purchase": 0.5}
    assert open_data(data.config).config == data.config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.multi_task.tasks=['purchase','click']", r"tasks is \['purchase', 'click'\], but the labels of"),
        ("model.multi_task.weights.view=1.0", "weights names 'view', but the tasks are click, purchase"),
        ("model.multi_task.weights={click=0.0,purchase=0.0}", "weights are all 0"),
        ("model.wide=true", r"model.wide is true, which is of models with one label, but there are 2"),
        ("model.calibrate=true", "model.calibrate is true, which is of models with one label"),
        ("model.batch_norm=true", "model.batch_norm is true, which is of models with one label"),
        ("model.interaction=fm", "model.interaction is 'fm', which is of models with one label"),
        ("model.top_mlp=[1]", r"model.top_mlp is \[1\], but its layers before the logit are what tasks share"),
        ("evaluate.early_stopping.task=view", "early_stopping.task is 'view', but the labels of .* click, purchase"),
    ],
)
def test_what_is_refused_before_training(dataset, override, message):
    with pytest.raises(ConfigError, match=message):
        check_start(config_of(dataset, override), resume=False, overwrite=False)


def test_a_network_by_a_factory_learns_several_labels(dataset, tmp_path, capsys):
    config, data = str(tmp_path / "own.toml"), f"data.path={dataset / 'data'}"
    text = f"[data]\npath = '{dataset / 'data'}'\nbatch_size = 128\n[model]\nfactory = 'own_model:several'\n"
    (tmp_path / "own.toml").write_text(text + "[log]\nprogress = 'off'\ntensorboard = false\n")
    assert cli.main(["train", config, data, f"out={tmp_path / 'run'}", "epochs=4", "optimizer.learning_rate=0.05"]) == 0
    tasks = report(tmp_path / "run")["tasks"]
    assert list(tasks) == list(TASKS)
    assert tasks["purchase"]["splits"]["test"]["auc"] > 0.6  # the price, of which it is linear; clicks are products
    wrong = ["train", config, data, f"out={tmp_path / 'wrong'}", "model.factory=own_model:make"]
    assert cli.main(wrong) == 2
    assert "return a dictionary by task (click, purchase), of float32" in capsys.readouterr().err


def test_one_label_and_several_do_not_mix(dataset, tmp_path):
    schema = Schema.load(dataset / "data")
    one = dataclasses.replace(schema, tasks=())
    several = open_data(config_of(dataset)).config
    check_tasks(several, schema)
    check_tasks(several, dataclasses.replace(one, labels=False))
    with pytest.raises(DatasetError, match=r"has one label where the run was trained with \['click', 'purchase'\]"):
        check_tasks(several, one)
    single = load_config(str(dataset / "run.toml"), [f"data.path={dataset / 'data'}"])
    with pytest.raises(DatasetError, match=r"has \['click', 'purchase'\] where the run was trained with one label"):
        check_tasks(single, schema)
    (tmp_path / "log.csv").write_text("click,user\n" + "0,a\n1,b\n" * 20)
    (tmp_path / "columns.toml").write_text('[label]\ncolumn = "click"\n[[categorical]]\ncolumn = "user"\n')
    arguments = ["--schema", str(tmp_path / "columns.toml"), "--input", str(tmp_path / "log.csv"), "--quiet"]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(tmp_path / "data")]) == 0
    with pytest.raises(ConfigError, match=r"model.multi_task is set, but .* has one label"):
        open_data(config_of(dataset, f"data.path={tmp_path / 'data'}"))


@pytest.fixture(scope="module")
def run(dataset):
    """A run of two epochs."""
    arguments = [f"data.path={dataset / 'data'}", f"out={dataset / 'run'}", "epochs=2"]
    assert cli.main(["train", str(dataset / "run.toml"), *arguments]) == 0
    return dataset / "run"


def report(run):
    return json.loads((run / "report" / "metrics.json").read_text())


@pytest.mark.slow
def test_report_by_task(run, dataset, capsys, monkeypatch):
    content = report(run)
    assert list(content["tasks"]) == list(TASKS)
    assert content["splits"] == content["tasks"]["click"]["splits"]
    assert content["reliability"] == content["tasks"]["click"]["reliability"]
    log = columns(2_000)
    for task, name in zip(TASKS, ("click", "bought"), strict=True):
        labels = log[name][1_800:]
        found = content["tasks"][task]["splits"]["test"]
        assert (found["examples"], found["positives"]) == ((labels >= 0).sum(), (labels == 1).sum())
        assert found["auc"] > 0.6
    page = (run / "report" / "report.html").read_text()
    assert "Tasks on the test split" in page
    assert "Calibration on test, purchase" in page
    splits = {json.loads(line)["split"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert {"valid", "valid/purchase"} <= splits
    capsys.readouterr()
    assert cli.main(["eval", str(run), str(dataset / "data")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tasks"] == {task: content["tasks"][task]["splits"]["test"] for task in TASKS}
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["eval", str(run), str(dataset / "data")]) == 0
    shown = capsys.readouterr().out
    assert all(f"\ntest, {task} " in shown for task in TASKS)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "slices"), [(1, 1), (2, 1), (2, 2)])
def test_devices_and_resumed_runs_agree(run, dataset, devices, slices, tmp_path):
    """A run that was stopped in between, on one device or two, or in slices, scores as the whole one."""
    arguments = [f"data.path={dataset / 'data'}", f"out={tmp_path / 'run'}", "epochs=2"]
    arguments += [
        f"mesh.devices={devices}",
        "checkpoint.every_steps=7",
        "checkpoint.keep=9",
        f"data.micro_batches={slices}",
    ]
    assert cli.main(["train", str(dataset / "run.toml"), *arguments]) == 0
    whole = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert cli.main(["train", str(dataset / "run.toml"), *arguments, "--resume-from", "14"]) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == whole
    for task in TASKS:
        for split in ("valid", "test"):
            one, other = (report(r)["tasks"][task]["splits"][split] for r in (run, tmp_path / "run"))
            assert other["log_loss"] == pytest.approx(one["log_loss"], rel=1e-4)
            assert other["auc"] == pytest.approx(one["auc"], abs=2e-3)


@pytest.mark.slow
def test_the_best_step_is_that_of_the_named_task(dataset, tmp_path):
    arguments = [f"data.path={dataset / 'data'}", "epochs=3", "evaluate.every_steps=3", "checkpoint.keep_best=true"]
    for task in ("", "purchase"):
        out = tmp_path / f"run{task}"
        more = [f"out={out}", f"evaluate.early_stopping.task={task}"]
        assert cli.main(["train", str(dataset / "run.toml"), *arguments, *more]) == 0
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        of_task = {r["step"]: r["auc"] for r in records if r["split"] == ("valid/purchase" if task else "valid")}
        training = report(out)["training"]
        assert training.get("scored_step", training["steps"]) == max(of_task, key=lambda step: (of_task[step], -step))


@pytest.mark.parametrize("lacking", ["valid", "test"])
def test_a_split_that_knows_no_first_label_is_left_out(tmp_path, caplog, lacking):
    log = columns(2000)
    log["click"][slice(1600, 1800) if lacking == "valid" else slice(1800, 2000)] = -1
    folder = prepared(tmp_path, log)
    config = config_of(folder, "max_steps=20", "evaluate.every_steps=10", "evaluate.baselines='on'")
    _, content, _ = train_and_report(config, check_start(config, resume=False, overwrite=False))
    assert content is not None
    assert list(content["splits"]) == [split for split in ("valid", "test") if split != lacking]
    assert list(content["baselines"]["logistic_regression"]["splits"]) == list(content["splits"])
    said = [record.message for record in caplog.records if "weight 0, or lacks the label" in record.message]
    assert len(said) == (2 if lacking == "valid" else 1)
    assert all(repr(lacking) in text for text in said)


def test_a_split_that_knows_no_first_label_is_evaluated_by_the_others(tmp_path, capsys, monkeypatch):
    log = columns(2000)
    log["click"][1800:] = -1
    log["bought"][1800:] = np.arange(200) % 2
    folder = prepared(tmp_path, log)
    config = config_of(folder, "max_steps=10")
    train_and_report(config, check_start(config, resume=False, overwrite=False))
    evaluated = ["eval", str(folder / "run"), str(folder / "data"), "--split", "test"]
    capsys.readouterr()
    assert cli.main(evaluated) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert [*shown["tasks"]] == ["purchase"]
    assert shown["tasks"]["purchase"]["examples"] == 200
    assert "auc" not in shown
    assert "no example of split 'test' has the label 'click'; the others are scored" in err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(evaluated) == 0
    out = capsys.readouterr().out
    assert "test, purchase" in out
    assert "200 examples of" in out
    assert cli.main([*evaluated, "--out", str(tmp_path / "report")]) == 2  # whose sections are of the first label
    assert (
        cli.main(["compress", str(folder / "run"), "--rank", "2", "--largest", "1", "--out", str(folder / "tt")]) == 0
    )
    compressed = json.loads((folder / "tt" / "report" / "compression.json").read_text())
    assert [*compressed["before"]] == [*compressed["after"]] == ["valid"]


def test_scores_of_one_label_know_no_task():
    scores = Scores(logits=np.array([0.5, -0.5], np.float32), labels=np.array([True, False]))
    assert evaluate_tasks(scores) == {}
