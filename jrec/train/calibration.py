"""The scale of a model's logits that is best on some examples, after Platt, "Probabilistic Outputs for SVMs", 1999.

A model that trains on ranks examples better and better long after its probabilities have become too extreme. One scale
puts that right, so that log loss, taken after it, says when a model is at its best (Berta et al., "Rethinking Early
Stopping: Refine, Then Calibrate", 2025).

The mean prediction stays that of training. Taking the click rate of the valid split, too, gains little where days are
alike, and costs much where the next ones are not, as in a log of flights whose autumn says little of December.
"""

from __future__ import annotations

import numpy as np

from jrec.train.report.metrics import Scores, sigmoid

_STEPS = 50
_TOLERANCE = 1e-10


def fit_calibration(scores: Scores) -> tuple[float, float]:
    """The scale of Platt's least log loss, by Newton's method, and the shift that keeps the mean prediction.

    Args:
      scores: Logits and labels of examples that the model was not trained on.

    Returns:
      The scale, above 0, and the shift; 1 and 0 where no others are better, as where all labels are equal, or where
      the best scale would reverse the ranking.
    """
    logits, labels = scores.logits.astype(np.float64), scores.labels.astype(np.float64)
    if labels.size == 0 or labels.min() == labels.max() or logits.min() == logits.max():
        return 1.0, 0.0
    mean, deviation = logits.mean(), logits.std()
    inputs = np.stack([(logits - mean) / deviation, np.ones_like(logits)])
    found = np.array([deviation, mean])  # the logits as they are
    loss = _loss(found @ inputs, labels)
    for _ in range(_STEPS):
        p = sigmoid(found @ inputs)
        gradient = inputs @ (p - labels) / labels.size
        hessian = (inputs * (p * (1 - p))) @ inputs.T / labels.size + 1e-12 * np.eye(2)
        step, factor = np.linalg.solve(hessian, gradient), 1.0
        while (new := _loss((found - factor * step) @ inputs, labels)) > loss and factor > 1e-6:
            factor /= 2
        if not new < loss - _TOLERANCE:
            break
        found, loss = found - factor * step, new
    scale = float(found[0] / deviation)
    if scale <= 0:
        return 1.0, 0.0
    shift = _shift(logits, scale)
    after = _loss(scale * logits + shift, labels)
    return (scale, shift) if after < _loss(logits, labels) else (1.0, 0.0)


def _shift(logits: np.ndarray, scale: float) -> float:
    """The shift by which the mean prediction stays as it is, by bisection."""
    mean, scaled = sigmoid(logits).mean(), scale * logits
    reach = float(np.abs(logits).max() * (1 + scale)) + 1
    low, high = -reach, reach
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(scaled + middle).mean() < mean else (low, middle)
    return (low + high) / 2


def calibrated(scores: Scores, scale: float, shift: float) -> Scores:
    """Scores whose logits are ``scale * logits + shift``."""
    return Scores(logits=(scale * scores.logits.astype(np.float64) + shift).astype(np.float32), labels=scores.labels)


def _loss(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))
