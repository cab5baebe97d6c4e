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
  python -m benchmarks.gpu --list
  python -m benchmarks.gpu --out results.jsonl --earlier results.jsonl.partial
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import gpu_cases, gpu_peers, gpu_run, gpu_sides, gpu_timing, harness, resume
from benchmarks.gpu_cases import Case
from jrec.ops.dispatch import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")
PEERS = ("torch", "fbgemm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long and what to measure.

    Attributes:
      bandwidth: Of a copy, bytes a second.
      seconds: For each figure.
      metrics: Of ``gpu_cases.METRICS``.
      peers: Of ``PEERS``, those that can run here.
      tiny: Whether kernels run in their interpreter: one call each.
    """

    bandwidth: float
    seconds: float
    metrics: Collection[str]
    peers: Sequence[str]
    tiny: bool


class Measured:
    """One case: both implementations compared and timed, then its peers.

    A side that raises is a line of its own, and so is a difference; the other side is timed nevertheless.
    """

    def __init__(self, report: harness.Report, name: str, case: Case, effort: Effort) -> None:
        self._report, self._name, self._case, self._effort = report, name, case, effort
        self._errors: list[str] = []

    def run(self) -> None:
        """Measures all of it.

        Raises:
          RuntimeError: If anything failed, after everything else was measured.
        """
        self._implementations()
        self._peers()
        if self._errors:
            raise RuntimeError("; ".join(self._errors))

    def _implementations(self) -> None:
        batches = gpu_sides.Batches.of(self._case)
        sides, traces = {}, {}
        for implementation in IMPLEMENTATIONS:
            with self._kept(f"compute, {implementation}"):
                side = gpu_sides.Side(self._case, batches, implementation)
                traces[implementation] = side.trace()
                sides[implementation] = side
        if len(traces) == len(IMPLEMENTATIONS):
            with self._kept("compare"):
                error = gpu_sides.compare(self._case, traces["pallas"], traces["xla"])
                self._report.add(
                    self._name, "largest difference of pallas and xla", error, "of the largest value"
                )  # fmt: skip
        for metric in self._case.metrics:
            if metric in self._effort.metrics:
                self._metric(metric, batches, sides)

    def _metric(self, metric: str, batches: gpu_sides.Batches, sides: Mapping[Implementation, gpu_sides.Side]) -> None:
        moved = gpu_cases.traffic(self._case, metric, batches.ids[0])
        expected = gpu_cases.expected_seconds(self._case, self._effort.bandwidth)
        rounds = 1 if self._effort.tiny else gpu_timing.rounds_for(expected, len(batches.bags))
        xla = None
        for implementation, side in sides.items():
            with self._kept(f"{metric}, {implementation}"):
                loop = side.loop(metric, rounds=rounds)
                timing = loop.time(seconds=self._effort.seconds, least=1 if self._effort.tiny else 3)
                xla = timing.seconds if implementation == "xla" else xla
                peer = "xla" if implementation != "xla" and xla is not None else None
                self._report.add(
                    self._name, f"{metric}, {implementation}", 1e6 * timing.seconds, "us",
                    peer=peer, ratio=xla / timing.seconds if peer and xla else None,
                    details=figures(moved, timing, self._effort.bandwidth),
                )  # fmt: skip

    def _peers(self) -> None:
        ids = [gpu_cases.stacked_ids(stack, seed=0) for stack in self._case.stacks]
        moved = gpu_cases.traffic(self._case, gpu_cases.FORWARD, ids)
        for peer in self._effort.peers:
            with self._kept(f"peer {peer}"):
                for metric, timing in gpu_peers.runs(peer, self._case):
                    forward = metric == gpu_cases.FORWARD
                    details = figures(moved, timing, self._effort.bandwidth) if forward else timing.details()
                    self._report.add(self._name, f"{metric}, {peer}", 1e6 * timing.seconds, "us", details=details)

    @contextlib.contextmanager
    def _kept(self, measured: str) -> Iterator[None]:
        """Turns an exception into a line, so that the rest of the case goes on."""
        try:
            yield
        except Exception as error:
            self._errors.append(f"{measured}: {resume.describe(error)}")
            self._report.line({"case": self._name, "metric": measured, "error": resume.describe(error)})


def figures(moved: gpu_cases.Traffic, timing: gpu_timing.Timing, bandwidth: float) -> dict[str, Any]:
    """A line's details."""
    values: dict[str, Any] = {}
    for kind, size in (("lookup", moved.lookups), ("distinct", moved.distinct)):
        values[f"{kind}_gb_s"] = gpu_timing.rounded(size / timing.seconds / 1e9)
        values[f"{kind}_fraction"] = gpu_timing.rounded(size / timing.seconds / bandwidth)
    return values | timing.details()


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Measures the cases that were asked for."""
    bandwidth = gpu_timing.copy_bandwidth(1 << 20 if arguments.tiny else gpu_timing.COPY_BYTES)
    report.add("copy", "bandwidth", bandwidth / 1e9, "GB/s")
    reasons = {peer: gpu_peers.missing(peer) for peer in arguments.peer}
    for peer, why in reasons.items():
        if why is not None:
            report.note(f"{peer} is left out: {why}")
    effort = Effort(
        bandwidth=bandwidth,
        seconds=0.0 if arguments.tiny else 0.15 if arguments.quick else 0.4,
        metrics=arguments.metric,
        peers=[peer for peer, why in reasons.items() if why is None],
        tiny=arguments.tiny,
    )
    every = gpu_cases.cases()
    names = arguments.case or (gpu_cases.QUICK if arguments.quick else list(every))
    shape = gpu_cases.tiny if arguments.tiny else gpu_cases.capped
    cases.run({name: Measured(report, name, shape(every[name]), effort).run for name in names})


def main() -> None:
    """Runs the cases that were asked for."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=list(gpu_cases.cases()), metavar="NAME", help="only these cases")
    parser.add_argument("--list", action="store_true", help="print every case, and end")
    parser.add_argument("--metric", nargs="+", choices=gpu_cases.METRICS, default=list(gpu_cases.METRICS))
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=list(PEERS),
                        help="peers to measure where they are installed (default: torch fbgemm)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.list:
        for name, case in gpu_cases.cases().items():
            print(f"{name}: {case.describe()}")
        return
    gpu_run.run(arguments, "gpu", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
