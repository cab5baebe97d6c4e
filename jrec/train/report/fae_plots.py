"""The plot of FAE's schedules in a run's report: test loss, rate, and which batches were hot or cold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jrec.train.report.plots import GREY, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLD, HOT, MIXED = "#56B4E9", "#D55E00", "#CC79A7"  # Okabe and Ito


def plot_schedule(schedules: Sequence[Mapping[str, Any]], *, title: str, split: str) -> Figure:
    """The loss after each schedule, above the rate and the phases of hot and cold batches.

    Args:
      schedules: Records of ``metrics.jsonl``, see ``jrec.train.shuffle_scheduler.Schedule``; at least one.
      title: The plot's title.
      split: The split of the loss.
    """
    figure, (top, bottom) = new_figure(9, 7, rows=2, height_ratios=(3, 2))
    steps = [s["start"] + s["cold"] + s["hot"] for s in schedules]
    top.plot(steps, [s["test_loss"] for s in schedules], "o-", color=GREY, label=f"{split}, after each schedule")
    for first, then in itertools.pairwise(schedules):
        if first["next_rate"] != first["rate"]:
            color, word = (HOT, "doubled") if first["next_rate"] > first["rate"] else (COLD, "halved")
            top.axvline(then["start"], color=color, linestyle=":", linewidth=1.2, label=f"rate {word}")
    _phases(bottom, schedules)
    edges = [schedules[0]["start"], *steps]
    bottom.stairs([s["rate"] for s in schedules], edges, baseline=None, color="black", linewidth=1.8, label="rate")
    bottom.set_ylim(0, 105)
    for axes in (top, bottom):
        axes.set_xlim(0, steps[-1])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    finish(top, f"{title}: hot and cold schedules", "", "log loss (nats per example)", unique=True)
    finish(bottom, "", "step", "rate (% of an epoch's batches)", unique=True)
    return figure


def _phases(axes: Any, schedules: Sequence[Mapping[str, Any]]) -> None:
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {
        ("cold batches", COLD): [],
        ("hot batches", HOT): [],
        ("alternating", MIXED): [],
    }
    cold, hot, mixed = spans.values()
    for s in schedules:
        if s["rate"] <= 1 and s["cold"] and s["hot"]:
            mixed.append((s["start"], s["cold"] + s["hot"]))
        else:
            cold.append((s["start"], s["cold"]))
            hot.append((s["start"] + s["cold"], s["hot"]))
    for (label, color), phases in spans.items():
        if phases := [span for span in phases if span[1]]:
            axes.broken_barh(phases, (0, 105), facecolors=color, alpha=0.35, linewidth=0, label=label)
