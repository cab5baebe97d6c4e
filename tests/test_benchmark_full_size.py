"""The benchmark of whole runs, at a size that takes a minute, and what it computes from logs."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import full_size, many_tables
from benchmarks.full_size_process import JrecProcess, RunFolder
from jrec.app.report.logs import CHECKPOINTS, MetricLog


@pytest.mark.parametrize("rows", [[10, 3, 100], [5], [1, 1, 1]])
def test_tables_are_capped_to_at_most_a_total(rows):
    for total in range(len(rows), sum(rows) + 3):
        cap = full_size.capped(rows, total)
        assert sum(min(n, cap) for n in rows) <= total
        assert cap == max(rows) or sum(min(n, cap + 1) for n in rows) > total


def test_step_times_and_checkpoints_are_read_from_a_runs_logs(tmp_path):
    run = RunFolder(tmp_path)
    assert run.step == 0
    seconds = 0.0
    with MetricLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 6):
            seconds += 0.01 * step
            log.write(step, {"loss": 1.0}, timing={"examples_per_second": step * 32 / seconds})
            if step == 3:
                log.write_timing(step, {"of": 2, "blocking_seconds": 0.01, "seconds": 0.5}, split=CHECKPOINTS)
            assert run.step == step
    assert run.step_seconds(32) == pytest.approx({step: 0.01 * step for step in range(1, 6)})
    assert [(record["of"], record["step"]) for record in run.checkpoints()] == [(2, 3)]


def test_a_process_is_watched_by_phase_and_its_failure_is_told(tmp_path):
    process = JrecProcess("--version")
    process.watch()
    assert process.peak.resident >= process.peak.anonymous > 0
    assert "jrec" in process.output()
    process = JrecProcess("train", str(tmp_path / "absent.toml"))
    with pytest.raises(RuntimeError, match=r"jrec train .*absent.toml ended with 2: .*absent"):
        process.watch()


@pytest.mark.slow
def test_many_tables_measures_what_grows(monkeypatch, capsys):
    monkeypatch.setattr(many_tables.harness, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["many_tables", "--quick", "--tables", "2", "5"])
    many_tables.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    metrics = ["layout", "model", "packer", "pack and cast a batch", "first step, with compilation", "step"]
    assert [line["metric"] for line in lines] == metrics * 2
    assert all(line["details"]["by_fewest"] > 0 for line in lines[len(metrics) :])


@pytest.mark.slow
def test_a_hundredth_of_kaggle_is_trained_killed_resumed_and_evaluated(tmp_path):
    command = [sys.executable, "-m", "benchmarks.full_size", "--quick", "--work", str(tmp_path), "--out"]
    for _ in range(2):  # the second time, nothing is left to do, and the figures are the same
        done = subprocess.run([*command, str(tmp_path / "out.jsonl")], cwd=full_size.harness.ROOT, env=dict(os.environ))
        assert done.returncode == 0
        figures = {line["metric"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
        assert figures["same bits after kill and resume"]["value"] == 1
        for phase in ("start", "steps and checkpoints", "resume", "evaluation"):
            assert figures[f"peak memory, {phase}"]["details"]["met"]
        assert figures["resumed from step"]["value"] in (10, 20)
        assert {"step, median", "checkpoint of step 10", "checkpoint of step 10, steps held"} <= figures.keys()
    assert not (tmp_path / "quick" / "kaggle").exists()
