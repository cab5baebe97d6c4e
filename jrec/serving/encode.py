"""From raw columns, a dataset's, or row numbers to what an exported model looks up."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from jrec.data.blocks import WEIGHT_SUFFIX, ListColumn
from jrec.data.column_forms import by_name, form_of
from jrec.data.columns import count_examples, matrix
from jrec.data.keys import value_keys
from jrec.data.schema import DatasetError
from jrec.data.unknown import UnknownValues
from jrec.data.vocabulary import Vocabulary
from jrec.data.vocabulary_file import table_values
from jrec.prepare.encoder import Encoder
from jrec.serving.arrays import loaded
from jrec.serving.candidates import CANDIDATES
from jrec.serving.checks import MAX_ROWS, load_keying, load_schema
from jrec.serving.format import IDS, ITEMS, ExportError, Feature, Manifest, keys_file
from jrec.serving.ids import Ids

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.ops.layout import Pooling

RowsOfKeys = Callable[[np.ndarray], np.ndarray]
"""From (n,) uint64 keys to (n,) integer rows."""


class Column(NamedTuple):
    """What a column of a request holds: a datatype of KServe's V2 protocol, and 2 axes where values are lists."""

    datatype: str
    axes: int


class RawValues:
    """Inputs of a model whose export has a schema: of raw columns, as the dataset's log has them.

    Attributes:
      growing: The tables that grow.
      unknown: Counts the values that training did not see.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest):
        schema = load_schema(folder, manifest)
        self.growing = sorted(schema.growing & manifest.tables.keys())
        self._manifest, self._encoder = manifest, Encoder(schema)
        self.unknown = UnknownValues(schema, dict.fromkeys(self.growing))

    def with_keys(self, keys: Mapping[str, RowsOfKeys]) -> RawValues:
        """The same with these rows of tables that grow."""
        other = copy.copy(self)
        # A copy: requests that are being encoded keep the rows of their version. Unknown values have one count.
        other._encoder = self._encoder.with_growing(keys)
        return other

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The names of the columns that ``inputs`` needs."""
        return self._encoder.raw_columns

    @property
    def columns(self) -> dict[str, Column]:
        """What each of the ``raw_columns`` holds."""
        return {
            name: Column(
                "BYTES" if kind in ("text", "texts", "hex", "time") else "FP32", 1 + (kind in ("texts", "weights"))
            )
            for name, kind in self._encoder.column_kinds.items()
        }

    def warm_up(self) -> None:
        """Reads the vocabularies."""
        self._encoder.load_tables()

    def inputs(self, columns: object) -> tuple[np.ndarray, dict[str, Ids]]:
        """Dense features, (examples, num_dense) float32, and ids by feature."""
        encoded = self._encoder.columns(columns, unknown=self.unknown).by_name()
        return model_inputs(encoded, self._manifest, self._encoder.orders)

    def candidates(self, columns: object, table: str) -> ListColumn | None:
        """Rows of a table, by example of the values that a request names; None where it names none."""
        return self._encoder.named_rows(columns, CANDIDATES, table, unknown=self.unknown)


class RowNumbers:
    """Inputs of a model whose export has no schema: columns hold row numbers, of tables that grow their values."""

    unknown = None

    def __init__(self, folder: pathlib.Path, manifest: Manifest):
        from jrec.ops.layout import FeatureConfig  # imports JAX

        self._keying = load_keying(folder, manifest)
        self.growing = sorted(self._keying)
        self._manifest, self._vocabularies = manifest, {}
        self._features = [
            FeatureConfig(
                name=f.name,
                table=f.table,
                max_length=f.max_length,
                pooling=cast("Pooling", f.pooling),
                weighted=f.weighted,
            )
            for f in manifest.features
        ]

    def with_keys(self, keys: Mapping[str, RowsOfKeys]) -> RowNumbers:
        """The same with these rows of tables that grow."""
        other = copy.copy(self)
        other._vocabularies = {name: _GrownRows(of_keys, *self._keying[name]) for name, of_keys in keys.items()}
        return other

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The names of the columns that ``inputs`` needs."""
        from jrec.data.packing_columns import needed_columns

        return tuple(needed_columns(self._manifest.dense, self._features))

    @property
    def columns(self) -> dict[str, Column]:
        """What each of the ``raw_columns`` holds."""
        held = {name: Column("FP32", 1 + (name in self._manifest.widths)) for name in self._manifest.dense}
        for feature in self._features:
            axes = 1 + (feature.max_length > 1)
            held[feature.name] = Column("BYTES" if feature.table in self.growing else "INT64", axes)
            if feature.weighted:
                held[feature.name + WEIGHT_SUFFIX] = Column("FP32", axes)
        return held

    def warm_up(self) -> None:
        """Reads nothing: rows of keys are there."""

    def candidates(self, columns: object, table: str) -> ListColumn | None:
        """Rows of a table, by example of the row numbers that a request names, -1 of others; None if it names none."""
        if CANDIDATES in self.raw_columns or (column := by_name(columns).get(CANDIDATES)) is None:
            return None
        form = form_of(CANDIDATES, column)
        if form.offsets is None or form.is_text or form.values.dtype.kind not in "iu":
            raise DatasetError(f"column {CANDIDATES!r} must hold lists of row numbers of table {table!r}")
        most = sum(part.rows for part in self._manifest.tables[table])
        known = (form.values >= 0) & (form.values < most)
        # int64 first: unsigned integers have no -1, and a number of 64 bits beyond the table is none of its rows.
        return ListColumn(form.bounds, np.where(known, np.where(known, form.values, 0).astype(np.int64), -1))

    def inputs(self, columns: object) -> tuple[np.ndarray, dict[str, Ids]]:
        """Dense features, (examples, num_dense) float32, and ids by feature, in any form that ``pack_batch`` takes."""
        from jrec.data.packing_columns import prepare_columns, read_columns
        from jrec.data.value_rows import ValueRows

        read = read_columns(columns, numbers=self._manifest.dense, features=self._features)
        for feature in self._features:
            if read.forms[feature.name].is_text and feature.table not in self._vocabularies:
                raise DatasetError(
                    f"{feature.name!r} holds texts, but the model was exported without a schema: give the numbers of"
                    f" rows of table {feature.table!r}, or export it with one"
                )
        prepared = prepare_columns(
            read,
            numbers=self._manifest.dense,
            features=self._features,
            values=ValueRows(vocabularies=self._vocabularies),
        )
        numbers = _side_by_side(prepared.numbers, prepared.examples, self._manifest)
        ids = {}
        for name, column in prepared.ids.items():  # of any size: whether they are rows is checked as they are looked up
            if isinstance(column, ListColumn):
                begin, end = int(column.offsets[0]), int(column.offsets[-1])
                weights = prepared.weights.get(name)
                ids[name] = Ids(
                    values=np.array(column.values[begin:end]),
                    offsets=column.offsets - begin,
                    weights=None if weights is None else np.array(weights[begin:end]),
                )
            else:
                ids[name] = Ids(values=np.array(column)[:, None])
        return numbers, ids


@dataclasses.dataclass(frozen=True)
class _GrownRows:
    """The vocabulary of a table that grows, as of an export or a delta."""

    rows_of_keys: RowsOfKeys
    key_seed: int
    canonical: bool
    oov_row: int | None = 0
    complete: bool = True

    def rows(self, values: object) -> np.ndarray:
        """(n,) int64 rows of integers or texts, 0 for those without one."""
        return self.rows_of_keys(value_keys(values, self.key_seed, canonical=self.canonical)).astype(np.int64)


def encoder_of(folder: pathlib.Path, manifest: Manifest) -> RawValues | RowNumbers:
    """What turns the columns of requests into inputs of a whole export's model, without the keys of growing tables.

    Raises:
      DatasetError: If its schema is damaged.
      ExportError: If its schema is not the manifest's, or its ``ids.json`` is damaged.
    """
    return RowNumbers(folder, manifest) if IDS in manifest.files else RawValues(folder, manifest)


def model_inputs(
    columns: Mapping[str, np.ndarray | ListColumn], manifest: Manifest, orders: Mapping[str, np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, Ids]]:
    """Dense features, (examples, num_dense) float32, and ids by feature.

    Args:
      columns: Columns in the form of a dataset's blocks (``jrec.data.blocks``): numbers, row numbers, lists of these. A
        list of a dense feature has zeros behind its end.
      manifest: What the model takes.
      orders: By table that was reordered, the model's row of each of the dataset's.
    """
    count = count_examples(next(iter(columns.values())))
    wide = {name: matrix(columns[name], count, width, absent=0) for name, width in manifest.widths.items()}
    numbers = _side_by_side({**columns, **wide}, count, manifest)
    ids = {}
    for feature in manifest.features:
        column, weights = columns[feature.name], columns.get(feature.name + WEIGHT_SUFFIX)
        ids[feature.name] = _ids(column, weights, feature, (orders or {}).get(feature.table))
    return numbers, ids


def _side_by_side(columns: Mapping[str, Any], examples: int, manifest: Manifest) -> np.ndarray:
    """(examples, num_dense) float32: dense features in the model's order, (examples,) or (examples, width) each.

    Raises:
      ValueError: If one has another width than the model takes.
    """
    numbers, stop = np.empty((examples, len(manifest.dense_columns)), np.float32), 0
    for name in manifest.dense:
        column, width = columns[name], manifest.widths.get(name, 1)
        start, stop = stop, stop + width
        if width == 1 == column.ndim:
            numbers[:, start] = column
        elif column.shape == (examples, width):
            numbers[:, start:stop] = column
        else:
            raise ValueError(f"{name!r} is {list(column.shape)}, but the model takes {[examples, width]}")
    return numbers


def rows_of_keys(folder: pathlib.Path, table: str, rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from (n,) uint64 keys of a table that grows to (n,) uint32 rows, as of an export or a delta.

    Raises:
      ExportError: If the file of its keys cannot be read, or has none or more of them than ``rows``.
    """
    path = folder / keys_file(table)
    keys = loaded(path, np.uint64, (None,))
    if not 1 <= keys.size <= rows:
        raise ExportError(f"{path} has {keys.size:,} keys, but table {table!r} has {rows:,} rows; export the run again")
    return Vocabulary(keys, oov_row=0).encoder()


def item_values(folder: pathlib.Path, manifest: Manifest, table: str) -> pa.Array | None:
    """The values of a table's rows, texts, by an export's vocabulary; None where it has none.

    Raises:
      DatasetError: If the vocabulary is damaged.
    """
    if IDS in manifest.files:
        return None
    schema = load_schema(folder, manifest)
    return table_values(folder, schema, schema.table(table))


def item_rows(folder: pathlib.Path, manifest: Manifest, values: pa.Array | None) -> np.ndarray:
    """(items,) int64, ascending: the rows of the items that an export's vectors are of.

    Args:
      folder: The export's folder.
      manifest: Its manifest, with a ``retrieval``.
      values: The values of all rows of the items' table (``item_values``).

    Raises:
      ExportError: If the file cannot be read, or does not hold such rows.
    """
    path, retrieval = folder / ITEMS, manifest.retrieval
    assert retrieval is not None
    count = sum(part.rows for part in manifest.tables[retrieval.table])
    rows = loaded(path, np.int64, (count,))
    most = MAX_ROWS if values is None else len(values)
    if rows[0] < 0 or rows[-1] >= most or (rows[1:] <= rows[:-1]).any():
        raise ExportError(
            f"{path} does not hold ascending rows of table {retrieval.items!r} below {most:,}; export the run again"
        )
    return rows


def _ids(
    column: np.ndarray | ListColumn, weights: np.ndarray | ListColumn | None, feature: Feature, order: np.ndarray | None
) -> Ids:
    def rows(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values if order is None else order[values], np.int32)

    if not isinstance(column, ListColumn):
        return Ids(values=rows(column)[:, None])
    begin, end = int(column.offsets[0]), int(column.offsets[-1])
    of_weights = None
    if feature.weighted:
        assert weights is not None  # the encoder gave them
        values = weights.values if isinstance(weights, ListColumn) else weights
        of_weights = np.ascontiguousarray(values[begin:end], np.float32)
    offsets = (column.offsets - begin).astype(np.int32)
    return Ids(values=rows(column.values[begin:end]), offsets=offsets, weights=of_weights)
