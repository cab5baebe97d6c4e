"""The page of ``jrec init``: which kinds of model were tried, which was chosen and why, and what it was chosen for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jrec import environment
from jrec.app.first_config import LARGE, Candidate, Facts, Key, warnings
from jrec.app.report.elements import Cell, note, number, page, paragraph, section, side_by_side, table
from jrec.app.report.svg import Axis, Mark, around, chart

if TYPE_CHECKING:
    from jrec.app.first_trials import Trial

_COLORS = ("train", "valid", "test", "grey")


def first_page(
    name: str, out: str, keys: Sequence[Key], facts: Facts, some: Sequence[Candidate], trials: Sequence[Trial]
) -> str:
    """The page as HTML.

    Args:
      name: The dataset's name.
      out: The configuration's file.
      keys: The configuration.
      facts: What it depends on.
      some: The kinds of model that may suit the dataset, the chosen one first.
      trials: How they went, the best first; none where none were tried.
    """
    warned = list(warnings(facts))
    parts = [
        *((note("Warnings", warned),) if warned else ()),
        note(f"Chosen: {some[0].title}", [_why(facts, trials)], good=True),
        paragraph(f"Train it: jrec train {out}"),
        *section("Trials", _trials(facts, trials)),
        *section("Configuration", [_configuration(keys)]),
        *section("Dataset", [_dataset(facts)]),
    ]
    return page(f"A first configuration for {name}", parts)


def _why(facts: Facts, trials: Sequence[Trial]) -> str:
    if trials:
        name = facts.metric[1]
        least = f"the least {name} on the valid split"
        if any(trial.score < trials[0].score for trial in trials):
            least = f"the greatest AUC of those whose {name} on the valid split is the least or about the same"
        return f"Of {len(trials)} models that may suit the dataset, it has {least}."
    if facts.examples >= LARGE:
        return f"By its numbers alone: with {LARGE:,} training examples or more nothing is tried."
    if not facts.valid:
        return "By its numbers alone: without a valid split nothing can be compared."
    return "By its numbers alone, as --quick asks for."


def _trials(facts: Facts, trials: Sequence[Trial]) -> Iterator[str]:
    if not trials:
        return
    from jrec.app.first_trials import EXAMPLES, STEPS, spread  # loads JAX

    _, name, unit = facts.metric
    yield paragraph(
        f"Each kind was trained for up to {STEPS:,} steps or {EXAMPLES:,} examples, on {environment.summary()}. The"
        f" scores are of the evaluation with the least {name}{'' if facts.numeric else _CALIBRATED}."
    )
    columns = {"kind of model": "", f"valid {name}": unit, "valid AUC": "0 to 1"}
    columns |= {"at step": "", "steps": "", "training": "s"}
    rows: list[list[Cell]] = [[t.candidate.title, t.score, t.auc, t.step, t.steps, t.seconds] for t in trials]
    yield table("Trials, the best first", columns, rows, marks={0: "own"})
    if (chance := spread(trials)) is not None:
        yield paragraph(f"The same model with another seed differs by {chance:.5f} ({unit}): so much is chance.")
    yield from side_by_side(_curves(facts, trials))


_CALIBRATED = ", taken after the best scale and shift of its logits"


def _curves(facts: Facts, trials: Sequence[Trial]) -> Iterator[str]:
    last = max(trial.steps for trial in trials)
    key, name, unit = facts.metric
    metrics = {key: f"{name} ({unit})"} if facts.numeric else {"auc": "AUC", key: f"{name} once calibrated ({unit})"}
    for metric, label in metrics.items():
        marks = []
        for place, trial in enumerate(trials):
            points = [(r["step"], r[metric]) for r in trial.records if r[metric] is not None]
            if points:
                x, y = zip(*points, strict=True)
                dash = f"dash{place // len(_COLORS)}" if place >= len(_COLORS) else ""
                color = _COLORS[place % len(_COLORS)]
                marks.append(Mark(kind="points", color=color, x=x, y=y, name=trial.candidate.title, dash=dash))
        if marks:
            low, high = around([value for mark in marks for value in mark.y])
            title = f"{label.partition(' (')[0]} on valid, by step"
            yield chart(
                marks, title=title, x=Axis(label="step", low=0, high=last), y=Axis(label=label, low=low, high=high)
            )


def _configuration(keys: Sequence[Key]) -> str:
    rows = [[f"{key.section}.{key.name}".lstrip("."), _value(key.value), key.reason] for key in keys]
    return table("Keys, and the reasons for them", {"key": "", "value": "", "reason": ""}, rows)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} = {_value(one)}" for name, one in value.items())
    return number(value) if isinstance(value, str | int | float | list | tuple) else str(value)


def _dataset(facts: Facts) -> str:
    rows: list[list[Cell]] = [
        ["training examples", facts.examples, "count"],
        ["valid examples", facts.valid, "count"],
        ["dense features", facts.dense, "count"],
        ["ids", facts.lookups, "of an example, on average"],
        ["lookups of a row", facts.visits, "in an epoch, on average"],
        ["rows", facts.rows, "count, of all tables"],
        *([f"rows of {name}", rows, "count"] for name, rows in facts.tables.items()),
    ]
    return table("What the configuration depends on", {"": "", "value": "", "unit": ""}, rows)
