"""Several labels by the command, the whole way: a log, a dataset, a run, its scores, its export, a served request."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from task_logs import CONFIG, SCHEMA, TASKS, columns, write_log
from test_serve import ARROW, JSON, ask, running

import jrec
from jrec import cli, serving

pytestmark = pytest.mark.slow
NAMES = dict(zip(TASKS, ("click", "bought"), strict=True))


@pytest.fixture(scope="module", params=[{"mesh.devices": 1}, {"mesh.devices": 2, "model.members": 2}], ids=str)
def trained(request, tmp_path_factory):
    """A folder with a dataset, a run on one device, or of two members on two, its export, and a log of later lines."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "columns.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG)
    log = write_log(folder / "log.csv", columns(1_500))
    write_log(folder / "later.csv", columns(300, seed=9))
    for arguments in (
        ["prepare", "csv", "--schema", str(folder / "columns.toml"), "--input", log, "--out", str(folder / "data")],
        ["train", str(folder / "run.toml"), f"data.path={folder / 'data'}", f"out={folder / 'run'}",
         *(f"{key}={value}" for key, value in request.param.items())],
        ["export", str(folder / "run"), "--out", str(folder / "export"), "--quiet"],
    ):  # fmt: skip
        assert cli.main(arguments) == 0
    return folder


def raw(folder):
    """The later lines as a request has them."""
    table = pa_csv.read_csv(folder / "later.csv")
    return {name: table[name].to_pylist() for name in ("user", "item", "price")}


def predicted(folder, source, **options):
    out = folder / f"scores.{options.pop('kind', 'parquet')}"
    arguments = ["--overwrite", "--quiet", *(f"--{name}={value}" for name, value in options.items())]
    assert cli.main(["predict", str(folder / "run"), str(source), "--out", str(out), *arguments]) == 0
    return pq.read_table(out) if out.suffix == ".parquet" else pa_csv.read_csv(out)


def test_scores_of_a_log(trained):
    scores = predicted(trained, trained / "later.csv")
    assert scores.column_names == [
        "row", "label_click", "label_purchase", "score_click", "score_purchase", "logit_click", "logit_purchase",
    ]  # fmt: skip
    log, run = columns(300, seed=9), jrec.load_run(trained / "run").predict(raw(trained))
    assert list(run) == list(TASKS)
    for task, name in NAMES.items():
        labels = [None if label < 0 else label for label in log[name].tolist()]
        assert scores[f"label_{task}"].to_pylist() == labels
        found, logits = (scores[f"{what}_{task}"].to_numpy().astype(np.float64) for what in ("score", "logit"))
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), rtol=1e-6)
        np.testing.assert_allclose(found, run[task], rtol=1e-5)
    as_csv = predicted(trained, trained / "later.csv", kind="csv")
    assert as_csv.column_names == scores.column_names
    assert as_csv["label_purchase"].null_count == (log["bought"] < 0).sum()


def test_scores_of_logs_with_some_labels_or_none(trained):
    whole = predicted(trained, trained / "later.csv")
    for dropped, labels in ((["click"], ["label_click", "label_purchase"]), (["click", "bought"], [])):
        log = {name: column for name, column in columns(300, seed=9).items() if name not in dropped}
        write_log(trained / "some.csv", log)
        scores = predicted(trained, trained / "some.csv")
        assert [name for name in scores.column_names if name.startswith("label")] == labels
        if labels:
            assert scores["label_click"].null_count == 300
            assert scores["label_purchase"].equals(whole["label_purchase"])
        for task in TASKS:
            assert scores[f"score_{task}"].equals(whole[f"score_{task}"])


def test_scores_of_a_dataset_are_those_of_the_report(trained):
    scores = predicted(trained, trained / "data", split="test")
    content = json.loads((trained / "run" / "report" / "metrics.json").read_text())
    for task in TASKS:
        labels = scores[f"label_{task}"].to_numpy(zero_copy_only=False)
        logits = scores[f"logit_{task}"].to_numpy().astype(np.float64)[~np.isnan(labels)]
        labels = labels[~np.isnan(labels)]
        found = content["tasks"][task]["splits"]["test"]
        assert found["examples"] == len(labels)
        assert found["log_loss"] == pytest.approx(np.mean(np.logaddexp(0, logits) - labels * logits), rel=1e-5)
        assert found["calibration"] == pytest.approx(np.mean(1 / (1 + np.exp(-logits))) / labels.mean(), rel=1e-5)


def test_scores_of_the_served_export(trained):
    asked = {name: values[:40] for name, values in raw(trained).items()}
    expected = jrec.load_run(trained / "run").predict(asked)
    model = serving.load(trained / "export", batch_sizes=(1, 16, 64))
    found = model(asked)
    with running(trained / "export") as server:
        status, headers, body = ask(server.port, content=json.dumps({"columns": asked}))
        assert status == 200
        answer = json.loads(body)
        stream = ask(server.port, content=json.dumps({"columns": asked}), Accept=ARROW)[2]
        rows = [dict(zip(asked, row, strict=True)) for row in zip(*asked.values(), strict=True)]
        instances = json.loads(ask(server.port, content=json.dumps({"instances": rows}))[2])
        empty = json.loads(ask(server.port, content=json.dumps({"columns": {n: [] for n in asked}}))[2])
    assert headers["Content-Type"].startswith(JSON)
    table = pa.ipc.open_stream(stream).read_all()
    assert sorted(table.column_names) == ["score_click", "score_purchase"]
    assert instances["predictions"] == [{t: answer["scores"][t][n] for t in TASKS} for n in range(40)]
    assert empty["scores"] == {task: [] for task in TASKS}
    for task in TASKS:
        np.testing.assert_allclose(found[task], expected[task], rtol=1e-5)
        np.testing.assert_allclose(answer["scores"][task], expected[task], rtol=1e-5)
        np.testing.assert_allclose(table[f"score_{task}"].to_numpy(), expected[task], rtol=1e-5)


def test_hot_and_cold_batches(trained, tmp_path):
    """A dataset packed for FAE keeps every label, and trains on all."""
    packing = [
        "fae",
        "pack",
        str(trained / "data"),
        "--out",
        str(tmp_path / "packed"),
        "--budget",
        "2KB",
        "--small",
        "1B",
    ]
    assert cli.main(packing) == 0
    arguments = [
        f"data.path={tmp_path / 'packed'}",
        f"out={tmp_path / 'run'}",
        "schedule=fae",
        "evaluate.every_steps=auto",
    ]
    assert cli.main(["train", str(trained / "run.toml"), *arguments]) == 0
    content = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())
    assert {task: one["splits"]["test"]["examples"] for task, one in content["tasks"].items()} == {
        task: int((columns(1_500)[name][1_350:] >= 0).sum()) for task, name in NAMES.items()
    }
