"""Logits of examples, by task where there are several labels, with their labels where these are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, override

import jax
import numpy as np

from jrec.app.models.predictor import Piece, Predictor
from jrec.app.why import Reasons, ScoreExplainer
from jrec.batch import Batch
from jrec.data.blocks import known_labels
from jrec.data.encoded_columns import EncodedColumns
from jrec.metrics import check_finite
from jrec.regression import Numbers
from jrec.serving.answers import ByTask, column_name
from jrec.serving.model import predictions

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Piece):
    """The logits, or other outputs, of some examples that follow each other.

    Attributes:
      split, first: As of ``Piece``.
      logits: (n,) float32, by task where there are several labels.
      labels: Of the same form, or None where the examples have none; of several labels -1 is one that is not known.
      reasons: The features that the scores depend on most, by task where there are several; None where nobody asked.
      weights: (n,) float32, of a log that has weights; else None.
      numbers: How outputs are numbers, by task whose label is one; under "" where there is one label.
    """

    split: str
    first: int
    logits: ByTask
    labels: ByTask | None
    reasons: Reasons | Mapping[str, Reasons] | None = None
    weights: np.ndarray | None = None
    numbers: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)

    @property
    @override
    def examples(self) -> int:
        return len(next(iter(self.logits.values())) if isinstance(self.logits, Mapping) else self.logits)

    @property
    def predictions(self) -> ByTask:
        """Probabilities, (n,) float32, by task where there are several labels; or numbers."""
        return predictions(self.logits, self.numbers)

    @override
    def columns(self) -> tuple[np.ndarray, dict[str, np.ndarray | pa.Array]]:
        """The columns label (where known), score and logit, and why_1, …; of several tasks each by task, NAME_TASK.

        What is a number has the column prediction in place of score and logit.
        """
        import pyarrow as pa

        labels, logits, predicted = map(_by_task, (self.labels, self.logits, self.predictions))
        columns: dict[str, np.ndarray | pa.Array] = {}
        for task, own in labels.items():  # of one label all examples of an input have theirs, or none
            unknown = ~known_labels(own, numeric=task in self.numbers) if task else None
            columns[f"label_{task}" if task else "label"] = own if unknown is None else pa.array(own, mask=unknown)
        for task in sorted(predicted, key=self.numbers.__contains__):  # scores, then numbers
            columns[column_name(task, self.numbers)] = predicted[task]
        for task in (task for task in logits if task not in self.numbers):
            columns[f"logit_{task}" if task else "logit"] = logits[task]
        if isinstance(self.reasons, Mapping):
            for task, own in self.reasons.items():
                columns |= own.columns(f"_{task}")
        elif self.reasons is not None:
            columns |= self.reasons.columns()
        return np.arange(self.examples), columns


def _by_task(values: ByTask | None) -> Mapping[str, np.ndarray]:
    """Numbers of examples by task, under "" where there is one label; none of None."""
    return values if isinstance(values, Mapping) else {} if values is None else {"": values}


class ClickPredictor(Predictor[ByTask]):
    """Logits, and the labels beside them."""

    @property
    def numbers(self) -> Mapping[str, Numbers]:
        """How outputs are numbers, by task whose label is one; under "" where there is one label."""
        return self.run.config.model.numbers_by_label

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels where there are several; else ()."""
        return self.run.config.model.multi_task.tasks

    @override
    def of_batch(self, batch: Batch) -> ByTask:
        outputs, count = jax.device_get(self.run.run.predictions.of_batch(batch)), int(batch.mask.sum())
        logits = jax.tree.map(lambda array: np.asarray(array)[:count], outputs)
        for one in jax.tree.leaves(logits):
            check_finite(one)
        return logits

    @override
    def nothing(self) -> ByTask:
        none = np.zeros(0, np.float32)
        return dict.fromkeys(self.tasks, none) if self.tasks else none

    @override
    def piece(
        self,
        outputs: ByTask,
        *,
        split: str = "",
        first: int = 0,
        labels: ByTask | None = None,
        weights: np.ndarray | None = None,
    ) -> Scored:
        return Scored(
            split=split, first=first, logits=self.logits(outputs), labels=labels, weights=weights, numbers=self.numbers
        )

    @override
    def explainer(self, k: int) -> ScoreExplainer:
        return ScoreExplainer(self, k)

    @override
    def logits(self, outputs: ByTask) -> ByTask:
        # JAX sorts trees by key.
        return {task: outputs[task] for task in self.tasks} if isinstance(outputs, Mapping) else outputs

    @override
    def labels_of(self, encoded: EncodedColumns) -> ByTask | None:
        if self.tasks and encoded.labels is not None:
            return {self.tasks[0]: encoded.labels} | {task: encoded.tasks[task] for task in self.tasks[1:]}
        return encoded.labels

    @override
    def labels_of_batch(self, batch: Batch) -> ByTask | None:
        if not self.run.schema.labels:
            return None
        count = int(batch.mask.sum())
        labels = np.asarray(batch.labels)[:count]
        if self.tasks:
            return {self.tasks[0]: labels} | {task: np.asarray(batch.extras[task])[:count] for task in self.tasks[1:]}
        return labels
