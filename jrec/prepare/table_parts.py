"""The second pass of preparation, a table at a time: counts its keys and writes the row numbers of all its accesses."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

from jrec.data import blocks
from jrec.data.schema import Table
from jrec.data.texts import TextStore
from jrec.data.vocabulary import HashedTable, KeyTable, build_table, count_keys
from jrec.data.vocabulary_file import save_table
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.spill import PlainColumn, SpilledLists
from jrec.prepare.vocabulary_from import EarlierDataset, Usage

_READ_ROWS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePart:
    """What one table's features have in the log.

    Attributes:
      name: The table.
      features: Its features.
      columns: Their keys.
      paths: Where their row numbers go.
      rows: How many examples there are.
      train_rows: How many of them are for training.
      min_count: The table's own ``min_count``; None for the options'.
    """

    name: str
    features: tuple[str, ...]
    columns: tuple[PlainColumn | SpilledLists, ...]
    paths: tuple[pathlib.Path, ...]
    rows: int
    train_rows: int
    min_count: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A table's entry in the schema, row numbers by feature, and how it was made.

    Attributes:
      usage: How the earlier dataset's table is used, if there is one.
      hashed: Whether it is capped by hashing.
    """

    table: Table
    ids: dict[str, PlainColumn]
    usage: Usage | None
    hashed: bool


def encode_table(
    part: TablePart,
    folder: pathlib.Path,
    options: PrepareOptions,
    growing: bool,
    earlier: EarlierDataset | None,
    texts: TextStore | None,
    key_seed: int,
    remove: bool,
) -> Encoded:
    """Builds a table, or takes it from the earlier dataset, and replaces keys by row numbers.

    Args:
      part: The table and its keys.
      folder: The dataset.
      options: How to build it.
      growing: Whether it grows.
      earlier: The dataset that it comes from, if any.
      texts: Its long texts.
      key_seed: The seed of their hashes.
      remove: Whether to delete a feature's keys once they are encoded; False where this may be done again.
    """
    usage = None
    if earlier is not None:
        built = earlier.table(part.name)
        usage = Usage(built)
    else:

        def trained_keys() -> Iterator[np.ndarray]:
            return (chunk for column in part.columns for chunk in _keys(column, part.train_rows))

        if growing:
            built = count_keys(trained_keys)
        else:
            # A cross may have its own: most of its pairs are rare.
            min_count = options.min_count if part.min_count is None else part.min_count
            built = build_table(part.name, trained_keys, min_count=min_count, max_rows=options.max_rows)
    encode, ids = built.encoder(), {}
    dtype = np.dtype(np.uint64) if isinstance(built, KeyTable) else blocks.id_dtype(built.rows)
    for feature, column, path in zip(part.features, part.columns, part.paths, strict=True):
        ids[feature] = encoded = PlainColumn(path, dtype)
        trained = _values(column, part.train_rows)
        for chunk in _keys(column, part.rows):
            rows = encode(chunk)
            if usage is not None:
                # The first ``trained`` values of the column are training's, of which these are what is left in this
                # piece.
                usage.add(rows, rows[: max(trained - encoded.rows, 0)])
            encoded.append(rows)
        encoded.finish()
        if remove:
            (column.values if isinstance(column, SpilledLists) else column).remove()
    if earlier is not None and usage is not None:
        table = earlier.save_table(folder, part.name, usage.counts)
    else:
        table = save_table(folder, part.name, built, texts, key_seed=key_seed)
    return Encoded(table=table, ids=ids, usage=usage, hashed=earlier is None and isinstance(built, HashedTable))


def _values(column: PlainColumn | SpilledLists, rows: int) -> int:
    """How many keys the first ``rows`` examples have."""
    return int(column.ends.read(rows, rows + 1)[0]) if isinstance(column, SpilledLists) else rows


def _keys(column: PlainColumn | SpilledLists, rows: int) -> Iterator[np.ndarray]:
    """All keys of the first ``rows`` examples."""
    values, stop = column.values if isinstance(column, SpilledLists) else column, _values(column, rows)
    for start in range(0, stop, _READ_ROWS):
        yield values.read(start, min(start + _READ_ROWS, stop))
