"""Examples as a dataset's blocks hold them, in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.blocks import LABEL, WEIGHT_SUFFIX, label_columns, weight_column
from jrec.data.columns import Column, ListColumn, concatenate, cut
from jrec.data.schema import Schema


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
      tasks: Where there are several labels, all but the first (``labels``), by task; which are known,
        ``known_labels`` tells. Weights of examples are under ``EXAMPLE_WEIGHT``.
    """

    dense_names: tuple[str, ...]
    dense: np.ndarray
    ids: Mapping[str, Column]
    weights: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    labels: np.ndarray | None = None
    tasks: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_block(cls, columns: Mapping[str, Column], schema: Schema) -> EncodedColumns:
        """The examples of a dataset's block, of which only the features of ``schema`` are taken."""
        dense_names = tuple(f.name for f in schema.dense)
        labels, *further = label_columns(schema)
        # Column by column, as it is filled and read.
        dense = np.empty((len(columns[LABEL]), len(dense_names)), np.float32, order="F")
        for k, name in enumerate(dense_names):
            dense[:, k] = columns[name]
        weights = {f.name: columns[column] for f in schema.categorical if (column := weight_column(f))}
        return cls(
            dense_names=dense_names,
            dense=dense,
            ids={f.name: columns[f.name] for f in schema.categorical},
            weights={name: lists.values for name, lists in weights.items() if isinstance(lists, ListColumn)},
            labels=np.asarray(columns[labels]) if schema.labels else None,
            tasks={name: np.asarray(columns[name]) for name in further} if schema.labels else {},
        )

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


def of_size(pieces: Iterable[EncodedColumns], size: int) -> Iterator[EncodedColumns]:
    """The same examples in pieces of ``size``, the last one shorter."""
    waiting: list[EncodedColumns] = []
    count = 0
    for piece in pieces:
        at = 0
        while count + piece.examples - at >= size:
            stop = at + size - count
            yield _joined([*waiting, piece.cut(at, stop)])
            waiting, count, at = [], 0, stop
        if at < piece.examples:
            waiting.append(piece.cut(at, piece.examples))
            count += piece.examples - at
    if waiting:
        yield _joined(waiting)


def _joined(pieces: Sequence[EncodedColumns]) -> EncodedColumns:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    labels = [piece.labels for piece in pieces if piece.labels is not None]
    return dataclasses.replace(
        first,
        dense=np.asfortranarray(np.concatenate([piece.dense for piece in pieces])),
        ids={name: concatenate([piece.ids[name] for piece in pieces]) for name in first.ids},
        weights={name: np.concatenate([piece.weights[name] for piece in pieces]) for name in first.weights},
        labels=np.concatenate(labels) if labels else None,
        tasks={name: np.concatenate([piece.tasks[name] for piece in pieces]) for name in first.tasks},
    )
