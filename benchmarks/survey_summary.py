"""What a survey's files say, in one object and in one table for people."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, resume, survey_steps
from benchmarks.survey_steps import Step

ERRORS = 12  # of a step that the summary holds; its file has all
FIGURES = 40  # of a step


def make(folder: pathlib.Path, steps: Sequence[Step]) -> dict[str, Any]:
    """The summary: every step's outcome, counts and errors, its figures, and what stood in the way."""
    return {
        "commit": harness.commit(),
        "steps": [_step(step, folder / f"{step.name}.jsonl") for step in steps],
        "device": _device(folder),
    }


def _step(step: Step, file: pathlib.Path) -> dict[str, Any]:
    state = survey_steps.state(file)
    figures = survey_steps.figures(file)
    made: dict[str, Any] = {
        "step": step.name,
        "outcome": state.outcome,
        "seconds": state.seconds,
        "budget_seconds": 60 * step.minutes,
        "cases": state.cases,
        "failed": len(state.failed),
        "lines": state.lines,
    }
    if state.failed:
        made["errors"] = [{"case": case, "error": error[:300]} for case, error in state.failed[:ERRORS]]
    if state.open:
        made["open"] = list(state.open[:ERRORS])
    lines = list(resume.read_lines(file))
    if absent := [str(line["absent"])[:200] for line in lines if "absent" in line]:
        made["absent"] = absent[:ERRORS]
    if entries := [line["entry"] for line in lines if "entry" in line]:
        made["entries"] = entries
    stops = [line for line in lines if line.get("survey") == survey_steps.STOP]
    if stops and "tail" in stops[-1]:
        made["tail"] = stops[-1]["tail"][-1500:]
    made["figures"] = [{k: v for k, v in f.items() if k != "details"} | _short(f) for f in figures[:FIGURES]]
    return made


def _short(figure: dict[str, Any]) -> dict[str, Any]:
    details = figure.get("details", {})
    names = ("lookup_fraction", "distinct_fraction", "launches", "kernel_us")
    return {name: details[name] for name in names if name in details}


def _device(folder: pathlib.Path) -> dict[str, Any]:
    lines = [line for line in resume.read_lines(folder / "smoke.jsonl") if "smi" in line]
    return {name: lines[-1].get(name) for name in ("device", "smi", "missing packages")} if lines else {}


def table(summary: dict[str, Any]) -> str:
    """The summary as text of at most about a hundred lines."""
    rows = [("step", "outcome", "seconds", "of", "cases", "failed", "first error or reason")]
    for step in summary["steps"]:
        reasons = [f"{e['case']}: {e['error']}" for e in step.get("errors", [])] + step.get("absent", [])
        reason = reasons[0] if reasons else _last_words(step.get("tail", ""))
        rows.append(
            (step["step"], step["outcome"], f"{step['seconds']:.0f}", f"{step['budget_seconds']:.0f}",
             str(step["cases"]), str(step["failed"]), reason[:90])
        )  # fmt: skip
    text = [
        f"survey of {summary['commit']} on {summary['device'].get('device', 'no known device')}",
        "",
        *_aligned(rows),
    ]
    measured = [("step", "case", "metric", "value", "unit", "by peer", "of floor")]
    for step in summary["steps"]:
        measured += [
            (step["step"], f["case"][:52], f["metric"][:40], f"{f['value']:.4g}", f["unit"],
             f"{f['ratio']:.2f}x {f['peer']}" if "ratio" in f and "peer" in f else "",
             f"{f['distinct_fraction']:.0%}" if "distinct_fraction" in f else "")
            for f in step["figures"][:16]
        ]  # fmt: skip
    if len(measured) > 1:
        text += ["", *_aligned(measured)]
    return "\n".join(text)


def _last_words(tail: str) -> str:
    """The last line of a process's output that is a sentence, not part of a table that it drew."""
    told = [line for line in tail.splitlines() if line.strip() and not set(line) & set("│┃─━└┡┏")]
    return told[-1] if told else ""


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
