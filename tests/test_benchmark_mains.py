"""Benchmarks of the embedding kernels, run whole on tiny workloads: every case, metric and figure they promise."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from benchmarks import casting, embedding, mlperf, startup, workloads

TINY = workloads.Workload(
    name="tiny", rows=(90, 70), dim=8, ids_per_bag=(3, 3), batch=16, num_dense=0, bottom=(), top=()
)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a benchmark's main with arguments and returns the results it printed."""

    def run(main, *arguments):
        platforms = jax.config.jax_platforms
        monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--out", str(tmp_path / "out.jsonl"), *arguments])
        try:
            main()
        finally:
            jax.config.update("jax_platforms", platforms)
        results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert results == [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        return results

    return run


@pytest.mark.slow
def test_embedding_measures_forward_and_backward_of_every_case(monkeypatch, run):
    cases = {name: dataclasses.replace(TINY, name=name) for name in ("cpu", "one-hot")}
    monkeypatch.setattr(embedding, "CASES", cases)
    results = run(embedding.main, "--case", "cpu", "one-hot")
    found = {(r["case"].split(",")[0], r["case"].split(",")[1].strip(), r["metric"]) for r in results}
    for case in cases:
        for optimizer in ("rowwise_adagrad", "adagrad"):
            for metric in ("forward", "backward", "backward, cast in loader"):
                assert (case, optimizer, f"{metric}, median") in found
    assert all(r["value"] > 0 for r in results)
    assert {r["unit"] for r in results} == {"ms"}


def test_casting_counts_bytes_and_draws_the_papers_figures(monkeypatch, run, tmp_path):
    rm1 = dataclasses.replace(TINY, name="rm1")
    monkeypatch.setitem(workloads.WORKLOADS, "rm1", rm1)
    monkeypatch.setattr(casting, "QUICK_SECONDS", 0.0)
    figures = tmp_path / "figures"
    results = run(casting.main, "--model", "rm1", "--batch", "16", "32", "--dim", "8", "16", "--plot", str(figures))
    values = {(r["case"], r["metric"]): r["value"] for r in results}
    assert {case for case, _ in values} == {
        "rm1, batch 16, dim 8", "rm1, batch 32, dim 8", "rm1, batch 16, dim 16",
    }  # fmt: skip
    ids = workloads.zipf_ids(np.random.default_rng(0), 90, 48, rm1.zipf)
    lookups, unique, row = 48, len(np.unique(ids)), 4 * 8
    for metric, expected in {
        "expand, traffic": lookups * (row + 4) + 16 * row,
        "casted gather-reduce, traffic": lookups * (row + 4) + unique * (row + 4),
        "fused update, traffic": lookups * (row + 4) + unique * (2 * row + 8),
    }.items():
        assert values["rm1, batch 16, dim 8", metric] == pytest.approx(2 * expected / 1e6)
    assert sorted(path.name for path in figures.iterdir()) == [
        "figure06_traffic.png", "figure12_latency.png", "figure16_batch.png", "figure17_dim.png",
    ]  # fmt: skip


@pytest.mark.slow
def test_startup_times_whole_processes_of_two_checkouts(monkeypatch, run):
    monkeypatch.setattr(startup, "ROWS", 4000)
    results = run(startup.main, "--case", "imports", "resume", "--against", str(startup.harness.ROOT))
    medians = [r for r in results if r["metric"].endswith(", median")]
    assert [r["metric"].split(",")[0] for r in medians] == ["what jrec eval imports", "jrec train --resume"]
    assert all(r["value"] > 0 and r["ratio"] > 0 for r in medians)


@pytest.mark.slow
def test_mlperf_times_steps_of_cross_layers(monkeypatch, run):
    tiny = dataclasses.replace(TINY, num_dense=3, bottom=(8,), top=(4, 1), cross_layers=2, cross_rank=3)
    monkeypatch.setitem(workloads.WORKLOADS, mlperf.WORKLOAD, tiny)
    results = run(mlperf.main, "--batch", "16")
    assert "step, median" in {r["metric"] for r in results}
    assert all(r["value"] > 0 for r in results)
