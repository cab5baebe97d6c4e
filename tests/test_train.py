"""Training runs from a configuration: they learn, log, resume to the same bits, and refuse what cannot work."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoint_state import final_arrays
from run_cases import CONFIG, configuring, killed_and_resumed, quickstart

from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.processes.interrupt import stop_on_signals
from jrec.app.recorder import Recorder
from jrec.app.run_folder import open_run_folder
from jrec.app.run_record import TrainedRun, find_run
from jrec.data.schema import DatasetError
from jrec.errors import CheckpointError, ConfigError, DivergedError, OutputError
from jrec.metrics import evaluate
from jrec.signals import ECHO_SECONDS


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


def test_a_run_learns_logs_checkpoints_and_evaluates(configure):
    config = configure("epochs=4")
    outcome = train(config)
    folder = outcome.folder
    assert outcome.finished
    assert outcome.step == 4 * 19  # 4,800 training examples in batches of 256
    assert set(outcome.scores) == {"valid", "test"}
    assert len(outcome.scores["test"].labels) == 600
    assert evaluate(outcome.scores["test"]).auc > 0.6
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [r for r in records if r["split"] == "train"]
    assert [r["step"] for r in training] == list(range(4, 77, 4))
    assert training[-1]["loss"] < training[0]["loss"]
    assert [r["step"] for r in records if r["split"] == "valid"] == list(range(8, 77, 8))
    timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    rates = [r["examples_per_second"] for r in timing if r["split"] == "train"]
    # Each of the steps since the record before, so that the compiler's time stays in the first.
    counts = np.diff([0, *(min(step % 19 * 256, 4800) + step // 19 * 4800 for step in range(4, 77, 4))])
    assert sum(counts / rates) == pytest.approx(outcome.seconds, rel=1e-6)
    assert rates[-1] > rates[0]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["75", "76"]
    again = evaluate_checkpoint(folder, config.data.path, split="test")
    np.testing.assert_array_equal(again.scores.logits, outcome.scores["test"].logits)
    earlier = evaluate_checkpoint(folder / "checkpoints" / "75", config.data.path, split="test")
    assert earlier.step == 75
    assert not np.array_equal(earlier.scores.logits, again.scores.logits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_interrupted_anywhere_resumes_to_the_same_bits(configure, monkeypatch, dtype):
    config = configure("epochs=2", f"model.table_dtype={dtype!r}", out="whole")
    whole = train(config).folder
    expected = final_arrays(whole)

    class Killed(BaseException):
        """As sudden as a kill: nothing in the loop handles it."""

    rng = np.random.default_rng(0)
    config = configure("epochs=2", f"model.table_dtype={dtype!r}", out="killed")
    absorb = Recorder.absorb
    deaths = 0
    while deaths < 40:
        survive = int(rng.integers(2, 14))

        def dies(self, *args, budget=[survive]):  # noqa: B006
            budget[0] -= 1
            if budget[0] < 0:
                raise Killed
            absorb(self, *args)

        monkeypatch.setattr(Recorder, "absorb", dies)
        try:
            outcome = train(config, resume=True)
        except Killed:
            deaths += 1
            continue
        break
    assert deaths > 2
    assert outcome.finished
    step, arrays, meta = final_arrays(outcome.folder)
    assert step == expected[0]
    assert arrays.keys() == expected[1].keys()
    assert [n for n in arrays if arrays[n] != expected[1][n]] == []
    assert meta == expected[2]
    assert (outcome.folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_16_bit_tables_are_rounded_stochastically_unless_the_configuration_says_otherwise(configure):
    def tables(*overrides, out):
        config = configure("max_steps=6", "model.table_dtype='bfloat16'", *overrides, out=out)
        arrays = final_arrays(train(config).folder)[1]
        return [value for name, value in sorted(arrays.items()) if name.endswith("/values")]

    stochastic = tables(out="stochastic")
    assert stochastic
    assert tables("optimizer.embedding.stochastic_rounding=false", out="nearest") != stochastic


@pytest.mark.slow
def test_kill_9_at_ten_random_moments_then_resume_gives_the_same_bits(configure, tmp_path, dataset):
    overrides = [f"data.path={dataset}", "epochs=40", "checkpoint.every_steps=20", "evaluate.every_steps=50"]
    command = [sys.executable, "-m", "jrec", "train", str(tmp_path / "tiny.toml"), *overrides]
    subprocess.run([*command, f"out={tmp_path / 'whole'}"], check=True, capture_output=True)
    configure()
    killed = [*command, f"out={tmp_path / 'killed'}", "--resume"]
    killed_and_resumed(killed, tmp_path / "killed", most=10, least=5, seconds=lambda rng: rng.uniform(0, 0.3))
    assert final_arrays(tmp_path / "killed") == final_arrays(tmp_path / "whole")
    for name in ("metrics.jsonl", "report/metrics.json"):
        texts = [(tmp_path / run / name).read_text() for run in ("whole", "killed")]
        if name.endswith(".json"):
            contents = [json.loads(text) for text in texts]
            assert contents[0]["splits"] == contents[1]["splits"]
        else:
            assert texts[0] == texts[1]


def test_a_signal_stops_after_the_step_with_a_checkpoint(configure, monkeypatch):
    config = configure()
    absorb = Recorder.absorb

    def signals(self, *args):
        absorb(self, *args)
        if self.absorbed == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "absorb", signals)
    outcome = train(config)
    assert not outcome.finished
    assert outcome.scores == {}
    assert final_arrays(outcome.folder)[0] == outcome.step < 10
    monkeypatch.setattr(Recorder, "absorb", absorb)
    assert train(config, resume=True).finished


def test_an_echo_of_a_signal_is_none_and_a_later_one_gives_up(monkeypatch, capfd):
    with stop_on_signals() as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal == signal.SIGTERM
        monkeypatch.setattr("jrec.signals.ECHO_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on from the last complete one"):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == (
        "jrec: SIGTERM: stopping after the current step or evaluation, with a checkpoint; one more, in 2 seconds or"
        " later, gives that up\n"
    )


_SLOW_DISK = """
import sys, time
from jrec import cli
from jrec.checkpoint import writer
write = writer.Writer._write
def slowly(self, *args):
    time.sleep({seconds})
    write(self, *args)
writer.Writer._write = slowly
sys.exit(cli.main())
"""


@contextlib.contextmanager
def training(command, log):
    """A child process that has trained for some steps."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (log.exists() and log.stat().st_size) and process.poll() is None:
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_two_signals_at_once_lose_no_step(configure, tmp_path, dataset):
    configure()
    overrides = [f"data.path={dataset}", "epochs=30", "checkpoint.every_steps=1000", "evaluate.every_steps=0"]
    arguments = ["train", str(tmp_path / "tiny.toml"), *overrides, "log.every_steps=1"]
    slow = [sys.executable, "-c", _SLOW_DISK.format(seconds=0.2), *arguments]
    for number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / number.name
        with training([*slow, f"out={out}"], out / "metrics.jsonl") as process:
            process.send_signal(number)
            time.sleep(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        stopping, stopped = err.splitlines()
        assert stopping.startswith(f"jrec: {number.name}: stopping after the current step")
        steps = sorted(int(path.name) for path in (out / "checkpoints").iterdir())
        assert stopped == f"stopped after step {steps[-1]:,}; the same command with --resume goes on"
        assert len((out / "metrics.jsonl").read_text().splitlines()) == steps[-1] < 570
    command = [sys.executable, "-m", "jrec", *arguments]
    runs = [(tmp_path / "whole", []), *((tmp_path / name, ["--resume"]) for name in ("SIGINT", "SIGTERM"))]
    for out, options in runs:
        subprocess.run([*command, f"out={out}", *options], check=True, capture_output=True)
    whole, *resumed = [(final_arrays(out), (out / "metrics.jsonl").read_bytes()) for out, _ in runs]
    assert resumed == [whole, whole]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_later_signal_gives_up_the_checkpoint_that_is_written(configure, tmp_path, dataset, number):
    configure()
    out = tmp_path / "run"
    overrides = [f"data.path={dataset}", "epochs=30", "log.every_steps=1", "checkpoint.every_steps=1000"]
    slow = [sys.executable, "-c", _SLOW_DISK.format(seconds=3)]
    with training([*slow, "train", str(tmp_path / "tiny.toml"), *overrides, f"out={out}"], out / "metrics.jsonl") as (
        process
    ):
        process.send_signal(number)
        time.sleep(ECHO_SECONDS + 0.5)
        assert [path.suffix for path in (out / "checkpoints").iterdir()] == [".partial"]
        for _ in range(2):
            process.send_signal(number)
            time.sleep(0.05)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.splitlines()[1:] == [
        "jrec: interrupted without a checkpoint of the last steps; --resume goes on from the last complete one"
    ]
    assert list((out / "checkpoints").iterdir()) == []


def test_a_second_run_in_the_folder_needs_resume_or_overwrite(configure):
    train(configure("max_steps=2"))
    with pytest.raises(ConfigError, match="holds a run already; go on with --resume"):
        train(configure("max_steps=2"))
    with pytest.raises(ConfigError, match=r"model\.top_mlp was .*16.* and is .*32"):
        train(configure("max_steps=2", "model.top_mlp=[32,1]"), resume=True)
    longer = train(configure("max_steps=4", "log.every_steps=1"), resume=True)
    assert longer.step == 4
    assert train(configure("max_steps=3", "model.top_mlp=[32,1]"), overwrite=True).step == 3


def test_a_run_that_never_began_is_in_nobodys_way(configure):
    other = configure("model.top_mlp=[32,1]")
    with pytest.raises(ConfigError, match="the plan"), open_run_folder(configure(), resume=False, overwrite=False):
        raise ConfigError("the plan does not fit")
    for resume in (False, True):
        with open_run_folder(other, resume=resume, overwrite=False) as folder:
            assert "32" in (folder / "config.toml").read_text()
    (folder / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already"), open_run_folder(other, resume=False, overwrite=False):
        pass


def test_a_folder_in_use_is_refused(configure):
    config = configure()
    with (
        open_run_folder(config, resume=False, overwrite=False),
        pytest.raises(OutputError, match="another process is training"),
        open_run_folder(config, resume=True, overwrite=False),
    ):
        pass


def test_divergence_is_an_error_that_leaves_the_last_checkpoint(configure):
    config = configure("optimizer.name=sgd", "optimizer.learning_rate=1e12")
    with pytest.raises(DivergedError, match="diverged"):
        train(config)


def test_a_run_s_folder_of_checkpoints_stands_for_the_run(configure):
    config = configure("max_steps=2", "checkpoint.every_steps=1")
    folder = train(config).folder
    for path in (folder / "checkpoints", folder):
        record, step = find_run(path)
        assert (type(record), record.folder, step) == (TrainedRun, folder, None)
    scores = [evaluate_checkpoint(at, config.data.path, split="test").scores for at in (folder, folder / "checkpoints")]
    np.testing.assert_array_equal(scores[0].logits, scores[1].logits)


def test_unusable_checkpoints_and_data_are_named(configure, tmp_path):
    config = configure("max_steps=1")
    folder = train(config).folder
    with pytest.raises(CheckpointError, match="neither a run folder"):
        evaluate_checkpoint(tmp_path / "nowhere", config.data.path, split="test")
    with pytest.raises(DatasetError, match="not a finished dataset"):
        evaluate_checkpoint(folder, tmp_path, split="test")
    with pytest.raises(ConfigError, match=r"model\.features\.C99"):
        train(configure("model.features.C99.pooling=max", out="other"))


@pytest.mark.parametrize("steps", [3, 8])
def test_steps_of_one_dispatch_leave_the_log_and_the_bits_of_one_by_one(configure, steps):
    one_by_one = train(configure("epochs=2", out="one")).folder
    together = train(configure("epochs=2", f"data.steps_per_dispatch={steps}", out="together")).folder
    assert (together / "metrics.jsonl").read_bytes() == (one_by_one / "metrics.jsonl").read_bytes()
    assert final_arrays(together) == final_arrays(one_by_one)


def test_a_loss_that_diverges_within_a_dispatch_names_its_step(configure, monkeypatch):
    config = configure(
        "data.steps_per_dispatch=8", "log.every_steps=8", "checkpoint.every_steps=0", "evaluate.every_steps=0"
    )
    absorb = Recorder.absorb

    def diverges(self, *of_steps):
        broken = [
            dataclasses.replace(r, loss=r.loss.at[..., -3].set(np.nan) if r.loss.ndim else r.loss) for r in of_steps
        ]
        absorb(self, *broken)

    monkeypatch.setattr(Recorder, "absorb", diverges)
    with pytest.raises(DivergedError, match="the loss became nan at step 6:"):
        train(config)
