"""Examples as a dataset's blocks hold them, in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jrec.data.blocks import WEIGHT_SUFFIX
from jrec.data.columns import Column, ListColumn, cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedColumns:
    """Examples in the form in which a dataset's blocks hold them.

    Attributes:
      dense_names: The dense features, in order.
      dense: (examples, dense features) float32, transformed.
      ids: By categorical feature, (examples,) uint32 stored rows of its table, uint64 keys if the table grows, or a
        ``ListColumn`` of them.
      weights: By weighted feature, float32 weights, one for each value of its ``ListColumn``.
      labels: (examples,) float32 in {0, 1}; None where the examples have none.
      tasks: Where there are several labels, all but the first (``labels``), by task; -1 is one that is not known.
        Weights of examples are under ``EXAMPLE_WEIGHT``.
    """

    dense_names: tuple[str, ...]
    dense: np.ndarray
    ids: Mapping[str, Column]
    weights: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    labels: np.ndarray | None = None
    tasks: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def examples(self) -> int:
        """How many there are."""
        return len(self.dense)

    def by_name(self) -> dict[str, Column]:
        """The columns of a dataset's block by name, without labels."""
        columns_by_name: dict[str, Column] = {name: self.dense[:, k] for k, name in enumerate(self.dense_names)}
        columns_by_name |= self.ids
        for name, values in self.weights.items():
            column = self.ids[name]
            assert isinstance(column, ListColumn)  # weights are of lists
            columns_by_name[name + WEIGHT_SUFFIX] = ListColumn(column.offsets, values)
        return columns_by_name

    def cut(self, start: int, stop: int) -> EncodedColumns:
        """The examples from ``start`` to ``stop``."""
        weights = {}
        for name, values in self.weights.items():
            column = self.ids[name]
            assert isinstance(column, ListColumn)  # weights are of lists
            weights[name] = values[column.offsets[start] : column.offsets[stop]]
        return dataclasses.replace(
            self,
            dense=self.dense[start:stop],
            ids={name: cut(column, start, stop) for name, column in self.ids.items()},
            weights=weights,
            labels=None if self.labels is None else self.labels[start:stop],
            tasks={name: labels[start:stop] for name, labels in self.tasks.items()},
        )
