"""Plots of a report: loss over steps, ROC curves, calibration. Built without pyplot, so nothing global is touched."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.train.report.metrics import ReliabilityBins, Scores, auc, evaluate, reliability_bins, roc_curve, sigmoid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"train": "#0072B2", "valid": "#E69F00", "test": "#009E73"}  # Okabe and Ito: apart for the colour-blind too
GREY = "#666666"
COLD, HOT, MIXED = "#56B4E9", "#D55E00", "#CC79A7"  # Okabe and Ito
CURVE_POINTS = 2000
_DASHES = ("-.", (0, (1, 1)))


def plot_loss(
    records: Iterable[Mapping[str, Any]],
    *,
    title: str,
    ceiling: Mapping[str, Mapping[str, float]],
    batch_size: int,
    baselines: Mapping[str, Mapping[str, float]] = types.MappingProxyType({}),
) -> Figure:
    """Training loss, log loss of the evaluations, and where known the log loss of the planted teacher.

    Args:
      records: The records of ``metrics.jsonl``.
      title: The plot's title.
      ceiling: The teacher's metrics by split.
      batch_size: Examples in a step, for the axis.
      baselines: By split and baseline, its log loss.
    """
    figure, axes = _new_figure(9, 5)
    records = list(records)
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r], float).reshape(-1, 2)
    shown = [train[:, 1]]
    if len(train):
        at, smooth = _smoothed(train[:, 1])
        axes.plot(*train.T, color=COLORS["train"], linewidth=1, alpha=0.3)
        label = f"train, moving median (last {smooth[-1]:.4f})"
        axes.plot(
            train[at, 0], smooth, "o-" if len(train) < 3 else "-", color=COLORS["train"], linewidth=2, label=label
        )
    for split in sorted({r["split"] for r in records if "log_loss" in r}):
        points = np.array([(r["step"], r["log_loss"]) for r in records if r["split"] == split and "log_loss" in r])
        color = _color(split)
        label = f"{split} (best {points[:, 1].min():.4f} at step {int(points[points[:, 1].argmin(), 0]):,})"
        axes.plot(*points.T, "o-", color=color, markersize=5, linewidth=1.5, label=label)
        shown.append(points[:, 1])
    for split, metrics in ceiling.items():
        if "log_loss" in metrics:
            label = f"{split}, teacher's own ({metrics['log_loss']:.4f})"
            axes.axhline(metrics["log_loss"], color=_color(split), linestyle=":", linewidth=1.5, label=label)
            shown.append(np.array([metrics["log_loss"]]))
    for split, losses in baselines.items():
        for number, (name, loss) in enumerate(losses.items()):
            label = f"{split}, {name} ({loss:.4f})"
            axes.axhline(loss, color=GREY, linestyle=_DASHES[number % 2], linewidth=1, label=label)
            shown.append(np.array([loss]))
    _limit_to_bulk(axes, np.concatenate(shown))
    _finish(axes, f"{title}: loss", f"step of {batch_size:,} examples", "log loss (nats per example)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if records:
        axes.set_xlim(left=0)
    return figure


def plot_roc(
    scores: Mapping[str, Scores],
    *,
    title: str,
    ceiling: Mapping[str, Mapping[str, float]],
    baselines: Mapping[str, Mapping[str, float]] = types.MappingProxyType({}),
) -> Figure:
    """ROC curves of the splits, their AUC, and where known the AUC of the planted teacher and of the baselines."""
    figure, axes = _new_figure(6.5, 6.5)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="chance: AUC 0.5")
    for split, one in scores.items():
        curve = roc_curve(one.logits, one.labels)
        if curve is None:
            axes.plot([], [], color=_color(split), label=f"{split}: undefined, all labels are of one class")
            continue
        # Evenly spread along the curve's length, so that thinning shows nowhere.
        length = curve[0] + curve[1]
        keep = np.unique(np.searchsorted(length, np.linspace(0, 2, CURVE_POINTS)).clip(0, len(length) - 1))
        label = f"{split}: AUC {auc(one.logits, one.labels):.4f}"
        if "auc" in ceiling.get(split, {}):
            label += f" (teacher's ceiling {ceiling[split]['auc']:.4f})"
        label += "".join(f"\n   {name}: AUC {value:.4f}" for name, value in baselines.get(split, {}).items())
        axes.plot(curve[0][keep], curve[1][keep], color=_color(split), linewidth=2, label=label)
    axes.set_aspect("equal")
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(-0.01, 1.01)
    _finish(axes, f"{title}: ROC", "false positive rate", "true positive rate", loc="lower right")
    return figure


def plot_calibration(scores: Mapping[str, Scores], *, title: str) -> Figure:
    """Observed against predicted click rate in bins of equal count, above a histogram of the predictions.

    Bars are 95 % intervals of the observed rate (normal approximation). Axes are logarithmic where clicks are rare.
    """
    figure, (top, bottom) = _new_figure(6.5, 8, rows=2, height_ratios=(3, 1))
    evaluations = {split: evaluate(one) for split, one in scores.items()}
    logarithmic = any(e.base_rate < 0.1 for e in evaluations.values())
    predictions = {split: sigmoid(one.logits) for split, one in scores.items()}
    edges = _histogram_edges(np.concatenate(list(predictions.values())), logarithmic)
    low, high = 1.0, 0.0
    for split, probabilities in predictions.items():
        color = _color(split)
        ratio = evaluations[split].calibration
        label = f"{split}: mean prediction / click rate {'undefined' if ratio is None else f'{ratio:.3f}'}"
        bins = reliability_bins(probabilities, scores[split].labels)
        shown = _draw_reliability(top, bins, logarithmic, color, f"{label}, error {bins.error:.4f}")
        low, high = min(low, *shown), max(high, *shown)
        share = np.full(len(probabilities), 1 / len(probabilities))
        style = {"histtype": "step", "color": color, "linewidth": 1.5, "label": split}
        bottom.hist(probabilities.clip(edges[0], edges[-1]), edges, weights=share, **style)
    low, high = (low / 1.5, min(1, high * 1.5)) if logarithmic else (0, min(1, high * 1.1))
    top.plot([low, high], [low, high], color=GREY, linestyle="--", linewidth=1, label="perfectly calibrated")
    for set_scale in (top.set_xscale, top.set_yscale, bottom.set_xscale):
        set_scale("log" if logarithmic else "linear")
    top.set_xlim(low, high)
    top.set_ylim(low, high)
    _finish(top, f"{title}: calibration", "predicted click rate (mean of bin)", "observed click rate", loc="upper left")
    _finish(bottom, "", "predicted click rate", "share of examples")
    bottom.set_xlim(edges[0], edges[-1])
    return figure


def plot_groups(groups: Mapping[str, Any], *, title: str) -> Figure:
    """How AUC within a group is spread over the examples of groups with both labels.

    Args:
      groups: The report's section ``groups``.
      title: The plot's title.
    """
    figure, axes = _new_figure(7, 4.5)
    for split, one in groups["splits"].items():
        shares = np.array(one["histogram"], float)
        if shares.sum() == 0:
            continue
        label = f"{split}: GAUC {one['gauc']:.4f}, of {100 * one['coverage']:.1f} % of the examples"
        edges = np.linspace(0, 1, len(shares) + 1)
        axes.stairs(shares / shares.sum(), edges, color=_color(split), linewidth=1.5, label=label)
        axes.axvline(one["gauc"], color=_color(split), linestyle=":", linewidth=1.5)
    _finish(axes, f"{title}: groups by {groups['feature']}", "AUC within the group", "share of examples", "upper left")
    return figure


def plot_schedule(schedules: Sequence[Mapping[str, Any]], *, title: str, split: str) -> Figure:
    """The loss after each schedule, above the rate and the phases of hot and cold batches.

    Args:
      schedules: Records of ``metrics.jsonl``, see ``jrec.train.shuffle_scheduler.Schedule``; at least one.
      title: The plot's title.
      split: The split of the loss.
    """
    figure, (top, bottom) = _new_figure(9, 7, rows=2, height_ratios=(3, 2))
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
    _finish(top, f"{title}: hot and cold schedules", "", "log loss (nats per example)", unique=True)
    _finish(bottom, "", "step", "rate (% of an epoch's batches)", unique=True)
    return figure


def _draw_reliability(
    axes: Axes, bins: ReliabilityBins, logarithmic: bool, color: str, label: str
) -> tuple[float, float]:
    """Draws the bins and returns the least and greatest rate among them."""
    keep = bins.observed > 0 if logarithmic else np.ones(len(bins.counts), bool)
    if left_out := int(np.count_nonzero(~keep)):
        label += f"\n({left_out} of {len(keep)} bins saw no click and lie below the axis)"
    predicted, observed = bins.mean_predicted[keep], bins.observed[keep]
    error = 1.96 * np.sqrt(observed * (1 - observed) / bins.counts[keep])
    lower = np.minimum(error, observed * 0.999) if logarithmic else error
    style = {"color": color, "markersize": 5, "linewidth": 1.2, "capsize": 2}
    axes.errorbar(predicted, observed, yerr=(lower, error), fmt="o-", label=label, **style)
    rates = np.concatenate([bins.mean_predicted, observed])
    return float(rates.min()), float(rates.max())


def _new_figure(width: float, height: float, rows: int = 1, **options: object) -> tuple[Figure, Any]:
    """A figure, its size in inches, and its axes, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1, gridspec_kw=options or None)


def _finish(axes: Axes, title: str, x: str, y: str, loc: Any = "upper right", *, unique: bool = False) -> None:
    """Title, labels, grid and legend in the style of all plots; ``unique`` shows each label once in the legend."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if unique:
        first = dict(zip(reversed(labels), reversed(handles), strict=True))
        labels, handles = list(first), list(first.values())
    if handles:
        axes.legend(handles, labels, loc=loc, fontsize="small", framealpha=0.9)


def _color(split: str) -> str:
    return COLORS.get(split, GREY)


def _smoothed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moving medians over a twentieth of the values, at no more than 1000 positions, and these positions."""
    half = len(values) // 40
    at = np.unique(np.linspace(0, len(values) - 1, 1000).astype(int))
    return at, np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in at])


def _limit_to_bulk(axes: Axes, values: np.ndarray) -> None:
    """Keeps the first steps, whose loss can be huge, from squeezing all others flat."""
    if len(values) < 20:
        return
    low, high = values.min(), np.quantile(values, 0.98)
    margin = 0.08 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + 2 * margin)


def _histogram_edges(probabilities: np.ndarray, logarithmic: bool) -> np.ndarray:
    if not logarithmic:
        return np.linspace(0, 1, 51)
    low = max(1e-6, float(np.quantile(probabilities, 0.001)) / 1.5)
    return np.geomspace(min(low, 0.5), 1, 51)


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
