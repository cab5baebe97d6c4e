"""Brings columns of any accepted form into the one that the packing kernels read, and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jrec.data.blocks import WEIGHT_SUFFIX, Column, ListColumn
from jrec.data.schema import DatasetError
from jrec.ops.layout import FeatureConfig

_ID_DTYPES = (np.uint8, np.uint16, np.uint32, np.int64)  # kernels are compiled for these; others become int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedColumns:
    """Checked columns: what a packer packs examples from.

    Attributes:
      examples: How many there are.
      numbers: Labels and dense features by name, (examples,) float32.
      ids: By feature name, (examples,) integers or a ``ListColumn``.
      weights: Values by feature name, float32, parallel to the values of the feature's ``ListColumn``.
    """

    examples: int
    numbers: Mapping[str, np.ndarray]
    ids: Mapping[str, Column]
    weights: Mapping[str, np.ndarray]


def needed_columns(numbers: Collection[str], features: Collection[FeatureConfig]) -> list[str]:
    """The names of all columns that packing these reads."""
    names = list(numbers)
    for feature in features:
        names.append(feature.name)
        names.extend([feature.name + WEIGHT_SUFFIX] if feature.weighted else [])
    return names


def prepare_columns(
    columns: Mapping[str, Any], *, numbers: Collection[str], features: Collection[FeatureConfig], plain: Collection[str]
) -> PreparedColumns:
    """Checks presence, form and length of columns.

    Args:
      columns: As ``pack_batch`` takes them.
      numbers: Names of labels and dense features.
      features: The categorical features to read.
      plain: Features among them that are to stay plain arrays if they are; the others become lists.

    Raises:
      DatasetError: A column is missing, or weights do not run parallel to their ids.
      ValueError: Wrong shape or type, or unequal lengths.
    """
    if missing := [name for name in needed_columns(numbers, features) if name not in columns]:
        raise DatasetError(f"column(s) {', '.join(missing)} are missing; there are {', '.join(columns) or 'none'}")
    lengths: dict[str, int] = {}
    found_numbers = {name: _numbers(name, columns[name]) for name in numbers}
    lengths.update({name: len(values) for name, values in found_numbers.items()})
    ids: dict[str, Column] = {}
    weights: dict[str, np.ndarray] = {}
    for feature in features:
        name = feature.name
        column, present = _ids(name, columns[name])
        if feature.weighted:
            column = _as_lists(column)
            weights[name] = _weights(name, columns[name + WEIGHT_SUFFIX], column, present)
        ids[name] = column if name in plain else _as_lists(column)
        lengths[name] = count_examples(column)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must be equally long, but have {lengths}")
    return PreparedColumns(examples=next(iter(lengths.values()), 0), numbers=found_numbers, ids=ids, weights=weights)


def concatenate(columns: list[Column]) -> Column:
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


def take(prepared: Sequence[PreparedColumns], indices: Sequence[np.ndarray]) -> PreparedColumns:
    """The examples ``indices[i]`` of ``prepared[i]``, one after the other, for batches that span several windows."""

    def gather(name: str) -> Column:
        return concatenate([_gather(p.ids[name], i) for p, i in zip(prepared, indices, strict=True)])

    def gather_weights(name: str) -> np.ndarray:
        pieces = []
        for p, i in zip(prepared, indices, strict=True):
            ids = p.ids[name]
            assert isinstance(ids, ListColumn)  # prepare_columns makes lists of weighted features
            pieces.append(_gather(ListColumn(ids.offsets, p.weights[name]), i))
        column = concatenate(pieces)
        assert isinstance(column, ListColumn)
        return column.values

    return PreparedColumns(
        examples=sum(map(len, indices)),
        numbers={
            name: np.concatenate([p.numbers[name][i] for p, i in zip(prepared, indices, strict=True)])
            for name in prepared[0].numbers
        },
        ids={name: gather(name) for name in prepared[0].ids},
        weights={name: gather_weights(name) for name in prepared[0].weights},
    )


def _gather(column: Column, indices: np.ndarray) -> Column:
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


def _numbers(name: str, column: Any) -> np.ndarray:
    values = np.asarray(column)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "fiub":
        raise ValueError(f"{name!r} must be (examples,) numbers, but is {values.dtype}{list(values.shape)}")
    return _plain(values, np.float32)


def _plain(values: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """The array in one of the few forms that kernels are compiled for: contiguous, writeable, of ``dtype``."""
    return np.require(values, dtype, ["C", "W"])


def _ids(name: str, column: Any) -> tuple[Column, np.ndarray | None]:
    """The ids, and for a padded matrix which of its entries are present."""
    if isinstance(column, ListColumn):
        offsets, values = (_integers(name, array, ndim=1) for array in column)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"offsets of {name!r} must ascend from 0 to the number of its values, {len(values)}")
        return ListColumn(_plain(offsets, np.int64), values), None
    if not isinstance(column, np.ndarray) and hasattr(column, "type"):
        column = _from_arrow(name, column)
        if isinstance(column, ListColumn):
            return _ids(name, column)
    values = _integers(name, np.asarray(column), ndim=None)
    if values.ndim == 1:
        return values, None
    present = values != -1
    return _lists_of(values, present), present


def _integers(name: str, values: np.ndarray, *, ndim: int | None) -> np.ndarray:
    if values.dtype.kind not in "iu" or values.ndim not in ((1, 2) if ndim is None else (ndim,)):
        raise ValueError(
            f"ids of {name!r} must be integers, (examples,), (examples, length) or a ListColumn, but are"
            f" {values.dtype}{list(values.shape)}"
        )
    return _plain(values, values.dtype if values.dtype in _ID_DTYPES else np.int64)


def _from_arrow(name: str, column: Any) -> Column:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count:
        raise ValueError(f"column {name!r} has nulls; give missing values an id of their own, or an empty list")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        offsets = column.offsets.to_numpy()
        return ListColumn(offsets - offsets[0], column.flatten().to_numpy(zero_copy_only=False))
    return column.to_numpy(zero_copy_only=False)


def _as_lists(column: Column) -> ListColumn:
    if isinstance(column, ListColumn):
        return column
    return ListColumn(np.arange(len(column) + 1, dtype=np.int64), column)


def _lists_of(values: np.ndarray, present: np.ndarray) -> ListColumn:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(present.sum(axis=1), out=offsets[1:])
    return ListColumn(offsets, values[present])


def _weights(name: str, weights: Any, ids: ListColumn, present: np.ndarray | None) -> np.ndarray:
    """The weights' values, parallel to the ids'."""
    if not isinstance(weights, np.ndarray | ListColumn) and hasattr(weights, "type"):
        column = _from_arrow(name + WEIGHT_SUFFIX, weights)
    else:
        column = weights if isinstance(weights, ListColumn) else np.asarray(weights)
    if isinstance(column, ListColumn):
        parallel = present is None and np.array_equal(column.offsets, ids.offsets)
        values = column.values
    elif column.ndim == 2:
        parallel = present is not None and present.shape == column.shape
        values = column[present] if parallel else column
    else:
        parallel = len(column) == len(ids.offsets) - 1 == len(ids.values)
        values = column
    if not parallel:
        raise DatasetError(f"weights of {name!r} must have the form and lengths of its ids, example by example")
    if values.dtype.kind != "f":
        raise ValueError(f"weights of {name!r} must be floats, but are {values.dtype}")
    return _plain(values, np.float32)
