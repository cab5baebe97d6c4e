"""What the main thread does for a step: its CPU time from batch to batch, beside steps that compute nothing.

The run is one of ``jrec.distribute`` as a GPU has it: casts on the device, batches placed ahead by the feed's thread,
the running AUC on the device, losses read one dispatch late. The step's body is emptied, so that what is left is the
host's work. "steps a dispatch" says how many steps go to the devices at once; "feed thread" is the CPU time of the
thread that cuts, stacks and places batches, which includes copies that a GPU makes by itself. Both are floors of a
step's time on a GPU, each on a core of its own. Several devices are virtual ones; a batch is that of all of them, and
its rows are dealt to them in turn.

Examples:
  python -m benchmarks.feed
  python -m benchmarks.feed --model dcnv2 --steps 16 --devices 8
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import jax
import jax.numpy as jnp

import jrec
from benchmarks import dispatched, harness, models, workloads
from jrec.app.report.running_auc import RunningAuc
from jrec.run.feeds.ahead import AheadFeed
from jrec.run.run import Run
from jrec.run.step import FlatState, HostRows, Metrics, StackRows, StepBatch, StepResults

MODELS = ("kaggle", "dcnv2")
ROWS = 1000  # of a table: no step reads them
STEPS = (1, dispatched.STEPS)
DEVICES = (1, 8)


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS), help="steps a dispatch (default: 1 16)")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), help="devices (default: 1 8)")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    with harness.Report(arguments, "feed") as report:
        for devices, name, steps in itertools.product(arguments.devices, arguments.model, arguments.steps):
            measure(report, dispatched.workload_of(name).with_rows_capped(ROWS), steps, devices)


def measure(report: harness.Report, workload: workloads.Workload, steps: int, devices: int) -> None:
    """The CPU time of a step in the main thread and in the feed's."""
    packed = [models.batch(workload, seed=seed) for seed in range(4)]
    threads: dict[int, float] = {}
    with _emptied(workload, devices) as run, _thread_times(threads):
        step = run.compile(metrics=RunningAuc.empty(devices=None if run.mesh is None else devices))
        # A function makes a feed that works ahead, as on a GPU, of one step a dispatch, too.
        feed, before = run.feed(itertools.cycle(packed), steps=lambda _: steps), None
        taken, least, seconds = 0, (20 if report.quick else 100) * steps, 0.0
        for number in range(least // steps + 3):
            if number == 3:  # compiled by now
                seconds, taken = -time.thread_time(), 0
                threads.clear()
            _, outputs = step(next(feed))
            if before is not None:
                jax.device_get((before.loss, before.examples))
            before, taken = outputs, taken + steps
        seconds += time.thread_time()
        placing = sum(threads.values())
    where = "one device" if devices == 1 else f"{devices} devices"
    case = f"{workload.name}, batch {workload.batch:,}, {where}, {steps} steps a dispatch"
    report.add(case, "main thread, CPU time of a step", 1e3 * seconds / taken, "ms")
    report.add(case, "feed thread, CPU time of a step", 1e3 * placing / taken, "ms")


def _emptied(workload: workloads.Workload, devices: int) -> Run:
    """A run whose steps compute nothing."""
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("devices",), devices=jax.devices()[:devices])
    run = jrec.distribute(*models.modules(workload), mesh=mesh, cast="none")

    def nothing(
        state: FlatState, rows: StackRows, host: HostRows, batch: StepBatch, metrics: Metrics | None = None
    ) -> tuple[FlatState, StackRows, HostRows, StepResults]:
        none = jnp.zeros((batch.steps,) if batch.steps > 1 else ())
        return state, rows, host, StepResults(loss=none, examples=none, metrics=metrics)

    empty = jax.jit(nothing, donate_argnums=(0, 1, 2))
    compiled = run._state.compiled
    run._state.compiled = dataclasses.replace(compiled, with_loss=lambda loss, slices: empty)
    return run


class _thread_times:  # noqa: N801, a context manager
    """Adds up the CPU seconds that feeds' threads take to make dispatches, by thread."""

    def __init__(self, seconds: dict[int, float]):
        self._seconds, self._make = seconds, AheadFeed._make

    def __enter__(self) -> None:
        seconds, make = self._seconds, self._make

        def timed(feed: AheadFeed, number: int, item: None) -> object:
            begin = time.thread_time()
            made = make(feed, number, item)
            own = threading.get_ident()
            seconds[own] = seconds.get(own, 0.0) + time.thread_time() - begin
            return made

        AheadFeed._make = timed  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        AheadFeed._make = self._make  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
