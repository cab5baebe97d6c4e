"""Pieces of columns: cut, and joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrec.data.blocks import Column, ListColumn


def concatenate(columns: Sequence[Column]) -> Column:
    """One column after the other, as a fresh array or list column; all of one kind."""
    first = columns[0]
    if not isinstance(first, ListColumn):
        return np.concatenate(columns)
    lists = [column for column in columns if isinstance(column, ListColumn)]
    offsets = np.zeros(1 + sum(map(count_examples, lists)), np.int64)
    start = 0
    for column in lists:
        stop = start + count_examples(column)
        offsets[start + 1 : stop + 1] = column.offsets[1:] + offsets[start]
        start = stop
    return ListColumn(offsets, np.concatenate([column.values for column in lists]))


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
    lengths = column.offsets[indices + 1] - starts
    offsets = np.zeros(len(indices) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return ListColumn(offsets, column.values[positions])


def count_examples(column: Column) -> int:
    """How many examples a column has."""
    return len(column.offsets) - 1 if isinstance(column, ListColumn) else len(column)
