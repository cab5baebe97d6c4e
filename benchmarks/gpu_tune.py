"""Sweeps the tuning of the gather-reduce and update kernels on a GPU, and writes the entries that ``tune`` reads.

For every dim, in this order:

    forward            padded bags: chunks x unroll
    ragged             sums of long segments: split, and the long kernel's own unroll
    update, short      uniform ids, no long segment: chunks x unroll of the fused update
    update, long       a power law of 1.2: split, and the long kernel's own unroll, with the best of short
    update, mixed      a power law of 1.05: the winners and the default, on which the entry is decided

Ids are hashed, and each point's results are compared with XLA's. Axes that ``TuningConfig`` lacks are left out. A point
is a line ``{"tuning": …}``; an entry is ``{"entry": …}``, printed when its dim has ended, if the winner beats the
default by more than the spread of both.

Examples:
  python -m benchmarks.gpu_tune --out tuning.jsonl
  python -m benchmarks.gpu_tune --dim 64 --out tuning.jsonl --earlier tuning.jsonl.partial
  python -m benchmarks.gpu_tune --apply tuning.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from benchmarks import gpu, gpu_device, gpu_timing, gpu_tune_entries, harness, resume
from benchmarks.gpu_tune_problems import Problem, Size
from jrec.pallas import measured
from jrec.pallas.interpret import interpreted
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


def variants(default: TuningConfig, axes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> list[TuningConfig]:
    """The default, then it with every combination of the named axes that ``TuningConfig`` has."""
    present = [name for name in names if name in {field.name for field in dataclasses.fields(TuningConfig)}]
    made = [default]
    for values in itertools.product(*(axes[name] for name in present)):
        config = dataclasses.replace(default, **dict(zip(present, values, strict=True)))
        if config not in made:
            made.append(config)
    return made


class Sweep:
    """The sweep of one run: its points so far, and the cases that add to them.

    Args:
      report: Takes the lines.
      found: Points of earlier runs.
      seconds: How long each point is timed.
      tiny: Whether to run at the interpreter's size.
    """

    def __init__(self, report: harness.Report, points: list[gpu_tune_entries.Point], *, seconds: float, tiny: bool):
        self._report, self._seconds, self._tiny = report, seconds, tiny
        self.points = points
        self._axes = TINY_AXES if tiny else AXES
        self._common = {
            "gpu": jax.devices()[0].device_kind,
            "driver": gpu_device.driver(),
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
        point = gpu_tune_entries.best(
            self.points, gpu=self._common["gpu"], dim=problem.dim, itemsize=problem.itemsize, case=problem.case
        )
        if point is None:
            return base
        return dataclasses.replace(base, **{n: point["config"][n] for n in names if n in point["config"]})

    def _stage(self, cases: resume.Cases, problem: Problem, configs: list[TuningConfig]) -> None:
        made: dict[str, Callable[[], None]] = {}
        for config in dict.fromkeys(configs):
            fields = dataclasses.asdict(config)
            key = f"{problem.describe()} {gpu_tune_entries.config_key(fields)}"
            made[key] = functools.partial(self._point, problem, config)
        cases.run(made)

    def _point(self, problem: Problem, config: TuningConfig) -> None:
        rounds = 1 if self._tiny else gpu_timing.rounds_for(problem.expected_seconds(), len(problem.batches()))
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
        for (name, of_dim, size, kind), entry in gpu_tune_entries.entries(self.points).items():
            if (name, of_dim, size) != (self._common["gpu"], dim, itemsize):
                continue
            key = {"gpu": name, "dim": of_dim, "itemsize": size, "kind": kind}
            self._report.line({"entry": {**key, "config": dict(entry.config), "evidence": dict(entry.evidence)}})
            ratio = entry.evidence["default_us"] / entry.evidence["us"]
            self._report.add(f"dim {dim}", kind, entry.evidence["us"], "us", peer="default", ratio=ratio)


def _apply(path: pathlib.Path, target: pathlib.Path) -> None:
    lines = list(resume.read_lines(path))
    if not gpu_tune_entries.points(lines):
        raise SystemExit(f"{path}: no line holds a point of a sweep; make one with --out")
    made = gpu_tune_entries.apply(lines, target)
    for (name, dim, itemsize, kind), entry in made.items():
        print(f"{name}, dim {dim}, {itemsize} bytes, {kind}: {dict(entry.config)}, {entry.evidence['us']} us"
              f" against {entry.evidence['default_us']} us")  # fmt: skip
    print(f"{len(made)} entries of {path} are in {target}")


def _parser() -> argparse.ArgumentParser:
    made = harness.parser(__doc__)
    made.add_argument("--dim", nargs="+", type=int, default=list(DIMS), help="dims to sweep (default: 16 64 128)")
    made.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"])
    made.add_argument("--earlier", type=pathlib.Path, metavar="FILE",
                      help="lines of a run that was cut off: its points are not measured again")  # fmt: skip
    made.add_argument("--apply", type=pathlib.Path, metavar="FILE",
                      help="measure nothing: write the winners among the lines of FILE to --measured")  # fmt: skip
    made.add_argument("--measured", type=pathlib.Path, metavar="FILE", default=measured.PATH,
                      help="the entries that jrec reads (default: jrec/pallas/measured.json)")  # fmt: skip
    made.add_argument("--tiny", action="store_true", help="a tiny sweep in the kernels' interpreter on a CPU")
    return made


@contextlib.contextmanager
def _interpreted_if(tiny: bool) -> Iterator[None]:
    with interpreted() if tiny else contextlib.nullcontext():
        yield


def main() -> None:
    """Runs the sweep, or applies one."""
    arguments = _parser().parse_args()
    if arguments.apply is not None:
        _apply(arguments.apply, arguments.measured)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    earlier = list(resume.read_lines(arguments.earlier))
    with harness.Report(arguments, "gpu_tune") as report, _interpreted_if(arguments.tiny):
        if not arguments.tiny and jax.default_backend() != "gpu":
            report.note(gpu.MISSING)
            return
        cases = resume.Cases(report.line, earlier)
        seconds = 0.0 if arguments.tiny else 0.03 if arguments.quick else 0.08
        sweep = Sweep(report, gpu_tune_entries.points(earlier), seconds=seconds, tiny=arguments.tiny)
        for dim, dtype in itertools.product(arguments.dim[: 1 if arguments.tiny else None], arguments.dtype):
            sweep.run(cases, dim, dtype)


if __name__ == "__main__":
    main()
