"""Log loss and calibration within slices of a split: by the values of features that have few, by their frequency else.

Rows of a table descend by their frequency in training, so a band of rows is a band of frequencies. Slices are summed
up block by block, so that any number of examples takes the memory of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jrec.data.blocks import Column
from jrec.data.schema import CategoricalFeature, Schema, Table
from jrec.metrics import Scores, entropy, sigmoid

EACH = 12
"""Rows of a table up to which each has a slice of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slicer:
    """The slices of one feature with one id an example.

    Attributes:
      feature: The feature's name.
      table: Its table.
      edges: (slices + 1,) int64, ascending: slice ``i`` has rows ``edges[i]`` to ``edges[i + 1] - 1``.
      sums: (slices + 1, 6) float64: examples, and sums of weights, positives, predictions, their variances and log
        losses; the last is of values that training lacks, which the table's OOV row stands for.
    """

    feature: str
    table: Table
    edges: np.ndarray
    sums: np.ndarray

    @staticmethod
    def of(schema: Schema, feature: CategoricalFeature) -> Slicer:
        """Without examples."""
        table = schema.table(feature.table)
        edges = np.arange(table.rows + 1) if table.rows <= EACH else _decades(table.rows)
        return Slicer(feature=feature.name, table=table, edges=edges, sums=np.zeros((len(edges), 6)))

    def add(self, ids: np.ndarray, summands: list[np.ndarray | None]) -> None:
        """Counts examples: (examples,) rows, and by column of ``sums`` what each adds, None for 1."""
        which = np.searchsorted(self.edges, ids, side="right") - 1
        if self.table.oov_row is not None:
            which[ids == self.table.oov_row] = len(self.edges) - 1
        for column, weights in enumerate(summands):
            self.sums[:, column] += np.bincount(which, weights, minlength=len(self.edges))

    def describe(self, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """The slices that have examples, in JSON types.

        Args:
          names: What texts call a row.
        """
        for at, (examples, weight, positives, predicted, variance, loss) in enumerate(self.sums.tolist()):
            if not examples:
                continue
            own = entropy(min(1.0, positives / weight))
            yield {
                "feature": self.feature,
                "slice": self._name(at, names),
                "examples": int(examples),
                "base_rate": positives / weight,
                "mean_prediction": predicted / weight,
                "calibration": predicted / positives if positives else None,
                "deviations": (predicted - positives) / max(variance, 1e-12) ** 0.5,
                "log_loss": loss / weight,
                "normalized_entropy": loss / weight / own if own else None,
            }

    def _name(self, at: int, names: Mapping[int, str]) -> str:
        if at == len(self.edges) - 1:
            return "values not in training"
        first, last = int(self.edges[at]), int(self.edges[at + 1]) - 1
        if first == last:
            return names.get(first, f"row {first}")
        return f"rows {first:,} to {last:,} by frequency"


def _decades(rows: int) -> np.ndarray:
    """0, 10, 100, … and ``rows``."""
    powers = 10 ** np.arange(1, 11)
    return np.array([0, *powers[powers < rows], rows])


def slicers(schema: Schema) -> list[Slicer]:
    """One for every categorical feature with one id an example whose table does not grow."""
    fit = (f for f in schema.categorical if f.one_hot and not schema.table(f.table).growing)
    return [Slicer.of(schema, feature) for feature in fit]


def add_block(some: list[Slicer], columns: Mapping[str, Column], scores: Scores) -> None:
    """Counts the scored examples of a block in all slices."""
    labels, z, p = scores.labels, scores.logits.astype(np.float64), sigmoid(scores.logits)
    w = np.ones(len(labels)) if scores.weights is None else scores.weights.astype(np.float64)
    losses = np.logaddexp(0.0, np.where(labels, -z, z))
    # The variance of a sum of independent clicks, each by its weight.
    summands = [None, w, w * labels, w * p, w**2 * p * (1 - p), w * losses]
    for one in some:
        one.add(np.asarray(columns[one.feature])[: len(labels)].astype(np.int64), summands)
