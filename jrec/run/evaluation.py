"""Metrics of a run's predictions for examples with labels, from any iterable of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.data.packing import Packer
from jrec.metrics import Evaluation, ScoreAccumulator, evaluate
from jrec.run.predictions import Predictions


def evaluated(
    predictions: Predictions, batches: Iterable[Any], packer: Packer, batch_size: int | None
) -> Evaluation | dict[str, Evaluation]:
    """See ``Run.evaluate``.

    Args:
      predictions: The run's.
      batches: Columns or packed batches.
      packer: Packs columns.
      batch_size: How many examples of columns are predicted at once; None for as many as the first item has.
    """
    by_task: dict[str, ScoreAccumulator] = {}

    def add(logits: Any, batch: Batch) -> None:
        for task, values in _by_task(logits, len(batch.labels)).items():
            labels = np.asarray(batch.extras.get(task, batch.labels))
            known = np.asarray(batch.mask) * (labels >= 0)  # of several labels some may not be known
            by_task.setdefault(task, ScoreAccumulator()).update(values, labels, known if task else batch.mask)

    waiting: tuple[Any, Batch] | None = None
    for batch in _packed(batches, packer, batch_size):
        logits = predictions.of_batch(batch)
        # The batch before is read back while this one computes.
        if waiting is not None:
            add(*waiting)
        waiting = (logits, batch)
    if waiting is not None:
        add(*waiting)
    if by_task.keys() <= {""}:
        return evaluate(by_task.get("", ScoreAccumulator()).scores())
    return {task: evaluate(accumulator.scores()) for task, accumulator in by_task.items()}


def _packed(batches: Iterable[Any], packer: Packer, batch_size: int | None) -> Iterator[Batch]:
    size = batch_size
    for item in batches:
        if isinstance(item, Batch):
            yield item
            continue
        prepared = packer.prepare(item)
        size = size or max(1, prepared.examples)
        for begin in range(0, prepared.examples, size):
            yield packer.pack(prepared.cut(begin, min(begin + size, prepared.examples)), size)


def _by_task(logits: Any, examples: int) -> Mapping[str, np.ndarray]:
    named = logits if isinstance(logits, Mapping) else {"": logits}
    arrays = {task: np.asarray(values) for task, values in named.items()}
    if any(values.shape != (examples,) for values in arrays.values()):
        shapes = jax.tree.map(np.shape, logits)
        raise ValueError(
            f"evaluate scores one logit an example, or one for each of several labels by name, but the model's logits"
            f" have shapes {shapes} for {examples} examples; use run.predict, and metrics of your own"
        )
    return arrays
