"""What to run first where a GPU is there for a few minutes: one command, everything that matters most at the front.

    check       1.6 min   does each kernel of the steps compile and give XLA's bits, and its time by XLA's
    steps       4 min     whole steps as they are dispatched (Kaggle at 2,048 and 16,384, DLRM-DCNv2 at 6,912 in
                          bfloat16): kernels, XLA, nnx.Embed and optax; examples/s, and a profile of each
    train       2.5 min   jrec train on synthesized Kaggle and DCNv2 logs: examples/s, share of the time the GPU is busy
    counters    0.8 min   ncu: bandwidth, occupancy and registers of each kernel

and, where time is left or in another call:

    smoke       0.7 min   copy bandwidth; gather, fused update, cast and TT expansion against float64, timed
    uncaptured  0.8 min   the kernels' steps without command buffers
    classes     1.6 min   the check of other optimizers' kernels
    tests       4 min     tests marked gpu
    benchmark   7 min     benchmarks.gpu: kernels against XLA and PyTorch at named shapes
    tuning      6 min     benchmarks.gpu_tune, and the entries that follow
    tt          2 min     benchmarks.gpu_tt

and in a call of its own, only where ``--only`` names it:

    sanitizer   1.5 min   compute-sanitizer's memcheck, racecheck and initcheck on every kind of kernel, at tiny sizes

Each runs in a process with its budget, none past ``--minutes``; one that cannot bring its first figures home in what is
left is skipped, and the call says so. The folder gets few files: lines.jsonl, a line for every result as it comes and
for every step that ends, log.txt, all else that steps print, and a few of the profiler's traces. Whatever ends a step
or the call, what was printed before is there. Figures are also printed as they come, a row each, and all of them as a
table at the end. A step that crashes goes on at its next case. The same command again, with ``--earlier`` or in the
same folder, runs the steps that have not ended well, at the cases that are left; a case that was cut off begins anew,
and its later figures count. Exits with 1 if a step or case failed. ``--keep`` takes the figures of a folder into
benchmarks/results, from which the pages have them.

Examples:
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 9 --out first
  PYTHONPATH=. python3 -m benchmarks.gpu_first --minutes 5 --earlier first --out second --only sanitizer
  python -m benchmarks.gpu_first --keep second
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
import re
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

LINES, LOG = "lines.jsonl", "log.txt"
TRACES = "{traces}"  # in a step's command: the folder of the results
STARTS = 4  # of a step that crashes, each time at another case
END_SECONDS = 3  # for a step whose time is up to print what it has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step.

    Attributes:
      minutes: Its budget; in a dry run it has all of the call's.
      least: Minutes in which it brings its first figures home.
      command: What runs on a GPU.
      dry: What runs in a dry run.
      earlier: Whether that takes ``--earlier FILE``.
    """

    minutes: float
    least: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    earlier: bool = True


def _module(name: str, *words: str, minutes: float, least: float, dry: tuple[str, ...] = ()) -> Step:
    """A benchmark, tiny in a dry run."""
    module = f"benchmarks.{name}"
    return Step(minutes=minutes, least=least, command=(module, *words), dry=(module, *words, "--tiny", *dry))


FILES = [str(f) for f in sorted(harness.ROOT.glob("tests/test_*.py")) if "mark.gpu" in f.read_text(encoding="utf-8")]
WORKERS = ("-n", "4", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()  # a file's big tables in turn
# Where pytest-benchmark is installed, it warns beside xdist, and warnings are errors. Tests are told one by one: a call
# that ends early says which have passed.
TESTS = ("pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:benchmark", *WORKERS, *FILES)
KERNELS = ("--case", "kaggle, pallas", "dcnv2, bfloat16")
STEPS = {
    "check": _module("gpu_check", minutes=1.6, least=0.7, dry=("--only", "gather_reduce float32 64")),
    "steps": _module("gpu_step", "--trace", TRACES, minutes=4, least=0.7,
                     dry=("--case", "kaggle, pallas", "kaggle, plain")),
    "train": _module("gpu_train", minutes=2.5, least=0.8, dry=("--model", "kaggle", "--threads", "2")),
    "counters": _module("gpu_tools", "counters", minutes=0.8, least=0.4),
    "smoke": _module("gpu_smoke", minutes=0.7, least=0.4),
    "uncaptured": _module("gpu_step", "--uncaptured", *KERNELS, minutes=0.8, least=0.5, dry=("--case", "kaggle, xla")),
    "classes": _module("gpu_check", "--more", minutes=1.6, least=0.7, dry=("--only", "gather_reduce float32 64")),
    # Without a GPU every test is skipped: what is tried is that they can be collected.
    "tests": Step(minutes=4, least=1, command=TESTS, dry=TESTS, earlier=False),
    "benchmark": _module("gpu", minutes=7, least=1, dry=("--case", "design", "several dims", "--metric", "forward")),
    "tuning": _module("gpu_tune", minutes=6, least=1, dry=("--dim", "16")),
    "tt": _module("gpu_tt", "--quick", minutes=2, least=0.5, dry=("--way", "naive", "pallas, fused")),
    "sanitizer": _module("gpu_tools", "sanitizer", minutes=1.5, least=0.8),
}  # fmt: skip
ALONE = ("sanitizer",)  # in a call of their own: what they do to a GPU that goes wrong costs nothing else


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
    outcome = {"status": status, "took": round(time.monotonic() - start, 1), "errors": _errors(_lines(folder, name))}
    with (folder / LINES).open("a") as lines:
        print(json.dumps({"step": name, **outcome}), file=lines)
    return outcome


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
            stderr=log, process_group=0,  # in the call's session, with which it ends where that is killed
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
    """Keeps what a step prints: its JSON objects in one file, with the step's name, all else in the other.

    Figures are printed as they come: of a call that is cut off, its last output has them.
    """
    with printed:
        for text in printed:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                print(json.dumps({"step": name, **line}), file=lines, flush=True)
                with contextlib.suppress(OSError):  # where nobody reads what the call prints, its files still go on
                    print(*_rows(name, [line]), sep="", end="", flush=True)
            else:
                print(text.decode(errors="replace"), end="", file=log, flush=True)


def _lines(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """A step's lines so far."""
    return [line for line in resume.read_lines(folder / LINES) if line.get("step") == name]


def _errors(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Errors of the cases that ended with one, by the last word on each case."""
    ended = {line["end"]: line.get("error") for line in lines if "end" in line}
    return [f"{case}: {error}" for case, error in ended.items() if error]


def _outcome(folder: pathlib.Path, name: str) -> dict[str, Any] | None:
    """How a step's last run ended; None where none has."""
    return next((line for line in reversed(_lines(folder, name)) if "status" in line), None)


def _rows(name: str, lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A row for every figure of a step, and one for how it ended, each with its newline."""
    for line in lines:
        if "metric" in line and "value" in line:
            case, metric, value = str(line.get("case"))[:48], str(line["metric"])[:40], line["value"]
            figure = f"{value:.5g}" if isinstance(value, float) else str(value)
            yield f"{name:<10} {case:<48} {metric:<40} {figure:>12} {line.get('unit', '')}\n"
        elif line.keys() >= {"status", "took", "errors"}:
            ended = "not ended" if line["status"] is None else f"exit {line['status']}"
            yield f"{name:<10} {ended} after {line['took']} s{''.join(f'; {error}' for error in line['errors'])}\n"


def _table(folder: pathlib.Path) -> Iterator[str]:
    """The rows of all steps so far."""
    for name in STEPS:
        lines, outcome = _lines(folder, name), _outcome(folder, name)
        yield from _rows(name, [*resume.figures(lines), *([] if outcome is None else [outcome])])


def keep(folder: pathlib.Path, results: pathlib.Path) -> list[pathlib.Path]:
    """Writes a call's figures to RESULTS/GPU/BENCHMARK.jsonl, over older ones of the same cases; returns the paths."""
    files: dict[pathlib.Path, list[dict[str, Any]]] = {}
    for name, step in STEPS.items():
        for line in resume.figures(_lines(folder, name)):
            gpu = re.match(r"NVIDIA (?:GeForce |RTX )*(\w+)", line["device"])
            if gpu is None:
                raise SystemExit(f"{folder / LINES} has figures of {line['device']!r}, which is no NVIDIA GPU")
            path = results / gpu[1].lower() / f"{step.command[0].rpartition('.')[2]}.jsonl"
            files.setdefault(path, []).append({key: value for key, value in line.items() if key != "step"})
    for path, lines in files.items():
        new = {(line["case"], line["metric"]) for line in lines}
        lines += [line for line in resume.read_lines(path) if (line["case"], line["metric"]) not in new]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return list(files)


def main() -> None:
    """Runs the steps that have not ended well, as far as time goes."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = os.environ.get("OUT")  # as systems that run jobs name the folder of their results
    parser.add_argument("--out", type=pathlib.Path, default=told, metavar="DIR",
                        help="folder of the results (default: $OUT)")  # fmt: skip
    parser.add_argument("--earlier", type=pathlib.Path, metavar="DIR", help="folder of an earlier call, to go on from")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole call (default 9)")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=[name for name in STEPS if name not in ALONE],
                        help="only these steps")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, kernels in their interpreter")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="run nothing: keep the figures of DIR")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        print(*keep(arguments.keep, harness.ROOT / "benchmarks" / "results"), sep="\n")
        return
    if arguments.out is None:
        parser.error("give --out a folder, or set OUT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a running step is ended too
    folder: pathlib.Path = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.earlier is not None and not (folder / LINES).exists():
        whole = shutil.copyfile(arguments.earlier / LINES, folder / f"{LINES}.new")
        whole.rename(folder / LINES)
    with (folder / LINES).open("a") as lines:
        lines.write("\n")  # closes a line that an earlier call left torn
        for name in STEPS:
            if (case := resume.cut_off(_lines(folder, name))) is not None:
                print(json.dumps({"step": name, "cut": case}), file=lines)
    failed = False
    for name in arguments.only:
        step, before = STEPS[name], _outcome(folder, name)
        if before is None or before["status"] != 0:
            left = arguments.minutes - (time.monotonic() - start) / 60
            if left < step.least:
                print(f"{name}: skipped: it needs {step.least} minutes, and {max(left, 0):.1f} are left", flush=True)
                continue
            minutes = left if arguments.dry_run else min(step.minutes, left)
            before = run_step(name, step, folder, seconds=60 * minutes, dry=arguments.dry_run)
            if before["status"] != 0:
                print((folder / LOG).read_text(errors="replace")[-2000:], file=sys.stderr)
            print(*_rows(name, [before]), sep="", end="", flush=True)
        failed |= before["status"] != 0 or bool(before["errors"])
    print("\nAll figures:\n", *_table(folder), sep="", end="", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
