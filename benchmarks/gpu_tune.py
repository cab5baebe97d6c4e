"""Sweeps the tuning of the gather-reduce and update kernels on a GPU, and writes the entries that ``tune`` reads.

For every dim, in this order:

    forward            padded bags: chunks x unroll
    ragged             sums of long segments: split, and the long kernel's own unroll
    update, short      uniform ids, no long segment: chunks x unroll of the fused update
    update, long       a power law of 1.2: split, and the long kernel's own unroll, with the best of short
    update, mixed      a power law of 1.05: the winners and the default, on which the entry is decided

Ids are hashed, and each point's results are compared with XLA's. A point is a line ``{"tuning": …}``; an entry is
``{"entry": …}``, printed when its dim has ended, if the winner beats the default by more than the spread of both.

Examples:
  python -m benchmarks.gpu_tune --out tuning.jsonl
  python -m benchmarks.gpu_tune --dim 64 --out tuning.jsonl --earlier tuning.jsonl.partial
  python -m benchmarks.gpu_tune --apply tuning.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import gpu_run, gpu_timing, harness, resume
from benchmarks.gpu_tune_problems import Problem, Size
from jrec.pallas import measured
from jrec.pallas.measured import Entry, Key
from jrec.pallas.tuning import TuningConfig

DIMS = (16, 64, 128)
AXES: Mapping[str, tuple[int, ...]] = {
    "chunks": (1, 2, 4),
    "unroll": (1, 2, 4, 8),
    "split": (32, 64, 128),
    "long_unroll": (4, 8, 16, 32),
}
TINY_AXES: Mapping[str, tuple[int, ...]] = {"chunks": (1,), "unroll": (2,), "split": (8,), "long_unroll": (2,)}
SHORT_AXES, LONG_AXES = ("chunks", "unroll"), ("split", "long_unroll")
TINY = Size(rows=40, bags=8, length=4)
TOLERANCE = 1e-3  # of the largest value, after all updates of a dispatch
# The case that decides on each kind of kernel; the update's has ids as they come, hot and rare ones.
DECIDES = {"padded": "forward", "ragged": "ragged", "update": "update, mixed"}
TRUSTED_SPREAD = 0.1  # of the times of one point: above, the machine was busy, and nothing follows

Point = Mapping[str, Any]
"""What the sweep prints as ``{"tuning": …}``."""


def variants(default: TuningConfig, axes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> list[TuningConfig]:
    """The default, then it with every combination of the named axes."""
    combinations = itertools.product(*(axes[name] for name in names))
    made = [dataclasses.replace(default, **dict(zip(names, values, strict=True))) for values in combinations]
    return list(dict.fromkeys([default, *made]))


class Sweep:
    """The sweep of one run: its points so far, and the cases that add to them.

    Args:
      report: Takes the lines.
      found: Points of earlier runs.
      seconds: How long each point is timed.
      tiny: Whether to run at the interpreter's size.
    """

    def __init__(self, report: harness.Report, points: list[Point], *, seconds: float, tiny: bool):
        self._report, self._seconds, self._tiny = report, seconds, tiny
        self.points = points
        self._axes = TINY_AXES if tiny else AXES
        self._common = {
            "gpu": jax.devices()[0].device_kind,
            "driver": gpu_run.smi().get("driver_version", "none"),
            "jax": jax.__version__,
            "commit": harness.commit(),
        }

    def run(self, cases: resume.Cases, dim: int, dtype: str) -> None:
        """All stages of a dim; each begins with the winners of the one before."""
        size = TINY if self._tiny else Size.of(dim)
        problem = functools.partial(Problem, dim=dim, dtype=dtype, size=size)
        forward, ragged = problem(case="forward"), problem(case="ragged")
        configs = variants(forward.default(), self._axes, SHORT_AXES)
        self._stage(cases, forward, configs)
        self._stage(cases, ragged, variants(ragged.default(), self._axes, LONG_AXES))
        short, long, mixed = (problem(case=f"update, {which}") for which in ("short", "long", "mixed"))
        self._stage(cases, short, variants(short.default(), self._axes, SHORT_AXES))
        won = self._winner(short, mixed.default(), SHORT_AXES)
        self._stage(cases, long, variants(won, self._axes, LONG_AXES))
        self._stage(cases, mixed, [mixed.default(), won, self._winner(long, won, LONG_AXES)])
        self._emit_entries(dim, mixed.itemsize)

    def _winner(self, problem: Problem, base: TuningConfig, names: tuple[str, ...]) -> TuningConfig:
        """``base`` with the named fields of the fastest point; ``base`` where nothing was measured."""
        point = best(
            self.points, gpu=self._common["gpu"], dim=problem.dim, itemsize=problem.itemsize, case=problem.case
        )
        if point is None:
            return base
        return dataclasses.replace(base, **{n: point["config"][n] for n in names if n in point["config"]})

    def _stage(self, cases: resume.Cases, problem: Problem, configs: list[TuningConfig]) -> None:
        made: dict[str, Callable[[], None]] = {}
        for config in dict.fromkeys(configs):
            fields = dataclasses.asdict(config)
            key = f"{problem.describe()} {json.dumps(fields, sort_keys=True)}"
            made[key] = functools.partial(self._point, problem, config)
        cases.run(made)

    def _point(self, problem: Problem, config: TuningConfig) -> None:
        rounds = 1 if self._tiny else gpu_timing.rounds_for(problem.expected_seconds(), len(problem.batches))
        loop = problem.loop(config, rounds=rounds)
        loop.dispatch()
        want = problem.reference(rounds)
        error = float(np.max(np.abs(problem.observe(loop) - want)) / np.max(np.abs(want)))
        if not error < TOLERANCE:  # NaN fails too
            raise ValueError(f"{config} differs from XLA by {error:.1e} of the largest value")
        least, profile = (1, False) if self._tiny else (3, True)
        timing = loop.time(seconds=self._seconds, least=least, profile=profile)
        point = {
            **self._common,
            "dim": problem.dim,
            "itemsize": problem.itemsize,
            "kind": problem.kind,
            "case": problem.case,
            "workload": problem.describe(),
            "config": dataclasses.asdict(config),
            "default": config == problem.default(),
            "us": round(1e6 * timing.seconds, 3),
            "spread": round(timing.spread, 4),
            "kernels": {k.name: round(1e6 * k.seconds / timing.calls, 3) for k in timing.kernels[:8]},
        }
        self.points.append(point)
        self._report.line({"tuning": point})

    def _emit_entries(self, dim: int, itemsize: int) -> None:
        for (name, of_dim, size, kind), entry in entries(self.points).items():
            if (name, of_dim, size) != (self._common["gpu"], dim, itemsize):
                continue
            key = {"gpu": name, "dim": of_dim, "itemsize": size, "kind": kind}
            self._report.line({"entry": {**key, "config": dict(entry.config), "evidence": dict(entry.evidence)}})
            ratio = entry.evidence["default_us"] / entry.evidence["us"]
            self._report.add(f"dim {dim}", kind, entry.evidence["us"], "us", peer="default", ratio=ratio)


def points_of(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The sweep's points among other lines."""
    return [line["tuning"] for line in lines if isinstance(line.get("tuning"), dict)]


def best(points: Iterable[Point], **wanted: Any) -> Point | None:
    """The fastest point whose fields have the wanted values; the default where it is as fast to within its spread."""
    matching = [p for p in points if all(p[name] == value for name, value in wanted.items())]
    if not matching:
        return None
    fastest = min(matching, key=lambda p: p["us"])
    for point in matching:
        if point["default"] and point["us"] <= fastest["us"] * (1 + max(point["spread"], fastest["spread"])):
            return point
    return fastest


def entries(points: Iterable[Point]) -> dict[Key, Entry]:
    """The configs that beat the default by more than the spread of both, with their evidence.

    A GPU, dim and kind of kernel whose default was not measured, or was measured on a busy machine, gives no entry.
    """
    points = list(points)
    made: dict[Key, Entry] = {}
    for key in _keys(points):
        outcome = _outcome(points, key)
        if outcome is not None and not outcome[0]["default"]:
            winner, default = outcome
            made[key] = Entry(config=dict(winner["config"]), evidence=_evidence(winner, default))
    return made


def _keys(points: Iterable[Point]) -> list[Key]:
    return list(dict.fromkeys((p["gpu"], p["dim"], p["itemsize"], p["kind"]) for p in points))


def _outcome(points: list[Point], key: Key) -> tuple[Point, Point] | None:
    """(winner, default) of a key; None where the default was not measured, or on a busy machine."""
    gpu, dim, itemsize, kind = key
    wanted = {"gpu": gpu, "dim": dim, "itemsize": itemsize, "kind": kind, "case": DECIDES[kind]}
    winner = best(points, **wanted)
    default = next((p for p in points if p["default"] and all(p[n] == v for n, v in wanted.items())), None)
    if winner is None or default is None or default["spread"] > TRUSTED_SPREAD:
        return None
    return winner, default


def _evidence(winner: Point, default: Point) -> dict[str, Any]:
    return {
        "us": winner["us"],
        "default_us": default["us"],
        "spread": max(winner["spread"], default["spread"]),
        "case": winner["workload"],
        "default_config": dict(default["config"]),
        **{name: winner[name] for name in ("commit", "driver", "jax")},
    }


def apply(lines: Iterable[Mapping[str, Any]], path: pathlib.Path = measured.PATH) -> dict[Key, Entry]:
    """Rewrites the file of entries: the sweep's replace older ones with the same key.

    An older entry stays where the sweep measured nothing, and where it was the default of the sweep and won again.
    Otherwise the sweep contradicts it, and it goes.

    Returns:
      The entries of the sweep.
    """
    swept = points_of(lines)
    new = entries(swept)
    kept = measured.read(path) if path.is_file() else {}
    for key in _keys(swept):
        outcome = _outcome(swept, key)
        if outcome is not None and not _holds(kept.get(key), outcome[0]["config"]):
            kept.pop(key, None)
    measured.write(path, {**kept, **new})
    return new


def _holds(entry: Entry | None, config: Mapping[str, Any]) -> bool:
    return entry is not None and all(config.get(name) == value for name, value in entry.config.items())


def _apply_file(path: pathlib.Path, target: pathlib.Path) -> None:
    lines = list(resume.read_lines(path))
    if not points_of(lines):
        raise SystemExit(f"{path}: no line holds a point of a sweep; make one with --out")
    made = apply(lines, target)
    for (name, dim, itemsize, kind), entry in made.items():
        print(f"{name}, dim {dim}, {itemsize} bytes, {kind}: {dict(entry.config)}, {entry.evidence['us']} us"
              f" against {entry.evidence['default_us']} us")  # fmt: skip
    print(f"{len(made)} entries of {path} are in {target}")


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Sweeps the dims that were asked for."""
    seconds = 0.0 if arguments.tiny else 0.03 if arguments.quick else 0.08
    points = points_of(resume.read_lines(arguments.earlier))
    sweep = Sweep(report, points, seconds=seconds, tiny=arguments.tiny)
    for dim, dtype in itertools.product(arguments.dim, arguments.dtype):
        sweep.run(cases, dim, dtype)


def main() -> None:
    """Runs the sweep, or applies one."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--dim", nargs="+", type=int, default=list(DIMS), help="dims to sweep (default: 16 64 128)")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    parser.add_argument("--apply", type=pathlib.Path, metavar="FILE",
                        help="measure nothing: write the winners among the lines of FILE to --measured")  # fmt: skip
    parser.add_argument("--measured", type=pathlib.Path, metavar="FILE", default=measured.PATH,
                        help="the entries that jrec reads (default: jrec/pallas/measured.json)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.apply is not None:
        _apply_file(arguments.apply, arguments.measured)
        return
    gpu_run.run(arguments, "gpu_tune", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
