"""What a report says of windows of time that were scored before training (``jrec.app.progressive``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jrec.app.report.content import Content, Records, Section
from jrec.app.report.elements import Cell, folded, paragraph, side_by_side, table
from jrec.app.report.logs import PROGRESSIVE
from jrec.app.report.svg import Axis, Mark, around, chart
from jrec.json_values import JsonObject

_COLUMNS = {
    "since": ("window since", "UTC"),
    "step": ("before it", "steps"),
    "examples": ("examples", "count"),
    "base_rate": ("click rate", "share of examples"),
    "mean_prediction": ("mean prediction", "probability"),
}
_OFF, _SURE, _MANY = 0.1, 4.0, 1 / 3
"""A window's mean prediction is off beyond this share of its click rate and so many standard deviations; the click
rate is said to drift where more than a third of the windows are."""


def section(records: Records) -> JsonObject:
    """The section "progressive" of ``metrics.json``, or nothing: of each window its metrics, and under "means" the
    means over all windows, each counting as often as it has examples.

    Args:
      records: The records of ``metrics.jsonl``.
    """
    windows = [{k: v for k, v in r.items() if k != "split"} for r in records if r["split"] == PROGRESSIVE]
    return {"progressive": {"windows": windows, "means": _means(windows)}} if windows else {}


def _means(windows: Sequence[Section]) -> dict[str, float]:
    names = [name for name in windows[-1] if any(isinstance(window.get(name), float) for window in windows)]
    means = {}
    for name in names:
        measured = [(window[name], window["examples"]) for window in windows if window.get(name) is not None]
        means[name] = sum(value * count for value, count in measured) / sum(count for _, count in measured)
    return means


def lines(content: Content, names: Mapping[str, str]) -> Iterator[str]:
    """A line for the terminal: the means over all windows.

    Args:
      content: The content of ``metrics.json``.
      names: By metric, what texts call it.
    """
    if (scored := content.get("progressive")) is None:
        return
    windows, means = scored["windows"], scored["means"]
    shown = ", ".join(f"{name} {means[key]:.4f}" for key, name in names.items() if key in means)
    yield (
        f"progressive validation, mean of {len(windows):,} windows since {windows[0]['since']}, each scored before the"
        f" model learnt from it: {shown}"
    )


def parts(content: Content, names: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The chart of click rates and the table of all windows, for the page.

    Args:
      content: The content of ``metrics.json``.
      names: By metric what texts call it, and its unit.
    """
    if (scored := content.get("progressive")) is None:
        return
    windows = scored["windows"]
    yield paragraph(
        "Training went in order of time. The model as it was then scored each window before it learnt from it; the"
        " learning curves have these scores by step."
    )
    if "base_rate" in windows[0]:
        numbers = list(range(1, len(windows) + 1))
        rates, predicted = ([window[key] for window in windows] for key in ("base_rate", "mean_prediction"))
        low, high = around([*rates, *predicted])
        marks = [
            Mark(kind="points", color="valid", x=numbers, y=rates, name="click rate"),
            Mark(kind="points", color="train", x=numbers, y=predicted, name="mean prediction"),
        ]
        x = Axis(label=f"window since {windows[0]['since']}", low=0, high=len(windows) + 1)
        y = Axis(label="share of examples", low=low, high=high)
        yield from side_by_side([chart(marks, title="Click rate and mean prediction by window", x=x, y=y)])
    columns = {key: value for key, value in _COLUMNS.items() if key in windows[0]} | dict(names)
    rows: list[list[Cell]] = [[window.get(key) for key in columns] for window in windows]
    rows.append(["mean", None, *(scored["means"].get(key) for key in list(columns)[2:])])
    yield from folded("All windows", [table("Windows", dict(columns.values()), rows)])


def drift(content: Content) -> str:
    """A sentence without its full stop where mean predictions of many windows miss their click rates; else ""."""
    windows = content.get("progressive", {"windows": []})["windows"]
    off = [window for window in windows if "base_rate" in window and _is_off(window)]
    if len(off) <= _MANY * len(windows):
        return ""
    worst = max(off, key=lambda window: abs(_gap(window)) / max(window["base_rate"], 1 / window["examples"]))
    return (
        f"click rates drift: in {len(off):,} of {len(windows):,} windows the model's mean prediction, before it learnt"
        f" from them, was off by more than {100 * _OFF:.0f} %, most in that since {worst['since']}: mean prediction"
        f" {worst['mean_prediction']:.4f}, click rate {worst['base_rate']:.4f}"
    )


def _gap(window: Section) -> float:
    return window["mean_prediction"] - window["base_rate"]


def _is_off(window: Section) -> bool:
    rate, gap = window["base_rate"], abs(_gap(window))
    return gap > max(_OFF * rate, _SURE * math.sqrt(rate * (1 - rate) / window["examples"]))
