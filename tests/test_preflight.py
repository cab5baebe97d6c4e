"""What ``jrec train`` refuses before it loads or compiles anything."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from small_run import CONFIG

from jrec.app import preflight
from jrec.app.build import build_layout
from jrec.app.config import load_config
from jrec.app.preflight import check_space, check_start
from jrec.app.run_record import TrainedRun
from jrec.cli import main
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import DatasetError, Schema, Split
from jrec.errors import ConfigError
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

WITHOUT_JAX = """
import sys, time
began = time.monotonic()
from jrec.cli import main
code = main(sys.argv[1:])
loaded = [m for m in ("jax", "grain", "numba", "pyarrow", "tensorstore") if m in sys.modules]
assert not loaded, loaded
assert time.monotonic() - began < 10
sys.exit(code)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """670 training examples: 11 batches of 64."""
    folder = tmp_path_factory.mktemp("data") / "quickstart"
    synthesize(shape_like("quickstart"), folder, SynthOptions(rows=838, seed=1))
    return folder


@pytest.fixture
def configured(tmp_path, dataset):
    """Gives a run's configuration, and how the command is told it."""
    (tmp_path / "run.toml").write_text(CONFIG)

    def make(*overrides):
        given = [f"data.path={str(dataset)!r}", f"out={str(tmp_path / 'run')!r}", *overrides]
        return load_config(tmp_path / "run.toml", given), [str(tmp_path / "run.toml"), *given]

    return make


@pytest.fixture
def empty_split(dataset, tmp_path):
    """A copy of the dataset whose test split has no examples."""
    folder = tmp_path / "empty"
    folder.mkdir()
    for path in dataset.iterdir():
        (folder / path.name).symlink_to(path)
    schema = Schema.load(dataset)
    (folder / "schema.json").unlink()
    dataclasses.replace(schema, splits={**schema.splits, "test": Split(shards=())}).save(folder)
    return folder


def start(config, *, resume=False, overwrite=False):
    return check_start(config, resume=resume, overwrite=overwrite)


def begin(folder, config_arguments):
    """What a run leaves that was killed after its first record."""
    config, _ = config_arguments
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config.to_toml())
    TrainedRun(folder).keep_dataset(Schema.load(config.data.path).identity)
    (folder / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 0.5}\n')


def finish(folder, steps, splits=("valid", "test")):
    (folder / "report").mkdir(exist_ok=True)
    report = {"training": {"steps": steps}, "splits": {split: {} for split in splits}}
    (folder / "report" / "metrics.json").write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "holds a run already"),
        (("lr_schedule.kind=warmup_linear", "lr_schedule.warmup_steps=11", "out={new}"), "start at step 11 of"),
        (("out=/proc/run",), "cannot be written to"),
    ],
)
def test_mistakes_are_answered_before_jax_is_loaded(configured, tmp_path, overrides, said):
    begin(tmp_path / "run", configured())
    _, arguments = configured(*(o.format(new=tmp_path / "new") for o in overrides))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, "train", *arguments], capture_output=True, text=True, timeout=120
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_splits_without_examples_are_left_out_of_evaluations_unless_none_is_left(configured, empty_split, capsys):
    path = f"data.path={str(empty_split)!r}"
    assert start(configured(path, "evaluate.every_steps=5", "evaluate.splits=['valid', 'test']")[0]).steps == 11
    config, _ = configured(path, "evaluate.every_steps=5", "evaluate.splits=['test']")
    with pytest.raises(ConfigError, match=r"evaluate.splits names 'test', of which .* has no examples"):
        start(config)
    _, arguments = configured(path, "max_steps=1")
    assert main(["train", *arguments]) == 0
    assert f"{empty_split} has no examples in split test, without which the report is" in capsys.readouterr().err
    assert list(json.loads((pathlib.Path(config.out) / "report" / "metrics.json").read_text())["splits"]) == ["valid"]
    assert start(configured(path, "max_steps=1")[0], resume=True).finished == 1
    schema = Schema.load(empty_split)
    dataclasses.replace(schema, splits={**schema.splits, "train": Split(shards=())}).save(empty_split)
    with pytest.raises(DatasetError, match="no examples in a 'train' split"):
        start(configured(path)[0], overwrite=True)


@pytest.mark.parametrize(
    "overrides", [(), ("data.drop_remainder=true",), ("epochs=3", "data.batch_size=48"), ("max_steps=4",)]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_steps_are_those_of_the_loader(configured, overrides, processes):
    config, _ = configured(*overrides)
    schema = Schema.load(config.data.path)
    loader = make_loader(
        config.data.path,
        schema,
        build_layout(config, schema),
        "train",
        LoaderConfig(batch_size=config.data.batch_size // processes, drop_remainder=config.data.drop_remainder),
        epochs=config.epochs,
        process_count=processes,
    )
    assert start(config).steps == min(loader.total_batches or 0, config.max_steps or 10**9)


def test_a_finished_run_says_so_unless_there_is_more_to_do(configured, tmp_path, capsys):
    begin(tmp_path / "run", configured())
    config, arguments = configured()
    assert not start(config, resume=True).finished  # killed
    finish(tmp_path / "run", 11)
    assert start(config, resume=True).finished
    assert main(["train", *arguments, "--resume"]) == 0
    assert "all 11 steps are taken" in capsys.readouterr().err
    assert not start(configured("epochs=2")[0], resume=True).finished
    assert not start(configured("evaluate.final_splits=['train']")[0], resume=True).finished
    finish(tmp_path / "run", 5)
    assert not start(config, resume=True).finished  # the report is that of a shorter run
    (tmp_path / "run" / "report" / "metrics.json").write_text("[")
    assert not start(config, resume=True).finished


def test_a_disk_too_small_for_the_first_checkpoint_is_refused(configured, tmp_path, monkeypatch):
    config, _ = configured("optimizer.embedding.name=adam")
    schema = Schema.load(config.data.path)
    rows = sum(t.rows for t in schema.tables)
    size = rows * 4 * 4 * 3  # of dim 4, with two slots an element
    real = os.statvfs(tmp_path)

    def free(count):
        values = list(real)
        values[0], values[1], values[4] = 1, 1, count
        monkeypatch.setattr(preflight.os, "statvfs", lambda folder: os.statvfs_result(values))

    def check(config, overwrite=False):
        check_space(config, build_layout(config, schema), None, overwrite=overwrite)

    free(size)
    check(config)
    free(size - 1)
    with pytest.raises(ConfigError, match=r"first checkpoint of 'run' takes 0.9 MiB .* where 0.9 MiB are free"):
        check(config)
    check(
        dataclasses.replace(config, tables=dataclasses.replace(config.tables, tier="host"))
    )  # only written rows go there
    host = configured(
        "optimizer.embedding.name=adam", "tables.tier=host", f"tables.host.folder={str(tmp_path / 'host')!r}"
    )
    with pytest.raises(ConfigError, match=r"tables in host memory .* choose another folder with tables.host.folder="):
        check(host[0])
    begin(tmp_path / "run", configured())
    check(config)  # goes on
    with pytest.raises(ConfigError, match="first checkpoint"):
        check(config, overwrite=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "old").write_bytes(b"x")
    check(config, overwrite=True)  # one byte comes free


def test_rows_beyond_the_machines_memory_are_told_of(configured, tmp_path, monkeypatch):
    def warning(*overrides):
        config, _ = configured("optimizer.embedding.name=adam", "tables.tier=host", *overrides)
        return preflight.host_memory_warning(config, build_layout(config, Schema.load(config.data.path)), None)

    folder = f"tables.host.folder={str(tmp_path / 'host')!r}"
    assert warning() is None
    monkeypatch.setattr("jrec.host.memory.physical_memory", lambda: 2**19)
    assert re.search(r"take 0\.9 MiB .* has 0\.5 MiB; set tables\.host\.folder .* tables\.host\.memory to", warning())
    assert re.search(r"has 0\.5 MiB; set tables\.host\.memory to what they may take", warning(folder))
    assert re.search(r"memory is '1MiB', but this machine has 0\.5 MiB", warning(folder, "tables.host.memory=1MiB"))
    monkeypatch.setattr("jrec.host.memory.physical_memory", lambda: 2**20 - 1)
    monkeypatch.setattr("jrec.run.options.LEAST_MEMORY", 2**19)
    assert warning(folder, "tables.host.memory=0.5MiB") is None


def test_a_finished_run_goes_back_to_an_earlier_checkpoint(configured, tmp_path, monkeypatch):
    """``--resume-from`` passes the checks of the start, with a report of all steps there."""
    begin(tmp_path / "run", configured())
    finish(tmp_path / "run", 11)
    asked = []

    def train(config, *, data, **how):
        assert data.config == config  # what the checks have read
        asked.append(how)
        raise ConfigError("far enough")

    monkeypatch.setattr("jrec.app.reported_run.train", train)
    _, arguments = configured()
    assert main(["train", *arguments, "--resume-from", "5"]) == 2
    assert asked == [{"resume": True, "overwrite": False, "resume_from": 5, "callbacks": ()}]
