"""Popularity: a value's click rate in training, of the one feature whose values tell clicks apart best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jrec.app.baselines.examples import LabelSums, lists_of, slots_of, weights_of
from jrec.data.blocks import LABEL, Column
from jrec.data.schema import CategoricalFeature, Schema
from jrec.metrics import ScoreAccumulator, Scores, auc

_PRIOR = 20.0
"""Examples of the mean click rate that every value has besides its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Popularity:
    """The click rates of one feature's values.

    Attributes:
      feature: The feature.
      logits: (slots,) float32, the log-odds of each row's smoothed click rate; rare rows of a large table share one.
      base: The log-odds of the mean click rate, for an example without an id.
    """

    feature: CategoricalFeature
    logits: np.ndarray
    base: float

    def scores(self, blocks: Iterable[Mapping[str, Column]]) -> Scores:
        """Logits and labels of all examples, in their order; of a list, the mean of its ids' log-odds."""
        accumulated = ScoreAccumulator()
        for columns in blocks:
            lengths, ids, share = lists_of(columns, self.feature)
            own = self.logits[slots_of(ids, len(self.logits))]
            if share is not None:
                example = np.repeat(np.arange(len(lengths)), lengths)
                own = np.bincount(example, own * share, len(lengths))
                own[lengths == 0] = self.base
            accumulated.update(own, np.asarray(columns[LABEL]) > 0, weights_of(columns))
        return accumulated.scores()


def fit(
    schema: Schema, training: Iterable[Mapping[str, Column]], choosing: Sequence[Mapping[str, Column]]
) -> Popularity | None:
    """The feature with the greatest AUC on the examples for choosing; None without a categorical feature.

    Args:
      schema: The dataset's description.
      training: Blocks to count clicks in.
      choosing: Blocks to choose the feature by.
    """
    counts = LabelSums.of(schema, training)
    rate = (counts.label + 1) / (counts.weight + 2)
    best, best_auc = None, -1.0
    for feature in schema.categorical:
        accesses, clicked = counts.by_feature.pop(feature.name)
        p = (clicked + _PRIOR * rate) / (accesses + _PRIOR)
        one = Popularity(feature=feature, logits=_log_odds(p).astype(np.float32), base=float(_log_odds(rate)))
        scores = one.scores(choosing)
        value = auc(scores.logits, scores.labels, weights=scores.weights)
        if best is None or (value is not None and value > best_auc):
            best, best_auc = one, -1.0 if value is None else value
    return best


def _log_odds(p: np.ndarray | float) -> np.ndarray:
    return np.log(p) - np.log1p(-np.asarray(p))
