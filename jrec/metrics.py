"""Metrics of click prediction: exact AUC and ROC, log loss, normalized entropy, accuracy, calibration.

Scores are logits; probabilities are their sigmoid. Where examples have weights, an example of weight 2 counts as two
of weight 1. Everything is computed in float64 on the host. A metric that the
data leave undefined, such as the AUC of a single class, is None and never NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike

from jrec.data.blocks import known_labels
from jrec.data.schema import DatasetError
from jrec.json_values import JsonObject
from jrec.regression import (
    NO_EXAMPLES,
    NumberEvaluation,
    Numbers,
    NumberScores,
    check_finite,
    checked_weights,
    evaluate_numbers,
)

UNITS = {
    "examples": "count",
    "positives": "count",
    "weight": "sum of the examples' weights, by which all other metrics are means",
    "base_rate": "fraction of labels that are 1",
    "mean_prediction": "probability",
    "auc": "area under the ROC curve, 0 to 1",
    "average_precision": "area under the precision-recall curve, 0 to 1; the base rate is that of chance",
    "log_loss": "nats per example",
    "refinement": "log loss after the best scale and shift of the logits, nats per example",
    "normalized_entropy": "log loss over the entropy of the base rate",
    "accuracy": "fraction correct at probability 0.5",
    "calibration": "mean prediction over base rate",
    "calibration_error": "probability, mean absolute gap over 20 bins of equal count",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """A model's predictions for the examples of a split, with their labels.

    Attributes:
      logits: (examples,) float32.
      labels: (examples,) bool.
      weights: (examples,) float32 above 0; None where all count alike.
      tasks: Where examples have several labels, by task the scores of those whose label of it is known; ``logits`` and
        ``labels`` are then the first task's. Empty where they have one.
    """

    logits: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None = None
    tasks: Mapping[str, Scores | NumberScores] = dataclasses.field(default_factory=dict)

    def cut(self, chosen: slice | np.ndarray) -> Scores:
        """The scores of some examples, without tasks."""
        weights = None if self.weights is None else self.weights[chosen]
        return Scores(logits=self.logits[chosen], labels=self.labels[chosen], weights=weights)


LabelScores = Scores | NumberScores
"""Of labels of 0 and 1, or of numbers; of several labels the first task's, with ``tasks``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of ``Scores``, in ``UNITS``. ``undefined`` gives the reason for each that is None.

    ``refinement`` is measured only in training, where ``evaluate.early_stopping`` goes by it. ``examples`` and
    ``positives`` count whatever the weights, of which ``weight`` is the sum; None where examples have none.
    """

    examples: int
    positives: int
    base_rate: float
    mean_prediction: float
    auc: float | None
    average_precision: float | None
    log_loss: float
    normalized_entropy: float | None
    accuracy: float
    calibration: float | None
    calibration_error: float
    undefined: dict[str, str]
    refinement: float | None = None
    weight: float | None = None

    def to_dict(self) -> JsonObject:
        """The metrics in JSON types; an empty ``undefined`` is left out, and what was not measured."""
        there = {"undefined": bool(self.undefined)}
        there |= {name: getattr(self, name) is not None for name in ("refinement", "weight")}
        return {name: value for name, value in dataclasses.asdict(self).items() if there.get(name, True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReliabilityBins:
    """Examples grouped by predicted probability; empty groups are left out. All arrays are (bins,).

    Attributes:
      counts: int64, examples.
      weights: float64, sums of their weights.
      mean_predicted: float64, mean probability.
      observed: float64, fraction of labels that are 1.
    """

    counts: np.ndarray
    weights: np.ndarray
    mean_predicted: np.ndarray
    observed: np.ndarray

    def to_dict(self) -> dict[str, list[float]]:
        """The bins in JSON types."""
        return {name: values.tolist() for name, values in dataclasses.asdict(self).items()}

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap between predicted and observed, by weight."""
        return float(np.average(np.abs(self.mean_predicted - self.observed), weights=self.weights))


class ScoreAccumulator:
    """Collects the scores of an evaluation batch by batch, 9 bytes per example.

    Args:
      check: Whether a logit that is NaN or infinite raises at once.
      numbers: How outputs are numbers, where labels are; None for logits, and labels of 0 and 1.
      several: Whether the label is one of several, so that it may be unknown (``known_labels``); such examples are left
        out.
    """

    def __init__(self, *, check: bool = True, numbers: Numbers | None = None, several: bool = False) -> None:
        self._check, self._numbers, self._several = check, numbers, several
        self._logits: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []

    def update(self, logits: ArrayLike, labels: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Adds a batch.

        Args:
          logits: (batch,) of any float type.
          labels: (batch,) 0 or 1, of any type, or numbers.
          mask: (batch,), the examples' weights, 0 for rows that only pad the batch; None counts all alike.

        Raises:
          ValueError: If shapes differ or a label is neither 0 nor 1.
          DivergedError: If ``check`` and a logit is NaN or infinite.
        """
        scores, truth = np.asarray(logits, np.float32), np.asarray(labels)
        weights = np.ones(scores.shape, np.float32) if mask is None else np.asarray(mask, np.float32)
        if weights.shape != scores.shape:
            raise ValueError(f"mask has shape {weights.shape}, but logits have {scores.shape}")
        if truth.shape == scores.shape and (mask is not None or self._several):
            keep = weights != 0
            if self._several:
                keep &= known_labels(truth, numeric=self._numbers is not None)
            scores, truth, weights = scores[keep], truth[keep], weights[keep]
        truth = _binary(truth, scores) if self._numbers is None else _alike(truth.astype(np.float32), scores)
        if self._check:
            check_finite(scores)
        self._logits.append(scores.copy())
        self._labels.append(truth)
        self._weights.append(weights.copy())

    def scores(self) -> Scores:
        """All batches so far, in order, of labels of 0 and 1."""
        logits, weights = self._collected()
        return Scores(logits=logits, labels=np.concatenate([np.empty(0, bool), *self._labels]), weights=weights)

    def number_scores(self) -> NumberScores:
        """All batches so far, in order, of labels that are numbers."""
        assert self._numbers is not None
        outputs, weights = self._collected()
        labels = np.concatenate([np.empty(0, np.float32), *self._labels])
        return NumberScores(predictions=self._numbers.predictions(outputs), labels=labels, weights=weights)

    def label_scores(self) -> LabelScores:
        """``scores``, or ``number_scores`` of labels that are numbers."""
        return self.scores() if self._numbers is None else self.number_scores()

    def _collected(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits, and weights if they are not all 1."""
        logits, weights = (np.concatenate([np.empty(0, np.float32), *some]) for some in (self._logits, self._weights))
        return logits, None if (weights == 1).all() else weights


def evaluate(scores: Scores) -> Evaluation:
    """All metrics of the scores.

    Raises:
      DatasetError: If there are no examples.
      DivergedError: If a logit is NaN or infinite.
    """
    logits, labels = np.asarray(scores.logits), _binary(scores.labels, scores.logits)
    if logits.size == 0:
        raise DatasetError(NO_EXAMPLES)
    check_finite(logits)
    probabilities = sigmoid(logits)
    weights = checked_weights(scores.weights, logits)
    positives = int(np.count_nonzero(labels))
    base_rate = positives / labels.size if weights is None else float(np.average(labels, weights=weights))
    mean_prediction = float(np.average(probabilities, weights=weights))
    loss = log_loss(logits, labels, weights=weights)
    worst = entropy(base_rate if 0 < positives < labels.size else float(positives > 0))
    by_score = _count_by_score(logits, labels, weights)
    undefined = {}
    if worst == 0:
        reason = f"all labels are {int(positives > 0)}"
        undefined = {"auc": reason, "normalized_entropy": reason}
        if positives == 0:
            undefined |= {"calibration": reason, "average_precision": reason}
    return Evaluation(
        examples=labels.size,
        positives=positives,
        base_rate=base_rate,
        mean_prediction=mean_prediction,
        auc=_auc(*by_score),
        average_precision=_average_precision(*by_score),
        log_loss=loss,
        normalized_entropy=loss / worst if worst else None,
        accuracy=float(np.average((logits >= 0) == labels, weights=weights)),
        calibration=mean_prediction / base_rate if positives else None,
        calibration_error=reliability_bins(probabilities, labels, weights=weights).error,
        undefined=undefined,
        weight=None if weights is None else float(weights.sum()),
    )


LabelEvaluation = Evaluation | NumberEvaluation


def evaluate_labels(scores: LabelScores) -> LabelEvaluation:
    """``evaluate``, or ``evaluate_numbers``."""
    return evaluate(scores) if isinstance(scores, Scores) else evaluate_numbers(scores)


def evaluate_tasks(scores: LabelScores) -> dict[str, LabelEvaluation]:
    """The metrics of every task of which any label is known; {} where examples have one label."""
    return {task: evaluate_labels(own) for task, own in scores.tasks.items() if own.labels.size}


def by_task(tasks: Mapping[str, LabelScores]) -> LabelScores:
    """The scores of several tasks, the first of which is the one that counts where one must."""
    return dataclasses.replace(next(iter(tasks.values())), tasks=dict(tasks))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities in float64, without overflow for any finite logit."""
    z = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(z))  # in (0, 1]
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def auc(scores: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """The exact area under the ROC curve: how often a positive outscores a negative, ties counting half.

    Counted in integers after one sort, O(n log n), and divided once, so the result is correctly rounded; with weights,
    in float64.

    Args:
      scores: (n,) floats, larger for likelier clicks; infinities are allowed.
      labels: (n,) 0 or 1.
      weights: (n,) of at least 0; a pair counts by the product of its two. None for 1.

    Returns:
      The area, or None where one of the classes is absent.

    Raises:
      ValueError: If shapes differ, a label is neither 0 nor 1, a score is NaN, or a weight is negative or not finite.
    """
    return _auc(*_count_by_score(scores, labels, weights))


def _auc(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    # Of integers these are Python's, whose products do not overflow.
    total_positives, total_negatives = positives.sum().item(), negatives.sum().item()
    if total_positives == 0 or total_negatives == 0:
        return None
    below = np.cumsum(negatives) - negatives
    # Doubled, so that half a win of a tie is a whole number.
    twice_wins = np.sum(positives * (2 * below + negatives)).item()
    return twice_wins / (2 * total_positives * total_negatives)


def average_precision(scores: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """The area under the precision-recall curve as a sum of steps: precision at each score, by its positives' share.

    Unlike the AUC it looks only at the examples above the positives, so that it tells models of rare clicks apart. What
    scores alike is taken together, as scikit-learn does.

    Args:
      scores, labels, weights: As of ``auc``.

    Returns:
      The area, or None without positives.

    Raises:
      ValueError: As ``auc``.
    """
    return _average_precision(*_count_by_score(scores, labels, weights))


def _average_precision(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    total = positives.sum()
    if total == 0:
        return None
    hits, misses = np.cumsum(positives[::-1]), np.cumsum(negatives[::-1])
    precision = hits / np.where(hits + misses > 0, hits + misses, 1)  # weights of 0 may come first
    return float(np.sum(positives[::-1] * precision) / total)


def log_loss(logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Mean binary cross-entropy in nats, from logits of any size without overflow.

    Args:
      logits: (n,) finite floats, n at least 1.
      labels: (n,) 0 or 1.
      weights: (n,) of at least 0 and not all 0; None for 1.
    """
    z = np.asarray(logits, np.float64)
    truth = _binary(labels, z)
    # log(1 + exp(-z)) of a click, log(1 + exp(z)) of none; logaddexp neither overflows nor loses small losses to 1 + x.
    return float(np.average(np.logaddexp(0.0, np.where(truth, -z, z)), weights=checked_weights(weights, z)))


def normalized_entropy(logits: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Log loss over the entropy of the base rate: 1 is no better than predicting the base rate, 0 is perfect.

    He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014, equation 1. None for one class.
    """
    truth = _binary(labels, np.asarray(logits))
    worst = entropy(float(np.average(truth, weights=checked_weights(weights, truth))))
    return log_loss(logits, truth, weights=weights) / worst if worst else None


def reliability_bins(
    probabilities: np.ndarray, labels: ArrayLike, bins: int = 20, *, weights: ArrayLike | None = None
) -> ReliabilityBins:
    """Groups examples into ``bins`` of equal count by predicted probability; equal probabilities stay together.

    With weights, (n,) of at least 0, the bins are of equal weight.

    Equal counts, not equal widths, because at a click rate of 2 % nearly all predictions share the first of any bins
    of equal width.
    """
    p = np.asarray(probabilities, np.float64)
    truth = _binary(labels, p)
    w = checked_weights(weights, p)
    # Edges are values that occur, the only method that NumPy has with weights; equal ones make one bin.
    edges = np.unique(np.quantile(p, np.arange(1, bins) / bins, method="inverted_cdf", weights=w))
    which = np.searchsorted(edges, p, side="left")
    counts, each = np.bincount(which, minlength=len(edges) + 1), np.ones(p.size) if w is None else w
    total = np.bincount(which, each, len(counts))
    used = total > 0
    counts, total = counts[used], total[used]
    predicted, observed = (np.bincount(which, values * each, len(used))[used] for values in (p, truth))
    return ReliabilityBins(counts=counts, weights=total, mean_predicted=predicted / total, observed=observed / total)


def _count_by_score(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """How many positives and negatives have each score, by ascending score, or the sums of their weights.

    (distinct scores,) int64, or float64 with weights.
    """
    values = np.asarray(scores)
    truth = _binary(labels, values)
    if bad := int(np.count_nonzero(np.isnan(values))):
        raise ValueError(f"{bad:,} of {values.size:,} scores are NaN, which cannot be ranked")
    counted = checked_weights(weights, values)
    counted = np.ones(values.size, np.int64) if counted is None else counted
    if not values.size:
        return counted, counted
    order = np.argsort(values)
    values, truth, counted = values[order], truth[order], counted[order]
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    positives, negatives = (np.add.reduceat(np.where(chosen, counted, 0), starts) for chosen in (truth, ~truth))
    return positives, negatives


def _binary(labels: ArrayLike, scores: np.ndarray) -> np.ndarray:
    """The labels as bools."""
    values = _alike(np.asarray(labels), scores)
    if values.dtype == np.bool_:
        return values
    truth = values == 1
    if not np.all(truth | (values == 0)):
        first = int(np.argmin(truth | (values == 0)))
        raise ValueError(f"label {first} is {values[first]!r}; labels must be 0 or 1")
    return truth


def _alike(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The labels, of which there must be as many as scores."""
    if labels.ndim != 1 or labels.shape != scores.shape:
        raise ValueError(f"scores and labels must be of one shape (n,), but are {scores.shape} and {labels.shape}")
    return labels


def entropy(rate: float) -> float:
    """The entropy of a coin of this rate, in nats."""
    return 0.0 if rate in (0.0, 1.0) else -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
