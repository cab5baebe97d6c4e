"""Embedding kernels on a GPU: jrec's Pallas kernels, XLA's lowering and PyTorch, each against what the memory allows.

    forward            gather-reduce of the batch
    update             casted gather-reduce and optimizer in one program, the cast made beforehand
    cast and update    the same with the cast on the device

A line holds microseconds a call, timed by loops inside one compiled program (``gpu_timing``), and in its details:

    lookup_gb_s, lookup_fraction        bytes of every gathered row a second, and as a fraction of a copy's bandwidth.
                                        Above 1 where ids are skewed: hot rows come from the L2 cache
    distinct_gb_s, distinct_fraction    the same with each distinct input byte counted once: the fraction of the floor
    launches, kernel_us                 kernels launched a call and only their time, where the profiler tells

Before anything is timed, both implementations update tables of the same values, and samples of sums and touched rows
are compared, with a checksum over the rows that no id names. Only one side's tables are on the device at a time. A case
that raises is a line, and the next goes on.

Examples:
  python -m benchmarks.gpu --out results.jsonl
  python -m benchmarks.gpu --case design kaggle "several dims" --peer torch
  python -m benchmarks.gpu --cuembed --metric forward --max-table-gb 20
  python -m benchmarks.gpu --out results.jsonl --earlier results.jsonl.partial
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks import gpu_cases, gpu_peers, gpu_sides, gpu_timing, harness, resume
from benchmarks.gpu_cases import Case
from jrec.ops.dispatch import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")
PEERS = ("torch", "fbgemm")
MISSING = "skipped: there is no NVIDIA GPU that JAX can use; install jrec[cuda] on a machine with one"


def measure(report: harness.Report, name: str, case: Case, *, bandwidth: float, quick: Quick) -> None:
    """Compares and times one case, and its peers.

    A side that raises is a line of its own, and so is a difference; the other side is timed nevertheless.
    """
    batches = gpu_sides.Batches.of(case)
    sides = {i: gpu_sides.Side(case, batches, i) for i in IMPLEMENTATIONS}
    traces, errors = {}, []
    for implementation, side in sides.items():
        with _kept(report, name, f"compute, {implementation}", errors):
            traces[implementation] = side.trace()
    if len(traces) == len(IMPLEMENTATIONS):
        with _kept(report, name, "compare", errors):
            error = gpu_sides.compare(case, traces["pallas"], traces["xla"])
            report.add(name, "largest difference of pallas and xla", error, "of the largest value")
    for metric in (m for m in case.metrics if m in quick.metrics):
        times: dict[str, float] = {}
        moved = gpu_cases.traffic(case, metric, batches.ids[0])
        for implementation in traces:
            with _kept(report, name, f"{metric}, {implementation}", errors):
                rounds = quick.rounds or gpu_timing.rounds_for(
                    gpu_cases.expected_seconds(case, bandwidth), len(batches.bags)
                )
                timing = (
                    sides[implementation].loop(metric, rounds=rounds).time(seconds=quick.seconds, least=quick.least)
                )
                times[implementation] = timing.seconds
                ratio = times["xla"] / timing.seconds if implementation == "pallas" and "xla" in times else None
                report.add(
                    name, f"{metric}, {implementation}", 1e6 * timing.seconds, "us",
                    peer=None if ratio is None else "xla", ratio=ratio,
                    details={**figures(moved, timing, bandwidth), "cast": sides[implementation].cast},
                )  # fmt: skip
    del batches, sides
    _measure_peers(report, name, case, bandwidth, quick, errors)
    if errors:
        raise RuntimeError("; ".join(errors))


def figures(moved: gpu_cases.Traffic, timing: gpu_timing.Timing, bandwidth: float) -> dict[str, Any]:
    """A line's details."""
    values: dict[str, Any] = {}
    for kind, size in (("lookup", moved.lookups), ("distinct", moved.distinct)):
        values[f"{kind}_gb_s"] = _rounded(size / timing.seconds / 1e9)
        values[f"{kind}_fraction"] = _rounded(size / timing.seconds / bandwidth)
    return values | timing_figures(timing)


def timing_figures(timing: gpu_timing.Timing) -> dict[str, Any]:
    """The details that need no bytes: spread, calls, and the profiler's launches and kernels."""
    values: dict[str, Any] = {
        "spread": _rounded(timing.spread), "calls": timing.calls, "dispatches": timing.dispatches
    }  # fmt: skip
    if timing.launches is not None and timing.kernel_seconds is not None:
        values |= {"launches": _rounded(timing.launches), "kernel_us": _rounded(1e6 * timing.kernel_seconds)}
        values["kernels"] = [
            [kernel.name, _rounded(1e6 * kernel.seconds / timing.calls)] for kernel in timing.kernels[:6]
        ]
    return values


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _measure_peers(
    report: harness.Report, name: str, case: Case, bandwidth: float, quick: Quick, errors: list[str]
) -> None:
    ids = [gpu_cases.stacked_ids(stack, seed=0) for stack in case.stacks]
    moved = gpu_cases.traffic(case, gpu_cases.FORWARD, ids)
    for peer in quick.peers:
        with _kept(report, name, f"peer {peer}", errors):
            for metric, seconds, spread in gpu_peers.runs(peer, case):
                details: dict[str, Any] = {"spread": _rounded(spread)}
                if metric == gpu_cases.FORWARD:
                    timing = gpu_timing.Timing(seconds=seconds, spread=spread, calls=1, dispatches=gpu_peers.SAMPLES)
                    details = figures(moved, timing, bandwidth)
                report.add(name, f"{metric}, {peer}", 1e6 * seconds, "us", details=details)


@contextlib.contextmanager
def _kept(report: harness.Report, case: str, measured: str, errors: list[str]) -> Iterator[None]:
    """Turns an exception into a line, so that the rest of the case goes on; ``errors`` takes its description."""
    try:
        yield
    except Exception as error:
        errors.append(f"{measured}: {resume.describe(error)}")
        report.line({"case": case, "metric": measured, "error": resume.describe(error)})
        report.note(f"{case}: {errors[-1]}")


class Quick:
    """How long and what to measure: the figures that ``--quick`` and dry runs make smaller."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seconds = 0.0 if arguments.tiny else 0.15 if arguments.quick else 0.4
        self.rounds = 1 if arguments.tiny else None
        self.least = 1 if arguments.tiny else 3
        self.metrics: tuple[str, ...] = tuple(arguments.metric)
        self.peers: tuple[str, ...] = tuple(p for p in arguments.peer if gpu_peers.missing(p) is None)


def chosen(arguments: argparse.Namespace) -> dict[str, Case]:
    """The cases that were asked for, none above the limit on tables."""
    every = gpu_cases.cases()
    names = arguments.case or (gpu_cases.QUICK if arguments.quick else gpu_cases.default_names())
    if arguments.cuembed:
        names = list(gpu_cases.cuembed())
    limit = round(arguments.max_table_gb * 1e9)
    shape = gpu_cases.tiny if arguments.tiny else functools.partial(gpu_cases.capped, limit=limit)
    return {name: shape(every[name]) for name in names}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = harness.parser(__doc__)
    made.add_argument("--case", nargs="+", choices=sorted(gpu_cases.cases()), metavar="NAME",
                      help="only these cases; --list prints them")  # fmt: skip
    made.add_argument("--cuembed", action="store_true", help="cuEmbed's whole sweep: 108 cases")
    made.add_argument("--list", action="store_true", help="print every case, and end")
    made.add_argument("--metric", nargs="+", choices=gpu_cases.METRICS, default=list(gpu_cases.METRICS))
    made.add_argument("--peer", nargs="*", choices=PEERS, default=list(PEERS),
                      help="peers to measure where they are installed (default: torch fbgemm)")  # fmt: skip
    made.add_argument("--max-table-gb", type=float, default=gpu_cases.MAX_TABLE_BYTES / 1e9, metavar="GB",
                      help="cap on the tables of a case (default: 12.9); larger tables are cut")  # fmt: skip
    made.add_argument("--earlier", type=pathlib.Path, metavar="FILE",
                      help="lines of a run that was cut off: its finished cases are skipped")  # fmt: skip
    made.add_argument("--tiny", action="store_true", help="tiny cases in the kernels' interpreter on a CPU; no timings")
    return made


def main() -> None:
    """Runs the cases that were asked for."""
    arguments = parser().parse_args()
    if arguments.list:
        for name, case in gpu_cases.cases().items():
            print(f"{name}: {case.describe()}")
        return
    # Before JAX's backend starts: PyTorch shares the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jrec.pallas.interpret import interpreted

    earlier = list(resume.read_lines(arguments.earlier))
    with harness.Report(arguments, "gpu") as report, contextlib.ExitStack() as stack:
        if arguments.tiny:
            stack.enter_context(interpreted())
        elif jax.default_backend() != "gpu":
            report.note(MISSING)
            return
        bandwidth = gpu_timing.copy_bandwidth(1 << 20 if arguments.tiny else gpu_timing.COPY_BYTES)
        report.add("copy", "bandwidth", bandwidth / 1e9, "GB/s")
        for peer in arguments.peer:
            if (why := gpu_peers.missing(peer)) is not None:
                report.note(f"{peer} is left out: {why}")
        quick = Quick(arguments)
        made = {
            name: functools.partial(measure, report, name, case, bandwidth=bandwidth, quick=quick)
            for name, case in chosen(arguments).items()
        }
        resume.Cases(report.line, earlier).run(made)


if __name__ == "__main__":
    main()
