"""The steps of the survey: what each runs, for how long, and what its file says of earlier runs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import resume

STALL = 150.0  # seconds without output: no compilation, table or batch takes as long


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the survey.

    Attributes:
      name: As on the command line; its lines are in NAME.jsonl.
      minutes: Its budget.
      command: What runs on a GPU.
      dry: What runs in a dry run instead.
      earlier: Whether the command takes ``--earlier FILE``, and goes on at its next case.
      stall: Seconds without output until it is ended.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    dry: tuple[str, ...]
    earlier: bool = True
    stall: float = STALL

    def arguments(self, file: pathlib.Path, *, dry: bool) -> list[str]:
        """The command line."""
        chosen = list(self.dry if dry else self.command)
        return [*chosen, "--earlier", str(file)] if self.earlier else chosen


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"benchmarks.{name}", *arguments


STEPS: tuple[Step, ...] = (
    Step(name="smoke", minutes=2, command=_module("gpu_smoke"), dry=_module("gpu_smoke", "--tiny")),
    # Without a GPU every one of them is skipped, with its reason: what is tried is that all can be collected.
    Step(
        name="tests",
        minutes=7,
        command=_module("gpu_tests", "--workers", "8"),
        dry=_module("gpu_tests", "--workers", "2", "--files", "tests/test_gpu_kernels.py"),
    ),
    Step(
        name="kernels",
        minutes=1.5,
        command=_module("gpu_kernels_check"),
        dry=_module("gpu_kernels_check", "--", "--interpret", "--only", "gather_reduce float32 64"),
        earlier=False,
    ),
    Step(
        name="benchmark",
        minutes=7,
        command=_module("gpu"),
        dry=_module("gpu", "--tiny", "--case", "design", "several dims", "--metric", "forward"),
    ),
    Step(
        name="tuning",
        minutes=6,
        command=_module("gpu_tune"),
        dry=_module("gpu_tune", "--tiny", "--dim", "16"),
    ),
    Step(name="step", minutes=2.5, command=_module("gpu_step"), dry=_module("gpu_step", "--tiny")),
    Step(
        name="tt",
        minutes=2,
        command=_module("gpu_tt", "--quick"),
        dry=_module("gpu_tt", "--tiny", "--way", "naive", "pallas, fused"),
    ),
)

# Marks of the survey in a step's file, among the step's own lines.
START, STOP = "start", "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What a step's file says.

    Attributes:
      outcome: Of its last run; "not begun", or "cut off" where the survey itself was ended.
      seconds: All of its runs together.
      dry: Whether its lines are a dry run's; None without lines.
      whole: Whether its last run had its whole budget.
      cases: Cases that ended well.
      failed: (case, error) of those that ended with an error.
      open: Cases that began and did not end.
      lines: Lines of its own.
    """

    outcome: str
    seconds: float
    dry: bool | None
    whole: bool
    cases: int
    failed: tuple[tuple[str, str], ...]
    open: tuple[str, ...]
    lines: int

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run."""
        return self.outcome == "ended"

    @property
    def tried(self) -> bool:
        """Whether it had its chance: others come first in a run that goes on."""
        return self.outcome not in ("not begun", "cut off") and (self.whole or self.outcome != "timeout")


def state(file: pathlib.Path) -> State:
    """Reads a step's file; of an absent one, a step that has not begun."""
    outcome, seconds, dry, whole, lines = "not begun", 0.0, None, False, 0
    begun: dict[str, None] = {}
    ended: dict[str, str] = {}
    for line in resume.read_lines(file):
        if line.get("survey") == START:
            outcome, dry = "cut off", bool(line.get("dry"))
        elif line.get("survey") == STOP:
            outcome, whole = str(line.get("outcome")), bool(line.get("whole"))
            seconds += float(line.get("seconds", 0))
        else:
            lines += 1
            if isinstance(line.get("begin"), str):
                begun[line["begin"]] = None
            if isinstance(line.get("end"), str):
                ended[line["end"]] = str(line.get("error", ""))
    return State(
        outcome=outcome,
        seconds=round(seconds, 1),
        dry=dry,
        whole=whole,
        cases=sum(not error for error in ended.values()),
        failed=tuple((case, error) for case, error in ended.items() if error),
        open=tuple(case for case in begun if case not in ended),
        lines=lines,
    )


def order(steps: Sequence[Step], states: dict[str, State]) -> list[Step]:
    """Steps that are left, those first that had no chance yet, each kind in the steps' order."""
    left = [step for step in steps if not states[step.name].done]
    return sorted(left, key=lambda step: states[step.name].tried)


def limit(step: Step, later: Sequence[Step], remaining: float) -> float:
    """Seconds that a step may take: its budget, and what the budgets of the later ones leave of ``remaining``."""
    budget = 60 * step.minutes
    slack = max(0.0, remaining - budget - sum(60 * other.minutes for other in later))
    return max(0.0, min(remaining, budget + slack))


def figures(file: pathlib.Path) -> list[dict[str, Any]]:
    """The results among a step's lines: case, metric, value, unit, ratio and details."""
    wanted = ("case", "metric", "value", "unit", "peer", "ratio", "details")
    return [
        {name: line[name] for name in wanted if line.get(name) is not None}
        for line in resume.read_lines(file)
        if "metric" in line and "value" in line
    ]
