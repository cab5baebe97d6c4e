"""Whole training steps on a GPU as ``jrec train`` dispatches them: 16 steps a dispatch, the running AUC on the device.

For each model and side: the time of a step whose batches are on the device already, and of one that a feed packs and
places; examples a second; then the launches, the kernels' time and the slowest kernels of a profiled run, and what the
host calls. First losses of the sides are compared. Sides:

    pallas, xla      jrec's kernels, or XLA's programs for the embedding ops; dense layers in float32 (TF32 products)
    bfloat16, xla bfloat16     the same with dense layers in bfloat16
    adagrad          jrec's kernels with element-wise Adagrad, beside
    plain            an nnx.Embed a table and optax's Adagrad, as one writes it without jrec: one dispatch a step

Tables of DLRM-DCNv2 are capped at 10 million rows, so that they fit 80 GB; Kaggle's are whole.

Examples:
  python -m benchmarks.gpu_step
  python -m benchmarks.gpu_step --case "dcnv2, bfloat16" --trace traces
  python -m benchmarks.gpu_step --case "kaggle, pallas" --uncaptured
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

import jrec
from benchmarks import dispatched, gpu_run, gpu_timing, harness, models, plain_jax, resume, workloads
from jrec import ops
from jrec.app.report.running_auc import RunningAuc
from jrec.batch import Batch
from jrec.nn import binary_cross_entropy
from jrec.ops.dispatch import Implementation
from jrec.run.feeds.feed import Ready
from jrec.run.step import StepResults

# The most rows of a table, and how many different batches take turns.
MODELS = {
    "kaggle": (1 << 30, 32),
    "kaggle, large batch": (1 << 30, 16),
    "dcnv2": (10_000_000, 4),
    "rm1": (2_000_000, 8),
}
# of the embedding ops, the dense layers' dtype, the rows' optimizer, and how far losses may be from others', relatively
SIDES: dict[str, tuple[Implementation, str, type[Any], float]] = {
    "pallas": ("pallas", "float32", ops.RowWiseAdagrad, 1e-3),
    "xla": ("xla", "float32", ops.RowWiseAdagrad, 1e-3),
    "bfloat16": ("pallas", "bfloat16", ops.RowWiseAdagrad, 3e-2),
    "xla bfloat16": ("xla", "bfloat16", ops.RowWiseAdagrad, 3e-2),
    "adagrad": ("pallas", "float32", ops.Adagrad, 1e-3),
}
PLAIN = "plain"
CASES = (
    ("kaggle", "pallas"), ("kaggle", "xla"), ("dcnv2", "bfloat16"), ("kaggle, large batch", "pallas"),
    ("dcnv2", "xla bfloat16"), ("kaggle, large batch", "xla"), ("kaggle", "adagrad"), ("kaggle", PLAIN),
    ("dcnv2", "pallas"), ("kaggle", "bfloat16"), ("rm1", "pallas"), ("rm1", "xla"),
)  # fmt: skip
DEFAULT = 8
TRACED = (("kaggle", "pallas"), ("kaggle", "xla"), ("dcnv2", "bfloat16"))  # cases whose trace is worth keeping whole
TOP = 24
SECONDS = 0.25  # of one measurement, about
TINY = workloads.Workload(
    name="tiny", rows=(50, 30), dim=8, ids_per_bag=(2, 2), batch=8, num_dense=4, bottom=(16, 8), top=(16, 1)
)
ONE_HOT = workloads.Workload(
    name="tiny, one-hot", rows=(50, 30), dim=8, ids_per_bag=(1, 1), batch=8, num_dense=4, bottom=(16, 8), top=(16, 1)
)


class Dispatched:
    """A run's steps as they are dispatched, by one side."""

    def __init__(self, workload: workloads.Workload, side: str, packed: list[Batch], *, steps: int) -> None:
        implementation, dtype, rows, _ = SIDES[side]
        embedding = rows(learning_rate=0.01, initial_accumulator=0.1, eps=1e-7)
        made = models.modules(workload, dtype=dtype, implementation=implementation, embedding=embedding)
        self.steps = steps
        self._run = jrec.distribute(*made, cast="none")
        self._step_on = self._run._state.compiled.with_loss(binary_cross_entropy, 1)
        self._metrics: Any = RunningAuc.empty()
        self._feed = self._run.feed(itertools.cycle(packed), steps=lambda _: steps)
        self._placed: list[Ready] = []
        self._results: StepResults | None = None

    def fed(self) -> StepResults:
        """The steps of the feed's next dispatch; the first two dispatches are kept for ``placed``."""
        batch = next(self._feed)
        results = self._take(batch.ready)
        self._feed.stepped(batch, {}, results)
        if len(self._placed) < 2:
            self._placed.append(batch.ready)
        return results

    def placed(self, number: int) -> StepResults:
        """The steps of one of the dispatches whose batches are on the device."""
        return self._take(self._placed[number % len(self._placed)])

    def wait(self) -> None:
        """Until all steps have been taken."""
        jax.block_until_ready((self._results, self._run._state._flat))

    def close(self) -> None:
        """Ends the feed's thread."""
        self._feed.close()
        self._run.close()

    def _take(self, ready: Ready) -> StepResults:
        _, results = self._run._state.step(ready, self._step_on, self._metrics)
        self._metrics, self._results = results.metrics, results
        return results


def _seconds(dispatch: Callable[[], Any], wait: Callable[[], None], *, budget: float, parts: int = 5) -> list[float]:
    """Seconds of a dispatch, in ``parts`` measurements that take about ``budget`` together; in ascending order."""
    dispatch()
    wait()
    begin = time.perf_counter()
    dispatch()
    wait()
    calls = max(1, min(2000, round(budget / parts / (time.perf_counter() - begin))))
    taken = []
    for _ in range(parts):
        begin = time.perf_counter()
        for _ in range(calls):
            dispatch()
        wait()
        taken.append((time.perf_counter() - begin) / calls)
    return sorted(taken)


def measure(report: harness.Report, name: str, workload: workloads.Workload, side: str, *,
            losses: dict[str, np.ndarray], steps: int, different: int, captured: bool,
            traces: pathlib.Path | None) -> None:  # fmt: skip
    """Times and profiles a model's step, and compares its first losses with the other sides'."""
    note, case = "" if captured else ", without command buffers", f"{name}, batch {workload.batch:,}"
    begin = time.perf_counter()
    run = Dispatched(workload, side, _packed(workload, different), steps=steps)
    jax.block_until_ready(run._run._state._flat)
    made = time.perf_counter()
    try:
        _compare(name, side, np.asarray(run.fed().loss).reshape(-1)[:3], losses)
        first = time.perf_counter() - made
        report.add(case, f"first dispatch, {side}{note}", first, "s", details={"made in": round(made - begin, 2)})
        run.fed()
        number = itertools.count()
        budget, parts = (SECONDS, 5) if steps == dispatched.STEPS else (0.01, 1)
        taken = _seconds(lambda: run.placed(next(number)), run.wait, budget=budget, parts=parts)
        _add(report, case, f"{side}{note}", taken, workload, steps)
        taken_fed = _seconds(run.fed, run.wait, budget=2 * budget, parts=parts)
        _add(report, case, f"{side}, fed{note}", taken_fed, workload, steps)
        keep = None
        if traces is not None and (name, side) in TRACED:
            keep = traces / f"{name}_{side}{note}".replace(", ", "_").replace(" ", "_")
        trace = gpu_timing.traced(lambda: (run.placed(0), run.placed(1), run.wait()), keep=keep)
        if trace.kernels:
            _add_trace(report, case, f"{side}{note}", trace, 2 * steps, statistics.median(taken) / steps)
    finally:
        run.close()


@functools.cache
def _packed(workload: workloads.Workload, different: int) -> list[Batch]:
    return [models.batch(workload, seed=seed, hashed=True) for seed in range(different)]


def _add(report: harness.Report, case: str, side: str, taken: list[float], workload: workloads.Workload,
         steps: int) -> None:  # fmt: skip
    seconds = statistics.median(taken) / steps
    spread = gpu_timing.rounded((taken[-1] - taken[0]) / taken[0])
    details = {"spread": spread, "steps a dispatch": steps}
    report.add(case, f"step, {side}", 1e6 * seconds, "us", details=details)
    report.add(case, f"examples, {side}", workload.batch / seconds, "examples/s", details=details)


def _add_trace(report: harness.Report, case: str, side: str, trace: gpu_timing.Trace, steps: int,
               wall: float) -> None:  # fmt: skip
    seconds = sum(k.seconds for k in trace.kernels) / steps
    details = {
        "launches": gpu_timing.rounded(sum(k.count for k in trace.kernels) / steps),
        "of the time without a profiler": gpu_timing.rounded(seconds / wall),
        "of the traced span": gpu_timing.rounded(steps * seconds / trace.span),
        "launches in graphs": gpu_timing.rounded(trace.in_graphs / steps),
        "host calls": _by_step(trace.calls, steps),
        "kernels": _by_step(trace.kernels[:TOP], steps),
    }
    report.add(case, f"kernels' time, {side}", 1e6 * seconds, "us", details=details)


def _by_step(summed: Iterable[gpu_timing.Kernel], steps: int) -> list[list[Any]]:
    """Name, count and microseconds of a step."""
    return [[k.name, gpu_timing.rounded(k.count / steps), gpu_timing.rounded(1e6 * k.seconds / steps)] for k in summed]


def _compare(name: str, side: str, first: np.ndarray, losses: dict[str, np.ndarray]) -> None:
    losses[side] = first
    for other in losses.values():
        worst = float(np.max(np.abs(first / other - 1)))
        if not worst < SIDES[side][3]:  # NaN fails too
            raise ValueError(f"{name}: losses of {' and '.join(losses)} differ by {worst:.1e}")


def measure_plain(report: harness.Report, name: str, workload: workloads.Workload, *, different: int,
                  tiny: bool) -> None:  # fmt: skip
    """Times a step of ``nnx.Embed`` and optax."""
    case, begin = f"{name}, batch {workload.batch:,}", time.perf_counter()
    batches = [plain_jax.plain_batch(workload, seed=seed, hashed=True) for seed in range(different)]
    step = plain_jax.plain_step(workload, batches, seed=0)
    made = time.perf_counter()
    last = step()
    jax.block_until_ready(last)
    first = time.perf_counter() - made
    report.add(case, "first dispatch, plain", first, "s", details={"made in": round(made - begin, 2)})

    def dispatch() -> None:
        nonlocal last
        last = step()

    taken = _seconds(dispatch, lambda: jax.block_until_ready(last), budget=0.01 if tiny else SECONDS)
    _add(report, case, "nnx.Embed and optax", taken, workload, 1)


def workload_of(name: str) -> workloads.Workload:
    """The model at its batch, its tables capped so that they fit."""
    rows, _ = MODELS[name]
    return dispatched.workload_of(name).with_rows_capped(rows)


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Measures every case that was asked for."""
    tiny: bool = arguments.tiny
    losses: dict[str, dict[str, np.ndarray]] = {}
    made = {}
    for asked in arguments.case:
        name, _, side = asked.rpartition(", ")
        different = 4 if tiny else MODELS[name][1]
        if side == PLAIN:
            plain = ONE_HOT if tiny else workload_of(name)
            made[asked] = functools.partial(measure_plain, report, name, plain, different=different, tiny=tiny)
            continue
        workload = TINY if tiny else workload_of(name)
        made[asked] = functools.partial(
            measure, report, name, workload, side, losses=losses.setdefault(name, {}),
            steps=2 if tiny else dispatched.STEPS, different=different, captured=not arguments.uncaptured,
            traces=arguments.trace,
        )  # fmt: skip
    if arguments.uncaptured:
        made = {f"{name}, uncaptured": case for name, case in made.items()}
    cases.run(made)


def main() -> None:
    """Measures the cases that were asked for."""
    parser = gpu_run.parser(__doc__)
    names = [f"{name}, {side}" for name, side in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names[:DEFAULT])
    parser.add_argument("--uncaptured", action="store_true", help="without command buffers: each kernel is a launch")
    parser.add_argument("--trace", type=pathlib.Path, metavar="DIR", help="keep some traces in DIR")
    arguments = parser.parse_args()
    if arguments.uncaptured and not arguments.tiny:  # CPUs do not know the flag
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {gpu_run.UNCAPTURED}".strip()
    gpu_run.run(arguments, "gpu_step", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
