"""The tuning sweep's choices and the file of entries, without a GPU; and one point of it in the interpreter."""

import argparse
import io
import json

import numpy as np
import pytest

from benchmarks import gpu_tune, harness, resume
from benchmarks.gpu_tune_problems import EXPONENTS, Problem, Size
from jrec.pallas import measured
from jrec.pallas.interpret import interpreted
from jrec.pallas.tuning import TuningConfig

DEFAULT = {"chunks": 1, "unroll": 8, "split": 32}


KINDS = {"forward": "padded", "ragged": "ragged"}


def _point(case, us, *, default=False, spread=0.01, gpu="NVIDIA H100", dim=64, **config):
    return {
        "gpu": gpu, "driver": "580", "jax": "0.11.2", "commit": "abc", "dim": dim, "itemsize": 4,
        "kind": KINDS.get(case, "update"), "case": case, "workload": f"{case}: …", "config": {**DEFAULT, **config},
        "default": default, "us": us, "spread": spread, "kernels": {},
    }  # fmt: skip


def test_variants_begin_with_the_default():
    default = TuningConfig(chunks=2, unroll=4)
    made = gpu_tune.variants(default, {"chunks": (1, 2), "unroll": (4, 8), "split": (16,)}, ("chunks", "unroll"))
    assert made[0] == default
    assert {(c.chunks, c.unroll) for c in made} == {(1, 4), (1, 8), (2, 4), (2, 8)}
    assert len(made) == 4
    assert {c.split for c in made} == {default.split}


def test_an_entry_is_what_beats_the_default_by_more_than_noise():
    mixed = [_point("update, mixed", 24.0, default=True), _point("update, mixed", 20.0, unroll=4)]
    ((key, entry),) = gpu_tune.entries(mixed).items()
    assert key == ("NVIDIA H100", 64, 4, "update")
    assert entry.config == {**DEFAULT, "unroll": 4}
    assert (entry.evidence["us"], entry.evidence["default_us"]) == (20.0, 24.0)
    assert {"spread", "case", "commit", "driver", "default_config"} <= set(entry.evidence)
    # Within the noise, without a default, or with a default measured on a busy machine: no entry.
    assert not gpu_tune.entries([mixed[0], _point("update, mixed", 23.9, unroll=4)])
    assert not gpu_tune.entries(mixed[1:])
    assert not gpu_tune.entries([_point("update, mixed", 24.0, default=True, spread=0.5), mixed[1]])


def test_kinds_of_kernels_have_entries_of_their_own():
    found = [
        _point("forward", 10.0, default=True), _point("forward", 8.0, chunks=2),
        _point("ragged", 50.0, default=True), _point("ragged", 40.0, split=128),
        _point("update, short", 9.0, default=True), _point("update, short", 1.0, unroll=2),
    ]  # fmt: skip
    made = gpu_tune.entries(found)
    assert {key[3]: entry.config for key, entry in made.items()} == {
        "padded": {**DEFAULT, "chunks": 2}, "ragged": {**DEFAULT, "split": 128},
    }  # fmt: skip


def test_gpus_and_dims_are_told_apart():
    found = []
    for gpu, dim, us in (("NVIDIA H100", 64, 20.0), ("NVIDIA H200", 64, 30.0), ("NVIDIA H100", 128, 20.0)):
        found += [_point("update, mixed", 25.0, default=True, gpu=gpu, dim=dim)]
        found += [_point("update, mixed", us, unroll=4, gpu=gpu, dim=dim)]
    assert set(gpu_tune.entries(found)) == {("NVIDIA H100", 64, 4, "update"), ("NVIDIA H100", 128, 4, "update")}


def test_apply_rewrites_the_file_and_keeps_what_the_sweep_does_not_contradict(tmp_path):
    path = tmp_path / "measured.json"
    old = measured.Entry(config=DEFAULT, evidence={"us": 1.0})
    other, same, gone = (
        ("NVIDIA B200", 64, 4, "update"),
        ("NVIDIA H100", 16, 4, "update"),
        ("NVIDIA H100", 128, 4, "update"),
    )
    lost = measured.Entry(config={**DEFAULT, "unroll": 1}, evidence={})
    measured.write(path, {other: old, same: old, gone: lost})
    sweep = [
        _point("update, mixed", 24.0, default=True), _point("update, mixed", 20.0, unroll=4),
        _point("update, mixed", 9.0, default=True, dim=16), _point("update, mixed", 9.5, dim=16, unroll=4),
        _point("update, mixed", 9.0, default=True, dim=128), _point("update, mixed", 9.5, dim=128, unroll=4),
    ]  # fmt: skip
    file = tmp_path / "tuning.jsonl"
    file.write_text("".join(json.dumps({"tuning": p}) + "\n" for p in sweep) + '{"torn": ')
    gpu_tune._apply_file(file, path)
    found = measured.read(path)
    assert set(found) == {other, same, ("NVIDIA H100", 64, 4, "update")}
    assert TuningConfig(**found["NVIDIA H100", 64, 4, "update"].config).unroll == 4
    assert len(path.read_text().splitlines()) == 5
    with pytest.raises(SystemExit, match="no line holds a point"):
        gpu_tune._apply_file(path, path)


ENTRY = json.dumps({"gpu": "x", "dim": 4, "itemsize": 4, "kind": "update", "config": {}, "evidence": {}})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1}', "are a list, not dict"),
        ('[{"gpu": "x"}]', "entry 0 needs gpu"),
        (f"[{ENTRY}, {ENTRY}]", "entry 1 is the second one"),
        (f"[{ENTRY.replace('update', 'downdate')}]", "of kind 'downdate'"),
    ],
)
def test_a_bad_file_of_entries_is_refused(tmp_path, text, match):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        measured.read(path)


def test_the_entries_that_ship_can_be_read():
    for entry in measured.entries().values():
        TuningConfig(**entry.config)


def _sweep(found=()):
    arguments = argparse.Namespace(quick=True, out=None)
    report = harness.Report(arguments, "test", stdout=io.StringIO())
    return report, gpu_tune.Sweep(report, list(found), seconds=0.0, tiny=True)


def test_a_point_is_compared_with_xla_and_printed():
    report, sweep = _sweep()
    problem = Problem(case="forward", dim=8, dtype="float32", size=gpu_tune.TINY)
    with interpreted():
        sweep._point(problem, problem.default())
        problem.__dict__["_references"][1] = problem.reference(1) + np.float32(1)
        with pytest.raises(ValueError, match="differs from XLA"):
            sweep._point(problem, problem.default())
    (line,) = report._stdout.getvalue().splitlines()
    point = json.loads(line)["tuning"]
    assert (point["case"], point["dim"], point["default"], point["kind"]) == ("forward", 8, True, "padded")
    assert point["us"] > 0


@pytest.mark.slow
def test_a_sweep_runs_every_stage_and_goes_on(tmp_path):
    report, sweep = _sweep()
    with interpreted():
        sweep.run(resume.Cases(report.line), 16, "float32")
    lines = [json.loads(line) for line in report._stdout.getvalue().splitlines()]
    assert {p["case"] for p in gpu_tune.points_of(lines)} == set(EXPONENTS)
    assert not any("error" in line for line in lines)
    report, sweep = _sweep(gpu_tune.points_of(lines))
    sweep.run(resume.Cases(report.line, lines), 16, "float32")
    assert "tuning" not in report._stdout.getvalue()


def test_sizes_exceed_the_cache():
    for dim in gpu_tune.DIMS:
        assert Size.of(dim).rows * dim * 4 >= 200e6
