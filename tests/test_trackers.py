"""``log.to``: what services get, where a resumed run goes on, and that none of them ends a training."""

import importlib.machinery
import json
import logging
import sys
import types

import pytest
from run_cases import quickstart
from train_command import train_command

from jrec.app.report.logs import METRICS_FILE, MetricLog, read_records
from jrec.app.report.trackers import Trackers, check_trackers
from jrec.cli import main
from jrec.errors import ConfigError


def module(name, **values):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a test")
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

    class MlflowClient:
        def create_run(self, experiment, *, run_name):
            assert experiment == "0"
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=mlflow.start(None, run_name, None)))

        def update_run(self, id, *, status):
            assert status == "RUNNING"
            mlflow.start(id, None, None)

        def log_batch(self, id, *, params=(), metrics=()):
            assert len(params) <= 100
            mlflow.runs[id]["config"] |= dict(params)
            for key, value, milliseconds, step in metrics:
                assert milliseconds > 1.6e12
                mlflow.log({key: value}, step)

        def set_terminated(self, id):
            assert id == mlflow.open
            mlflow.end()

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=init))
    entities = module("mlflow.entities", Metric=lambda *of: of, Param=lambda *of: of)
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", MlflowClient=MlflowClient, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for variable in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(variable, raising=False)
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


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    """wandb leaves one where it ran, and the command looks for modules there."""
    (tmp_path / "mlflow").mkdir()
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"log\.to has 'mlflow', whose package is not installed"):
        check_trackers(["mlflow"])


def written(folder, name, *, steps, config=None):
    trackers = Trackers([name], folder, title="clicks", config=config or {})
    for step in steps:
        trackers.write(step, "train", {"loss": 0.5})
    trackers.close()
    return json.loads((folder / "trackers" / "ids.json").read_text())[name]


@pytest.mark.slow
def test_real_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed, which jrec's extra wandb has")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = written(tmp_path, "wandb", steps=[1], config={"name": "clicks"})
    assert written(tmp_path, "wandb", steps=[2]) == made
    assert list((tmp_path / "trackers" / "wandb").glob(f"offline-run-*-{made}/*.wandb"))


@pytest.mark.slow
def test_real_mlflow_in_files_beside_a_run_of_the_program(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed, which jrec's extra mlflow has")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "clicks")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as own:
        made = written(tmp_path, "mlflow", steps=[1], config={f"key{i}": i for i in range(150)})
        assert mlflow.active_run().info.run_id == own.info.run_id
        failing = Trackers(["mlflow"], tmp_path / "failing")
        failing.write(1, "train", {"a name?": 0.5})  # which MLflow refuses
        assert written(tmp_path, "mlflow", steps=[2]) == made
    assert [record.getMessage()[:20] for record in caplog.records if record.name.startswith("jrec")] == [
        "log.to: mlflow fails"
    ]
    client = mlflow.MlflowClient()
    assert len(client.get_run(made).data.params) == 150
    assert sorted((m.step, m.value) for m in client.get_metric_history(made, "train/loss")) == [(1, 0.5), (2, 0.5)]
    assert client.get_run(made).info.status == "FINISHED"
