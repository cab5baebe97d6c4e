"""The model beside its baselines, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAMES = {"logistic_regression": "logistic regression", "popularity": "popularity"}
"""The baselines, and what texts call them."""
_MARGIN = 5e-4  # of AUC, below which nothing is said
_WORSE = 1.002  # times the best log loss, at which training is said to have gone on for too long


def metric_by_split(content: Mapping[str, Any], metric: str) -> dict[str, dict[str, float]]:
    """A metric of every baseline, by split and by what texts call it; empty where none was computed."""
    by_split: dict[str, dict[str, float]] = {}
    for key, name in NAMES.items():
        for split, metrics in content.get("baselines", {}).get(key, {"splits": {}})["splits"].items():
            if metrics[metric] is not None:
                by_split.setdefault(split, {})[name] = metrics[metric]
    return by_split


def verdict(content: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for every baseline that ranks the last of the splits better than the model does, and what to try.

    Args:
      content: The content of ``metrics.json``.
      records: The records of ``metrics.jsonl``, which tell whether training went on for too long.
    """
    if not content["splits"]:
        return []
    split, metrics = list(content["splits"].items())[-1]
    lines = []
    for name, value in metric_by_split(content, "auc").get(split, {}).items():
        if metrics["auc"] is not None and metrics["auc"] < value - _MARGIN:
            why = "a linear model of the same features" if name == NAMES["logistic_regression"] else "one feature"
            lines.append(
                f"the model's {split} AUC {metrics['auc']:.4f} is below {name}'s {value:.4f}: {why} ranks better"
            )
    return [*lines, f"try {_remedy(content, records)}"] if lines else []


def _remedy(content: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    losses = [(r["log_loss"], r["step"]) for r in records if r["split"] == "valid" and "log_loss" in r]
    if losses and losses[-1][0] > _WORSE * min(losses)[0]:
        best, step = min(losses)
        return (
            f"shorter training, since valid's log loss was best, {best:.4f}, at step {step:,} and {losses[-1][0]:.4f}"
            " at the last evaluation: evaluate.early_stopping.patience=3 with checkpoint.keep_best=true, fewer epochs,"
            " or more optimizer.embedding.weight_decay"
        )
    return (
        "more epochs or larger learning rates if the training loss still falls, and optimizer.name=adam with"
        " optimizer.embedding.name=adam or rowwise_adagrad"
    )


def baseline_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """The baselines' metrics and the verdict, for the terminal."""
    if "baselines" not in content:
        return
    baselines = content["baselines"]
    for split in content["splits"]:
        texts = []
        for key, name in NAMES.items():
            metrics = baselines.get(key, {"splits": {}})["splits"].get(split)
            if metrics is not None:
                auc = "-" if metrics["auc"] is None else f"{metrics['auc']:.4f}"
                of = f" of {baselines[key]['feature']}" if "feature" in baselines[key] else ""
                texts.append(f"{name}{of}: AUC {auc}, log loss {metrics['log_loss']:.4f}")
        if texts:
            yield f"{split}, baselines: {'; '.join(texts)}"
    kept = ", kept from an earlier run" if baselines["cached"] else ""
    yield f"baselines: {baselines['seconds']:.1f} s{kept}"
    yield from baselines.get("verdict", [])


def step_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Evaluations during training, which step was scored, and whether training ended early."""
    training = content["training"]
    if (evaluations := content.get("evaluations")) is not None:
        yield (
            f"{evaluations['count']:,} evaluations every {evaluations['every_steps']:,} steps:"
            f" {100 * evaluations['share']:.1f} % of the time, {evaluations['seconds']:.1f} s"
        )
    if training.get("stopped_early"):
        yield f"stopped early after step {training['steps']:,}"
    if "scored_step" in training:
        yield f"scores are those of the best step, {training['scored_step']:,} of {training['steps']:,}"
