"""What the GPU benchmarks share: flags, cases that go on where a run was cut off, the device they ran on.

arguments = gpu_run.parser(__doc__).parse_args()
gpu_run.run(arguments, "gpu_step", work)  # work(report, cases)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
import signal
import subprocess
from collections.abc import Callable

from benchmarks import harness, resume

MISSING = "skipped: there is no NVIDIA GPU that JAX can use; install jrec[cuda] on a machine with one"
UNCAPTURED = "--xla_gpu_enable_command_buffer="  # every kernel a launch of its own
QUERY = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every benchmark, ``--earlier`` and ``--tiny``."""
    made = harness.parser(description)
    made.add_argument("--earlier", type=pathlib.Path, metavar="FILE",
                      help="lines of a run that was cut off: its finished cases are skipped")  # fmt: skip
    made.add_argument("--tiny", action="store_true", help="tiny cases in the kernels' interpreter on a CPU; no timings")
    return made


def run(arguments: argparse.Namespace, name: str, work: Callable[[harness.Report, resume.Cases], None]) -> None:
    """Calls ``work(report, cases)``; only says so on stderr where there is neither a GPU nor ``--tiny``."""
    # Before JAX's backend starts: PyTorch, and tests on several workers, share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jrec.pallas.interpret import interpreted

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a tool's output so far is printed
    earlier = list(resume.read_lines(arguments.earlier))  # before --out replaces the same file
    with (
        harness.Report(arguments, name) as report,
        interpreted() if arguments.tiny else contextlib.nullcontext(),
    ):
        if arguments.tiny or jax.default_backend() == "gpu":
            work(report, resume.Cases(report.line, earlier))
        else:
            report.note(MISSING)


@functools.cache
def smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; {} where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ") if done.stdout else []
    return dict(zip(QUERY, values, strict=False))
