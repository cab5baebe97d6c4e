"""The teacher: the true click probability of every example, and how well it predicts: the ceiling.

Its logit is a weighted sum of standardized parts: effects of single rows, pairwise interactions of rows' hidden vectors
(and one of the dense features), bent effects of the dense features, and what histories have in common with targets.
Hidden numbers are hashes of (seed, table, item), so they take no memory. Spread and bias are set by a sample that runs
over the whole log.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jrec.prepare.synth import kernels
from jrec.prepare.synth.examples import ExampleGenerator, Examples, derived_seed

_SAMPLE = 1 << 14
_CALENDAR = 0.3  # hours and weekdays matter less: the splits lie at different times and shall be much alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A calibrated teacher.

    Attributes:
      source: The examples it labels.
      dense_means, dense_deviations: (dense,) means and standard deviations of the features.
      weights: (4,) weights of the logit's terms.
      bias: The logit's bias.
    """

    source: ExampleGenerator
    dense_means: np.ndarray
    dense_deviations: np.ndarray
    weights: np.ndarray
    bias: float

    @staticmethod
    def calibrated(source: ExampleGenerator) -> Teacher:
        """The teacher of a log, with the shape's click rate and spread of logits."""
        shape = source.shape
        numbers = np.arange(min(_SAMPLE, source.total), dtype=np.int64) * source.total // min(_SAMPLE, source.total)
        sample = source.examples(numbers)
        plain = Teacher(
            source=source,
            dense_means=sample.dense.mean(axis=0),
            dense_deviations=np.maximum(sample.dense.std(axis=0), 1e-3),
            weights=np.ones(4),
            bias=0.0,
        )
        terms = plain.parts(sample)
        deviations = terms.std(axis=1)
        weights = np.where(deviations > 1e-9, np.sqrt(shape.shares) / np.maximum(deviations, 1e-9), 0.0)
        scores = weights @ terms
        weights *= shape.logit_std / max(scores.std(), 1e-9)
        bias = _bias(weights @ terms, shape.click_rate)
        return dataclasses.replace(plain, weights=weights, bias=bias)

    def parts(self, examples: Examples) -> np.ndarray:
        """The four parts of the logit, (4, n) float64."""
        n, shape, seed = len(examples.numbers), self.source.shape, self.source.seed
        rows, dense, squares, matches = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        sums = np.zeros((n, kernels.LATENT))
        for synth in shape.features:
            drawn = examples.items[synth.feature.name]
            row_seed = derived_seed(seed, "teacher", synth.feature.table)
            strength = _CALENDAR if synth.origin in ("hour", "weekday") else 1.0
            kernels.add_rows(
                row_seed, drawn.offsets, drawn.items, drawn.weights, strength, float(shape.head), rows, sums, squares
            )
        if shape.dense:
            dense_seed = derived_seed(seed, "teacher of dense features")
            kernels.add_dense(dense_seed, examples.dense, self.dense_means, self.dense_deviations, dense, sums, squares)
        for target, history in shape.matches:
            past = examples.items[history]
            kernels.add_matches(examples.items[target].items, past.offsets, past.items, matches)
        interactions = ((sums * sums).sum(axis=1) - squares) / 2
        return np.stack([rows, interactions, dense, matches])

    def logits(self, examples: Examples) -> np.ndarray:
        """The log odds of a click, (n,) float64."""
        return self.weights @ self.parts(examples) + self.bias

    def labels(self, examples: Examples, logits: np.ndarray) -> np.ndarray:
        """Clicks drawn with the teacher's probabilities, (n,) float32."""
        labels = np.empty(len(logits), np.float32)
        kernels.draw_labels(derived_seed(self.source.seed, "labels"), examples.numbers, logits, labels)
        return labels


def _bias(logits: np.ndarray, click_rate: float) -> float:
    """The bias at which the mean probability is the click rate, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        rate = (1 / (1 + np.exp(-(logits + middle)))).mean()
        low, high = (middle, high) if rate < click_rate else (low, middle)
    return (low + high) / 2


class Ceiling:
    """The teacher's own metrics, from a histogram of its logits: the AUC is exact but for ties in bins of 0.0005."""

    _LOW, _HIGH, _BINS = -16.0, 16.0, 1 << 16

    def __init__(self) -> None:
        self._clicks = np.zeros(self._BINS, np.int64)
        self._others = np.zeros(self._BINS, np.int64)
        self._loss = 0.0

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        """Takes in some examples."""
        kernels.count_scores(logits, labels, self._LOW, self._HIGH, self._clicks, self._others)
        self._loss += float(np.logaddexp(0.0, np.where(labels > 0.5, -logits, logits)).sum())

    def metrics(self) -> dict[str, float]:
        """``auc``, ``log_loss`` (nats), ``normalized_entropy`` and ``click_rate``; without the AUC and the entropy if
        all labels are equal, and empty without examples.
        """
        clicks, no_clicks = int(self._clicks.sum()), int(self._others.sum())
        total = clicks + no_clicks
        if not total:
            return {}
        rate, loss = clicks / total, self._loss / total
        metrics = {"log_loss": loss, "click_rate": rate}
        if clicks and no_clicks:
            below = np.cumsum(self._others) - self._others
            wins = float((self._clicks * (below + self._others / 2)).sum())
            entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
            metrics |= {"auc": wins / clicks / no_clicks, "normalized_entropy": loss / entropy}
        return metrics
