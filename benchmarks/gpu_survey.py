"""Everything there is to learn on a GPU that is there for half an hour, by one command that loses nothing.

    smoke       2 min     copy bandwidth; gather, fused update, cast and TT expansion against float64
    tests       7 min     tests marked gpu on 8 workers, the tables above 8 GB last, one at a time
    kernels     1.5 min   jrec kernels check
    benchmark   7 min     benchmarks.gpu: jrec's cases, FBGEMM's, cuEmbed's; XLA and torch beside
    tuning      6 min     benchmarks.gpu_tune: dim x chunks x unroll x split, and the entries that follow
    step        2.5 min   whole DLRM steps under the profiler, kernels by time
    tt          2 min     benchmarks.gpu_tt

Each step is a process with a budget. It is ended, with all that it started, when the budget is spent or when it prints
nothing for too long. Its lines go to DIR/STEP.jsonl one by one as they come. A step that crashes goes on at its next
case. When all is over, or anything fails, DIR/summary.json and a table tell what there is. The same command again goes
on where the last one ended. DIR holds at most 8 files, none above 16 MB. Nothing needs to be installed beside jax,
flax, numba, optax, rich and scipy. A dry run exits with 1 if any step or case failed.

Examples:
  PYTHONPATH=. python3 -m benchmarks.gpu_survey --out survey
  PYTHONPATH=. python3 -m benchmarks.gpu_survey --out survey --minutes 9
  PYTHONPATH=. python3 -m benchmarks.gpu_survey --out survey --only tuning tt
  python -m benchmarks.gpu_survey --dry-run --out survey-try
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from benchmarks import harness, survey_process, survey_steps, survey_summary
from benchmarks.survey_steps import START, STOP, Step

MAX_FILE = 15 << 20  # bytes a file: results are copied and committed
MIN_SECONDS = 5.0  # less is not worth starting a process for
RESTARTS = 10  # of a step that crashes or stalls, each time in another case


class Lines:
    """A step's file, to which lines are appended and flushed one by one. A torn last line is closed first."""

    def __init__(self, file: pathlib.Path) -> None:
        self._size = file.stat().st_size if file.is_file() else 0
        torn = self._size and not file.read_bytes().endswith(b"\n")
        self._file = file.open("a", encoding="utf-8")
        self.dropped = 0
        self.begun = 0
        if torn:
            self._file.write("\n")

    def append(self, line: dict[str, Any], *, always: bool = False) -> None:
        """Appends a line, or counts it as dropped where the file would grow too large."""
        text = json.dumps(line) + "\n"
        self._size += len(text.encode())
        if self._size > MAX_FILE and not always:
            self.dropped += 1
            return
        self.begun += "begin" in line
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def environment(*, dry: bool) -> dict[str, str]:
    """The environment of steps: the checkout can be imported, and the GPU's memory is not taken in advance."""
    made = dict(os.environ)
    made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(harness.ROOT), made.get("PYTHONPATH")]))
    made["PYTHONUNBUFFERED"] = "1"
    made["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    made["JREC_COMMIT"] = harness.commit()
    if dry:
        made |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return made


def run_step(step: Step, file: pathlib.Path, *, seconds: float, dry: bool) -> None:
    """Runs a step for at most ``seconds``, again after a crash or a stall if it got to another case."""
    deadline = time.monotonic() + seconds
    lines = Lines(file)
    try:
        for _ in range(RESTARTS + 1):
            remaining = deadline - time.monotonic()
            if remaining < min(MIN_SECONDS, seconds / 2):
                return
            lines.append(
                {"survey": START, "step": step.name, "dry": dry, "at": _now(), "seconds": round(remaining, 1)},
                always=True,
            )
            before = lines.begun
            ending = survey_process.run(
                step.arguments(file, dry=dry), environment=environment(dry=dry), folder=harness.ROOT,
                take=lines.append, timeout=remaining, stall=step.stall,
            )  # fmt: skip
            outcome = "empty" if ending.outcome == "ended" and not ending.lines else ending.outcome
            stop: dict[str, Any] = {
                "survey": STOP, "outcome": outcome, "status": ending.status, "seconds": ending.seconds,
                "whole": seconds >= 60 * step.minutes - 1, "garbage": ending.garbage, "dropped": lines.dropped,
            }  # fmt: skip
            if outcome != "ended" or ending.garbage:
                stop["tail"] = ending.tail
            lines.append(stop, always=True)
            if outcome not in ("crashed", "stalled") or lines.begun == before:
                return
    finally:
        lines.close()


def survey(steps: Sequence[Step], folder: pathlib.Path, *, minutes: float, dry: bool) -> dict[str, Any]:
    """Runs what is left of the steps within ``minutes``, and writes the summary, whatever happens.

    Args:
      steps: The steps, in their order.
      folder: Where files are; made if absent.
      minutes: All of the time.
      dry: Whether to run the steps' dry commands.

    Returns:
      The summary.

    Raises:
      SystemExit: If the folder holds other files, or results of the other kind of run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {step.name: folder / f"{step.name}.jsonl" for step in steps}
    _check_folder(folder, set(files.values()), dry=dry)
    deadline = time.monotonic() + 60 * minutes
    try:
        states = {name: survey_steps.state(file) for name, file in files.items()}
        left = survey_steps.order(steps, states)
        for number, step in enumerate(left):
            seconds = survey_steps.limit(step, left[number + 1 :], deadline - time.monotonic())
            if seconds < min(MIN_SECONDS, 30 * step.minutes):
                break
            _say(f"{step.name}: at most {seconds / 60:.1f} min")
            run_step(step, files[step.name], seconds=seconds, dry=dry)
            state = survey_steps.state(files[step.name])
            counts = f"{state.cases} cases, {len(state.failed)} failed"
            _say(f"{step.name}: {state.outcome} after {state.seconds:.0f} s, {counts}")
    finally:
        made = survey_summary.make(folder, list(steps))
        (folder / "summary.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(survey_summary.table(made), flush=True)
    return made


def _check_folder(folder: pathlib.Path, files: set[pathlib.Path], *, dry: bool) -> None:
    own = {folder / f"{step.name}.jsonl" for step in survey_steps.STEPS} | files | {folder / "summary.json"}
    foreign = sorted(path.name for path in folder.iterdir() if path not in own)
    if foreign:
        raise SystemExit(
            f"gpu_survey: {folder} holds other files ({', '.join(foreign[:3])}); choose a folder of its own"
        )
    for path in folder.glob("*.jsonl"):
        of_dry_run = survey_steps.state(path).dry
        if of_dry_run is not None and of_dry_run != dry:
            kind = "a dry run" if of_dry_run else "a GPU"
            raise SystemExit(f"gpu_survey: {path} holds results of {kind}; choose another folder, or remove it")


def _say(text: str) -> None:
    print(f"gpu_survey: {_now()}: {text}", file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # ends the running step's processes and writes the summary on its way


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the results")
    names = [step.name for step in survey_steps.STEPS]
    made.add_argument(
        "--only", nargs="+", choices=names, metavar="STEP", help=f"only these steps, in their order: {' '.join(names)}"
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=sum(step.minutes for step in survey_steps.STEPS),
        metavar="M",
        help="all of the time (default: 28); less cuts the last steps, more goes to those that need it",
    )
    made.add_argument(
        "--dry-run", action="store_true", help="every step at tiny sizes on the CPU, the kernels in their interpreter"
    )
    return made


def main() -> None:
    """Runs the survey."""
    arguments = _parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _stop)
    steps = [step for step in survey_steps.STEPS if arguments.only is None or step.name in arguments.only]
    summary = survey(steps, arguments.out, minutes=arguments.minutes, dry=arguments.dry_run)
    if arguments.dry_run and any(step["outcome"] != "ended" or step["failed"] for step in summary["steps"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
