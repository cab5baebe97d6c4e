"""The items that two towers rank: every item of the training split, with the features of its last line there.

A run keeps them as ``RUN/catalogue``, so that the training split is read for them once.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from jrec.access.container import read_container, write_container
from jrec.app.baselines.examples import Split
from jrec.app.config import TrainConfig
from jrec.app.models.ranking import ranking_kind
from jrec.app.run_folder import CATALOGUE_FILE
from jrec.data.blocks import weight_column
from jrec.data.columns import Column, ListColumn, concatenate, cut, gather_all
from jrec.data.identity import Identity
from jrec.data.schema import DatasetError, Schema, Table
from jrec.errors import CheckpointError
from jrec.json_values import JsonMapping

_KIND, _VERSION = "jrec-catalogue", 1
_OFFSETS, _VALUES = "offsets of ", "values of "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Items to rank.

    Attributes:
      rows: (items,) int64, ascending: their rows in the item table.
      columns: Their features as a dataset's blocks hold them, of ``items`` examples.
    """

    rows: np.ndarray
    columns: Mapping[str, Column]

    def cut(self, start: int, stop: int) -> dict[str, Column]:
        """The features of the items from ``start`` to ``stop``."""
        return {name: cut(column, start, stop) for name, column in self.columns.items()}


def catalogue_of(
    folder: pathlib.Path, config: TrainConfig, schema: Schema, trained_on: Identity, *, keep: bool = False
) -> Catalogue:
    """The catalogue of a run: as its folder keeps it, or else read from the training data.

    Args:
      folder: The run's folder.
      config: The run's configuration.
      schema: The features that its model reads, of the dataset at hand.
      trained_on: The dataset that the run was trained on.
      keep: Whether to write it to the folder where it is not there.

    Raises:
      CheckpointError: If the folder has no catalogue of this dataset, and the dataset is no longer where it was; or if
        the file is damaged.
      DatasetError: If the dataset cannot be read.
    """
    kind = ranking_kind(config.model)
    header = {**trained_on.digests, "item": list(kind.own(config.model).item)}
    path = folder / CATALOGUE_FILE
    # The file first: the training data may be gone, and ``schema`` may be of another dataset to evaluate on.
    if path.is_file() and (kept := _load(path, header, kind.item_table(config.model, schema).rows)) is not None:
        return kept
    if schema.identity != trained_on:
        schema = _training_data(folder, config, trained_on)
    made = read_catalogue(schema, config)
    if keep:
        write_container(path, kind=_KIND, version=_VERSION, header=header, arrays=_arrays(made))
    return made


def read_catalogue(schema: Schema, config: TrainConfig) -> Catalogue:
    """Reads a training split from its end, for the last line of every item; memory holds one line an item.

    Args:
      schema: The features that the model reads, read from a folder.
      config: The run's configuration.

    Raises:
      DatasetError: If the dataset cannot be read, or has no items to rank.
    """
    kind = ranking_kind(config.model)
    own, table = kind.own(config.model), kind.item_table(config.model, schema)
    if schema.folder is None or "train" not in schema.splits:
        raise DatasetError(f"{schema.folder or schema.name} has no training split, whose items are ranked")
    names = [feature.name for feature in schema.dense if feature.name in own.item]
    for feature in (feature for feature in schema.categorical if feature.name in own.item):
        names += filter(None, [feature.name, weight_column(feature)])
    # Rows whose item was not met yet; that of unknown values stands for no item.
    open_rows = np.ones(table.rows, bool)
    if table.oov_row is not None:
        open_rows[table.oov_row] = False
    split, pieces = Split(schema.folder, schema, "train"), []
    for columns in split.read(reversed(split.blocks)):
        items = np.asarray(columns[own.id])
        # The index is of the first place, which in reversed order is an item's last line of the block.
        rows, from_end = np.unique(items[::-1], return_index=True)
        last = (len(items) - 1 - from_end)[open_rows[rows]]
        open_rows[items[last]] = False
        pieces.append(gather_all({name: columns[name] for name in names}, last))
        if not open_rows.any():
            break
    features = {name: concatenate([piece[name] for piece in pieces]) for name in names} if pieces else {}
    if not features or not len(np.asarray(features[own.id])):
        raise DatasetError(f"the training split of {schema.folder} has no item with a row of its own, to be ranked")
    # In the order of blocks so far; ``Catalogue`` has ascending rows, and ``_faults`` refuses others.
    order = np.argsort(np.asarray(features[own.id]))
    columns = gather_all(features, order)
    return Catalogue(rows=np.asarray(columns[own.id], np.int64), columns=columns)


def training_counts(schema: Schema, table: Table) -> np.ndarray | None:
    """(rows,) int64, how often training reads each row of a table; None where the dataset does not say.

    Raises:
      DatasetError: If the file is damaged.
    """
    if schema.folder is None or table.counts is None:
        return None
    path = schema.check_file(schema.folder, table.counts)
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); copy the dataset again") from error


def _training_data(folder: pathlib.Path, config: TrainConfig, trained_on: Identity) -> Schema:
    """The schema of the run's own dataset, where a run is asked about another one."""
    problem = "it is another dataset now"
    try:
        schema = config.model.of_kind.schema(config.model, Schema.load(trained_on.path))
        if schema.identity == trained_on:
            return schema
    except DatasetError as error:
        problem = str(error)
    raise CheckpointError(
        f"{folder} has no {CATALOGUE_FILE} of the items to rank, which are read from the training data at"
        f" {trained_on.path}: {problem}; put the data there again, or copy the run with its {CATALOGUE_FILE}"
    )


def _arrays(catalogue: Catalogue) -> dict[str, np.ndarray]:
    arrays = {}
    for name, column in catalogue.columns.items():
        if isinstance(column, ListColumn):
            arrays[_OFFSETS + name] = column.offsets
        arrays[_VALUES + name] = column.values if isinstance(column, ListColumn) else column
    return {"rows": catalogue.rows, **arrays}


def _load(path: pathlib.Path, header: JsonMapping, table_rows: int) -> Catalogue | None:
    """What ``catalogue_of`` kept; None of another dataset, or of other features."""
    remedy = "delete it: it is made again from the training data"
    stored, arrays = read_container(path, kind=_KIND, version=_VERSION, error=CheckpointError, remedy=remedy)
    if stored != header:
        return None
    if fault := next(_faults(arrays, table_rows), ""):
        raise CheckpointError(f"{path}: {fault}; {remedy}")
    columns: dict[str, Column] = {}
    for key in (key for key in arrays if key.startswith(_VALUES)):
        name = key.removeprefix(_VALUES)
        offsets = arrays.get(_OFFSETS + name)
        columns[name] = arrays[key] if offsets is None else ListColumn(offsets, arrays[key])
    return Catalogue(rows=arrays["rows"], columns=columns)


def _faults(arrays: Mapping[str, np.ndarray], table_rows: int) -> Iterator[str]:
    """What is wrong with the arrays of a file; each check relies on those before it."""
    rows = arrays.get("rows", np.zeros((0, 0)))
    if rows.dtype != np.int64 or rows.ndim != 1 or not len(rows) or (np.diff(rows) <= 0).any():
        yield "rows are not ascending numbers"
    if rows[0] < 0 or rows[-1] >= table_rows:
        yield f"rows are from {rows[0]:,} to {rows[-1]:,}, of a table of {table_rows:,}"
    for key, array in arrays.items():
        if key != "rows" and (array.ndim != 1 or not key.startswith((_OFFSETS, _VALUES))):
            yield f"array {key!r} is odd"
    for key in (key for key in arrays if key.startswith(_VALUES)):
        offsets = arrays.get(_OFFSETS + key.removeprefix(_VALUES))
        if offsets is None:
            offsets = np.arange(len(rows) + 1)
        ends = (0, len(arrays[key]))
        if len(offsets) != len(rows) + 1 or (offsets[0], offsets[-1]) != ends or (np.diff(offsets) < 0).any():
            yield f"array {key!r} has {len(arrays[key]):,} values, which are not those of {len(rows):,} items"
