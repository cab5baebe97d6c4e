"""What reports say of models whose labels are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jrec.regression import NumberScores, residual_bins

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig
    from jrec.app.report.ranking import AnyScores

METRICS = {
    "rmse": ("RMSE", "units of the label"),
    "mae": ("MAE", "units of the label"),
    "r2": ("R2", "share of the variance"),
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


def sections(model: ModelConfig, scores: Mapping[str, AnyScores]) -> dict[str, Any]:
    """Sections of ``metrics.json``: "numbers", and by split the "residuals"; {} where no label is a number."""
    own = {split: one for split, one in scores.items() if isinstance(one, NumberScores)}
    if not own:
        return {}
    return {
        "numbers": {"loss": model.loss, **model.numbers.to_dict()},
        "residuals": {split: residual_bins(one).to_dict() for split, one in own.items()},
    }


def lines(content: Mapping[str, Any]) -> Iterator[str]:
    """The metrics of every split beside the baselines', for the terminal."""
    yield f"{'split':<24}" + "".join(f"{name:>18}" for name, _ in METRICS.values())
    for split, metrics in content["splits"].items():
        yield f"{split:<24}" + _cells(metrics)
        for name, of_baseline in baselines(content, split).items():
            yield f"{f'  {name}, {split}':<24}" + _cells(of_baseline)


def baselines(content: Mapping[str, Any], split: str) -> dict[str, Mapping[str, float]]:
    """By what texts call the baseline its metrics on a split, of those that were computed."""
    computed = content.get("baselines", {})
    splits = {name: computed[key]["splits"] for key, name in BASELINES.items() if key in computed}
    return {name: by_split[split] for name, by_split in splits.items() if split in by_split}


def findings(content: Mapping[str, Any]) -> dict[str, list[str]]:
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


def _cells(metrics: Mapping[str, Any]) -> str:
    return "".join(f"{'-' if metrics.get(key) is None else format(metrics[key], '.4g'):>18}" for key in METRICS)
