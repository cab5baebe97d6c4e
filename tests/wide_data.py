"""Twins of a small dataset whose tables have billions of rows, of which its examples read as many as before."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from jrec.data.blocks import ListColumn, ShardReader, ShardWriter
from jrec.data.schema import Schema, Split

ROWS = 3_000_000_000


def numbers_of(rows: int, *, seed: int) -> np.ndarray:
    """As many ascending row numbers of a wide table, on both sides of 2^31 and up to its last row."""
    found = np.unique(np.random.default_rng(seed).integers(0, ROWS, 2 * rows))
    chosen = np.sort(np.random.default_rng(seed + 1).permutation(found)[:rows])
    chosen[-1] = ROWS - 1
    if rows > 3:
        middle = np.searchsorted(chosen, 2**31)
        chosen[middle - 1 : middle + 1] = 2**31 - 1, 2**31
    return chosen


def widened(source: pathlib.Path, folder: pathlib.Path, numbers: Mapping[str, np.ndarray]) -> Schema:
    """Writes the dataset with other row numbers in some tables.

    Args:
      source: The small dataset.
      folder: Where the twin goes.
      numbers: By table, (rows,) ascending: what becomes of its rows' numbers, in a table of ``ROWS`` rows.
    """
    folder.mkdir()
    schema = Schema.load(source)
    table_of = {feature.name: feature.table for feature in schema.categorical}

    def renumbered(name, column):
        if table_of.get(name) not in numbers:
            return column
        of = numbers[table_of[name]].astype(np.uint32)
        return ListColumn(column.offsets, of[column.values]) if isinstance(column, ListColumn) else of[column]

    splits = {}
    for split, stored in schema.splits.items():
        shards = []
        for shard in stored.shards:
            reader = ShardReader(source, shard)
            with ShardWriter(folder / shard.file, schema.block_size) as writer:
                for block in range(len(reader)):
                    writer.write({name: renumbered(name, column) for name, column in reader.read(block).items()})
            shards.append(writer.shard)
        splits[split] = Split(shards=tuple(shards))
    tables = [
        dataclasses.replace(
            table,
            rows=ROWS,
            oov_row=None if table.oov_row is None else int(numbers[table.name][table.oov_row]),
            numbering="wide",
            counts=None,
            vocabulary=None,
        )
        if table.name in numbers
        else dataclasses.replace(table, counts=None, vocabulary=None)
        for table in schema.tables
    ]
    twin = dataclasses.replace(schema, tables=tuple(tables), splits=splits, files={}, folder=None)
    twin.save(folder)
    return Schema.load(folder)
