"""NVIDIA's tools over the kernels: compute-sanitizer's checks, and the hardware's counters by ncu.

    sanitizer   memcheck, racecheck and initcheck over benchmarks.gpu_smoke at tiny sizes: accesses out of bounds,
                conflicts in shared memory, reads of memory that nothing wrote. Any finding is an error.
    counters    ncu over the same programs at their usual sizes: a line a kernel and metric

Examples:
  python -m benchmarks.gpu_tools sanitizer
  python -m benchmarks.gpu_tools counters --out counters.jsonl
  python -m benchmarks.gpu_tools sanitizer --tiny
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from benchmarks import gpu_run, gpu_smoke, harness, resume

CHECKS = ("memcheck", "racecheck", "initcheck")
FOUND = 86  # compute-sanitizer's exit status where it found an error
SECONDS = 45  # of one tool's run
TIMED_OUT = 124  # the status of a run that was ended
METRICS = {
    "gpu__time_duration.sum": "duration",
    "dram__bytes.sum": "device memory moved",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory bandwidth, of its peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "launch__registers_per_thread": "registers a thread",
}
KERNELS = "regex:gather_reduce|casted_update|row_update|pieces|cast_|tt_"
SMOKE = (sys.executable, "-m", "benchmarks.gpu_smoke", "--implementation", "pallas")


def tool(name: str) -> str | None:
    """The path of one of CUDA's tools, on the PATH or where CUDA is usually installed; None where it is not."""
    usual = [*pathlib.Path("/usr/local").glob(f"cuda*/bin/{name}")]
    usual += pathlib.Path("/opt/nvidia").glob(f"nsight-compute/*/{name}")
    return shutil.which(name) or (str(max(usual)) if usual else None)


def check(report: harness.Report, name: str, *, tiny: bool) -> None:
    """Runs the kernels at tiny sizes under one of compute-sanitizer's checks.

    Raises:
      ValueError: If it found something, or the program failed.
    """
    found = None if tiny else tool("compute-sanitizer")
    if found is None and not tiny:
        report.line({"case": name, "absent": "compute-sanitizer is not installed"})
        return
    watched = [] if found is None else [found, "--tool", name, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    done = _ran([*watched, *SMOKE, "--tiny" if tiny else "--small"], tiny=tiny)
    if done.returncode:
        raise ValueError(f"{name} exited with {done.returncode}: {_last(done)}")
    if tiny:  # a CPU ran the program, and nothing watched it
        return
    found_of = findings(done.stdout)
    if found_of is None:
        raise ValueError(f"{name} printed no summary: {_last(done)}")
    report.add(name, "jrec's kernels at tiny sizes", found_of, "findings")


def findings(output: str) -> int | None:
    """The number in compute-sanitizer's summary, or None where there is no summary."""
    summary = re.search(r"SUMMARY: (\d+)", output)
    return None if summary is None else int(summary[1])


def count(report: harness.Report, check_name: str, *, tiny: bool) -> None:
    """Counts what each kernel of one of gpu_smoke's checks moves and how busy it keeps the GPU, by ncu.

    Each is a run of its own: under ncu 2025.3 the TT expansion ended in a segmentation fault, and took all lines along.
    """
    found = None if tiny else tool("ncu")
    if found is None and not tiny:
        report.line({"case": check_name, "absent": "ncu is not installed"})
        return
    watched = [] if found is None else [
        found, "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS), "--kernel-name", KERNELS,
        "--launch-count", "60",
    ]  # fmt: skip
    done = _ran([*watched, *SMOKE, "--check", check_name, "--tiny" if tiny else "--once"], tiny=tiny)
    for kernel, metric, value, unit in counted(done.stdout.splitlines()):
        report.add(kernel, metric, value, unit)
    if done.returncode:
        raise ValueError(f"ncu exited with {done.returncode}: {_last(done)}")


def counted(lines: Iterable[str]) -> Iterator[tuple[str, str, float, str]]:
    """(kernel, metric, value, unit) of each kernel's first launch in ncu's CSV, among other programs' lines."""
    table = [line for line in lines if line.startswith('"')]
    seen = set()
    for row in csv.DictReader(table):
        kernel, metric = row.get("Kernel Name", "")[:80], METRICS.get(row.get("Metric Name", ""))
        if metric is None or (kernel, metric) in seen:
            continue
        seen.add((kernel, metric))
        yield kernel, metric, float(row["Metric Value"].replace(",", "")), row["Metric Unit"]


def _ran(command: list[str], *, tiny: bool) -> subprocess.CompletedProcess[str]:
    # Kernels of a captured graph would be one launch to the tools.
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), "" if tiny else gpu_run.UNCAPTURED]))
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = TIMED_OUT
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = subprocess.run(
                    command, env=environment, cwd=harness.ROOT, stdout=output, stderr=subprocess.STDOUT,
                    timeout=SECONDS, check=False,
                ).returncode  # fmt: skip
        finally:  # also where this process is to end
            output.seek(0)
            printed = output.read()
            print(printed[-20_000:], file=sys.stderr, flush=True)
    return subprocess.CompletedProcess(command, code, printed)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return " | ".join(done.stdout.split("\n")[-12:])


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Runs the tool that was asked for."""
    if arguments.what == "counters":
        names = gpu_smoke.CHECKS[:1] if arguments.tiny else gpu_smoke.CHECKS  # without ncu all are alike
        cases.run({f"counters, {name}": functools.partial(count, report, name, tiny=arguments.tiny) for name in names})
    else:
        checks = CHECKS[:1] if arguments.tiny else CHECKS  # without a tool they are the same run
        cases.run({name: functools.partial(check, report, name, tiny=arguments.tiny) for name in checks})


def main() -> None:
    """Runs a tool."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("what", choices=("sanitizer", "counters"))
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_tools", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
