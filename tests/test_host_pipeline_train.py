"""Training runs with host tables: the bits of the device run, resumed, interrupted, failed, and with tiers mixed."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_state import final_arrays
from host_runs import pipeline_threads
from run_cases import CONFIG, configuring, killed_and_resumed, quickstart

from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.recorder import Recorder
from jrec.app.report import write_report
from jrec.data.loader import Loader
from jrec.data.schema import DatasetError
from jrec.errors import CheckpointError, ConfigError
from jrec.host import HostTable
from jrec.prepare.prepare import prepare
from jrec.prepare.readers.criteo import Criteo

PIPELINE = ("tables.tier=host", "tables.host.pipeline=on")
IN_PLACE = ("tables.tier=host", "tables.host.pipeline=off")
WAYS = pytest.mark.parametrize("way", [PIPELINE, IN_PLACE], ids=["pipeline", "in place"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


def test_a_run_on_the_host_is_the_run_on_the_device(configure):
    device = train(configure("max_steps=14", out="device"))
    host = train(configure("max_steps=14", *PIPELINE, "log.trace=true", out="host"))
    assert (host.folder / "metrics.jsonl").read_bytes() == (device.folder / "metrics.jsonl").read_bytes()
    for split, scores in device.scores.items():
        np.testing.assert_array_equal(host.scores[split].logits, scores.logits)
    on_device, on_host = final_arrays(device.folder), final_arrays(host.folder)
    assert on_device[2]["losses"] == on_host[2]["losses"]
    assert on_device[2]["loader"] == on_host[2]["loader"]
    assert on_host[1].keys() == on_device[1].keys()
    assert [name for name, array in on_host[1].items() if on_device[1][name] != array] == []
    again = evaluate_checkpoint(host.folder, configure().data.path, split="test")
    np.testing.assert_array_equal(again.scores.logits, device.scores["test"].logits)

    assert device.sections.keys() == {"evaluations"}
    assert host.sections.keys() == {"evaluations", "pipeline"}
    assert host.sections["pipeline"]["stages"]["host store"]["batches"] == 14
    assert len(json.loads((host.folder / "trace.json").read_text())["traceEvents"]) > 100
    report = write_report(
        host.folder / "report", config=configure(*PIPELINE), schema=host.schema, scores={},
        parameters=host.parameters, steps=14, sections=host.sections,
    )  # fmt: skip
    assert report["pipeline"]["rows"]["host_d8_float32"]["hit_rate"] > 0.1
    assert report["parameters"]["host_d8_float32"] == device.parameters["d8_float32"]

    in_place = train(configure("max_steps=14", *IN_PLACE, "log.trace=true", out="in_place"))
    assert kept(in_place.folder) == kept(host.folder)
    for split, scores in device.scores.items():
        np.testing.assert_array_equal(in_place.scores[split].logits, scores.logits)
    assert in_place.sections.keys() == {"evaluations", "in_place"}
    found = in_place.sections["in_place"]
    stages = [found[f"{stage}_seconds"] for stage in ("read", "lookup", "step", "update")]
    assert min(stages) > 0
    assert sum(stages) < found["seconds"] == in_place.seconds
    assert 100 < found["rows_made"]["host_d8_float32"] < in_place.parameters["host_d8_float32"]["rows"]
    assert len(json.loads((in_place.folder / "trace.json").read_text())["traceEvents"]) == 4 + 4 * 14


@pytest.mark.slow
@pytest.mark.parametrize(("way", "overrides"), [
    (PIPELINE, ("model.table_dtype='bfloat16'",)),
    (PIPELINE, ("optimizer.embedding.name='rowwise_adagrad'", "data.cast='device'", "data.workers=0")),
    (PIPELINE, ("tables.implementation='xla'",)),
    (IN_PLACE, ("model.table_dtype='bfloat16'", "lr_schedule.kind='warmup_cosine'", "lr_schedule.warmup_steps=3")),
    (IN_PLACE, ("optimizer.embedding.name='rowwise_adagrad'", "data.cast='device'", "data.workers=0")),
    (IN_PLACE, ("optimizer.max_global_norm=0.1", "lr_schedule.kind='warmup_poly_decay'", "data.cast='device'")),
    (IN_PLACE, ("tables.implementation='native'", "tables.host.folder=rows", "model.pooling='sqrtn'")),
])  # fmt: skip
def test_other_settings_give_the_device_runs_metrics_too(configure, way, overrides, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where "rows" are
    device = train(configure("max_steps=14", *overrides, out="device"))
    host = train(configure("max_steps=14", *way, "tables.host.queue=4", *overrides, out="host"))
    assert (host.folder / "metrics.jsonl").read_bytes() == (device.folder / "metrics.jsonl").read_bytes()
    for split, scores in device.scores.items():
        np.testing.assert_array_equal(host.scores[split].logits, scores.logits)


def kept(folder):
    """All that a run leaves: step, bits of the state and of rows, the meta, and the log."""
    return final_arrays(folder), (folder / "metrics.jsonl").read_bytes()


class Killed(BaseException):
    """As sudden as a kill: nothing in the loop handles it."""


@pytest.mark.parametrize("overrides", [
    ("max_steps=16",),
    pytest.param(("epochs=3", "tables.host.queue=5", "checkpoint.keep=1"), marks=pytest.mark.slow),
])  # fmt: skip
@WAYS
@pytest.mark.slow
def test_a_run_killed_anywhere_resumes_to_the_same_bits_in_host_memory_too(configure, monkeypatch, overrides, way):
    overrides = (*way, "checkpoint.every_steps=3", *overrides)
    whole = train(configure(*overrides, out="whole"))
    rng, absorb, deaths, outcome = np.random.default_rng(0), Recorder.absorb, 0, None
    while outcome is None and deaths < 40:
        budget = [int(rng.integers(4, 9))]

        def dies(self, *args, budget=budget):
            budget[0] -= 1
            if budget[0] < 0:
                raise Killed
            absorb(self, *args)

        monkeypatch.setattr(Recorder, "absorb", dies)
        pipeline, queue = str(rng.choice(["on", "auto"])), int(rng.integers(1, 5))
        others = (f"tables.host.pipeline={pipeline}", f"tables.host.queue={queue}", "tables.host.threads=1")
        try:  # a resumed run may go another way, and use other queues and threads
            outcome = train(configure(*overrides, *others), resume=True)
        except Killed:
            deaths += 1
    assert deaths >= 2
    assert outcome is not None
    assert outcome.finished
    assert kept(outcome.folder) == kept(whole.folder)


def test_a_failing_stage_leaves_a_checkpoint_that_resumes(configure, monkeypatch):
    overrides = (*PIPELINE, "max_steps=12", "checkpoint.every_steps=4", "evaluate.every_steps=0")
    whole = train(configure(*overrides, out="whole"))
    store, calls = HostTable.store, []

    def breaks(self, *args):
        calls.append(1)
        if len(calls) == 10:
            raise OSError("the disk of the mapped file is gone")
        store(self, *args)

    monkeypatch.setattr(HostTable, "store", breaks)
    with pytest.raises(OSError, match="the disk of the mapped file is gone") as error:
        train(configure(*overrides))
    assert "(in stage 'host store', after 9 batches)" in error.value.__notes__
    monkeypatch.undo()
    folder = whole.folder.with_name("run")
    assert final_arrays(folder)[0] == 8
    resumed = train(configure(*overrides), resume=True)
    assert kept(resumed.folder) == kept(whole.folder)


@pytest.mark.slow
@WAYS
def test_bad_data_fails_after_the_steps_before_it_as_on_the_device(configure, monkeypatch, way):
    real = Loader.__next__

    def breaks(self):
        if self.position == 11 and self._identity["split"] == "train":
            raise DatasetError("block 3 is damaged")
        return real(self)

    monkeypatch.setattr(Loader, "__next__", breaks)
    runs = {}
    for tier, keys in {"sharded": (), "host": way}.items():
        with pytest.raises(DatasetError, match="block 3 is damaged"):
            train(configure(*keys, "checkpoint.every_steps=10", out=tier))
        folder = pathlib.Path(configure(out=tier).out)
        runs[tier] = (folder / "metrics.jsonl").read_bytes(), final_arrays(folder)[0]
    assert runs["host"] == runs["sharded"]
    assert runs["host"][1] == 10


@pytest.mark.slow
@pytest.mark.parametrize(("number", "way"), [
    (signal.SIGINT, PIPELINE), (signal.SIGTERM, PIPELINE), (signal.SIGTERM, IN_PLACE),
])  # fmt: skip
def test_a_signal_drains_the_pipeline_into_a_checkpoint(configure, monkeypatch, number, way):
    overrides = (*way, "max_steps=14")
    whole = train(configure(*overrides, out="whole"))
    absorb = Recorder.absorb

    def signals(self, *args):
        absorb(self, *args)
        if self.absorbed == 6:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Recorder, "absorb", signals)
    stopped = train(configure(*overrides))
    assert not stopped.finished
    assert final_arrays(stopped.folder)[0] == stopped.step < 10
    monkeypatch.setattr(Recorder, "absorb", absorb)
    assert kept(train(configure(*overrides), resume=True).folder) == kept(whole.folder)


@pytest.mark.slow
def test_device_tensor_train_and_host_tables_in_one_model(configure):
    overrides = (
        "max_steps=14",
        "tables.overrides.C10.tier=host",
        "tables.overrides.C8.tier=host",
        "tables.overrides.C9.tier=tt",
        "tables.tt.rank=4",
    )
    ways = {"q1": ("on", 1), "q4": ("on", 4), "in_place": ("off", 3)}
    keys = {out: (f"tables.host.pipeline={pipeline}", f"tables.host.queue={q}") for out, (pipeline, q) in ways.items()}
    runs = [train(configure(*overrides, *of_way, out=out)) for out, of_way in keys.items()]
    assert sorted(runs[0].parameters) == ["d8_float32", "dense", "host_d8_float32", "tt_C9"]
    assert kept(runs[0].folder) == kept(runs[1].folder) == kept(runs[2].folder)
    device = train(configure("max_steps=14", "tables.overrides.C9.tier=tt", "tables.tt.rank=4", out="device"))
    for split, scores in device.scores.items():  # the features keep their order, so nothing else differs either
        np.testing.assert_array_equal(runs[0].scores[split].logits, scores.logits)


@pytest.mark.slow
@WAYS
def test_kill_9_at_random_moments_then_resume_gives_the_same_bits(configure, tmp_path, dataset, way):
    overrides = [f"data.path={dataset}", "epochs=16", "checkpoint.every_steps=20", "evaluate.every_steps=0"]
    overrides += [*way, "tables.host.queue=4"]
    command = [sys.executable, "-m", "jrec", "train", str(tmp_path / "tiny.toml"), *overrides]
    subprocess.run([*command, f"out={tmp_path / 'whole'}"], check=True, capture_output=True)
    killed_and_resumed([*command, f"out={tmp_path / 'killed'}", "--resume"], tmp_path / "killed")
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")


@pytest.mark.slow
@WAYS
def test_the_real_criteo_sample_on_the_host_has_the_device_runs_metrics(shared_data, tmp_path, way):
    folder, runs = tmp_path / "data", {}
    prepare(Criteo("criteo-kaggle"), [str(shared_data / "criteo_kaggle_80k.tsv.gz")], folder)
    root = pathlib.Path(__file__).resolve().parents[1]
    for tier, keys in {"sharded": (), "host": way}.items():
        config = load_config(
            root / "configs" / "criteo_kaggle.toml",
            [f"data.path={folder}", *keys, f"out={tmp_path / tier}", "log.tensorboard=false"],
        )
        runs[tier] = train(config)
    device, host = runs["sharded"], runs["host"]
    assert (host.folder / "metrics.jsonl").read_bytes() == (device.folder / "metrics.jsonl").read_bytes()
    for split, of in device.scores.items():
        np.testing.assert_array_equal(host.scores[split].logits, of.logits)


def test_what_cannot_work_is_refused(configure, monkeypatch):
    with pytest.raises(ConfigError, match=r"cached_batches is 2, .* rows of up to 4 batches"):
        configure("tables.host.queue=5", "tables.host.cached_batches=2")
    for keys, reason in (
        (("mesh.devices=2",), r"a plan places the run's rows"),
        (("tables.implementation=xla",), r"tables\.implementation is 'xla', .* updated by the 'native' kernels"),
    ):
        with monkeypatch.context() as nothing_is_made:
            nothing_is_made.setattr("jrec.app.make_run.build_modules", None)
            with pytest.raises(ConfigError, match=rf"tables\.host\.pipeline is 'off', but {reason}"):
                train(configure(*IN_PLACE, *keys, out="refused"))
    folder = train(configure(*PIPELINE, "max_steps=1", "evaluate.final_splits=[]")).folder
    chunk = next((folder / "checkpoints").rglob("c.0"))
    chunk.write_bytes(chunk.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=re.escape(str(chunk))):
        train(configure(*PIPELINE, "max_steps=1", "evaluate.final_splits=[]"), resume=True)
    with pytest.raises(ConfigError, match=r"tables\.tier was 'host' and is 'sharded'"):
        train(configure("max_steps=1", "evaluate.final_splits=[]"), resume=True)


@pytest.mark.slow
def test_the_benchmark_runs_whole_on_small_tables(monkeypatch, tmp_path, capsys):
    from benchmarks import pipeline

    sizes = {"table-gb": 0.002, "device-gb": 0.001, "dim": 8, "tables": 3, "ids": 2, "batch": 32}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    monkeypatch.setattr(sys, "argv", ["pipeline", "--quick", *flags, f"--out={tmp_path / 'out.jsonl'}"])
    pipeline.main()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    peers = {"pipelined": {"sequential", "plain", "device only"}, "in place": {"plain", "pipelined", "device only"}}
    for way, others in peers.items():
        assert {line["peer"] for line in lines if line["metric"] == f"step, {way}"} == others
    found = {line["metric"]: line["value"] for line in lines}
    assert 0 < found["overlap efficiency"] <= 1
    assert 0 < found["unique rows found on the device"] < 1
    assert found["rows in host memory"] > found["unique rows"] > 32
