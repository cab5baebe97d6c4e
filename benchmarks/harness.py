"""What every benchmark shares: alternating runs, medians of ratios, JSON lines on stdout, a table on stderr.

    arguments = harness.parser(__doc__).parse_args()
    with harness.Report(arguments, "embedding") as report, client.start_or_skip("fbgemm_tbe") as peer:
        ours = harness.timed(lambda: step(...))
        theirs = (lambda: peer.run("forward")) if peer else None
        report.compare("cpu", "forward", ours, peer="FBGEMM", theirs=theirs, peer_versions=peer and peer.versions)

A run is a callable without arguments that returns the seconds one call took. Ours and the peers' alternate in one loop,
so that a machine that slows down slows all; the ratio is the median over rounds of the peer's time by jrec's. A line of
a median says in its details how far its rounds spread, and how much its two halves differ: above ``STEADY`` the line is
marked as unsteady, and tests/test_doc_tables.py refuses it in benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TextIO

import jrec
from jrec import environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAUSE = 0.01  # lets thread pools of the side that just ran stop spinning before the other side is timed
BUSY = 0.5  # load by core above which spinning thread pools, such as PyTorch's, lose time to other processes
STEADY = 1.25
"""The medians of a measurement's two halves differ by this factor at most, or another program took part in it."""
QUICK_SECONDS = 2.0
FULL_SECONDS = 10.0

Run = Callable[[], float]
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of alternating runs of jrec and, where there is one, its peer: pair ``i`` ran back to back."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median of jrec's seconds."""
        return statistics.median(self.ours)

    @property
    def fastest(self) -> float:
        """Least seconds of jrec."""
        return min(self.ours)

    @property
    def ratio(self) -> float | None:
        """Median over pairs of the peer's seconds by jrec's: above 1, jrec is faster."""
        if not self.theirs:
            return None
        return statistics.median(peer / own for own, peer in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio_of_fastest(self) -> float | None:
        """The peer's least seconds by jrec's."""
        return min(self.theirs) / min(self.ours) if self.theirs else None

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of jrec's seconds, by their median."""
        if len(self.ours) < 2:
            return 1.0, 1.0
        first, _, third = statistics.quantiles(self.ours, n=4, method="inclusive")
        return first / self.median, third / self.median

    @property
    def halves(self) -> float:
        """By which factor the medians of the first and the second half differ, of the side that differs most."""
        middle = len(self.ours) // 2
        if middle == 0:
            return 1.0
        of_halves = [
            (statistics.median(s[:middle]), statistics.median(s[-middle:])) for s in (self.ours, self.theirs) if s
        ]
        return max(max(one / two, two / one) for one, two in of_halves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One JSON line. ``ratio`` is the peer's time by jrec's (above 1: jrec is faster), None without a peer."""

    case: str
    metric: str
    value: float
    unit: str
    peer: str | None
    ratio: float | None
    device: str
    versions: Mapping[str, str]
    commit: str
    details: Mapping[str, Any] | None = None  # further figures of the same measurement; left out of the line if None


# As `jrec.keep_freed_memory`, for programs that are started: peers, whose steps have temporaries as well.
KEPT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
_kept: dict[str, str] = {}


def keep_memory() -> None:
    """Has this process keep freed memory, as `jrec train` does, and the peers that it starts."""
    jrec.keep_freed_memory()
    _kept.update(KEPT)


def peer_environment() -> dict[str, str]:
    """Variables for peers: what ``keep_memory`` asks of them."""
    return dict(_kept)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark: ``--quick`` and ``--out``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a run under 30 seconds: fewer cases, shorter measurements")
    made.add_argument("--out", type=pathlib.Path, metavar="FILE", help="also write the JSON lines to FILE")
    return made


def timed(function: Step, *, calls: int = 1) -> Run:
    """A run that calls ``function``, waits for the JAX arrays it returns, and gives the seconds per call."""
    import jax

    def run() -> float:
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    return run


def alternate(
    ours: Run, theirs: Run | None = None, *, seconds: float, warmup: int = 2, min_pairs: int = 7, max_pairs: int = 200
) -> Measurement:
    """``interleave`` of one side, or of two."""
    sides = (ours,) if theirs is None else (ours, theirs)
    found = interleave(sides, seconds=seconds, warmup=warmup, min_rounds=min_pairs, max_rounds=max_pairs)
    return Measurement(ours=found[0], theirs=found[1] if len(found) > 1 else ())


def interleave(
    sides: Sequence[Run], *, seconds: float, warmup: int = 2, min_rounds: int = 7, max_rounds: int = 200
) -> list[tuple[float, ...]]:
    """Runs all sides in turn, each round in the other order than the one before, until ``seconds`` have passed.

    Args:
      sides: Runs; each returns its own seconds.
      seconds: How long to go on for, warm-up aside.
      warmup: Untimed runs of each side beforehand.
      min_rounds, max_rounds: Bounds on the number of rounds, whatever the time.

    Returns:
      The seconds of each side, by round.
    """
    for _ in range(warmup):
        for run in sides:
            run()
    samples: tuple[list[float], ...] = tuple([] for _ in sides)
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds or (time.perf_counter() < deadline and rounds < max_rounds):
        order = range(len(sides)) if rounds % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            time.sleep(PAUSE)
            samples[side].append(sides[side]())
        rounds += 1
    return [tuple(times) for times in samples]


def kept(path: pathlib.Path, measure: Callable[[], Any]) -> Any:
    """What an earlier call measured, else what ``measure`` returns, in JSON types."""
    if not path.is_file():
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(found), encoding="utf-8")
        path.with_suffix(".partial").replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


class Report:
    """Collects results: prints each as a JSON line at once, and all of them as a table at the end.

    A context manager. With ``--out FILE`` the lines also go to FILE.partial, one by one, so that a benchmark that is
    cut off leaves what it measured; FILE itself appears whole, when the benchmark has ended.
    """

    def __init__(self, arguments: argparse.Namespace, name: str, *, stdout: TextIO | None = None) -> None:
        self.name = name
        self.quick: bool = arguments.quick
        self.seconds = QUICK_SECONDS if arguments.quick else FULL_SECONDS
        self.results: list[Result] = []
        self._out: pathlib.Path | None = arguments.out
        self._partial: TextIO | None = None
        self._stdout = stdout if stdout is not None else sys.stdout
        self._device = describe_device()
        self._versions = environment.versions()
        self._commit = commit()

    def __enter__(self) -> Self:
        load = os.getloadavg()[0]
        if load > BUSY * cores():
            self.note(f"this machine is busy (load {load:.1f} on {cores()} cores): do not trust the ratios")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._table()
        if self._out is None:
            return
        partial = self._partial_file()
        partial.close()
        if kind is None:
            pathlib.Path(partial.name).replace(self._out)

    def _partial_file(self) -> TextIO:
        if self._partial is None:
            assert self._out is not None
            self._partial = self._out.with_name(self._out.name + ".partial").open("w", encoding="utf-8")
        return self._partial

    def line(self, fields: Mapping[str, Any]) -> None:
        """Prints one JSON line at once, and appends it to the partial file. NaN and infinities are refused."""
        text = json.dumps(fields, allow_nan=False)
        print(text, file=self._stdout, flush=True)
        if self._out is not None:
            print(text, file=self._partial_file(), flush=True)

    def note(self, text: str) -> None:
        """A line for the reader on stderr, such as why a peer is skipped."""
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        *,
        peer: str | None = None,
        ratio: float | None = None,
        peer_versions: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Records one figure and prints its line; ``details`` are further figures, in JSON types."""
        result = Result(
            case=case,
            metric=metric,
            value=float(value),
            unit=unit,
            peer=peer,
            ratio=None if ratio is None else float(ratio),
            device=self._device,
            versions={**self._versions, **(peer_versions or {})},
            commit=self._commit,
            details=details,
        )
        self.results.append(result)
        fields = dataclasses.asdict(result)
        if details is None:
            del fields["details"]
        self.line(fields)

    def compare(
        self,
        case: str,
        metric: str,
        ours: Run,
        *,
        peer: str | None = None,
        theirs: Run | None = None,
        peer_versions: Mapping[str, str] | None = None,
        seconds: float | None = None,
        warmup: int = 2,
    ) -> Measurement:
        """Measures jrec, alternating with the peer where there is one, and records median and fastest milliseconds.

        The peer's own milliseconds follow as lines of their own, whose metric ends in the peer's name and whose ratio
        is None.
        """
        peers = {} if peer is None or theirs is None else {peer: theirs}
        versions = {} if peer is None or peer_versions is None else {peer: peer_versions}
        found = self.compare_all(case, metric, ours, peers, peer_versions=versions, seconds=seconds, warmup=warmup)
        return found[0]

    def compare_all(
        self,
        case: str,
        metric: str,
        ours: Run,
        peers: Mapping[str, Run],
        *,
        peer_versions: Mapping[str, Mapping[str, str]] = types.MappingProxyType({}),
        seconds: float | None = None,
        warmup: int = 2,
    ) -> list[Measurement]:
        """``compare`` with several peers in one loop, so that all of them ran beside the same runs of jrec.

        Each peer has lines of its own, of the same milliseconds of jrec's. ``seconds`` are for jrec and one peer.

        Returns:
          Jrec beside each peer, in their order; alone where there is none.
        """
        own, *others = interleave(
            [ours, *peers.values()],
            seconds=(self.seconds if seconds is None else seconds) * max(1, len(peers)),
            warmup=1 if self.quick else warmup,
            min_rounds=3 if self.quick else 7,
        )
        if not peers:
            return [self._record(case, metric, Measurement(ours=own), None, None)]
        return [
            self._record(case, metric, Measurement(ours=own, theirs=theirs), peer, peer_versions.get(peer))
            for peer, theirs in zip(peers, others, strict=True)
        ]

    def _record(
        self, case: str, metric: str, measured: Measurement, peer: str | None, peer_versions: Mapping[str, str] | None
    ) -> Measurement:
        """The lines of one comparison."""
        details = {"rounds": len(measured.ours), "spread": measured.spread, "halves": measured.halves}
        if measured.halves > STEADY:
            details["unsteady"] = True
            beside = "" if peer is None else f" beside {peer}"
            self.note(
                f"{case}, {metric}{beside}: unsteady, the two halves of {len(measured.ours)} rounds differ by"
                f" {measured.halves:.2f}x (at most {STEADY}); measure anew"
            )
        for statistic, value, ratio, more in (
            ("median", measured.median, measured.ratio, details),
            ("fastest", measured.fastest, measured.ratio_of_fastest, None),
        ):
            self.add(
                case, f"{metric}, {statistic}", 1e3 * value, "ms", peer=peer, ratio=ratio, peer_versions=peer_versions,
                details=more,
            )  # fmt: skip
        if peer is not None and measured.theirs:
            for statistic, value in (("median", statistics.median(measured.theirs)), ("fastest", min(measured.theirs))):
                self.add(case, f"{metric}, {statistic}, {peer}", 1e3 * value, "ms", peer_versions=peer_versions)
        return measured

    def _table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.name} · {self._device} · {self._commit}", title_justify="left")
        for column in ("case", "metric", "value", "unit", "peer", "ratio", "spread"):
            table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
        for r in self.results:
            ratio = "" if r.ratio is None else f"{r.ratio:.2f}x"
            spread = ""
            if r.details and "spread" in r.details:
                first, third = r.details["spread"]
                spread = f"{first:.2f} to {third:.2f}{', unsteady' * ('unsteady' in r.details)}"
            table.add_row(r.case, r.metric, f"{r.value:,.4g}", r.unit, r.peer or "", ratio, spread)
        width = None if sys.stderr.isatty() else 160
        Console(stderr=True, width=width).print(table)


def on_virtual_devices(devices: int, module: str, *arguments: str) -> Any:
    """What ``python -m MODULE ARGUMENTS`` prints, JSON, in a process of its own that sees so many CPU devices."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**with_virtual_devices(devices), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def with_virtual_devices(devices: int) -> dict[str, str]:
    """The environment of this process, for one that sees so many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags.strip()}


def cores() -> int:
    """Cores this process may run on; peers get as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_device() -> str:
    """JAX's first device, the CPU's model, its microarchitecture as LLVM names it, and how many cores may be used."""
    import jax
    from llvmlite import binding

    device = jax.devices()[0]
    accelerator = "" if device.platform == "cpu" else f"{device.device_kind}; "
    return f"{accelerator}{_cpu_model()} ({binding.get_host_cpu_name()}), {cores()} cores"


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the checkout, with "-dirty" where tracked files differ from it; "unknown" outside of git.

    A copy of the checkout without its history may be told by the environment variable ``JREC_COMMIT``.
    """
    if told := os.environ.get("JREC_COMMIT"):
        return told
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
