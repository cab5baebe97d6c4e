"""Whole training steps on a GPU under the profiler, by XLA and by the kernels: which kernels take the time.

A line a model and side: microseconds a step by the wall clock over many steps, and of one profiled run the launches,
the kernels' time, its share of the wall time, and the 20 slowest kernels. Losses of the sides are compared first.
Tables are capped so that making them takes seconds; they are far larger than a GPU's cache.

Examples:
  python -m benchmarks.gpu_step
  python -m benchmarks.gpu_step --model dcnv2 --side pallas bfloat16
  python -m benchmarks.gpu_step --side pallas --uncaptured
"""

from __future__ import annotations

import argparse
import functools
import os
import time

import jax
import numpy as np

from benchmarks import gpu_run, gpu_timing, harness, models, resume, workloads
from jrec.ops.dispatch import Implementation

# workload, batch, and the most rows of a table
MODELS = {
    "kaggle": ("kaggle", 2048, 2_000_000),
    "kaggle, large batch": ("kaggle", 16_384, 2_000_000),
    "dcnv2": ("mlperf-dcnv2", 6912, 500_000),
    "rm1": ("rm1", 2048, 2_000_000),
}
DEFAULT = ("kaggle", "kaggle, large batch", "dcnv2")
# of the embedding ops, the dense layers' dtype, and how far losses may be from the other sides', relatively
SIDES: dict[str, tuple[Implementation, str, float]] = {
    "xla": ("xla", "float32", 1e-3),
    "pallas": ("pallas", "float32", 1e-3),
    "bfloat16": ("pallas", "bfloat16", 3e-2),
}
TOP = 20
STEPS = 20  # of the profiled run
TINY = workloads.Workload(
    name="tiny", rows=(50, 30), dim=8, ids_per_bag=(2, 2), batch=8, num_dense=4, bottom=(16, 8), top=(16, 1)
)


class Run:
    """A model's state and compiled step by one side, and three batches in rotation."""

    def __init__(self, workload: workloads.Workload, side: str) -> None:
        implementation, dtype, _ = SIDES[side]
        self.state, run = models.training_run(
            workload,
            "rowwise_adagrad",
            learning_rate=0.01,
            seed=0,
            implementation=implementation,
            compute_dtype=dtype,
        )
        self._step = run.step
        self._batches = [models.on_device(models.batch(workload, seed=seed, hashed=True)) for seed in range(3)]
        self.losses: list[jax.Array] = []

    def steps(self, count: int) -> float:
        """Seconds a step, over ``count`` of them without a wait in between."""
        start = time.perf_counter()
        for number in range(count):
            self.state, loss, _ = self._step(self.state, self._batches[number % len(self._batches)])
            self.losses.append(loss)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / count


def measure(report: harness.Report, name: str, workload: workloads.Workload, side: str,
            *, losses: dict[str, np.ndarray], steps: int, captured: bool) -> None:  # fmt: skip
    """Times and profiles a model's step, and compares its first losses with the other sides'."""
    run = Run(workload, side)
    run.steps(3)
    losses[side] = np.array([float(loss) for loss in run.losses[:3]])
    for other in losses.values():
        worst = float(np.max(np.abs(losses[side] / other - 1)))
        if not worst < SIDES[side][2]:  # NaN fails too
            raise ValueError(f"{name}: losses of {' and '.join(losses)} differ by {worst:.1e}")
    walls = sorted(run.steps(steps) for _ in range(3))
    kernels = gpu_timing.profiled(lambda: run.steps(steps))
    spread = (walls[-1] - walls[0]) / walls[0]
    timing = gpu_timing.Timing(seconds=walls[0], spread=spread, calls=steps, dispatches=3, kernels=kernels)
    details = timing.details(top=TOP)
    if kernels:
        details["busy"] = gpu_timing.rounded(sum(kernel.seconds for kernel in kernels) / steps / timing.seconds)
    metric = f"step, {side}" + ("" if captured else ", without command buffers")
    report.add(f"{name}, batch {workload.batch:,}", metric, 1e6 * timing.seconds, "us", details=details)


def workload_of(name: str) -> workloads.Workload:
    """The model at its batch, with tables that are made in seconds."""
    workload, batch, rows = MODELS[name]
    return workloads.WORKLOADS[workload].with_rows_capped(rows).with_batch(batch)


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Measures every model by every side."""
    chosen = {"tiny": TINY} if arguments.tiny else {name: workload_of(name) for name in arguments.model}
    made = {}
    for name, workload in chosen.items():
        losses: dict[str, np.ndarray] = {}
        for side in arguments.side:
            made[f"{name}, {side}"] = functools.partial(
                measure,
                report,
                name,
                workload,
                side,
                losses=losses,
                steps=2 if arguments.tiny else STEPS,
                captured=not arguments.uncaptured,
            )
    cases.run(made)


def main() -> None:
    """Measures the models that were asked for."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(DEFAULT))
    parser.add_argument("--side", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--uncaptured", action="store_true", help="without command buffers: each kernel is a launch")
    arguments = parser.parse_args()
    if arguments.uncaptured and not arguments.tiny:  # CPUs do not know the flag
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {gpu_run.UNCAPTURED}".strip()
    gpu_run.run(arguments, "gpu_step", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
