"""The page of ``jrec init``: which kinds of model were tried, which was chosen and why, and what it was chosen for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jrec import environment
from jrec.app.first_config import LARGE
from jrec.app.first_rules import Choice, Key, Rules
from jrec.app.report.elements import Cell, note, number, page, paragraph, section, side_by_side, table
from jrec.app.report.svg import Axis, Mark, around, chart

if TYPE_CHECKING:
    from jrec.app.first_trials import Trial

_COLORS = ("train", "valid", "test", "grey")


def first_page(
    name: str, out: str, keys: Sequence[Key], rules: Rules[Any], some: Sequence[Choice], trials: Sequence[Trial[Choice]]
) -> str:
    """The page as HTML.

    Args:
      name: The dataset's name.
      out: The configuration's file.
      keys: The configuration.
      rules: What it follows from.
      some: The kinds of model that may suit the dataset, the chosen one first.
      trials: How they went, the best first; none where none were tried.
    """
    warned = list(rules.warnings())
    parts = [
        *((note("Warnings", warned),) if warned else ()),
        note(f"Chosen: {some[0].title}", [_why(rules, trials)], good=True),
        paragraph(f"Train it: jrec train {out}"),
        *section("Trials", _trials(rules, trials)),
        *section("Configuration", [_configuration(keys)]),
        *section("Dataset", [_dataset(rules)]),
    ]
    return page(f"A first configuration for {name}", parts)


def _why(rules: Rules[Any], trials: Sequence[Trial[Choice]]) -> str:
    if trials:
        metric = rules.metric
        best = f"the {metric.best} {metric.name} on the valid split"
        if metric.beside and any(metric.loss(t.score) < metric.loss(trials[0].score) for t in trials):
            best = (
                f"the greatest {metric.beside[1]} of those whose {metric.name} on the valid split is the {metric.best}"
                " or about the same"
            )
        return f"Of {len(trials)} models that may suit the dataset, it has {best}."
    if rules.examples >= LARGE:
        return f"By its numbers alone: with {LARGE:,} training examples or more nothing is tried."
    if not rules.valid:
        return "By its numbers alone: without a valid split nothing can be compared."
    return "By its numbers alone, as --quick asks for."


def _trials(rules: Rules[Any], trials: Sequence[Trial[Choice]]) -> Iterator[str]:
    if not trials:
        return
    from jrec.app.first_trials import STEPS, spread  # loads JAX

    metric = rules.metric
    yield paragraph(
        f"Each kind was trained for up to {STEPS:,} steps or {rules.trial_examples:,} examples, on"
        f" {environment.summary()}. The scores are of the evaluation with the {metric.best}"
        f" {metric.name}{_CALIBRATED if metric.calibrated else ''}."
    )
    columns = {"kind of model": "", f"valid {metric.name}": metric.unit}
    if metric.beside:
        columns[f"valid {metric.beside[1]}"] = "0 to 1"
    columns |= {"at step": "", "steps": "", "training": "s"}
    rows: list[list[Cell]] = [
        [t.candidate.title, t.score, *([t.beside] if metric.beside else []), t.step, t.steps, t.seconds] for t in trials
    ]
    yield table("Trials, the best first", columns, rows, marks={0: "own"})
    if (chance := spread(trials)) is not None:
        yield paragraph(f"The same model with another seed differs by {chance:.5f} ({metric.unit}): so much is chance.")
    yield from side_by_side(_curves(rules, trials))


_CALIBRATED = ", taken after the best scale and shift of its logits"


def _curves(rules: Rules[Any], trials: Sequence[Trial[Choice]]) -> Iterator[str]:
    last = max(trial.steps for trial in trials)
    metric = rules.metric
    once = " once calibrated" if metric.calibrated else ""
    metrics = dict([metric.beside] if metric.beside else []) | {metric.key: f"{metric.name}{once} ({metric.unit})"}
    for key, label in metrics.items():
        marks = []
        for place, trial in enumerate(trials):
            points = [(r["step"], r[key]) for r in trial.records if r[key] is not None]
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


def _dataset(rules: Rules[Any]) -> str:
    rows: list[list[Cell]] = [[*line] for line in rules.table()]
    return table("What the configuration depends on", {"": "", "value": "", "unit": ""}, rows)
