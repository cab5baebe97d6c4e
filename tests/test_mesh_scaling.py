"""``benchmarks.scaling``: what it reads off compiled programs, projects, and prints."""

import json
import re
import sys

import pytest

from benchmarks import scaling, scaling_project, scaling_step, workloads

HLO = """
  %a = s32[8,96]{1,0} all-to-all(%x), channel_id=1, dimensions={0}
  %b = ((f32[8,96,16]{2,1,0}), f32[8,96,16]{2,1,0}) all-to-all-start(%y), channel_id=1
  %c = f32[8,96,16]{2,1,0} all-to-all-done(%b)
  %d = (f32[10]{0}, bf16[3,2]{1,0}, pred[4]{0}) all-reduce(%p, %q, %r), to_apply=%sum
  %e = ((s32[5]{0}), s32[40]{0}) all-gather-start(%t), dimensions={0}
  %f = f32[16]{0} fusion(%all-to-all.1), kind=kLoop
"""


def test_collectives_of_a_program():
    found = scaling_step.collectives(HLO, 8)
    kinds = ["all-to-all", "all-to-all", "all-reduce", "all-gather"]
    assert [(c.kind, c.bytes) for c in found] == list(
        zip(kinds, (4 * 8 * 96, 4 * 8 * 96 * 16, 40 + 12 + 4, 160), strict=True)
    )
    assert [c.sent for c in found] == [7 / 8 * c.bytes * (2 if c.kind == "all-reduce" else 1) for c in found]
    assert found[2].shapes == ("f32[10]", "bf16[3,2]", "pred[4]")


def test_projection_adds_what_the_links_carry():
    workload = workloads.WORKLOADS["kaggle"].with_rows_capped(1000).with_batch(128 * 16)
    setup = scaling_step.planned(workload, scaling_project.cluster(16), extra_memory=0.0)
    found = scaling_project.project(setup, compute=1e-3, dense_bytes=37_000_000)
    assert found.exchange == pytest.approx(scaling_project.PADDING * (132 / 64) * setup.cost.links.sum(axis=1).max())
    assert found.all_reduce == pytest.approx(2 * 15 / 16 * 1e-3)  # 37 MB at 37 GB/s; nothing is replicated
    assert found.latency == pytest.approx(6 * 40e-6)
    assert found.apart == pytest.approx(1e-3 + found.communication)
    assert found.hidden == found.communication > 1e-3
    assert scaling_project.cluster(4).devices == 4


def test_no_device_steps_faster_than_it_moves_and_multiplies():
    workload = workloads.WORKLOADS["kaggle"].with_rows_capped(1).with_batch(64)  # one row a table: all bags read it
    cast, bags = 4 * 64 * 26, 4 * 16 * 64 * 26
    moved = (cast + 26 * 64 + bags) + (cast + 26 * 8 + bags + 2 * 26 * (64 + 4))
    assert scaling_project.floor_seconds(workload, dense_parameters=1) == pytest.approx(moved / 4800e9)
    assert scaling_project.floor_seconds(workload, dense_parameters=10**9) == pytest.approx(6 * 64 * 1e9 / 494e12)


def test_projections_are_printed_with_what_they_assume(monkeypatch, capsys):
    arguments = ["--quick", "--examples", "32", "--only", "projection", "--single-step-ms", "2", "--device-name", "X"]
    lines, notes = _printed(monkeypatch, capsys, arguments)
    values = {(re.search(r"\d+ H200", r["case"])[0], r["metric"]): r["value"] for r in lines}
    for cluster in ("8 H200", "64 H200"):
        assert values[cluster, "compute"] == 2
        assert values[cluster, "step, nothing overlaps"] > values[cluster, "step, all is hidden"] >= 2
        together = sum(values[cluster, what] for what in ("exchange", "all-reduce", "latency"))
        assert values[cluster, "communication"] == pytest.approx(together)
    assert values["64 H200", "exchange"] > values["8 H200", "exchange"]
    assert "a step of 2 ms, of X, and assume that" in notes
    assert all(assumption in notes for assumption in scaling_project.ASSUMPTIONS)


@pytest.mark.slow
def test_steps_are_measured_and_their_links_counted(monkeypatch, capsys):
    lines, _ = _printed(monkeypatch, capsys, ["--quick", "--devices", "2", "--examples", "32", "--only", "steps"])
    values = {r["metric"]: r for r in lines}
    assert 0.1 < values["loss after the steps"]["value"] < 3
    assert values["fetched over a link, mean"]["ratio"] == pytest.approx(1, abs=0.2)
    real, moved = (values[f"sent by a device, all collectives{w}"]["value"] for w in (", without padding", ""))
    assert 0 < real <= moved


def _printed(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    scaling.main()
    out = capsys.readouterr()
    return [json.loads(line) for line in out.out.splitlines()], out.err
