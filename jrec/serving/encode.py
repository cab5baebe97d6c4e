"""From raw columns, or a dataset's, to what an exported model looks up."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data.blocks import WEIGHT_SUFFIX, ListColumn
from jrec.data.vocabulary import Vocabulary
from jrec.serving.arrays import loaded
from jrec.serving.format import ExportError, Feature, keys_file
from jrec.serving.ids import Ids


def model_inputs(
    columns: Mapping[str, Any],
    dense: Sequence[str],
    features: Sequence[Feature],
    orders: Mapping[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[str, Ids]]:
    """Dense features, (examples, num_dense) float32, and ids by feature.

    Args:
      columns: As a dataset's blocks have them (``jrec.data.blocks``): numbers, row numbers, lists of these.
      dense: Names of the dense features in the model's order.
      features: The categorical ones.
      orders: By table that was reordered, the model's row of each of the dataset's.
    """
    first = next(iter(columns.values()))
    count = len(first.offsets) - 1 if isinstance(first, ListColumn) else len(first)
    numbers = np.empty((count, len(dense)), np.float32)
    for place, name in enumerate(dense):
        numbers[:, place] = columns[name]
    ids = {}
    for feature in features:
        column, weights = columns[feature.name], columns.get(feature.name + WEIGHT_SUFFIX)
        ids[feature.name] = _ids(column, weights, feature, (orders or {}).get(feature.table))
    return numbers, ids


def rows_of_keys(folder: pathlib.Path, table: str, rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from (n,) uint64 keys of a table that grows to (n,) uint32 rows, as of an export or a delta.

    Raises:
      ExportError: If the file of its keys cannot be read, or has none or more of them than ``rows``.
    """
    path = folder / keys_file(table)
    keys = loaded(path, np.uint64, (None,))
    if not 1 <= keys.size <= rows:
        raise ExportError(f"{path} has {keys.size:,} keys, but table {table!r} has {rows:,} rows; export the run again")
    return Vocabulary(keys, np.empty(0, np.int64), oov_row=0).encoder()


def _ids(column: Any, weights: Any, feature: Feature, order: np.ndarray | None) -> Ids:
    def rows(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values if order is None else order[values], np.int32)

    if not isinstance(column, ListColumn):
        return Ids(values=rows(column)[:, None])
    begin, end = int(column.offsets[0]), int(column.offsets[-1])
    of_weights = None
    if feature.weighted:
        values = weights.values if isinstance(weights, ListColumn) else weights
        of_weights = np.ascontiguousarray(values[begin:end], np.float32)
    offsets = (column.offsets - begin).astype(np.int32)
    return Ids(values=rows(column.values[begin:end]), offsets=offsets, weights=of_weights)
