"""Baselines of labels that are numbers: their mean, and the mean by the values of the feature that tells them best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jrec.app.baselines.examples import LabelSums, lists_of, slots_of, weights_of
from jrec.data.blocks import LABEL, Column
from jrec.data.schema import CategoricalFeature, Schema
from jrec.metrics import ScoreAccumulator
from jrec.regression import Numbers, NumberScores, rmse

_PRIOR = 20.0
"""Examples of the mean label that every value has besides its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueMeans:
    """The smoothed mean labels of one feature's values.

    Attributes:
      feature: The feature; None predicts the mean of all.
      means: (slots,) float64; rare rows of a large table share one.
      base: The mean of all, for an example without an id.
    """

    feature: CategoricalFeature | None
    means: np.ndarray
    base: float

    def scores(self, blocks: Iterable[Mapping[str, Column]]) -> NumberScores:
        """Predictions and labels of all examples, in their order; of a list, the mean of its ids' means."""
        accumulated = ScoreAccumulator(numbers=Numbers())
        for columns in blocks:
            predictions = np.full(len(columns[LABEL]), self.base)
            if self.feature is not None:
                lengths, ids, share = lists_of(columns, self.feature)
                own = self.means[slots_of(ids, len(self.means))] - self.base
                example = np.repeat(np.arange(len(lengths)), lengths)
                predictions += np.bincount(example, own if share is None else own * share, len(lengths))
            accumulated.update(predictions, np.asarray(columns[LABEL]), weights_of(columns))
        return accumulated.number_scores()


def fit(
    schema: Schema, training: Iterable[Mapping[str, Column]], choosing: Sequence[Mapping[str, Column]]
) -> tuple[ValueMeans, ValueMeans | None]:
    """The mean, and the feature with the least RMSE on the examples for choosing; None without a categorical feature.

    Args:
      schema: The dataset's description.
      training: Blocks to take means of.
      choosing: Blocks to choose the feature by.
    """
    sums = LabelSums.of(schema, training)
    base = sums.label / sums.weight if sums.weight else 0.0
    mean = ValueMeans(feature=None, means=np.empty(0), base=base)
    best, least = None, np.inf
    for feature in schema.categorical:
        weights, labels = sums.by_feature.pop(feature.name)
        one = ValueMeans(feature=feature, means=(labels + _PRIOR * base) / (weights + _PRIOR), base=base)
        scores = one.scores(choosing)
        value = rmse(scores.predictions, scores.labels, weights=scores.weights) if scores.labels.size else np.inf
        if best is None or value < least:
            best, least = one, value
    return mean, best
