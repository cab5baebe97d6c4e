"""Metrics of a run's predictions for examples with labels, from any iterable of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.data.packers import packed
from jrec.data.packing import Packer
from jrec.metrics import LabelEvaluation, LabelScores, ScoreAccumulator, by_task, evaluate_labels
from jrec.regression import Numbers
from jrec.run.predictions import Predictions


def evaluated(
    predictions: Predictions,
    batches: Iterable[object],
    packer: Packer,
    batch_size: int | None,
    numbers: Numbers | Mapping[str, Numbers] | None = None,
) -> LabelEvaluation | dict[str, LabelEvaluation]:
    """See ``Run.evaluate``.

    Args:
      predictions: The run's.
      batches: Columns or packed batches.
      packer: Packs columns.
      batch_size: How many examples of columns are predicted at once; None for as many as the first item has.
      numbers: How outputs are numbers, where labels are; of several labels by task.
    """
    pairs = ((predictions.of_batch(batch), batch) for batch in _packed(batches, packer, batch_size))
    first = next(pairs, None)
    tasks = () if first is None else _tasks(*first)
    # The first batch was taken to see what the model returns, and is scored like the others.
    pairs = itertools.chain([] if first is None else [first], pairs)
    by_label = numbers if isinstance(numbers, Mapping) else {} if numbers is None else {"": numbers}
    if first is not None and (odd := sorted(by_label.keys() - {*(tasks or ("",))})):
        known = f"of {', '.join(tasks)}: give a mapping by their names" if tasks else "of one: give it without a name"
        raise ValueError(f"numbers are of label {odd[0]!r}, but the model's outputs are {known}")
    scores = collected(pairs, tasks=tasks, numbers=by_label)
    return {task: evaluate_labels(scores.tasks[task]) for task in tasks} if tasks else evaluate_labels(scores)


def _tasks(logits: PyTree, batch: Batch) -> tuple[str, ...]:
    """The names of a model's labels, the one that batches have as ``labels`` first; () where it has one logit."""
    if any(np.shape(array) != (len(batch.labels),) for array in jax.tree.leaves(logits)):
        raise ValueError(
            "evaluate scores one logit an example, or one for each of several labels by name, but the model's logits"
            f" have shapes {jax.tree.map(np.shape, logits)} for {len(batch.labels)} examples; use run.predict, and"
            " metrics of your own"
        )
    if not isinstance(logits, Mapping):
        return ()
    first, *further = sorted(logits, key=lambda task: task in batch.extras)
    if lacking := [task for task in further if task not in batch.extras]:
        raise ValueError(
            f"the model has the labels {', '.join(logits)}, and of {first} and {lacking[0]} neither is among the extras"
            f" of the batches; name the columns of all labels but one: extras=[{lacking[0]!r}]"
        )
    return (first, *further)


def collected(
    predictions: Iterable[tuple[PyTree, Batch]],
    *,
    tasks: Sequence[str] = (),
    numbers: Mapping[str, Numbers] | None = None,
    check: bool = True,
    on_batch: Callable[[], None] = lambda: None,
) -> LabelScores:
    """The scores of this process's examples.

    Args:
      predictions: Pairs of logits and batch, in order; with several processes, the logits of all their batches and the
        process's own batch. Of several tasks logits are dictionaries.
      tasks: The names of the labels, of which batches have the first as their ``labels``; () where there is one.
      numbers: How outputs are numbers, by task whose labels are; under "" where there is one label.
      check: Whether a logit that is NaN or infinite raises; ``shared_scores`` checks the logits of all processes.
      on_batch: Called after each batch.

    Raises:
      DivergedError: If ``check`` and a logit is NaN or infinite.
    """
    numbers = numbers or {}
    accumulators = {
        task: ScoreAccumulator(check=check, numbers=numbers.get(task), several=bool(tasks)) for task in tasks or ("",)
    }
    first_task = next(iter(accumulators))
    waiting: tuple[PyTree, Batch] | None = None

    def add(logits: PyTree, batch: Batch) -> None:
        examples = len(batch.labels)
        for task, accumulator in accumulators.items():
            all_logits = np.asarray(logits[task] if task else logits)
            # On a mesh of several processes logits are of all processes' examples, in the processes' order; labels are
            # the process's own.
            begin = 0 if all_logits.size == examples else jax.process_index() * examples
            labels, mask = np.asarray(batch.labels), np.asarray(batch.mask)
            if task not in ("", first_task):
                labels = np.asarray(batch.extras[task])
            accumulator.update(all_logits[begin : begin + examples], labels, mask)

    for logits, batch in predictions:
        # The batch before is read back while this one computes.
        if waiting is not None:
            add(*waiting)
        waiting = (logits, batch)
        on_batch()
    if waiting is not None:
        add(*waiting)
    scores = {task: accumulator.label_scores() for task, accumulator in accumulators.items()}
    return by_task(scores) if tasks else scores[""]


def _packed(batches: Iterable[object], packer: Packer, batch_size: int | None) -> Iterator[Batch]:
    size = batch_size
    for item in batches:
        if isinstance(item, Batch):
            yield item
            continue
        prepared = packer.prepare(item)
        size = size or max(1, prepared.examples)
        yield from packed(packer, prepared, size)
