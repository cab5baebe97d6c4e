"""Metric logs: what is written, what a resumed run keeps, and damaged files."""

import json

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jrec.app.report.logs import METRICS_FILE, TIMING_FILE, MetricLog, read_records, truncate_after
from jrec.errors import CheckpointError, DivergedError
from jrec.metrics import Scores, evaluate


def run(folder, first, last, *, every=3):
    """A stand-in for training: logs every step, evaluates every third, and times itself."""
    with MetricLog(folder, tensorboard=False) as log:
        log.truncate_after(first - 1)
        for step in range(first, last + 1):
            log.write(step, {"loss": np.float32(1) / step, "running_auc": None}, timing={"seconds": step + first / 7})
            if step % every == 0:
                log.write(step, {"auc": jnp.float32(0.5), "undefined": {"calibration": "why"}}, split="valid")


def test_records(tmp_path):
    run(tmp_path / "run", 1, 3)
    assert list(read_records(tmp_path / "run" / METRICS_FILE)) == [
        {"step": 1, "split": "train", "loss": 1.0, "running_auc": None},
        {"step": 2, "split": "train", "loss": 0.5, "running_auc": None},
        {"step": 3, "split": "train", "loss": float(np.float32(1) / 3), "running_auc": None},
        {"step": 3, "split": "valid", "auc": 0.5, "undefined": {"calibration": "why"}},
    ]
    assert [r["seconds"] for r in read_records(tmp_path / "run" / TIMING_FILE)] == [1 + 1 / 7, 2 + 1 / 7, 3 + 1 / 7]


@given(killed_at=st.integers(0, 12), resumed_from=st.integers(0, 12), torn=st.binary(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_resumed_file_is_that_of_an_uninterrupted_run(tmp_path_factory, killed_at, resumed_from, torn):
    folder = tmp_path_factory.mktemp("run")
    run(folder / "whole", 1, 12)
    run(folder / "killed", 1, killed_at)
    with (folder / "killed" / METRICS_FILE).open("ab") as file:
        file.write(torn.replace(b"\n", b""))  # a record that the kill cut short
    run(folder / "killed", min(resumed_from, killed_at) + 1, 12)
    whole, resumed = ((folder / name / METRICS_FILE).read_bytes() for name in ("whole", "killed"))
    assert whole == resumed
    assert len(list(read_records(folder / "killed" / TIMING_FILE))) == 12


def test_diverged_metrics_are_not_recorded(tmp_path):
    with MetricLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"loss": 0.5})
        with pytest.raises(DivergedError, match=r"train loss is nan at step 2"):
            log.write(2, {"loss": jnp.float32(jnp.nan)})
        with pytest.raises(DivergedError, match=r"valid log_loss is inf at step 2"):
            log.write(2, {"log_loss": float("inf")}, split="valid")
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "split": "train", "loss": 0.5}\n'


def test_steps_do_not_descend(tmp_path):
    with MetricLog(tmp_path, tensorboard=False) as log:
        log.write(5, {"loss": 0.5})
        log.write(5, {"auc": 0.5}, split="valid")
        with pytest.raises(ValueError, match=r"step 4 come after those of step 5"):
            log.write(4, {"loss": 0.5})


@pytest.mark.parametrize("line", [b"not json\n", b'{"loss": 1}\n', b"[1]\n", b"\xff\n", b"\n"])
def test_damaged_files_are_named(tmp_path, line):
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step": 1}\n' + line + b'{"step": 3}\n')
    with pytest.raises(CheckpointError, match=rf"{METRICS_FILE}: line 2 is no record"):
        truncate_after(path, 5)
    assert path.read_bytes().endswith(b'{"step": 3}\n')


def test_truncating_an_absent_file_leaves_it_absent(tmp_path):
    truncate_after(tmp_path / METRICS_FILE, 3)
    assert not (tmp_path / METRICS_FILE).exists()


def scalars(folder):
    """Tags, steps and values of all TensorBoard files, and the steps from which each file purges."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found, purges = [], []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            if event.HasField("session_log") and event.session_log.status == SessionLog.SessionStatus.START:
                purges.append(event.step)
    return found, purges


def test_tensorboard(tmp_path):
    with MetricLog(tmp_path, tensorboard=True) as log:
        scores = Scores(logits=np.zeros(2, np.float32), labels=np.array([True, True]))
        log.write(10, {"loss": 0.5}, timing={"examples_per_second": 100})
        log.write(10, evaluate(scores).to_dict(), split="valid")
        log.sync()
    found, _ = scalars(tmp_path / "tensorboard")
    values = {tag: (step, value) for tag, step, value in found}
    assert values["train/loss"] == (10, 0.5)
    assert values["train/examples_per_second"] == (10, 100.0)
    assert values["valid/accuracy"] == (10, 1.0)
    assert "valid/auc" not in values  # undefined
    with MetricLog(tmp_path, tensorboard=True) as log:
        log.truncate_after(10)
        log.write(15, {"loss": 0.25})
    found, purges = scalars(tmp_path / "tensorboard")
    assert ("train/loss", 15, 0.25) in found
    assert purges[-1] == 11
    assert json.loads((tmp_path / TIMING_FILE).read_text())["examples_per_second"] == 100


def test_without_tensorboard_nothing_of_it_is_made(tmp_path):
    run(tmp_path / "run", 1, 2)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [METRICS_FILE, TIMING_FILE]
