"""Brings columns of any accepted form into the one that the packing kernels read, and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jrec.data import packing_kernels as kernels
from jrec.data.blocks import WEIGHT_SUFFIX
from jrec.data.column_forms import Form, array_of, by_name, form_of
from jrec.data.columns import Column, ListColumn, concatenate, count_examples, cut
from jrec.data.schema import DatasetError
from jrec.data.value_rows import ValueRows
from jrec.ops.layout import FeatureConfig

_ID_DTYPES = (np.uint8, np.uint16, np.uint32, np.int64)  # kernels are compiled for these; others become int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadColumns:
    """Columns in the one form, as they came: packing's first stage, which looks at no value.

    Attributes:
      arrays: Labels, dense features and extras by name, as NumPy arrays.
      forms: Ids and weights by name.
    """

    arrays: Mapping[str, np.ndarray]
    forms: Mapping[str, Form]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedColumns:
    """Checked columns: what a packer packs examples from.

    Attributes:
      examples: How many there are.
      numbers: Labels and dense features by name, (examples,) or (examples, n) float32.
      ids: By feature name, (examples,) or (examples, length) integers, or a ``ListColumn``: rows, or uint64 keys that
        are yet to get rows.
      weights: Values by feature name, float32, parallel to the values of the feature's ``ListColumn``.
      extras: Further arrays by name, (examples, ...).
    """

    examples: int
    numbers: Mapping[str, np.ndarray]
    ids: Mapping[str, Column]
    weights: Mapping[str, np.ndarray]
    extras: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def cut(self, start: int, stop: int) -> PreparedColumns:
        """The examples from ``start`` to ``stop``, which arrays show where they are."""
        return self._each(stop - start, lambda column: cut(column, start, stop))

    def take(self, indices: np.ndarray) -> PreparedColumns:
        """The examples ``indices``, (n,) integers, in this order, as fresh arrays."""
        return self._each(len(indices), lambda column: _taken(column, indices))

    def _each(self, examples: int, chosen: Callable[[Column], Column]) -> PreparedColumns:
        def arrays(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: cast("np.ndarray", chosen(column)) for name, column in columns.items()}

        def values(ids: Column, weights: np.ndarray) -> np.ndarray:
            assert isinstance(ids, ListColumn)  # prepare_columns makes lists of weighted features
            return cast("ListColumn", chosen(ListColumn(ids.offsets, weights))).values

        return PreparedColumns(
            examples=examples,
            numbers=arrays(self.numbers),
            ids={name: chosen(column) for name, column in self.ids.items()},
            weights={name: values(self.ids[name], weights) for name, weights in self.weights.items()},
            extras=arrays(self.extras),
        )


def needed_columns(
    numbers: Collection[str], features: Collection[FeatureConfig], extras: Collection[str] = ()
) -> list[str]:
    """The names of all columns that packing these reads."""
    names = [*numbers, *extras]
    for feature in features:
        names.append(feature.name)
        names.extend([feature.name + WEIGHT_SUFFIX] if feature.weighted else [])
    return names


def read_columns(
    columns: object,
    *,
    numbers: Collection[str],
    features: Collection[FeatureConfig],
    extras: Collection[str] = (),
    copy: bool = False,
) -> ReadColumns:
    """Brings columns of any form that ``pack_batch`` takes into the one form.

    Args:
      columns: Columns in any form that ``pack_batch`` takes.
      numbers: Names of labels and dense features.
      features: The categorical features to read.
      extras: Names of the further arrays.
      copy: Whether to copy what would otherwise stay in the caller's memory, since it has the form already.

    Raises:
      DatasetError: A column is missing.
      ValueError: A column has no such form.
    """
    columns = by_name(columns)
    if missing := [name for name in needed_columns(numbers, features, extras) if name not in columns]:
        raise DatasetError(f"column(s) {', '.join(missing)} are missing; there are {', '.join(columns) or 'none'}")
    arrays = {name: array_of(name, columns[name]) for name in (*numbers, *extras)}
    if copy:
        arrays = {name: array.copy() for name, array in arrays.items()}
    read = _copied_form if copy else form_of
    return ReadColumns(arrays=arrays, forms={name: read(name, columns[name]) for name in needed_columns((), features)})


def _copied_form(name: str, column: object) -> Form:
    """``form_of`` in memory of its own.

    Numbers are copied whatever holds them, since Arrow, polars, pandas and JAX take NumPy's arrays over without a copy;
    texts are Arrow's, which nobody writes to.
    """
    if isinstance(column, np.ndarray):
        return form_of(name, column.copy())
    values, offsets, present = form = form_of(name, column)
    return Form(values if form.is_text else values.copy(), None if offsets is None else offsets.copy(), present)


def prepare_columns(
    columns: ReadColumns,
    *,
    numbers: Collection[str],
    features: Collection[FeatureConfig],
    values: ValueRows,
    extras: Collection[str] = (),
) -> PreparedColumns:
    """Checks types and lengths of columns, and gives values their rows.

    Args:
      columns: From ``read_columns``.
      numbers: Names of labels and dense features.
      features: The categorical features to read.
      values: Which rows values have.
      extras: Names of the further arrays.

    Raises:
      DatasetError: Weights do not run parallel to their ids, or a value has no row.
      ValueError: Wrong shape or type, or unequal lengths.
    """
    lengths: dict[str, int] = {}
    found_numbers = {name: _numbers(name, columns.arrays[name]) for name in numbers}
    found_extras = {name: _extra(name, columns.arrays[name]) for name in extras}
    lengths.update({name: len(array) for name, array in (found_numbers | found_extras).items()})
    ids: dict[str, Column] = {}
    weights: dict[str, np.ndarray] = {}
    for feature in features:
        name = feature.name
        form = _with_absent(columns.forms[name])
        column = _ids(feature, form, values)
        if feature.weighted:
            column = _as_lists(column)
            weights[name] = _weights(name, columns.forms[name + WEIGHT_SUFFIX], form)
        ids[name] = column
        lengths[name] = count_examples(column)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must be equally long, but have {lengths}")
    examples = next(iter(lengths.values()), 0)
    return PreparedColumns(examples=examples, numbers=found_numbers, ids=ids, weights=weights, extras=found_extras)


def join(pieces: Sequence[PreparedColumns]) -> PreparedColumns:
    """The examples of all pieces, one after the other."""

    def joined(columns: Sequence[Column]) -> Column:
        if any(isinstance(column, ListColumn) for column in columns):
            columns = [_as_lists(column) for column in columns]
        return concatenate(columns)

    def arrays(named: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([arrays[name] for arrays in named]) for name in named[0]}

    return PreparedColumns(
        examples=sum(piece.examples for piece in pieces),
        numbers=arrays([piece.numbers for piece in pieces]),
        ids={name: joined([piece.ids[name] for piece in pieces]) for name in pieces[0].ids},
        weights=arrays([piece.weights for piece in pieces]),
        extras=arrays([piece.extras for piece in pieces]),
    )


def as_matrix(column: Column, length: int) -> Column:
    """(examples, length) if every example has ``length`` values, else lists.

    Only a matrix is read without looking up where each example begins.
    """
    if not isinstance(column, ListColumn):
        return column.reshape(-1, 1) if length == 1 else _as_lists(column)
    examples = len(column.offsets) - 1
    # The sum first, which tells most ragged columns without a look at the offsets.
    full = column.values.size == examples * length
    if full and np.array_equal(column.offsets, np.arange(examples + 1) * length):
        return column.values.reshape(examples, length)
    return column


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiub":
        raise ValueError(
            f"{name!r} must be (examples,) numbers, or (examples, n), but is {values.dtype}{list(values.shape)}; cast"
            " it, and fill missing numbers"
        )
    return _plain(values, np.float32)


def _extra(name: str, values: np.ndarray) -> np.ndarray:
    """An array in the types that JAX holds without 64 bits: float64 becomes float32, and integers int32."""
    number = jnp.issubdtype(values.dtype, np.number) and values.dtype.kind != "m"  # NumPy counts durations as integers
    if not values.ndim or not (number or values.dtype == bool):
        raise ValueError(
            f"extra {name!r} must be numbers, (examples, ...), but is {values.dtype}{list(values.shape)}; cast it,"
            " number its texts, and pad its lists to one length"
        )
    if values.dtype == np.float64:
        return values.astype(np.float32)
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values
    if (bad := np.argwhere((values < -(2**31)) | (values >= 2**31))).size:
        place = tuple(bad[0].tolist())
        raise DatasetError(
            f"extra {name!r} is {values[place]} in example {place[0]}, which does not fit int32; number its values from"
            " 0 on, or give them as floats"
        )
    return values.astype(np.int32)


def _plain(values: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """The array in one of the few forms that kernels are compiled for: contiguous, writeable, of ``dtype``."""
    return np.require(values, dtype, ["C", "W"])


def _ids(feature: FeatureConfig, form: Form, values: ValueRows) -> Column:
    """The rows of a feature."""
    present = _present(form)
    rows = values.rows(feature, present)
    if feature.table in values.keyed:
        rows = _plain(rows, np.uint64)
    else:
        if rows.dtype == np.uint64:  # what int64 does not hold stays too large
            rows = np.minimum(rows, np.uint64(2**63 - 1))
        rows = _plain(rows, rows.dtype if rows.dtype in _ID_DTYPES else np.int64)
    return rows if present.offsets is None else ListColumn(present.offsets, rows)


def _with_absent(form: Form) -> Form:
    """A form of ids with which of them are present: -1 is not."""
    ids = form.values
    if form.is_text or ids.dtype.kind != "i" or not (absent := ids == -1).any():
        return form
    return form._replace(present=~absent if form.present is None else form.present & ~absent)


def _present(form: Form) -> Form:
    """The values that are present."""
    if form.present is None or form.present.all():
        return form._replace(present=None)
    mask = form.present
    values = form.values[mask] if isinstance(form.values, np.ndarray) else form.values.filter(mask)
    counts = np.zeros(len(mask) + 1, np.int64)
    np.cumsum(mask, out=counts[1:])
    return Form(values, counts if form.offsets is None else counts[form.offsets])


def _as_lists(column: Column) -> ListColumn:
    if isinstance(column, ListColumn):
        return column
    each = column.size // max(1, len(column))
    return ListColumn(np.arange(len(column) + 1, dtype=np.int64) * each, column.reshape(-1))


def _taken(column: Column, indices: np.ndarray) -> Column:
    if not isinstance(column, ListColumn):
        return column.take(indices, axis=0)
    starts = column.offsets[indices]
    offsets = np.zeros(len(indices) + 1, np.int64)
    np.cumsum(column.offsets[indices + 1] - starts, out=offsets[1:])
    values = np.empty(offsets[-1], column.values.dtype)
    kernels.copy_lists(column.values, starts, offsets, values)
    return ListColumn(offsets, values)


def _weights(name: str, weights: Form, ids: Form) -> np.ndarray:
    """The weights of the ids that are present, one after the other."""
    # Before absent ids are taken out, whose weights go with them.
    if len(weights.values) != len(ids.values) or not np.array_equal(weights.bounds, ids.bounds):
        raise DatasetError(f"weights of {name!r} must have the form and lengths of its ids, example by example")
    if weights.is_text or weights.values.dtype.kind != "f":
        raise ValueError(f"weights of {name!r} must be floats, but are {getattr(weights.values, 'dtype', 'texts')}")
    return _plain(_present(weights._replace(present=ids.present)).values, np.float32)
