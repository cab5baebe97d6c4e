"""The scale of a model's logits that is best on some examples, after Platt, "Probabilistic Outputs for SVMs", 1999.

A model that trains on ranks examples better and better long after its probabilities have become too extreme. One scale
puts that right, so that log loss, taken after it, says when a model is at its best (Berta et al., "Rethinking Early
Stopping: Refine, Then Calibrate", 2025).

The mean prediction is corrected by as much as it misses the click rate on examples of training, where steps of single
batches leave it off by up to a tenth. Taking the click rate of the valid split costs much where the next days are not
like it, as in a log of flights whose autumn says little of December.
"""

from __future__ import annotations

import math

import numpy as np

from jrec.metrics import Scores, entropy, sigmoid

_STEPS = 50
_TOLERANCE = 1e-10
_LEAST = 2.0**-53


def fit_calibration(scores: Scores, *, bias: float = 0.0) -> tuple[float, float]:
    """The scale of Platt's least log loss, by Newton's method, and a shift that keeps the mean but for a bias.

    Args:
      scores: Logits and labels of examples that the model was not trained on.
      bias: What is added to logits so that their mean prediction is right (``bias_of``).

    Returns:
      The scale, above 0, and the shift; 1 and the bias where no others are better, as where all labels are equal, or
      where the best scale would reverse the ranking.
    """
    logits, labels = scores.logits.astype(np.float64), scores.labels.astype(np.float64)
    weights = scores.weights
    scale, _ = _platt(logits, labels, weights)
    if scale <= 0:
        return 1.0, bias
    shift = _shift(scale * logits, float(np.average(sigmoid(logits + bias), weights=weights)), weights)
    after = _loss(scale * logits + shift, labels, weights)
    return (scale, shift) if after < _loss(logits + bias, labels, weights) else (1.0, bias)


def bias_of(training: Scores) -> float:
    """What is to be added to logits so that their mean prediction is the click rate of these examples.

    Args:
      training: Logits and labels of examples that the model was trained on; 0 where all labels are equal.
    """
    rate = float(np.average(training.labels, weights=training.weights)) if training.labels.size else 0.0
    return _shift(training.logits.astype(np.float64), rate, training.weights) if 0 < rate < 1 else 0.0


def refinement(scores: Scores) -> float:
    """The log loss that is left after the best scale, not below 0, and shift, in nats per example.

    It does not depend on the mean prediction. The model that tells examples apart better has the lower value, whether
    or not these examples have training's click rate.

    Args:
      scores: Logits and labels.
    """
    labels = scores.labels.astype(np.float64)
    scale, loss = _platt(scores.logits.astype(np.float64), labels, scores.weights)
    return loss if scale > 0 else entropy(float(np.average(labels, weights=scores.weights)))


def _platt(logits: np.ndarray, labels: np.ndarray, counted: np.ndarray | None) -> tuple[float, float]:
    """The scale of the least log loss that a scale and a shift give, and that loss; by (n,) weights, or None.

    The scale is below 0 where the best one reverses the ranking. Where logits or labels are all equal, it is 0, and the
    loss is what a constant prediction has.
    """
    if labels.size == 0 or labels.min() == labels.max() or logits.min() == logits.max():
        return 0.0, entropy(float(np.average(labels, weights=counted))) if labels.size else 0.0
    mean = np.average(logits, weights=counted)
    deviation = np.sqrt(np.average((logits - mean) ** 2, weights=counted))
    each = np.ones_like(logits) if counted is None else counted.astype(np.float64)
    inputs = np.stack([(logits - mean) / deviation, np.ones_like(logits)])
    weights = np.array([deviation, mean])  # the logits as they are
    loss = _loss(weights @ inputs, labels, counted)
    for _ in range(_STEPS):
        p = sigmoid(weights @ inputs)
        gradient = inputs @ ((p - labels) * each) / each.sum()
        hessian = (inputs * (p * (1 - p) * each)) @ inputs.T / each.sum() + 1e-12 * np.eye(2)
        step, factor = np.linalg.solve(hessian, gradient), 1.0
        while (new := _loss((weights - factor * step) @ inputs, labels, counted)) > loss and factor > 1e-6:
            factor /= 2
        if not new < loss - _TOLERANCE:
            break
        weights, loss = weights - factor * step, new
    return float(weights[0] / deviation), loss


def _shift(logits: np.ndarray, mean: float, counted: np.ndarray | None) -> float:
    """What to add to logits for a mean prediction of ``mean``, by bisection."""
    mean = min(max(mean, _LEAST), 1 - _LEAST)  # which of extreme logits is 0 or 1 to the last bit
    reach = float(np.abs(logits).max()) + abs(math.log(mean / (1 - mean)))
    low, high = -reach, reach
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.average(sigmoid(logits + middle), weights=counted) < mean else (low, middle)
    return (low + high) / 2


def calibrated(scores: Scores, scale: float, shift: float) -> Scores:
    """Scores whose logits are ``scale * logits + shift``."""
    logits = (scale * scores.logits.astype(np.float64) + shift).astype(np.float32)
    return Scores(logits=logits, labels=scores.labels, weights=scores.weights)


def _loss(logits: np.ndarray, labels: np.ndarray, counted: np.ndarray | None) -> float:
    return float(np.average(np.logaddexp(0, logits) - labels * logits, weights=counted))
