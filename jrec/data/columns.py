"""Columns in memory: arrays, and lists of any lengths; cut, gathered and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class ListColumn(NamedTuple):
    """A column of lists: example ``i`` has ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
      offsets: (examples + 1,) int32 or int64, ascending from 0.
      values: (offsets[-1],) of the column's element type.
    """

    offsets: np.ndarray
    values: np.ndarray


Column = np.ndarray | ListColumn


def count_examples(column: Column) -> int:
    """How many examples a column has."""
    return len(column.offsets) - 1 if isinstance(column, ListColumn) else len(column)


def cut(column: Column, start: int, stop: int) -> Column:
    """The examples from ``start`` to ``stop``."""
    if not isinstance(column, ListColumn):
        return column[start:stop]
    offsets = column.offsets[start : stop + 1]
    return ListColumn(offsets - offsets[0], column.values[offsets[0] : offsets[-1]])


def gather(column: Column, indices: np.ndarray) -> Column:
    """The examples ``indices``, (n,) integers, in this order, as a fresh column."""
    if not isinstance(column, ListColumn):
        return column[indices]
    starts = column.offsets[indices].astype(np.int64)
    return lists_at(column.values, starts, column.offsets[indices + 1] - starts)


def gather_all(columns: Mapping[str, Column], indices: np.ndarray) -> dict[str, Column]:
    """The examples ``indices`` of every column."""
    return {name: gather(column, indices) for name, column in columns.items()}


def lists_at(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> ListColumn:
    """Lists that lie anywhere in ``values``: list ``i`` is the ``lengths[i]`` values from ``starts[i]`` on."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return ListColumn(offsets, values[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])])


def matrix(lists: Column, examples: int, length: int, *, absent: int = -1) -> np.ndarray:
    """(examples, length) int64, or float32 of floats: the lists, and ``absent`` behind their ends."""
    values = lists.values if isinstance(lists, ListColumn) else lists
    dtype = np.float32 if values.dtype.kind == "f" else np.int64
    if not isinstance(lists, ListColumn):
        return np.asarray(lists, dtype).reshape(examples, length)
    matrix = np.full((examples, length), absent, dtype)
    matrix[np.arange(length) < np.diff(lists.offsets)[:, None]] = values[lists.offsets[0] : lists.offsets[-1]]
    return matrix


def concatenate(columns: Sequence[Column]) -> Column:
    """One column after the other, as a fresh array or list column; all of one kind."""
    if not isinstance(columns[0], ListColumn):
        return np.concatenate(columns)
    lists = [column for column in columns if isinstance(column, ListColumn)]
    ends = np.cumsum([0, *(len(column.values) for column in lists)])
    offsets = [column.offsets[1:] + end for column, end in zip(lists, ends, strict=False)]
    return ListColumn(np.concatenate([ends[:1], *offsets]), np.concatenate([column.values for column in lists]))
