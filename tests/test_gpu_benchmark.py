"""What of the GPU benchmark needs no GPU: bytes, cases, hashed ids, both sides at tiny sizes, what a failure leaves."""

import argparse
import dataclasses
import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    gpu,
    gpu_cases,
    gpu_peers,
    gpu_sides,
    gpu_smoke,
    gpu_timing,
    harness,
    workloads,
)  # fmt: skip
from jrec import ops
from jrec.pallas.interpret import interpreted

TINY = workloads.Workload(
    name="tiny", rows=(50, 7), dim=8, ids_per_bag=(3, 1), batch=4, num_dense=4, bottom=(16, 8), top=(16, 1)
)
CASE = gpu_cases.Case(stacks=(TINY,), optimizer=ops.RowWiseAdagrad(learning_rate=0.1))


def test_forward_traffic_counts_each_row_once_and_once_a_lookup():
    moved = gpu_cases.forward_traffic(np.array([[5, 5], [6, -1]]), bags=2, dim=4, itemsize=2)
    assert moved == gpu_cases.Traffic(read=4 * 4 + 2 * 4 * 2, written=2 * 4 * 4, lookups=4 * 4 + 3 * 4 * 2 + 2 * 4 * 4)


@pytest.mark.parametrize(("optimizer", "slot_bytes"), [(ops.SGD, 0), (ops.RowWiseAdagrad, 4), (ops.Adam, 32)])
def test_update_traffic_counts_rows_and_slots_in_and_out(optimizer, slot_bytes):
    optimizer = optimizer(learning_rate=1.0)
    moved = gpu_cases.update_traffic(np.array([5, 5, 6]), bags=3, dim=4, itemsize=4, optimizer=optimizer)
    touched, cast = 2 * (16 + slot_bytes), 3 * 4 + 2 * 8
    assert moved == gpu_cases.Traffic(
        read=cast + 3 * 16 + touched, written=touched, lookups=cast + 3 * 16 + 2 * touched
    )


def test_tables_are_capped_to_the_memory():
    small = gpu_cases.capped(CASE, limit=20 * 8 * 4)
    assert small.table_bytes <= 20 * 8 * 4
    assert small.stacks[0].rows[1] == 7
    assert gpu_cases.capped(CASE) == CASE
    for name, case in gpu_cases.cases().items():
        cut = gpu_cases.capped(case)
        assert cut.table_bytes <= 12 << 30, name
        assert all(sum(stack.rows) < 2**31 - 1 for stack in cut.stacks)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000, 65_536, 100_003])
def test_hashing_permutes_the_rows_of_a_table(rows):
    hashed = workloads.hashed_ids(np.arange(rows, dtype=np.int32), rows)
    assert hashed.dtype == np.int32
    np.testing.assert_array_equal(np.sort(hashed), np.arange(rows))
    if rows > 100:  # neighbours end up a third of the table apart, as random places do
        assert np.abs(np.diff(hashed.astype(np.int64))).mean() / rows == pytest.approx(1 / 3, abs=0.05)


def test_hashing_keeps_shape_padding_and_multiplicity():
    ids = np.array([[3, -1, 3], [0, 9, -7]], np.int32)
    hashed = workloads.hashed_ids(ids, 10)
    assert hashed.shape == ids.shape
    assert hashed[0, 0] == hashed[0, 2] != hashed[1, 0]
    assert (hashed[0, 1], hashed[1, 2]) == (-1, -7)


def test_batches_are_stacked_feature_major_and_hashed():
    ids, offsets = gpu_cases.stacked_ids(TINY, seed=1), gpu_cases.stacked_offsets(TINY)
    np.testing.assert_array_equal(offsets, [0, 3, 6, 9, 12, 13, 14, 15, 16])
    assert np.all(ids[:12] < 50)
    assert np.all((ids[12:] >= 50) & (ids[12:] < 57))
    ranks = workloads.table_ids(TINY, seed=1)[0].reshape(-1)
    np.testing.assert_array_equal(ids[:12], workloads.hashed_ids(ranks, 50))
    one_hot = gpu_cases.cases()["kaggle"].stacks[0].with_rows_capped(10)
    assert gpu_cases.stacked_offsets(one_hot) is None
    assert gpu_cases.stacked_ids(one_hot, seed=0).shape == (26 * gpu_cases.BATCH, 1)


def test_a_loop_calls_its_step_in_turn_over_the_batches():
    batches = [jnp.int32(1), jnp.int32(10), jnp.int32(100)]
    loop = gpu_timing.Loop(
        lambda fixed, state, batch: (state * fixed + batch, state), jnp.int32(2), jnp.int32(0), batches, rounds=2
    )
    loop.dispatch()
    want = 0
    for batch in (1, 10, 100) * 2:
        want = want * 2 + batch
    assert int(loop.state) == want
    assert loop.calls == 6
    with pytest.raises(ValueError, match="1 batch"):
        gpu_timing.Loop(lambda fixed, state, batch: (state, batch), None, None, batches[:1], rounds=1)
    timing = loop.time(seconds=0.0, least=3, profile=False)
    assert timing.seconds > 0
    assert timing.details().keys() == {"spread", "calls", "dispatches"}


def test_rounds_fill_a_dispatch():
    assert gpu_timing.rounds_for(1e-4, 2, target=0.02) == 100
    assert gpu_timing.rounds_for(10.0, 2) == 1
    assert gpu_timing.rounds_for(1e-9, 2) == gpu_timing.MAX_ROUNDS


def test_a_run_gives_operations_by_time():
    function = jax.jit(lambda x: jnp.sort(x @ x, axis=0))
    x = jnp.ones((200, 200))
    function(x).block_until_ready()
    found = gpu_timing.profiled(lambda: [function(x).block_until_ready() for _ in range(3)])
    assert any(kernel.name.startswith("sort") and kernel.count == 3 for kernel in found)
    assert [k.seconds for k in found] == sorted((k.seconds for k in found), reverse=True)
    timing = gpu_timing.Timing(seconds=1.0, spread=0.0, calls=3, dispatches=1, kernels=found)
    details = timing.details(top=1)
    assert details["launches"] == sum(k.count for k in found) / 3
    assert details["kernels"] == [[found[0].name, pytest.approx(1e6 * found[0].seconds / 3, rel=1e-3)]]


class _Line:
    def __init__(self, name, *events):
        self.name = name
        self.events = [
            type("Event", (), {"name": n, "start_ns": at, "duration_ns": d, "stats": stats})()
            for n, at, d, *stats in events
        ]


def test_of_a_gpu_trace_the_streams_alone_count():
    plane = type("Plane", (), {})
    gpu_plane, host = plane(), plane()
    gpu_plane.name, gpu_plane.lines = "/device:GPU:0", [
        _Line(
            "Stream #13(Compute)", ("sgemm", 1e6, 2000.0, ("cuda_graph_id", 7)), ("sgemm", 1.003e6, 1000.0),
            ("memcpy", 1.005e6, 500.0),
        ),
        _Line("XLA Modules", ("jit_run", 0.0, 9000.0)),
    ]  # fmt: skip
    host.name, host.lines = "/host:CPU", [
        _Line(
            "python", ("call", 0.0, 1e9), ("cuGraphLaunch (CudaGraph:10)", 5.0, 9.0),
            ("cuGraphLaunch (CudaGraph:3)", 15.0, 9.0),
        )
    ]  # fmt: skip
    trace = type("Trace", (), {"planes": [host, gpu_plane]})()
    found = gpu_timing.trace_of(trace)
    assert [(k.name, k.count) for k in found.kernels] == [("sgemm", 2), ("memcpy", 1)]
    assert found.kernels[0].seconds == pytest.approx(3e-6)
    assert found.span == pytest.approx(5.5e-6)
    assert [(call.name, call.count) for call in found.calls] == [("cuGraphLaunch", 2)]
    assert found.in_graphs == 1


@pytest.mark.parametrize("implementation", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_side_steps_its_tables(implementation):
    batches = gpu_sides.Batches.of(CASE, 2)
    with interpreted():
        side = gpu_sides.Side(CASE, batches, implementation)
        state, out = side.forward(side.tables(), None, batches.bags[0])
        assert state is None
        assert out["stack0"].shape == (8, 8)
        before = np.asarray(side.tables()["stack0"])
        loop = side.loop("cast and update", rounds=1)
        loop.dispatch()
        after = np.asarray(loop.state[0]["stack0"])
    touched = np.unique(np.concatenate([ids[0] for ids in batches.ids]))
    changed = np.flatnonzero(np.any(after != before, axis=1))
    np.testing.assert_array_equal(changed, touched)


def test_sides_agree_and_a_wrong_one_is_found():
    batches = gpu_sides.Batches.of(CASE, 2)
    with interpreted():
        xla, pallas = (gpu_sides.Side(CASE, batches, name).trace() for name in ("xla", "pallas"))
    assert gpu_sides.compare(CASE, pallas, xla) < 1e-5
    for field, match in (("outputs", "forward of stack0 differs"), ("touched", "update of stack0 differs")):
        wrong = dataclasses.replace(pallas, **{field: {"stack0": getattr(pallas, field)["stack0"] * 1.01}})
        with pytest.raises(gpu_sides.SidesDifferError, match=match):
            gpu_sides.compare(CASE, wrong, xla)
    nan = dataclasses.replace(pallas, outputs={"stack0": np.full_like(pallas.outputs["stack0"], np.nan)})
    with pytest.raises(gpu_sides.SidesDifferError):
        gpu_sides.compare(CASE, nan, xla)
    astray = dataclasses.replace(pallas, untouched={"stack0": (1, 2)})
    with pytest.raises(gpu_sides.SidesDifferError, match="rows of stack0 that no id names"):
        gpu_sides.compare(CASE, astray, xla)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_checksum_sees_every_untouched_bit(dtype):
    table = gpu_sides.filled(20, 8, dtype)
    touched = gpu_sides._mask(20, jnp.array([3, 4]))
    want = int(gpu_sides._checksum(table, touched))
    assert int(gpu_sides._checksum(table.at[3, 2].set(7), touched)) == want
    assert int(gpu_sides._checksum(table.at[5, 2].add(jnp.asarray(0.01, dtype)), touched)) != want
    swapped = table.at[jnp.array([8, 9])].set(table[jnp.array([9, 8])])
    assert int(gpu_sides._checksum(swapped, touched)) != want


def test_fbgemms_ids_are_table_major_rows_of_each_table():
    ids, lengths = gpu_peers.fbgemm_ids(CASE, 1)
    np.testing.assert_array_equal(lengths, [3] * 4 + [1] * 4)
    stacked = gpu_cases.stacked_ids(TINY, seed=1)
    np.testing.assert_array_equal(ids, np.where(np.arange(16) < 12, stacked, stacked - 50))


def test_smoke_finds_a_wrong_kernel(monkeypatch):
    inputs = gpu_smoke.Inputs(rows=60, dim=8, bags=6, length=3)
    report = harness.Report(argparse.Namespace(quick=True, out=None), "test", stdout=io.StringIO())
    check = inputs.checks("xla", 1)["gather"]
    gpu_smoke._check(report, "gather", "xla", check, 0.0)
    right = ops.gather_reduce
    monkeypatch.setattr(ops, "gather_reduce", lambda *a, **k: right(*a, **k).at[0].add(0.01))
    with pytest.raises(ValueError, match="gather by xla is wrong"):
        gpu_smoke._check(report, "gather", "xla", check, 0.0)

    def missing():
        raise NotImplementedError("no such kernel")

    gpu_smoke._check(report, "cast", "pallas", missing, 0.0)
    assert json.loads(report._stdout.getvalue().splitlines()[-1])["absent"].startswith("NotImplementedError: no such")


def _run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--peer", *arguments])
    gpu.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_a_line_holds_both_fractions_and_launches(monkeypatch, capsys):
    lines = _run(monkeypatch, capsys, "--case", "fbgemm ci", "--metric", "forward")
    found = {line["metric"]: line for line in lines if line.get("case") == "fbgemm ci"}
    assert set(found) == {"largest difference of pallas and xla", "forward, xla", "forward, pallas"}
    details = found["forward, xla"]["details"]
    assert details["lookup_fraction"] >= details["distinct_fraction"] > 0
    assert details["launches"] > 0
    assert found["forward, pallas"]["peer"] == "xla"


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "skipped: there is no NVIDIA GPU that JAX can use" in done.stderr
    assert done.stdout == ""
