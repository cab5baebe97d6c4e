"""Scores of a whole split, or of its first batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jrec.batch import Batch
from jrec.train.metrics import ScoreAccumulator, Scores


def score(
    predict: Callable[[Any, Batch], jax.Array],
    state: Any,
    batches: Iterable[Batch],
    *,
    limit: int = 0,
    on_batch: Callable[[int], None] = lambda examples: None,
) -> Scores:
    """Runs ``predict`` over batches.

    Args:
      predict: ``state, batch -> logits``, (batch,) float32.
      state: its first argument.
      batches: as a loader yields them.
      limit: batches to read at most; 0 for all.
      on_batch: called with the number of examples of each batch done.

    Raises:
      DivergedError: if a logit is NaN or infinite.
    """
    accumulator = ScoreAccumulator()
    waiting: tuple[jax.Array, Batch] | None = None
    for batch in itertools.islice(batches, limit or None):
        logits = predict(state, batch)
        # The batch before is read back while this one computes.
        if waiting is not None:
            accumulator.update(waiting[0], waiting[1].labels, waiting[1].mask)
        waiting = (logits, batch)
        on_batch(batch.labels.shape[0])
    if waiting is not None:
        accumulator.update(waiting[0], waiting[1].labels, waiting[1].mask)
    return accumulator.scores()
