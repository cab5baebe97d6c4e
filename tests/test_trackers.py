"""``log.to``: what services get, where a resumed run goes on, and that none of them ends a training."""

import importlib.machinery
import json
import logging
import sys
import types

import pytest
from run_cases import quickstart
from train_command import train_command

from jrec.cli import main
from jrec.train.report.logs import METRICS_FILE, MetricLog, read_records
from jrec.train.report.trackers import Trackers


def module(name, **values):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(values)
    return made


class Service:
    """Stands for both packages: keeps what it is told, by the run's id."""

    def __init__(self):
        self.runs, self.open, self.fails = {}, None, False

    def start(self, known, title, config):
        if self.fails:
            raise OSError("no network")
        self.open = known or f"run{len(self.runs)}"
        self.runs.setdefault(self.open, {"title": title, "config": config or {}, "records": [], "ends": 0})
        return self.open

    def log(self, values, step):
        if self.fails:
            raise OSError("no network")
        self.runs[self.open]["records"].append((step, dict(values)))

    def end(self):
        self.runs[self.open]["ends"] += 1


@pytest.fixture
def services(monkeypatch):
    wandb, mlflow = Service(), Service()

    def init(*, id, resume, name, dir, config):
        assert resume == "allow"
        assert dir.endswith("trackers")
        started = wandb.start(id, name, config)
        return types.SimpleNamespace(id=started, log=wandb.log, finish=wandb.end)

    def start_run(*, run_id, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=mlflow.start(run_id, run_name, None)))

    def log_params(params):
        mlflow.runs[mlflow.open]["config"] |= params

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=init))
    functions = {"start_run": start_run, "log_params": log_params, "log_metrics": mlflow.log, "end_run": mlflow.end}
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", **functions))
    return {"wandb": wandb, "mlflow": mlflow}


def test_a_training_tells_both_and_a_resumed_one_goes_on(services, tmp_path):
    data = quickstart(tmp_path, rows=2000)
    keys = ['log.to=["wandb","mlflow"]', "log.every_steps=2", "checkpoint.every_steps=4"]
    run = train_command(tmp_path, data, *keys, "max_steps=4")
    train_command(tmp_path, data, *keys, "max_steps=8", "--resume")
    records = [r for r in read_records(run / METRICS_FILE) if r["split"] == "train"]
    for service in services.values():
        [told] = service.runs.values()
        assert told["ends"] == 4  # of the log, and after the report
        assert str(told["config"]["log.every_steps"]) == "2"
        losses = {step: v["train/loss"] for step, v in told["records"] if "train/loss" in v}
        assert losses == {r["step"]: r["loss"] for r in records}
        assert any("test/auc" in values for _, values in told["records"])
    assert set(json.loads((run / "trackers" / "ids.json").read_text())) >= {"wandb", "mlflow"}


def test_a_failing_service_is_a_warning_and_the_others_go_on(services, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        services["wandb"].fails = True
        log = MetricLog(tmp_path, tensorboard=False, trackers=Trackers(["wandb", "mlflow"], tmp_path))
        log.write(1, {"loss": 0.5, "name": "text", "undefined": None})
        services["mlflow"].fails = True
        log.write(2, {"loss": 0.4})
        log.write(3, {"loss": 0.3})
        log.close()
    assert services["mlflow"].runs["run0"]["records"] == [(1, {"train/loss": 0.5})]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "log.to: wandb fails" in said[0]
    assert "no network" in said[1]
    assert [r["loss"] for r in read_records(tmp_path / METRICS_FILE)] == [0.5, 0.4, 0.3]


def test_a_service_that_is_not_installed_is_refused_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    data, out = quickstart(tmp_path, rows=200), tmp_path / "run"
    assert main(["train", "quickstart", f"data.path={data}", f"out={out}", 'log.to=["wandb"]']) == 2
    assert "log.to has 'wandb', whose package is not installed: pip install 'jrec[wandb]'" in capsys.readouterr().err
    assert not out.exists()
