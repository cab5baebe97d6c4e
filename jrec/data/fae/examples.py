"""Hot examples told from cold ones, and a checksum of examples that does not depend on their order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jrec.data.blocks import LABEL, ShardReader, label_columns, weight_column
from jrec.data.columns import Column, ListColumn, concatenate, count_examples
from jrec.data.schema import DatasetError, Schema, Table
from jrec.kernel_cache import compiled

Columns = Mapping[str, Column]


def row_set(table: Table, rows: np.ndarray) -> np.ndarray:
    """Some rows of a table, (n,) uint32, as a bitmap of uint64 words; of size 0 where all rows are in it."""
    words = np.zeros(0 if len(rows) == table.rows else -(-table.rows // 64), np.uint64)
    if words.size:
        np.bitwise_or.at(words, rows >> 6, np.uint64(1) << (rows & 63).astype(np.uint64))
    return words


def read_blocks(reader: ShardReader, schema: Schema, start: int, stop: int) -> dict[str, Column]:
    """The columns of blocks ``start`` to ``stop`` of a shard, one block after the other, writeable.

    Raises:
      DatasetError: If a block cannot be read, has other columns than the schema says, or an id past its table.
    """
    blocks = []
    for block in range(start, stop):
        blocks.append(reader.read(block))
        examples = min(schema.block_size, reader.shard.examples - block * schema.block_size)
        _check(blocks[-1], schema, examples, f"block {block} of {reader.path}")
    return {name: concatenate([columns[name] for columns in blocks]) for name in _kinds(schema)}


def hot_examples(columns: Columns, schema: Schema, sets: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which examples read only rows of the sets, (examples,) bool.

    Args:
      columns: From ``read_blocks``.
      schema: Their description.
      sets: By table, the ``row_set`` of its hot rows as they are stored.
    """
    hot = np.ones(count_examples(columns[LABEL]), bool)
    for feature in schema.categorical:
        column, words = columns[feature.name], sets[feature.table]
        if not words.size:
            continue
        if not isinstance(column, ListColumn):
            _mark(column.astype(np.uint32), words, hot)
            continue
        inside = np.ones(len(column.values), bool)
        _mark(column.values.astype(np.uint32), words, inside)
        # One cold value makes the example cold. From the right, past empty lists, which have no value to be cold.
        hot[np.searchsorted(column.offsets, np.flatnonzero(~inside), "right") - 1] = False
    return hot


def content(columns: Columns, schema: Schema) -> int:
    """The sum of the hashes of all examples, modulo 2^64: the same in every order of the examples.

    Raises:
      DatasetError: If columns have unequal lengths.
    """
    state = np.zeros(count_examples(columns[LABEL]), np.uint64)
    for name, (kind, _) in _kinds(schema).items():
        column = columns[name]
        if count_examples(column) != len(state):
            raise DatasetError(f"column {name!r} has {count_examples(column):,} examples, not {len(state):,}")
        values = column.values if isinstance(column, ListColumn) else column
        bits = values.view(np.uint32) if kind == "f" else values.astype(np.uint32)
        if isinstance(column, ListColumn):
            _absorb_lists(column.offsets.astype(np.int64), bits, state)
        else:
            _absorb(bits, state)
    return int(_summed(state))


def _kinds(schema: Schema) -> Mapping[str, tuple[str, bool]]:
    """By column, in order: the kind of its elements ("f" or "u", as NumPy's), and whether it holds lists."""
    kinds: dict[str, tuple[str, bool]] = dict.fromkeys(
        (*label_columns(schema), *(f.name for f in schema.dense)), ("f", False)
    )
    for feature in schema.categorical:
        kinds[feature.name] = ("u", not feature.one_hot)
        if (weights := weight_column(feature)) is not None:
            kinds[weights] = ("f", True)
    return kinds


def _check(columns: Columns, schema: Schema, examples: int, place: str) -> None:
    for name, (kind, lists) in _kinds(schema).items():
        if (column := columns.get(name)) is None:
            raise DatasetError(f"{place} has no column {name!r}; the dataset is damaged: prepare it anew")
        values = column.values if isinstance(column, ListColumn) else column
        stored = (values.dtype.kind, isinstance(column, ListColumn), count_examples(column))
        if stored != (kind, lists, examples) or values.dtype == np.float64:
            raise DatasetError(
                f"{place} has {stored[2]:,} {'lists of ' if stored[1] else ''}{values.dtype} in column {name!r}, not"
                f" the {examples:,} {'lists' if lists else 'values'} that the schema promises; prepare the dataset anew"
            )
    for feature in schema.categorical:
        column, rows = columns[feature.name], schema.table(feature.table).rows
        ids = column.values if isinstance(column, ListColumn) else column
        if ids.size and (last := int(ids.max())) >= rows:
            at = int(ids.argmax())
            at = int(np.searchsorted(column.offsets, at, "right")) - 1 if isinstance(column, ListColumn) else at
            raise DatasetError(
                f"{place}, example {at}: feature {feature.name!r} has id {last:,}, but table {feature.table!r} has"
                f" {rows:,} rows; prepare the dataset anew"
            )


# Numba kernels; they release the GIL. Compiled for writeable arrays, ids and bits in uint32, and nothing else.


@compiled
def _mark(ids, words, inside):
    """Takes ``inside[i]`` from ids that are not in the bitmap."""
    for i in range(ids.size):
        if (words[ids[i] >> 6] >> np.uint64(ids[i] & 63)) & np.uint64(1) == 0:
            inside[i] = False


@compiled
def _step(state, value):
    state = (state ^ value) * np.uint64(0x9E3779B97F4A7C15)
    return state ^ (state >> np.uint64(29))


@compiled
def _absorb(values, state):
    """Lets the hash of every example depend on a column of one value each."""
    for i in range(values.size):
        state[i] = _step(state[i], np.uint64(values[i]))


@compiled
def _absorb_lists(offsets, values, state):
    """As ``_absorb`` for lists, whose lengths count too."""
    for i in range(offsets.size - 1):
        mixed = _step(state[i], np.uint64(offsets[i + 1] - offsets[i]))
        for j in range(offsets[i], offsets[i + 1]):
            mixed = _step(mixed, np.uint64(values[j]))
        state[i] = mixed


@compiled
def _summed(state):
    total = np.uint64(0)
    for h in state:
        z = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(31))
    return total
