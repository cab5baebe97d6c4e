"""What to run first where a GPU is there for a few minutes: one command, everything that matters most at the front.

    sanitizer   1.2 min   compute-sanitizer's memcheck, racecheck and initcheck on every kind of kernel, at tiny sizes
    kernels     1.5 min   jrec kernels check
    steps       2.5 min   whole steps (Kaggle at 2,048 and 16,384, DLRM-DCNv2 at 6,912): XLA, kernels, bfloat16 layers
    uncaptured  0.8 min   the kernels' steps without command buffers
    train       2.2 min   jrec train on synthesized Kaggle and DCNv2 logs: examples/s, share of the time the GPU is busy
    counters    0.8 min   ncu: bandwidth, occupancy and registers of each kernel

and, where time is left or in another call:

    smoke       1 min     copy bandwidth; gather, fused update, cast and TT expansion against float64, timed
    benchmark   7 min     benchmarks.gpu: kernels against XLA and PyTorch at named shapes
    tuning      6 min     benchmarks.gpu_tune, and the entries that follow
    tt          2 min     benchmarks.gpu_tt
    tests       7 min     tests marked gpu

Each runs in a process with its budget, none past ``--minutes``. A step's lines go to DIR/STEP.jsonl as they come, its
stderr to DIR/STEP.log, outcomes to DIR/outcomes.json; a table comes last. A step that crashes goes on at its next case.
The same command again, with the folder of the call before, runs the steps that have not ended well, at the cases that
are left. Exits with 1 if a step or case failed.

Examples:
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 9 --out first
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 9 --out first --only benchmark tuning
  python -m benchmarks.gpu_first --dry-run --out first-try
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
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import harness, resume

STARTS = 4  # of a step that crashes, each time at another case
DRY_MINUTES = 10  # a step, on a CPU of any speed
LEAST_SECONDS = 15  # a step is left to the next call where less is left: a process needs as much to begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step: its budget, what runs on a GPU and in a dry run, and whether that takes ``--earlier FILE``."""

    minutes: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    earlier: bool = True


CHECK = ("jrec", "kernels", "check", "--json")
# Those of the steps and of ``jrec train`` below, which then need no check of their own.
CLASSES = (
    "tensor_cast int32 1", "gather_reduce float32 16", "casted_update float32 16 RowWiseAdagrad",
    "gather_reduce float32 128", "casted_update float32 128 RowWiseAdagrad",
)  # fmt: skip
ONLY = [word for one in CLASSES for word in ("--only", one)]
FILES = [str(f) for f in sorted(harness.ROOT.glob("tests/test_*.py")) if "mark.gpu" in f.read_text(encoding="utf-8")]
WORKERS = ("-n", "4", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()  # a file's big tables in turn
TESTS = ("pytest", "-q", "-m", "gpu", "--tb=short", *WORKERS)
STEPS = {
    "sanitizer": Step(
        minutes=1.2, command=("benchmarks.gpu_tools", "sanitizer"), dry=("benchmarks.gpu_tools", "sanitizer", "--tiny")
    ),
    "kernels": Step(
        minutes=1.5,
        command=(*CHECK, "--timeout", "80", *ONLY),
        dry=(*CHECK, "--timeout", "500", "--interpret", "--only", "gather_reduce float32 64"),
        earlier=False,
    ),
    "steps": Step(minutes=2.5, command=("benchmarks.gpu_step",), dry=("benchmarks.gpu_step", "--tiny")),
    "uncaptured": Step(
        minutes=0.8,
        command=("benchmarks.gpu_step", "--side", "pallas", "--uncaptured"),
        dry=("benchmarks.gpu_step", "--tiny", "--side", "pallas", "--uncaptured"),
    ),
    "train": Step(minutes=2.2, command=("benchmarks.gpu_train",), dry=("benchmarks.gpu_train", "--tiny")),
    "counters": Step(
        minutes=0.8, command=("benchmarks.gpu_tools", "counters"), dry=("benchmarks.gpu_tools", "counters", "--tiny")
    ),
    "smoke": Step(minutes=1, command=("benchmarks.gpu_smoke",), dry=("benchmarks.gpu_smoke", "--tiny")),
    "benchmark": Step(
        minutes=7,
        command=("benchmarks.gpu",),
        dry=("benchmarks.gpu", "--tiny", "--case", "design", "several dims", "--metric", "forward"),
    ),
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


def run_step(step: Step, file: pathlib.Path, *, seconds: float, dry: bool) -> dict[str, Any]:
    """Runs a step for at most ``seconds``, again after a crash; its status, None where time was up, and its errors."""
    command = [sys.executable, "-m", *(step.dry if dry else step.command)]
    if step.earlier:
        command += ["--earlier", str(file)]
    start, status = time.monotonic(), None
    for _ in range(STARTS):
        left = seconds - (time.monotonic() - start)
        status = _ended(command, file, seconds=left, dry=dry)
        if status in (0, None) or not step.earlier:
            break
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "errors": _errors(file)}


def _ended(command: list[str], file: pathlib.Path, *, seconds: float, dry: bool) -> int | None:
    """The exit status of a command that appends to ``file``; None if it was killed, with all that it started."""
    path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    told = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Steps compile some of the same programs, and so does the call after this one on the same machine.
    told["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(tempfile.gettempdir()) / "jrec-gpu-first")
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


def _table(folder: pathlib.Path, outcomes: dict[str, Any]) -> Iterator[str]:
    """A row for every figure so far, and one for every step."""
    for name, outcome in outcomes.items():
        for line in resume.read_lines(folder / f"{name}.jsonl"):
            if "metric" in line and "value" in line:
                case, metric = line["case"][:48], line["metric"][:40]
                yield f"{name:<10} {case:<48} {metric:<40} {line['value']:>12.5g} {line['unit']}"
        took = "not ended" if outcome["status"] is None else f"exit {outcome['status']}"
        yield f"{name:<10} {took} after {outcome['seconds']} s" + "".join(f"; {error}" for error in outcome["errors"])


def main() -> None:
    """Runs the steps that have not ended well, as far as time goes."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole call (default 9)")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="only these steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, kernels in their interpreter")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a running step is ended too
    folder: pathlib.Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "outcomes.json"
    outcomes: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for name, step in STEPS.items():
        if name not in arguments.only or outcomes.get(name, {}).get("status") == 0:
            continue
        left = 60 * arguments.minutes - (time.monotonic() - start)
        if left < LEAST_SECONDS and not arguments.dry_run:
            print(f"{name}: left to the next call, since {max(left, 0):.0f} s are left of this one", flush=True)
            continue
        seconds = 60.0 * DRY_MINUTES if arguments.dry_run else min(60 * step.minutes, left)
        outcomes[name] = run_step(step, folder / f"{name}.jsonl", seconds=seconds, dry=arguments.dry_run)
        kept.write_text(json.dumps(outcomes, indent=1) + "\n")
        print(f"{name}: {outcomes[name]}", flush=True)
        if outcomes[name]["status"] != 0:
            print((folder / f"{name}.log").read_text(errors="replace")[-2000:], file=sys.stderr)
    print(*_table(folder, outcomes), sep="\n", flush=True)
    done = [outcomes[name] for name in arguments.only if name in outcomes]
    sys.exit(int(any(outcome["status"] != 0 or outcome["errors"] for outcome in done)))


if __name__ == "__main__":
    main()
