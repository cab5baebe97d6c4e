"""Whole DLRM training steps on a GPU under the profiler, by XLA and by the kernels: which kernels take the time.

A line a model and implementation: microseconds a step by the wall clock over many steps, and of one profiled run the
launches, the kernels' time, and the 20 slowest kernels. Losses of both implementations are compared first.

Examples:
  python -m benchmarks.gpu_step
  python -m benchmarks.gpu_step --model rm1 --batch 4096
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import numpy as np

from benchmarks import gpu_run, gpu_timing, harness, models, resume, workloads
from jrec.ops.dispatch import Implementation

MODELS = {"kaggle": 16_384, "rm1": 2048}  # batch by model
MAX_ROWS = 2_000_000
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")
TOP = 20
STEPS = 20  # of the profiled run
TOLERANCE = 1e-3  # relative, of losses
TINY = workloads.Workload(
    name="tiny", rows=(50, 30), dim=8, ids_per_bag=(2, 2), batch=8, num_dense=4, bottom=(16, 8), top=(16, 1)
)


class Run:
    """A model's state and compiled step by one implementation, and three batches in rotation."""

    def __init__(self, workload: workloads.Workload, implementation: Implementation) -> None:
        self.state, run = models.training_run(
            workload, "rowwise_adagrad", learning_rate=0.01, seed=0, implementation=implementation
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


def measure(report: harness.Report, name: str, workload: workloads.Workload, implementation: Implementation,
            *, losses: dict[str, np.ndarray], steps: int) -> None:  # fmt: skip
    """Times and profiles a model's step, and compares its first losses with the other implementation's."""
    run = Run(workload, implementation)
    run.steps(3)
    losses[implementation] = np.array([float(loss) for loss in run.losses[:3]])
    for other in losses.values():
        worst = float(np.max(np.abs(losses[implementation] / other - 1)))
        if not worst < TOLERANCE:  # NaN fails too
            raise ValueError(f"{name}: losses of {' and '.join(losses)} differ by {worst:.1e}")
    walls = sorted(run.steps(steps) for _ in range(3))
    kernels = gpu_timing.profiled(lambda: run.steps(steps))
    spread = (walls[-1] - walls[0]) / walls[0]
    timing = gpu_timing.Timing(seconds=walls[0], spread=spread, calls=steps, dispatches=3, kernels=kernels)
    report.add(name, f"step, {implementation}", 1e6 * timing.seconds, "us", details=timing.details(top=TOP))


def workload_of(name: str, batch: int | None) -> workloads.Workload:
    """The model at its batch, with tables that leave the GPU's memory to both states."""
    return workloads.WORKLOADS[name].with_rows_capped(MAX_ROWS).with_batch(batch or MODELS[name])


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Measures every model by both implementations."""
    chosen = {"tiny": TINY} if arguments.tiny else {n: workload_of(n, arguments.batch) for n in arguments.model}
    made = {}
    for name, workload in chosen.items():
        losses: dict[str, np.ndarray] = {}
        for implementation in IMPLEMENTATIONS:
            made[f"{name}, {implementation}"] = functools.partial(
                measure, report, name, workload, implementation, losses=losses, steps=2 if arguments.tiny else STEPS
            )
    cases.run(made)


def main() -> None:
    """Measures the models that were asked for."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--batch", type=int, help="examples a step (default: 16,384 for kaggle, 2,048 for rm1)")
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_step", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
