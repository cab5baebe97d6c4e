"""What a report advises, by the kinds of what it found, and never what the configuration says already."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jrec.app.report.content import Content, Records, Section

WORSE = 1.002
"""Times a log loss, up to which another one is as good."""
_PATIENCE, _DROPOUT, _DECAY = 3, 0.1, 1e-5
_LEAST_DIM = 4

Losses = Sequence[tuple[float, int]]
"""Log losses of the valid split, each with its step."""


def valid_losses(records: Records) -> list[tuple[float, int]]:
    """The log losses of the valid split in the records of ``metrics.jsonl``, each with its step."""
    return [(r["log_loss"], r["step"]) for r in records if r["split"] == "valid" and "log_loss" in r]


def scored(content: Content, losses: Losses) -> tuple[float, int] | None:
    """The last of the losses that the scored model had, or None without any."""
    training = content["training"]
    step = training.get("scored_step", training["steps"])
    return next((one for one in reversed(losses) if one[1] <= step), None)


def advise(content: Content, records: Records, kinds: set[str]) -> Iterator[str]:
    """Sentences, each with keys of the configuration and their values now.

    Args:
      content: The content of ``metrics.json``.
      records: The records of ``metrics.jsonl``.
      kinds: The kinds of what was found (``Finding.kind``).
    """
    config, losses = content["config"], valid_losses(records)
    if "course" in kinds:
        yield from _sentence("score the step whose log loss is best", _stopping(config))
    if kinds & {"rank", "loss"}:
        overfits = bool(losses) and losses[-1][0] > WORSE * min(losses)[0]
        yield from _against_overfitting(config) if overfits else _further(content)
    if "drift" in kinds:
        yield "train again often on the latest examples (init_from), and judge by evaluate.progressive how often"
    if "calibration" in kinds and "loss" not in kinds:  # model.calibrate takes the mean of training
        yield from _rescaling(content)


def _stopping(config: Section) -> dict[str, str]:
    metric = "evaluate.early_stopping.metric"
    keys: dict[str, object] = {metric: "log_loss", "checkpoint.keep_best": True}
    if _now(config, metric) == "refinement":  # a log loss, too
        del keys[metric]
    if not _now(config, "evaluate.early_stopping.patience"):
        keys["evaluate.early_stopping.patience"] = _PATIENCE
    return _changed(config, keys)


def _against_overfitting(config: Section) -> Iterator[str]:
    layers = [*(_now(config, "model.bottom_mlp") or ()), *(_now(config, "model.top_mlp") or ())]
    keys: dict[str, object] = {"optimizer.embedding.weight_decay": _DECAY}
    if len(layers) > 1 and not _now(config, "model.factory"):
        keys["model.dropout"] = _DROPOUT
    unset = {key: value for key, value in keys.items() if not _now(config, key)}
    yield from _sentence("the model learns the training examples by heart, so regularize it", _with_now(config, unset))
    if (dim := _now(config, "model.embedding_dim")) and dim > _LEAST_DIM:
        yield from _sentence("or make it smaller", _changed(config, {"model.embedding_dim": dim // 2}))


def _further(content: Content) -> Iterator[str]:
    config = content["config"]
    if not content["training"].get("stopped_early") and (epochs := _now(config, "epochs")):
        yield from _sentence("train for longer, if the losses still fall", _changed(config, {"epochs": 3 * epochs}))
    keys = {"optimizer.name": "adam"}
    if _now(config, "optimizer.embedding.name") not in ("adam", "rowwise_adagrad"):
        keys["optimizer.embedding.name"] = "rowwise_adagrad"
    yield from _sentence("take optimizers that adapt the size of their steps", _changed(config, keys))


def _rescaling(content: Content) -> Iterator[str]:
    """A constant for the logits where valid asks for the same as the last split, which else has other clicks."""
    splits = content["splits"]
    split, valid = next(reversed(splits)), splits.get("valid")
    if split == "valid" or valid is None or not 0 < valid["base_rate"] < 1 or not 0 < splits[split]["base_rate"] < 1:
        return
    here, there = (_logit(m["base_rate"]) - _logit(m["mean_prediction"]) for m in (valid, splits[split]))
    if here * there > 0 and abs(here) > abs(there) / 2:
        yield f"add {here:+.3f} to the logits: valid's mean prediction is then about its click rate"
        return
    yield (
        f"valid's mean prediction, {valid['mean_prediction']:.4f}, fits its click rate, {valid['base_rate']:.4f}, so"
        f" it is {split} that is unlike training: go on training on the latest examples (init_from)"
    )


def _sentence(goal: str, keys: Mapping[str, object]) -> Iterator[str]:
    if keys:
        yield f"{goal}: {', '.join(f'{key}={value}' for key, value in keys.items())}"


def _changed(config: Section, keys: Mapping[str, object]) -> dict[str, str]:
    """The keys to which the configuration gives another value, as texts with that value."""
    return _with_now(config, {key: value for key, value in keys.items() if _now(config, key) not in (None, value)})


def _with_now(config: Section, keys: Mapping[str, object]) -> dict[str, str]:
    return {key: f"{_text(value)} (now {_text(_now(config, key))})" for key, value in keys.items()}


def _now(config: Section, key: str) -> Any:
    """A key's value, or None where the configuration lacks it."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
