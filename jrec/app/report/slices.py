"""How right a model is within slices of a split: by the values of features that have few, by their frequency else.

Rows of a table descend by their frequency in training, so a band of rows is a band of frequencies. Slices are summed
up block by block, so that any number of examples takes the memory of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jrec.app.report.content import Section
from jrec.data.blocks import Column
from jrec.data.schema import CategoricalFeature, Schema, Table
from jrec.metrics import LabelScores, entropy, sigmoid
from jrec.regression import NumberScores

EACH = 12
"""Rows of a table up to which each has a slice of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slicer:
    """The slices of one feature with one id an example.

    Attributes:
      feature: The feature's name.
      table: Its table.
      edges: (slices + 1,) int64, ascending: slice ``i`` has rows ``edges[i]`` to ``edges[i + 1] - 1``.
      sums: (slices + 1, 6) float64: examples, and sums of weights, labels, predictions, variances of a label less its
        prediction, and losses; the last is of values that training lacks, which the table's OOV row stands for.
      numeric: Whether labels are numbers, whose loss is the squared error, or 0 and 1, whose loss is log loss.
    """

    feature: str
    table: Table
    edges: np.ndarray
    sums: np.ndarray
    numeric: bool

    @staticmethod
    def of(schema: Schema, feature: CategoricalFeature) -> Slicer:
        """Without examples."""
        table, numeric = schema.table(feature.table), schema.numbers is not None
        edges = np.arange(table.rows + 1) if table.rows <= EACH else _decades(table.rows)
        return Slicer(feature=feature.name, table=table, edges=edges, sums=np.zeros((len(edges), 6)), numeric=numeric)

    def add(self, ids: np.ndarray, summands: Sequence[np.ndarray | None]) -> None:
        """Counts examples: (examples,) rows, and by column of ``sums`` what each adds, None for 1."""
        which = np.searchsorted(self.edges, ids, side="right") - 1
        if self.table.oov_row is not None:
            which[ids == self.table.oov_row] = len(self.edges) - 1
        for column, weights in enumerate(summands):
            self.sums[:, column] += np.bincount(which, weights, minlength=len(self.edges))

    def describe(self, names: Mapping[int, str]) -> Iterator[Section]:
        """The slices that have examples, in JSON types.

        Args:
          names: What texts call a row.
        """
        described = _numbers if self.numeric else _clicks
        for at, (examples, *sums) in enumerate(self.sums.tolist()):
            if examples:
                named = {"feature": self.feature, "slice": self._name(at, names), "examples": int(examples)}
                yield named | described(*sums)

    def _name(self, at: int, names: Mapping[int, str]) -> str:
        if at == len(self.edges) - 1:
            return "values not in training"
        first, last = int(self.edges[at]), int(self.edges[at + 1]) - 1
        if first == last:
            return names.get(first, f"row {first}")
        return f"rows {first:,} to {last:,} by frequency"


def _clicks(weight: float, positives: float, predicted: float, variance: float, loss: float) -> dict[str, float | None]:
    own = entropy(min(1.0, positives / weight))
    return {
        "base_rate": positives / weight,
        "mean_prediction": predicted / weight,
        "calibration": predicted / positives if positives else None,
        "deviations": (predicted - positives) / max(variance, 1e-12) ** 0.5,
        "log_loss": loss / weight,
        "normalized_entropy": loss / weight / own if own else None,
    }


def _numbers(weight: float, labels: float, predicted: float, variance: float, loss: float) -> dict[str, float]:
    return {
        "mean_label": labels / weight,
        "mean_prediction": predicted / weight,
        "deviations": (predicted - labels) / variance**0.5 if variance else 0.0,
        "rmse": (loss / weight) ** 0.5,
    }


def _decades(rows: int) -> np.ndarray:
    """0, 10, 100, … and ``rows``."""
    powers = 10 ** np.arange(1, 11)
    return np.array([0, *powers[powers < rows], rows])


def slicers(schema: Schema) -> list[Slicer]:
    """One for every categorical feature with one id an example whose table does not grow."""
    fit = (f for f in schema.categorical if f.one_hot and not schema.table(f.table).growing)
    return [Slicer.of(schema, feature) for feature in fit]


def add_block(some: Sequence[Slicer], columns: Mapping[str, Column], scores: LabelScores) -> None:
    """Counts the scored examples of a block in all slices."""
    weights = scores.weights
    w = np.ones(scores.labels.size) if weights is None else weights.astype(np.float64)
    if isinstance(scores, NumberScores):
        y, p = scores.labels.astype(np.float64), scores.predictions.astype(np.float64)
        losses = variances = (p - y) ** 2
    else:
        y, z, p = scores.labels, scores.logits.astype(np.float64), sigmoid(scores.logits)
        losses, variances = np.logaddexp(0.0, np.where(y, -z, z)), p * (1 - p)
    # The variance of a sum of independent labels, each by its weight.
    summands = [None, w, w * y, w * p, w**2 * variances, w * losses]
    for one in some:
        one.add(np.asarray(columns[one.feature])[: y.size].astype(np.int64), summands)
