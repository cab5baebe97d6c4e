"""Hot rows as the classifier asks for them, and what it does to the columns of a block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrec.data.blocks import LABEL, Column, ListColumn, column_names, id_dtype, weight_column
from jrec.data.columns import count_examples
from jrec.data.fae import kernels
from jrec.data.schema import CategoricalFeature, DatasetError, Schema

_NO_ROWS = np.empty(0, np.uint32)
_NO_ROWS.flags.writeable = False


def sealed(array: np.ndarray) -> np.ndarray:
    """Read-only, as the columns of blocks are: numba compiles a kernel once for each."""
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """Some rows of a table: a bitmap with ranks, 3/16 bytes a row of the table (36 MB for 188 M rows).

    Attributes:
      rows: How many rows the table has.
      size: How many rows the set has.
      words, ranks: The bitmap and its ranks (``jrec.data.fae.kernels``), empty where all rows are in the set.
      order: The row in place of every stored id; empty where ids are rows.
    """

    rows: int
    size: int
    words: np.ndarray
    ranks: np.ndarray
    order: np.ndarray

    @staticmethod
    def of(table_rows: int, members: np.ndarray, order: np.ndarray | None = None) -> RowSet:
        """From ascending uint32 rows, in the numbers that ``order``, if any, gives to stored ids."""
        count = 0 if len(members) == table_rows else -(-table_rows // 64)
        words, ranks = np.zeros(count, np.uint64), np.zeros(count, np.uint32)
        if count:
            kernels.fill_set(members, words, ranks)
        return RowSet(
            rows=table_rows,
            size=len(members),
            words=sealed(words),
            ranks=sealed(ranks),
            order=_NO_ROWS if order is None else order,
        )

    @property
    def dtype(self) -> np.dtype:
        """The integers that hold places in the set."""
        return id_dtype(max(self.size, 1))


def hot_examples(
    columns: Mapping[str, Column], features: Sequence[CategoricalFeature], sets: Mapping[str, RowSet], place: str
) -> np.ndarray:
    """Which examples read only rows of the sets: (examples,) bool.

    Args:
      columns: A block's columns, see ``check_columns``.
      features: The categorical features.
      sets: The sets of hot rows, by table.
      place: The name of the block, for errors.

    Raises:
      DatasetError: On an id past its table.
    """
    hot = np.ones(len(_plain(columns[LABEL])), bool)
    for feature in features:
        rows, column = sets[feature.table], columns[feature.name]
        fault = np.array([kernels.NO_FAULT, 0])
        if isinstance(column, ListColumn):
            kernels.mark_lists(column.offsets, column.values, rows.rows, rows.order, rows.words, hot, fault)
        else:
            kernels.mark_ids(column, rows.rows, rows.order, rows.words, hot, fault)
        if fault[0] != kernels.NO_FAULT:
            raise DatasetError(
                f"{place}, example {fault[0]}: feature {feature.name!r} has id {fault[1]:,}, but table"
                f" {feature.table!r} has {rows.rows:,} rows; prepare the dataset anew"
            )
    return hot


def take(
    columns: Mapping[str, Column], positions: np.ndarray, schema: Schema, sets: Mapping[str, RowSet] | None
) -> dict[str, Column]:
    """The examples at ``positions``; ids become places in the ``sets`` if there are any, as is right for hot ones."""

    def values(column: np.ndarray, at: np.ndarray) -> np.ndarray:
        bits = _bits(column)
        out = np.empty(len(at), bits.dtype)
        kernels.take(sealed(bits), at, out)
        return out.view(column.dtype)

    taken: dict[str, Column] = {name: values(_plain(columns[name]), positions) for name in _numbers(schema)}
    for feature in schema.categorical:
        ids = values if sets is None else functools.partial(_places, sets[feature.table])
        column, weights = columns[feature.name], weight_column(feature)
        if isinstance(column, ListColumn):
            offsets, at = _list_positions(column.offsets, positions)
            taken[feature.name] = ListColumn(offsets, ids(column.values, at))
            if weights:
                taken[weights] = ListColumn(offsets, values(_lists(columns[weights]).values, at))
        else:
            taken[feature.name] = ids(column, positions)
    return taken


def _places(rows: RowSet, column: np.ndarray, at: np.ndarray) -> np.ndarray:
    out = np.empty(len(at), np.uint32)
    kernels.take_hot(sealed(column), at, rows.order, rows.words, rows.ranks, out)
    return out.astype(rows.dtype)


def content(
    columns: Mapping[str, Column], schema: Schema, rows_of: Callable[[str], np.ndarray | None], place: str
) -> int:
    """The sum of the hashes of all examples, whatever their order.

    Args:
      columns: A block's columns.
      schema: Names the columns, in order.
      rows_of: By table, the row that an id stands for, (ids,) uint32; None where the id is the row.
      place: The name of the block, for errors.

    Raises:
      DatasetError: On an id that stands for no row, or columns of unequal lengths.
    """
    state = np.zeros(len(_plain(columns[LABEL])), np.uint64)
    if any(count_examples(columns[name]) != len(state) for name in column_names(schema)):
        raise DatasetError(f"{place} has columns of unequal lengths; the memory of this machine is at fault")
    for name in _numbers(schema):
        kernels.absorb_bits(sealed(_bits(_plain(columns[name]))), state)
    for feature in schema.categorical:
        rows = rows_of(feature.table)
        rows = _NO_ROWS if rows is None else rows
        fault = np.array([kernels.NO_FAULT, 0])
        column = columns[feature.name]
        if isinstance(column, ListColumn):
            kernels.absorb_lists(column.offsets, column.values, rows, state, fault)
        else:
            kernels.absorb_ids(column, rows, state, fault)
        if fault[0] != kernels.NO_FAULT:
            raise DatasetError(
                f"{place}, example {fault[0]}: feature {feature.name!r} has id {fault[1]:,}, past its table"
            )
        if weights := weight_column(feature):
            lists = _lists(columns[weights])
            kernels.absorb_lists(lists.offsets, sealed(_bits(lists.values)), _NO_ROWS, state, fault)
    return int(kernels.summed(state))


def check_columns(columns: Mapping[str, Column], schema: Schema, examples: int, place: str) -> None:
    """Refuses a block whose columns are not what the schema says.

    Raises:
      DatasetError: Naming the block and the column.
    """
    floats = {*_numbers(schema), *filter(None, map(weight_column, schema.categorical))}
    lists = {n for f in schema.categorical if not f.one_hot for n in (f.name, weight_column(f))}
    for name in column_names(schema):
        column = columns.get(name)
        if column is None:
            problem = f"has no column {name!r}"
        elif isinstance(column, ListColumn) != (name in lists):
            problem = f"has {'no lists' if name in lists else 'lists'} in column {name!r}"
        elif _dtype(column).kind != ("f" if name in floats else "u"):
            problem = f"has {_dtype(column)} in column {name!r}"
        elif (actual := count_examples(column)) != examples:
            problem = f"has {actual:,} examples in column {name!r}, not the {examples:,} that the schema promises"
        else:
            continue
        raise DatasetError(f"{place} {problem}; the dataset is damaged: prepare it anew")
    for feature in schema.categorical:
        if (weights := weight_column(feature)) and not np.array_equal(
            _lists(columns[feature.name]).offsets, _lists(columns[weights]).offsets
        ):
            raise DatasetError(
                f"{place} has another number of weights than of ids of {feature.name!r}; prepare it anew"
            )


def _bits(column: np.ndarray) -> np.ndarray:
    return column.view(np.uint32) if column.dtype == np.float32 else column.view()


def _numbers(schema: Schema) -> list[str]:
    return [LABEL, *(f.name for f in schema.dense)]


def _dtype(column: Column) -> np.dtype:
    return column.values.dtype if isinstance(column, ListColumn) else column.dtype


def _plain(column: Column) -> np.ndarray:
    assert not isinstance(column, ListColumn)  # as check_columns ensured
    return column


def _lists(column: Column) -> ListColumn:
    assert isinstance(column, ListColumn)  # as check_columns ensured
    return column


def _list_positions(offsets: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = int((offsets[positions + 1] - offsets[positions]).sum()) if len(positions) else 0
    ends, at = np.empty(len(positions) + 1, np.int32), np.empty(total, np.int64)
    kernels.list_positions(offsets, positions, ends, at)
    return ends, at
