"""What to run first where a GPU is there for a few minutes: one command, everything that matters most at the front.

    check       1.6 min   does each kernel that follows compile and give XLA's bits, and its time by XLA's
    steps       4 min     whole steps as they are dispatched (Kaggle at 2,048 and 16,384, DLRM-DCNv2 at 6,912 in
                          bfloat16): kernels, XLA, nnx.Embed and optax; examples/s, and a profile of each
    smoke       0.7 min   copy bandwidth; gather, fused update, cast and TT expansion against float64, timed
    train       2.5 min   jrec train on synthesized Kaggle and DCNv2 logs: examples/s, share of the time the GPU is busy
    uncaptured  0.8 min   the kernels' steps without command buffers
    counters    0.8 min   ncu: bandwidth, occupancy and registers of each kernel

and, where time is left or in another call:

    tests       4 min     tests marked gpu
    benchmark   7 min     benchmarks.gpu: kernels against XLA and PyTorch at named shapes
    tuning      6 min     benchmarks.gpu_tune, and the entries that follow
    tt          2 min     benchmarks.gpu_tt
    sanitizer   1.5 min   compute-sanitizer's memcheck, racecheck and initcheck on every kind of kernel, at tiny sizes

Each runs in a process with its budget, none past ``--minutes``. The folder gets few files: lines.jsonl, a line for
every result as it comes, log.txt, what steps write to stderr, outcomes.json, and a few of the profiler's traces.
Whatever ends a step or the call, what was printed before is there. A step that crashes goes on at its next case. The
same command again, with ``--earlier`` or in the same folder, runs the steps that have not ended well, at the cases
that are left. Exits with 1 if a step or case failed.

Examples:
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 9 --out first
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 5 --earlier first --out second --only benchmark tuning
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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, TextIO

from benchmarks import harness, resume

LINES, LOG, OUTCOMES = "lines.jsonl", "log.txt", "outcomes.json"
TRACES = "{traces}"  # in a step's command: the folder of the results
STARTS = 4  # of a step that crashes, each time at another case
DRY_MINUTES = 10  # a step, on a CPU of any speed
LEAST_SECONDS = 15  # a step is left to the next call where less is left: a process needs as much to begin
END_SECONDS = 3  # for a step whose time is up to print what it has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step: its budget, what runs on a GPU and in a dry run, and whether that takes ``--earlier FILE``."""

    minutes: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    earlier: bool = True


def _module(name: str, *words: str, minutes: float, dry: tuple[str, ...] = ()) -> Step:
    """A benchmark, tiny in a dry run."""
    module = f"benchmarks.{name}"
    return Step(minutes=minutes, command=(module, *words), dry=(module, *words, "--tiny", *dry))


FILES = [str(f) for f in sorted(harness.ROOT.glob("tests/test_*.py")) if "mark.gpu" in f.read_text(encoding="utf-8")]
WORKERS = ("-n", "4", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()  # a file's big tables in turn
# Where pytest-benchmark is installed, it warns beside xdist, and warnings are errors. Tests are told one by one: a call
# that ends early says which have passed.
TESTS = ("pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:benchmark", *WORKERS, *FILES)
KERNELS = ("--case", "kaggle, pallas", "dcnv2, bfloat16")
STEPS = {
    "check": _module("gpu_check", minutes=1.6, dry=("--only", "gather_reduce float32 64")),
    "steps": _module("gpu_step", "--trace", TRACES, minutes=4, dry=("--case", "kaggle, pallas", "kaggle, plain")),
    "smoke": _module("gpu_smoke", minutes=0.7),
    "train": _module("gpu_train", minutes=2.5, dry=("--model", "kaggle", "--threads", "2")),
    "uncaptured": _module("gpu_step", "--uncaptured", *KERNELS, minutes=0.8, dry=("--case", "kaggle, xla")),
    "counters": _module("gpu_tools", "counters", minutes=0.8),
    # Without a GPU every test is skipped: what is tried is that they can be collected.
    "tests": Step(minutes=4, command=TESTS, dry=TESTS, earlier=False),
    "benchmark": _module("gpu", minutes=7, dry=("--case", "design", "several dims", "--metric", "forward")),
    "tuning": _module("gpu_tune", minutes=6, dry=("--dim", "16")),
    "tt": _module("gpu_tt", "--quick", minutes=2, dry=("--way", "naive", "pallas, fused")),
    "sanitizer": _module("gpu_tools", "sanitizer", minutes=1.5),
}


def run_step(name: str, step: Step, folder: pathlib.Path, *, seconds: float, dry: bool) -> dict[str, Any]:
    """Runs a step for at most ``seconds``, again after a crash; its status, None where time was up, and its errors."""
    start, status = time.monotonic(), None
    for _ in range(STARTS):
        command = [sys.executable, "-m", *(step.dry if dry else step.command)]
        command = [str(folder) if word == TRACES else word for word in command]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as earlier:
            if step.earlier:
                earlier.writelines(f"{json.dumps(line)}\n" for line in _lines(folder, name))
                earlier.flush()
                command += ["--earlier", earlier.name]
            status = _ended(name, command, folder, seconds=seconds - (time.monotonic() - start), dry=dry)
        if status in (0, None) or not step.earlier:
            break
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "errors": _errors(_lines(folder, name))}


def _ended(name: str, command: list[str], folder: pathlib.Path, *, seconds: float, dry: bool) -> int | None:
    """The exit status of a step's command; None if it was killed, with all that it started."""
    path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    told = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Steps compile some of the same programs, and so does the call after this one on the same machine.
    told["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(tempfile.gettempdir()) / "jrec-gpu-first")
    if dry:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with (folder / LINES).open("a") as lines, (folder / LOG).open("a") as log:
        print(f"== {name}", file=log, flush=True)
        process = subprocess.Popen(
            command, cwd=harness.ROOT, env={**os.environ, **told}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        keeper = threading.Thread(target=_keep, args=(name, process.stdout, lines, log), daemon=True)
        keeper.start()
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            for how, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            keeper.join(END_SECONDS)


def _keep(name: str, printed: IO[bytes], lines: TextIO, log: TextIO) -> None:
    """Keeps what a step prints: its JSON objects in one file, with the step's name, all else in the other."""
    with printed:
        for text in printed:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                print(json.dumps({"step": name, **line}), file=lines, flush=True)
            else:
                print(text.decode(errors="replace"), end="", file=log, flush=True)


def _lines(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """A step's lines so far."""
    return [line for line in resume.read_lines(folder / LINES) if line.get("step") == name]


def _errors(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Errors of the cases that ended with one, by the last word on each case."""
    ended = {line["end"]: line.get("error") for line in lines if "end" in line}
    return [f"{case}: {error}" for case, error in ended.items() if error]


def _table(folder: pathlib.Path, outcomes: dict[str, Any]) -> Iterator[str]:
    """A row for every figure so far, and one for every step."""
    for name, outcome in outcomes.items():
        for line in _lines(folder, name):
            if "metric" in line and "value" in line:
                case, metric = line["case"][:48], line["metric"][:40]
                yield f"{name:<10} {case:<48} {metric:<40} {line['value']:>12.5g} {line['unit']}"
        took = "not ended" if outcome["status"] is None else f"exit {outcome['status']}"
        yield f"{name:<10} {took} after {outcome['seconds']} s" + "".join(f"; {error}" for error in outcome["errors"])


def main() -> None:
    """Runs the steps that have not ended well, as far as time goes."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = os.environ.get("OUT")  # as systems that run jobs name the folder of their results
    parser.add_argument("--out", type=pathlib.Path, required=not told, default=told, metavar="DIR",
                        help="folder of the results (default: $OUT)")  # fmt: skip
    parser.add_argument("--earlier", type=pathlib.Path, metavar="DIR", help="folder of an earlier call, to go on from")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole call (default 9)")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="only these steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, kernels in their interpreter")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a running step is ended too
    folder: pathlib.Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.earlier is not None and not (folder / LINES).exists():
        for name in (LINES, OUTCOMES):
            if (arguments.earlier / name).is_file():
                shutil.copyfile(arguments.earlier / name, folder / name)
    with (folder / LINES).open("a") as lines:
        lines.write("\n")  # closes a line that an earlier call left torn
    kept = folder / OUTCOMES
    outcomes: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for name, step in STEPS.items():
        if name not in arguments.only or outcomes.get(name, {}).get("status") == 0:
            continue
        left = 60 * arguments.minutes - (time.monotonic() - start)
        if left < LEAST_SECONDS and not arguments.dry_run:
            print(f"{name}: left to the next call, since {max(left, 0):.0f} s are left of this one", flush=True)
            continue
        seconds = 60.0 * DRY_MINUTES if arguments.dry_run else min(60 * step.minutes, left)
        outcomes[name] = run_step(name, step, folder, seconds=seconds, dry=arguments.dry_run)
        kept.write_text(json.dumps(outcomes, indent=1) + "\n")
        print(f"{name}: {outcomes[name]}", flush=True)
        if outcomes[name]["status"] != 0:
            print((folder / LOG).read_text(errors="replace")[-2000:], file=sys.stderr)
    print(*_table(folder, outcomes), sep="\n", flush=True)
    done = [outcomes[name] for name in arguments.only if name in outcomes]
    sys.exit(int(any(outcome["status"] != 0 or outcome["errors"] for outcome in done)))


if __name__ == "__main__":
    main()
