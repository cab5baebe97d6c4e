"""Labels that are numbers, such as ratings, prices and counts: how a model's outputs become them, and metrics.

Everything is computed in float64 on the host. Where examples have weights, an example of weight 2 counts as two of
weight 1. A metric that the data leave undefined is None and never NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from jrec.concordance import concordance
from jrec.data.schema import DatasetError
from jrec.errors import DivergedError
from jrec.json_values import JsonObject

# Only for types: a manifest of an export, which names ``Numbers``, is read before JAX is loaded.
if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike

    from jrec.metrics import Scores

NO_EXAMPLES = (
    "there are no examples to evaluate: the split, or what was read of it, is empty, or each example lacks the label or"
    " has weight 0"
)
UNITS = {
    "mean_label": "units of the label",
    "rmse": "units of the label, root of the mean squared error",
    "mae": "units of the label, mean absolute error",
    "r2": "share of the labels' variance that is explained; 0 is no better than their mean",
    "xauc": "share of the pairs of examples with unlike labels that predictions order as labels do, ties counting half",
    "poisson_deviance": "nats per example, twice the log-likelihood ratio to predictions equal to the labels",
}
_BINS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """How a model's outputs are numbers.

    Models learn labels that are about 1 in size whatever the unit, so that learning rates do not depend on it.

    Attributes:
      link: "identity" for ``location + scale * output``, "log" for ``scale * exp(output)``, which is never negative.
      location: The labels' mean in training, or 0; of link "log" always 0.
      scale: Their deviation, or of link "log" their mean; above 0.
    """

    link: Literal["identity", "log"] = "identity"
    location: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.link not in ("identity", "log") or not 0 < self.scale < np.inf or not np.isfinite(self.location):
            raise ValueError(
                f"link={self.link!r} must be 'identity' or 'log', scale={self.scale} above 0, and"
                f" location={self.location} finite"
            )

    def predictions(self, outputs: ArrayLike) -> np.ndarray:
        """The numbers of a model's outputs, float32 of their shape."""
        values = np.asarray(outputs, np.float64)
        with np.errstate(over="ignore"):  # infinity, which ``check_finite`` finds
            numbers = np.exp(values) * self.scale if self.link == "log" else self.location + self.scale * values
            return numbers.astype(np.float32)

    def targets[A: (np.ndarray, jax.Array)](self, labels: A) -> A:
        """What outputs are trained on: labels as they are before location and scale, of any array type."""
        return (labels - self.location) / self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberScores:
    """A model's predictions for the examples of a split, with their labels.

    Attributes:
      predictions: (examples,) float32.
      labels: (examples,) float32.
      weights: (examples,) float32 above 0; None where all count alike.
      tasks: Where examples have several labels, as of ``Scores``.
    """

    predictions: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None = None
    tasks: Mapping[str, Scores | NumberScores] = dataclasses.field(default_factory=dict)

    def cut(self, chosen: slice | np.ndarray) -> NumberScores:
        """The scores of some examples, without tasks."""
        weights = None if self.weights is None else self.weights[chosen]
        return NumberScores(predictions=self.predictions[chosen], labels=self.labels[chosen], weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberEvaluation:
    """The metrics of ``NumberScores``, in ``UNITS``. ``undefined`` gives the reason for each that is None.

    ``examples`` counts whatever the weights, of which ``weight`` is the sum; None where examples have none.
    """

    examples: int
    mean_label: float
    mean_prediction: float
    rmse: float
    mae: float
    r2: float | None
    xauc: float | None
    poisson_deviance: float | None
    undefined: dict[str, str]
    weight: float | None = None

    def to_dict(self) -> JsonObject:
        """The metrics in JSON types; an empty ``undefined`` and a missing weight are left out."""
        there = {"undefined": bool(self.undefined), "weight": self.weight is not None}
        return {name: value for name, value in dataclasses.asdict(self).items() if there.get(name, True)}


def evaluate_numbers(scores: NumberScores) -> NumberEvaluation:
    """All metrics of the scores.

    Raises:
      DatasetError: If there are no examples.
      DivergedError: If a prediction is NaN or infinite.
    """
    predictions, labels = _both(scores.predictions, scores.labels)
    if not labels.size:
        raise DatasetError(NO_EXAMPLES)
    check_finite(predictions, "predictions")
    weights = checked_weights(scores.weights, labels)
    undefined = {}
    r2 = r2_score(predictions, labels, weights=weights)
    if r2 is None:
        undefined |= dict.fromkeys(("r2", "xauc"), f"all labels are {labels[0]:g}")
    deviance = None
    if (labels < 0).any():
        undefined["poisson_deviance"] = f"a label is {labels.min():g}, and counts are at least 0"
    elif (predictions <= 0).any():
        undefined["poisson_deviance"] = f"a prediction is {predictions.min():g}, and rates are above 0"
    else:
        deviance = mean_poisson_deviance(predictions, labels, weights=weights)
    return NumberEvaluation(
        examples=labels.size,
        mean_label=float(np.average(labels, weights=weights)),
        mean_prediction=float(np.average(predictions, weights=weights)),
        rmse=rmse(predictions, labels, weights=weights),
        mae=mae(predictions, labels, weights=weights),
        r2=r2,
        xauc=concordance(predictions, labels, weights),
        poisson_deviance=deviance,
        undefined=undefined,
        weight=None if weights is None else float(weights.sum()),
    )


def rmse(predictions: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """The root of the mean squared error.

    Args:
      predictions: (n,) floats, n at least 1.
      labels: (n,) floats.
      weights: (n,) of at least 0 and not all 0; None for 1.
    """
    p, y = _both(predictions, labels)
    return float(np.sqrt(np.average((p - y) ** 2, weights=checked_weights(weights, p))))


def mae(predictions: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """The mean absolute error; arguments as of ``rmse``."""
    p, y = _both(predictions, labels)
    return float(np.average(np.abs(p - y), weights=checked_weights(weights, p)))


def r2_score(predictions: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """The coefficient of determination: 1 less the squared error over the squared error of the labels' mean.

    None where all labels are equal; arguments as of ``rmse``.
    """
    p, y = _both(predictions, labels)
    w = checked_weights(weights, p)
    variance = np.average((y - np.average(y, weights=w)) ** 2, weights=w)
    # By the labels, not by a variance of 0, which a rounded mean of equal labels need not have.
    return None if y.min() == y.max() else float(1 - np.average((p - y) ** 2, weights=w) / variance)


def mean_poisson_deviance(predictions: ArrayLike, labels: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """The mean of ``2 (y log(y / p) - y + p)``; arguments as of ``rmse``.

    Raises:
      ValueError: If a label is below 0, or a prediction not above.
    """
    p, y = _both(predictions, labels)
    if (y < 0).any() or (p <= 0).any():
        raise ValueError("Poisson's deviance is of labels of at least 0 and predictions above 0")
    terms = np.where(y > 0, y * np.log(np.where(y > 0, y, 1) / p), 0)  # 0 log 0 is 0
    return float(2 * np.average(terms - y + p, weights=checked_weights(weights, p)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualBins:
    """Examples grouped by prediction. All arrays are (bins,) float64.

    Attributes:
      counts: Examples.
      weights: Sums of their weights.
      mean_predicted, mean_label: Means.
      deviation: The standard deviation of the residuals, labels less predictions.
    """

    counts: np.ndarray
    weights: np.ndarray
    mean_predicted: np.ndarray
    mean_label: np.ndarray
    deviation: np.ndarray

    def to_dict(self) -> dict[str, list[float]]:
        """The bins in JSON types."""
        return {name: values.tolist() for name, values in dataclasses.asdict(self).items()}


def residual_bins(scores: NumberScores, bins: int = _BINS) -> ResidualBins:
    """Groups examples into ``bins`` of equal weight by prediction; equal predictions stay together."""
    p, y = _both(scores.predictions, scores.labels)
    w = checked_weights(scores.weights, p)
    edges = np.unique(np.quantile(p, np.arange(1, bins) / bins, method="inverted_cdf", weights=w))
    which, each = np.searchsorted(edges, p, side="left"), np.ones(p.size) if w is None else w
    counts, total = (np.bincount(which, some, len(edges) + 1) for some in (None, each))
    used = total > 0

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(which, values * each, len(used))[used] / total[used]

    errors, predicted, labels = mean((y - p) ** 2), mean(p), mean(y)
    deviation = np.sqrt(np.maximum(errors - (labels - predicted) ** 2, 0))
    means = {"mean_predicted": predicted, "mean_label": labels, "deviation": deviation}
    return ResidualBins(counts=counts[used].astype(float), weights=total[used], **means)


def checked_weights(weights: ArrayLike | None, scores: np.ndarray) -> np.ndarray | None:
    """The weights of examples in float64, or None.

    Raises:
      ValueError: If there are not as many as scores, or one is negative or not finite.
    """
    if weights is None:
        return None
    values = np.asarray(weights, np.float64)
    if values.shape != scores.shape:
        raise ValueError(f"weights must be of the scores' shape {scores.shape}, but are {values.shape}")
    if not np.all((values >= 0) & np.isfinite(values)):
        first = int(np.argmin((values >= 0) & np.isfinite(values)))
        raise ValueError(f"weight {first} is {values[first]}; weights must be finite and at least 0")
    return values


def check_finite(values: np.ndarray, name: str = "logits") -> None:
    """Raises DivergedError if a logit, or what else the values are, is NaN or infinite."""
    finite = np.isfinite(values)
    if not np.all(finite):
        first = int(np.argmin(finite))
        raise DivergedError(
            f"{values.size - np.count_nonzero(finite):,} of {values.size:,} {name} are NaN or infinite (the first is"
            f" {values[first]!s}): training has diverged; lower the learning rates"
        )


def _both(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels in float64."""
    p, y = np.asarray(predictions, np.float64), np.asarray(labels, np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise ValueError(f"predictions and labels must be of one shape (n,), but are {p.shape} and {y.shape}")
    return p, y
