"""Folders that earlier versions of jrec wrote open, and mean what they meant.

``earlier/DATE.tar.xz`` has what jrec of that day made of one small log: a dataset; runs of 30 steps with tables on
the device and in host memory; what it measured of the test split (``RUN.json``); and where it had the commands, an
export, and the scores of the log's lines.
"""

import json
import pathlib
import tarfile

import numpy as np
import pytest

import jrec.serving
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.cli import main
from jrec.data.schema import Schema
from jrec.metrics import evaluate

EARLIER = sorted((pathlib.Path(__file__).parent / "earlier").glob("*.tar.xz"))


@pytest.fixture(params=EARLIER, ids=lambda path: path.name.partition(".")[0])
def folders(request, tmp_path, monkeypatch):
    with tarfile.open(request.param) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # as the runs name their dataset
    return tmp_path


def scores_in(path):
    return np.loadtxt(path, delimiter=",", skiprows=1, usecols=2)


def test_there_are_some():
    assert len(EARLIER) >= 2


@pytest.mark.parametrize("run", ["device", "host"])
def test_runs_are_evaluated_and_go_on(folders, run):
    expected = json.loads((folders / f"{run}.json").read_text())
    measured = evaluate(evaluate_checkpoint(run, "data", split="test").scores).to_dict()
    for name in ("examples", "auc", "log_loss", "mean_prediction", "calibration"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-5), name
    config = folders / "on.toml"
    # The run's own configuration, with nothing that its keys did not say then.
    config.write_text((folders / run / "config.toml").read_text())
    assert main(["train", str(config), "--resume", "max_steps=40", "epochs=3", "log.progress=off"]) == 0
    assert restore_run(run).saved.step == 40


def test_a_dataset_is_trained_on(folders):
    schema = Schema.load("data")
    assert {table.name: table.rows for table in schema.tables} == {"user": 32, "item": 21}
    assert main(["train", str(folders / "device" / "config.toml"), "out=new", "max_steps=5", "log.progress=off"]) == 0


def test_logs_and_requests_are_scored_as_then(folders):
    if not (folders / "export").is_dir():
        pytest.skip("this version had neither exports nor predictions")
    scores = scores_in(folders / "scores.csv")
    for run in ("device", "host"):
        assert main(["predict", run, "log.csv", "--out", f"{run}.csv", "--quiet"]) == 0
        np.testing.assert_allclose(scores_in(folders / f"{run}.csv"), scores, rtol=1e-5)
    lines = [line.split(",") for line in (folders / "log.csv").read_text().splitlines()[1:]]
    columns = {"price": [float(line[1]) for line in lines]}
    columns |= {name: [line[at] for line in lines] for name, at in (("user", 2), ("item", 3))}
    np.testing.assert_allclose(jrec.serving.load("export")(columns), scores, rtol=1e-5)
