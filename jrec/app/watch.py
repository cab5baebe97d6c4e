"""Evaluations during training: when they take place, which step is the best so far, and when that ends the run."""

from __future__ import annotations

import dataclasses

from jrec.app.config import TrainConfig
from jrec.app.report.ranking import AnyEvaluation
from jrec.data.schema import Schema
from jrec.json_values import JsonObject

_MOST, _LEAST, _BATCHES = 16, 5, 8
LOSSES = ("log_loss", "refinement", "rmse", "mae", "poisson_deviance")
"""The metrics that are better the smaller they are."""
_SHARE = 0.1
"""Examples that evaluations may score, by those that are trained on. Scoring one takes about a third of a step's time
an example, so this keeps their time below 5 per cent of training's, except in runs of a few seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """When the model is evaluated during training.

    Attributes:
      every_steps: Steps between evaluations; 0 for none.
      batches: The most batches of each split; 0 for all.
      splits: The splits, those that the dataset has.
    """

    every_steps: int
    batches: int
    splits: tuple[str, ...]


def plan_evaluations(config: TrainConfig, schema: Schema, total: int) -> EvaluationPlan:
    """The evaluations of a run of ``total`` steps; "auto" depends only on sizes, so that resumed runs agree."""
    wanted = config.evaluate
    splits = schema.with_examples(wanted.splits)
    if wanted.every_steps is not None or not splits or config.schedule == "fae":
        every = wanted.every_steps or 0
        return EvaluationPlan(every_steps=every if splits else 0, batches=wanted.batches, splits=splits)
    each = config.data.eval_batch_size * len(splits)
    budget = int(_SHARE * total * config.data.batch_size)
    whole = max(-(-schema.splits[s].examples // config.data.eval_batch_size) for s in splits)
    batches = min(whole, wanted.batches or max(1, min(_BATCHES, budget // _MOST // each)))
    further = config.model.of_kind.further_examples(config.model, schema)
    count = max(_LEAST, min(_MOST, budget // (batches * each + further)))
    return EvaluationPlan(every_steps=max(1, -(-total // count)), batches=batches, splits=splits)


class BestStep:
    """The best evaluation so far, and how many have been no better since.

    Args:
      metric: What an evaluation calls it: such as "auc" or "rmse".
      patience: Evaluations in a row without a better one after which training ends; 0 for no end.

    Attributes:
      step: The best step; None before the first evaluation.
    """

    def __init__(self, metric: str, patience: int):
        self._metric, self._patience = metric, patience
        self.step: int | None = None
        self._value, self._since = 0.0, 0

    @property
    def over(self) -> bool:
        """Whether training ends here."""
        return 0 < self._patience <= self._since

    def observe(self, step: int, evaluation: AnyEvaluation) -> bool:
        """Whether this evaluation is the best so far. One whose metric is undefined does not count."""
        value = getattr(evaluation, self._metric)
        if value is None:
            return False
        better = value < self._value if self._metric in LOSSES else value > self._value
        if self.step is None or better:
            self.step, self._value, self._since = step, value, 0
            return True
        self._since += 1
        return False

    def state(self) -> JsonObject:
        """For checkpoints, in JSON types."""
        return {"metric": self._metric, "step": self.step, "value": self._value, "since": self._since}

    def restore(self, state: JsonObject) -> None:
        """Goes on from a ``state()``; one of another metric does not count."""
        if state.get("metric") == self._metric:
            self.step, self._value, self._since = state["step"], state["value"], state["since"]
