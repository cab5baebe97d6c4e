"""The GPU benchmarks in turn, each in a process with a budget: what one may run where a GPU is there for half an hour.

    smoke       2 min     copy bandwidth; gather, fused update, cast and TT expansion against float64
    kernels     1.5 min   jrec kernels check
    benchmark   7 min     benchmarks.gpu: kernels against XLA and PyTorch at named shapes
    step        2.5 min   whole DLRM steps under the profiler
    tuning      6 min     benchmarks.gpu_tune, and the entries that follow
    tt          2 min     benchmarks.gpu_tt
    tests       7 min     tests marked gpu

A step's lines go to DIR/STEP.jsonl as they come, its stderr to DIR/STEP.log, outcomes to DIR/survey.json. A step that
crashes goes on at its next case. The same command again runs the steps that have not ended well, at the cases that are
left. Exits with 1 if a step or case failed.

Examples:
  PYTHONPATH=. python3 -m benchmarks.gpu_survey --out survey
  PYTHONPATH=. python3 -m benchmarks.gpu_survey --out survey --only smoke tuning
  python -m benchmarks.gpu_survey --dry-run --out survey-try
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks import harness, resume

STARTS = 4  # of a step that crashes, each time at another case
DRY_MINUTES = 10  # a step, on a CPU of any speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step: its budget, what runs on a GPU and in a dry run, and whether that takes ``--earlier FILE``."""

    minutes: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    earlier: bool = True


CHECK = ("jrec", "kernels", "check", "--json")
CLASSES = (
    "tensor_cast int32 1", "gather_reduce float32 64", "casted_update float32 64 RowWiseAdagrad",
    "casted_update bfloat16 128 SGD",
)  # fmt: skip
ONLY = [word for one in CLASSES for word in ("--only", one)]
FILES = [str(f) for f in sorted(harness.ROOT.glob("tests/test_*.py")) if "mark.gpu" in f.read_text(encoding="utf-8")]
WORKERS = ("-n", "4", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()  # a file's big tables in turn
TESTS = ("pytest", "-q", "-m", "gpu", "--tb=short", *WORKERS)
STEPS = {
    "smoke": Step(minutes=2, command=("benchmarks.gpu_smoke",), dry=("benchmarks.gpu_smoke", "--tiny")),
    "kernels": Step(
        minutes=1.5,
        command=(*CHECK, "--timeout", "80", *ONLY),
        dry=(*CHECK, "--timeout", "500", "--interpret", "--only", "gather_reduce float32 64"),
        earlier=False,
    ),
    "benchmark": Step(
        minutes=7,
        command=("benchmarks.gpu",),
        dry=("benchmarks.gpu", "--tiny", "--case", "design", "several dims", "--metric", "forward"),
    ),
    "step": Step(minutes=2.5, command=("benchmarks.gpu_step",), dry=("benchmarks.gpu_step", "--tiny")),
    "tuning": Step(
        minutes=6, command=("benchmarks.gpu_tune",), dry=("benchmarks.gpu_tune", "--tiny", "--dim", "16")
    ),
    "tt": Step(
        minutes=2,
        command=("benchmarks.gpu_tt", "--quick"),
        dry=("benchmarks.gpu_tt", "--tiny", "--way", "naive", "pallas, fused"),
    ),
    # Without a GPU every test is skipped: what is tried is that they can be collected.
    "tests": Step(
        minutes=7, command=(*TESTS, *FILES), dry=(*TESTS, *FILES), earlier=False
    ),
}  # fmt: skip


def run_step(step: Step, file: pathlib.Path, *, dry: bool) -> dict[str, Any]:
    """Runs a step within its budget, again after a crash; gives its status, None where time was up, and its errors."""
    command = [sys.executable, "-m", *(step.dry if dry else step.command)]
    if step.earlier:
        command += ["--earlier", str(file)]
    start, status = time.monotonic(), None
    for _ in range(STARTS):
        left = 60 * (DRY_MINUTES if dry else step.minutes) - (time.monotonic() - start)
        status = _ended(command, file, seconds=left, dry=dry)
        if status in (0, None) or not step.earlier:
            break
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "errors": _errors(file)}


def _ended(command: list[str], file: pathlib.Path, *, seconds: float, dry: bool) -> int | None:
    """The exit status of a command that appends to ``file``; None if it was killed, with all that it started."""
    path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    told = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if dry:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with file.open("a") as out, file.with_suffix(".log").open("a") as log:
        out.write("\n")  # closes the line that an earlier run left torn
        out.flush()
        process = subprocess.Popen(
            command, cwd=harness.ROOT, env={**os.environ, **told}, stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _errors(file: pathlib.Path) -> list[str]:
    """Errors of the cases that ended with one, by the last word on each case."""
    ended = {line["end"]: line.get("error") for line in resume.read_lines(file) if "end" in line}
    return [f"{case}: {error}" for case, error in ended.items() if error]


def main() -> None:
    """Runs the steps that have not ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="only these steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, kernels in their interpreter")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a running step is ended too
    folder: pathlib.Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "survey.json"
    outcomes: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for name in STEPS:
        if name not in arguments.only or outcomes.get(name, {}).get("status") == 0:
            continue
        outcomes[name] = run_step(STEPS[name], folder / f"{name}.jsonl", dry=arguments.dry_run)
        kept.write_text(json.dumps(outcomes, indent=1) + "\n")
        print(f"{name}: {outcomes[name]}", flush=True)
        if outcomes[name]["status"] != 0:
            print((folder / f"{name}.log").read_text(errors="replace")[-2000:], file=sys.stderr)
    sys.exit(int(any(outcomes[name]["status"] != 0 or outcomes[name]["errors"] for name in arguments.only)))


if __name__ == "__main__":
    main()
