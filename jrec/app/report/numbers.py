"""What reports say of models whose labels are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jrec.app.report.content import Content, Section
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.models.targets import Number

METRICS = {
    "rmse": ("RMSE", "units of the label"),
    "mae": ("MAE", "units of the label"),
    "r2": ("R2", "share of the variance"),
    "xauc": ("XAUC", "0 to 1"),
    "poisson_deviance": ("Poisson deviance", "nats per example"),
}
"""By key of ``NumberEvaluation.to_dict``, what texts call it, and its unit."""
OTHERS = {
    "mean_label": ("mean label", "units of the label"),
    "mean_prediction": ("mean prediction", "units of the label"),
    "examples": ("examples", "count"),
}
"""Of an evaluation, what is no metric."""
BASELINES = {"mean": "the mean", "value_mean": "mean by value"}
"""The baselines, and what texts call them."""
_OFF = 0.05  # of the labels' deviation from their mean, by which the mean prediction may be off


def sections(target: Number) -> JsonObject:
    """The section "numbers" of ``metrics.json``."""
    return {"numbers": {"loss": target.loss_name, **target.numbers.to_dict()}}


def are_of_numbers(splits: Mapping[str, Section]) -> bool:
    """Whether metrics by split are those of a label that is a number."""
    return any("rmse" in metrics for metrics in splits.values())


def lines(content: Content) -> Iterator[str]:
    """The metrics of every split beside the baselines', for the terminal; of several labels those that are numbers."""
    tasks = content.get("tasks") or {"": content}
    rows: dict[str, Section] = {}
    for split in content["splits"]:
        for task, inside in tasks.items():
            if are_of_numbers(scored := {split: inside["splits"].get(split, {})}):
                rows |= {f"{split}, {task}" if task else split: scored[split]}
        rows |= {f"  {name}, {split}": own for name, own in baselines(content, split).items()}  # of the first label
    width = max((24, *(len(name) + 2 for name in rows)))
    if rows:
        yield f"{'split':<{width}}" + "".join(f"{name:>18}" for name, _ in METRICS.values())
    for name, metrics in rows.items():
        cells = (f"{'-' if metrics.get(key) is None else format(metrics[key], '.4g'):>18}" for key in METRICS)
        yield f"{name:<{width}}" + "".join(cells)


def baselines(content: Content, split: str) -> dict[str, Mapping[str, float]]:
    """By what texts call the baseline its metrics on a split, of those that were computed."""
    computed = content.get("baselines", {})
    splits = {name: computed[key]["splits"] for key, name in BASELINES.items() if key in computed}
    return {name: by_split[split] for name, by_split in splits.items() if split in by_split}


def findings(content: Content) -> dict[str, list[str]]:
    """The report's section ``judgement`` of a model of numbers."""
    split, metrics = list(content["splits"].items())[-1]
    warnings, advice = [], []
    for name, of_baseline in baselines(content, split).items():
        if metrics["rmse"] >= of_baseline["rmse"]:
            warnings.append(
                f"the model's {split} RMSE {metrics['rmse']:.4g} is no better than {of_baseline['rmse']:.4g}, that of"
                f" {name}"
            )
    if warnings:
        advice.append("more epochs=, another optimizer.learning_rate and optimizer.embedding.learning_rate")
    if metrics["r2"] is not None and metrics["r2"] < 1:
        deviation = metrics["rmse"] / (1 - metrics["r2"]) ** 0.5
        if abs(gap := metrics["mean_prediction"] - metrics["mean_label"]) > _OFF * deviation:
            warnings.append(
                f"the mean prediction on {split} is {metrics['mean_prediction']:.4g}, {gap:+.4g} from the mean label"
            )
    return {"warnings": warnings, "advice": advice}
