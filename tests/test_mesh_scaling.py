"""``benchmarks.scaling``: what it reads off compiled programs, and prints."""

import json
import sys

import pytest

from benchmarks import scaling, scaling_step

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


@pytest.mark.slow
def test_steps_are_measured_and_their_links_counted(monkeypatch, capsys):
    lines = _printed(monkeypatch, capsys, ["--quick", "--devices", "2", "--examples", "32", "--only", "steps"])
    values = {r["metric"]: r for r in lines}
    assert 0.1 < values["loss after the steps"]["value"] < 3
    assert values["fetched over a link, mean"]["ratio"] == pytest.approx(1, abs=0.2)
    real, moved = (values[f"sent by a device, all collectives{w}"]["value"] for w in (", without padding", ""))
    assert 0 < real <= moved


def _printed(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    scaling.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
