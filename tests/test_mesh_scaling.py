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


@pytest.mark.slow
def test_benchmark_measures_counts_and_projects(monkeypatch, capsys):
    arguments = ["--quick", "--devices", "1", "2", "--examples", "32", "--only", "steps", "projection"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    scaling.main()
    out = capsys.readouterr()
    lines = [json.loads(line) for line in out.out.splitlines()]
    values = {(re.search(r"\d+ (devices|H200)", r["case"])[0], r["metric"]): r["value"] for r in lines}
    assert values["1 devices", "step, median"] == pytest.approx(values["8 H200", "compute"])
    assert values["2 devices", "fetched over a link, mean"] > 0
    assert values["2 devices", "sent by a device, all collectives"] > 0
    losses = [values[f"{n} devices", "loss after the steps"] for n in (1, 2)]
    assert all(0.1 < loss < 3 for loss in losses)
    assert "assume that" in out.err
