"""Benchmarks of the embedding kernels, run whole on tiny workloads: every case, metric and figure they promise."""

import dataclasses
import json
import sys
from concurrent import futures

import jax
import numpy as np
import pytest

from benchmarks import (
    casting,
    casting_overlap,
    checkpoints,
    embedding,
    harness,
    mlperf,
    plain_jax,
    startup,
    train_step,
    workloads,
)

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


def test_casting_counts_bytes(monkeypatch, run):
    rm1 = dataclasses.replace(TINY, name="rm1")
    monkeypatch.setitem(workloads.WORKLOADS, "rm1", rm1)
    monkeypatch.setattr(casting, "QUICK_SECONDS", 0.0)
    results = run(casting.main, "--model", "rm1", "--batch", "16", "32", "--dim", "8", "16")
    values = {(r["case"], r["metric"]): r["value"] for r in results}
    assert {case for case, _ in values if not case.startswith("counted")} == {
        "rm1, batch 16, dim 8", "rm1, batch 32, dim 8", "rm1, batch 16, dim 16",
    }  # fmt: skip
    counted = "counted: uniform over 10,131,227 rows, 10 ids a bag, batch 16, dim 64"
    assert values[counted, "gradient, expanded"] == 10
    assert values[counted, "gradient, coalesced"] == 10  # 160 ids of ten million: all are different
    expand, accumulate, forward = 160 * 260 + 16 * 256, 160 * 260 + 160 * 260, 160 * 260 + 16 * 256
    assert values[counted, "traffic, expand and coalesce"] == pytest.approx((expand + accumulate) / forward)
    assert values[counted, "traffic, casted gather-reduce"] == pytest.approx(accumulate / (expand + accumulate))
    reread = expand + accumulate + 160 * 256
    assert values[counted, "traffic, expand and coalesce, sums reread"] == pytest.approx(reread / forward)
    assert values[counted, "traffic, casted gather-reduce, sums reread"] == pytest.approx(accumulate / reread)
    ids = workloads.zipf_ids(np.random.default_rng(0), 90, 48, rm1.zipf)
    lookups, unique, row = 48, len(np.unique(ids)), 4 * 8
    for metric, expected in {
        "expand, traffic": lookups * (row + 4) + 16 * row,
        "casted gather-reduce, traffic": lookups * (row + 4) + unique * (row + 4),
        "fused update, traffic": lookups * (row + 4) + unique * (2 * row + 8),
    }.items():
        assert values["rm1, batch 16, dim 8", metric] == pytest.approx(2 * expected / 1e6)


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


RM = dataclasses.replace(TINY, name="rm1", num_dense=3, bottom=(8,), top=(4, 1))


def test_a_workload_of_another_dim_ends_its_bottom_mlp_in_it():
    changed = workloads.WORKLOADS["rm1"].with_dim(32)
    assert (changed.dim, changed.bottom[-1]) == (32, 32)
    assert changed.bottom[:-1] == workloads.WORKLOADS["rm1"].bottom[:-1]


@pytest.mark.slow
def test_sides_of_the_overlap_train_alike_and_alternate(monkeypatch):
    monkeypatch.setattr(casting_overlap, "BLOCK_SECONDS", 0.0)
    run = casting_overlap.Run(RM)
    run.compare_losses()
    with futures.ThreadPoolExecutor(1) as loader:
        found = run.alternate(loader, 0.0, rounds=2)
    assert {side: len(times) for side, times in found.items()} == dict.fromkeys(casting_overlap.SIDES, 2)
    assert run.cast_seconds() > 0
    assert run.dense_seconds() > 0


def test_a_side_of_the_overlap_that_trains_otherwise_is_refused(monkeypatch):
    def without_the_last_rows(side, table, *arguments):
        new = new_table(side, table, *arguments)
        return table if side == casting_overlap.NONE else new

    new_table = casting_overlap._new_table
    monkeypatch.setattr(casting_overlap, "_new_table", without_the_last_rows)
    monkeypatch.setattr(casting_overlap, "LEARNING_RATE", 1.0)
    with pytest.raises(SystemExit, match="losses differ"):
        casting_overlap.Run(RM).compare_losses()


def test_overlap_is_reported(monkeypatch, run):
    sides = {"cast ahead": 10.0, "cast in the step": 14.0, "no casting": 20.0, "cast given": 9.0}
    primitives = dict.fromkeys(("gather-reduce", *casting.BASELINE, *casting.FUSED, casting_overlap.DENSE), 2.0)
    found = {"case": "rm1, batch 16", "steps": sides, "speedups": dict.fromkeys(sides, 2.0), "cast": 4.0}
    found |= {"exposed": 1.0, "primitives": primitives}
    monkeypatch.setattr(casting_overlap, "_in_process", lambda *_, **__: found)
    values = {r["metric"]: (r["value"], r["ratio"]) for r in run(casting_overlap.main)}
    assert values["step, cast ahead"] == (10.0, 2.0)
    assert values["step, no casting"] == (20.0, None)
    assert values["cast hidden"] == (75.0, None)
    assert values["no casting: embeddings' backward pass"] == (pytest.approx(100 * 4 / 6), None)


@pytest.mark.slow
def test_a_plain_jax_program_takes_the_same_steps(monkeypatch, run):
    kaggle = dataclasses.replace(RM, name="kaggle", rows=(90, 70, 60), ids_per_bag=(1, 1, 1))
    monkeypatch.setitem(workloads.WORKLOADS, "kaggle", kaggle)
    monkeypatch.setattr(harness, "QUICK_SECONDS", 0.05)
    results = run(plain_jax.main, "--rows", "50")
    assert {r["case"] for r in results} == {"Kaggle-like, adagrad, batch 16, 3 tables of 50 rows x 8"}
    assert {r["metric"] for r in results if r["ratio"]} == {
        f"step{cast}, {statistic}" for cast in ("", ", cast in loader") for statistic in ("median", "fastest")
    }


@pytest.mark.slow
def test_steps_say_which_tables_they_cap(monkeypatch, run):
    monkeypatch.setitem(workloads.WORKLOADS, "rm1", RM)
    monkeypatch.setattr(harness, "QUICK_SECONDS", 0.05)
    results = run(train_step.main, "--model", "rm1", "--table-rows", "80", "--one-hot", "--batch", "8")
    assert {r["case"] for r in results} == {
        "rm1 with tables capped at 80 rows, one-hot, adagrad, batch 8, 150 rows x 8"
    }
    whole = run(train_step.main, "--model", "rm1", "--table-rows", "90", "--batch", "8")
    assert {r["case"] for r in whole} == {"rm1, adagrad, batch 8, 160 rows x 8"}


@pytest.mark.slow
def test_checkpoints_are_measured_in_every_place(run):
    results = run(checkpoints.main)
    assert [r["case"].split(",")[0] for r in results[::12]] == list(checkpoints.PLACES)
    written = [r["details"]["by_first"] for r in results if r["metric"] == "written" and "first" not in r["case"]]
    assert max(written) < 0.5
    assert all(r["value"] < 1 for r in results if r["metric"] == "held")
