"""Counting a dataset: exactly, from the counts that preparation left or by reading all, or from a sample of blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np

from jrec.access.profile import AccessProfile, ProfileError, TableProfile
from jrec.data.schema import DatasetError, Schema
from jrec.progress import Progress

_SILENT = Progress(show=False)
_PENDING = 1 << 22  # ids gathered before they are counted

Block = tuple[int, int]
"""The number of a shard in its split, and of a block in the shard."""


def exact_profile(
    folder: str | os.PathLike[str],
    schema: Schema | None = None,
    *,
    split: str = "train",
    progress: Progress = _SILENT,
) -> AccessProfile:
    """Counts every access of a split.

    Of the training split it takes the counts that the dataset holds, where it holds them for all tables. Which row of a
    table that grows a value will have is not known: all its rows share the accesses equally.

    Args:
      folder: The dataset's folder.
      schema: Its description, with the rows that a run gives to tables that grow (``Schema.with_capacities``); None
        reads and checks it.
      split: The split to count.
      progress: Shows how far the counting is.

    Raises:
      DatasetError: If the split is missing or empty, or counts do not fit the schema.
    """
    schema = Schema.load(folder) if schema is None else schema
    examples = _examples(schema, split)
    stored = [(t, t.counts) for t in schema.tables]
    if split != "train" or any(counts is None for _, counts in stored):
        tables = count_blocks(folder, schema, split, split_blocks(schema, split), progress=progress)
        growing = f"; rows of {', '.join(sorted(schema.growing))}, which grow, all alike" if schema.growing else ""
        source = f"exact, {examples:,} examples of split {split}{growing}"
        return AccessProfile(tables=tables, examples=examples, source=source, dataset=schema.identity)
    tables = []
    with progress.stage("reading counts", len(stored)) as advance:
        for done, (table, file) in enumerate(stored, start=1):
            path = schema.check_file(folder, str(file))
            try:
                counts = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DatasetError(f"{path} cannot be read ({error}); prepare the dataset again") from error
            if counts.shape != (table.rows,):
                raise DatasetError(
                    f"{path} holds counts of shape {counts.shape}, but table {table.name!r} has {table.rows:,} rows;"
                    " prepare the dataset again"
                )
            tables.append(TableProfile.from_counts(table.name, counts))
            advance(done)
    return AccessProfile(
        tables=tuple(tables),
        examples=examples,
        source=f"exact, {examples:,} examples, counted in preparation",
        dataset=schema.identity,
    )


def sampled_profile(
    folder: str | os.PathLike[str],
    schema: Schema | None = None,
    *,
    fraction: float = 0.05,
    split: str = "train",
    seed: int = 0,
    smooth: bool = True,
    progress: Progress = _SILENT,
) -> AccessProfile:
    """Counts a random sample of a split's blocks and reads no others.

    Args:
      folder: The dataset's folder.
      schema: Its description; None reads and checks it.
      fraction: The share of the blocks to read, above 0 up to 1; at least one block is read.
      split: The split to count.
      seed: The seed of the sample.
      smooth: Average the counts of rarely sampled rows, see ``TableProfile.smoothed``.
      progress: Shows how far the counting is.

    Raises:
      DatasetError: If the split is missing or empty.
      ProfileError: On a fraction out of range.
    """
    schema = Schema.load(folder) if schema is None else schema
    schema.check_numbered("a sample counts the accesses of single rows", remedy="use exact_profile")
    total = _examples(schema, split)
    sample = sample_blocks(schema, split, fraction=fraction, seed=seed)
    examples = sum(block_examples(schema, split, block) for block in sample)
    smooth = smooth and examples < total
    tables = count_blocks(folder, schema, split, sample, smooth=smooth, progress=progress)
    return AccessProfile(
        tables=tables,
        examples=examples,
        source=f"sampled, {examples:,} of {total:,} examples of split {split}, seed {seed}",
        dataset=schema.identity,
    )


def _examples(schema: Schema, split: str) -> int:
    if split not in schema.splits:
        raise DatasetError(f"dataset {schema.name!r} has no split {split!r}; it has {', '.join(schema.splits)}")
    if not schema.splits[split].examples:
        raise DatasetError(f"split {split!r} of dataset {schema.name!r} is empty; prepare it with another --split")
    return schema.splits[split].examples


def split_blocks(schema: Schema, split: str) -> list[Block]:
    """All blocks of a split, in order of time."""
    return [
        (number, block)
        for number, shard in enumerate(schema.splits[split].shards)
        for block in range(math.ceil(shard.examples / schema.block_size))
    ]


def sample_blocks(schema: Schema, split: str, *, fraction: float, seed: int) -> list[Block]:
    """A random share of a split's blocks, at least one, in order of time.

    Raises:
      DatasetError: If the split is missing or empty.
      ProfileError: On a fraction out of range.
    """
    if not 0 < fraction <= 1:
        raise ProfileError(f"the sampled fraction is {fraction}; give one above 0, up to 1")
    _examples(schema, split)
    blocks = split_blocks(schema, split)
    # Whole blocks: reading one is reading all of it. Of a log in order of time they are moments, spread over all of it.
    chosen = np.random.default_rng(seed).permutation(len(blocks))[: max(1, round(fraction * len(blocks)))]
    return [blocks[i] for i in sorted(chosen)]


def block_examples(schema: Schema, split: str, block: Block) -> int:
    """How many examples a block holds."""
    size = schema.block_size
    return min(size, schema.splits[split].shards[block[0]].examples - block[1] * size)


def count_blocks(
    folder: str | os.PathLike[str],
    schema: Schema,
    split: str,
    blocks: Sequence[Block],
    *,
    smooth: bool = False,
    progress: Progress = _SILENT,
) -> tuple[TableProfile, ...]:
    """The accesses of every table in some blocks of a split, smoothed if asked for; no others are read.

    All rows of a table that grows have the same.
    """
    from jrec.data.blocks import ListColumn, ShardReader

    readers = [ShardReader(folder, shard) for shard in schema.splits[split].shards]
    counters = {t.name: SparseCounter() for t in schema.tables if not t.growing}
    keys = dict.fromkeys(schema.growing, 0)  # how many of each table that grows
    with progress.stage(f"counting {split}", len(blocks)) as advance:
        for done, (shard, block) in enumerate(blocks, start=1):
            columns = readers[shard].read(block)
            for feature in schema.categorical:
                if feature.name not in columns:
                    raise DatasetError(f"block {block} of {readers[shard].path} has no column {feature.name}")
                column = columns[feature.name]
                ids = column.values if isinstance(column, ListColumn) else column
                if feature.table in keys:
                    keys[feature.table] += ids.size
                else:
                    counters[feature.table].add(ids)
            advance(done)
    of_rows = TableProfile.smoothed_from_sparse if smooth else TableProfile.from_sparse
    return tuple(
        TableProfile.uniform(t.name, t.rows, keys[t.name])
        if t.growing
        else of_rows(t.name, t.rows, *counters[t.name].counts())
        for t in schema.tables
    )


class SparseCounter:
    """Counts of the ids it is given, in memory that grows with the number of distinct ones."""

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def add(self, ids: np.ndarray) -> None:
        """Counts (n,) ids."""
        self._pending.append(ids)
        self._waiting += ids.size
        # A merge costs as much as there are distinct ids: with at least as many new ones, few merges are enough.
        if self._waiting >= max(_PENDING, len(self._ids)):
            self._merge()

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids, ascending, and how often each was given, int64 both."""
        self._merge()
        return self._ids, self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        ids, counts = _count(np.concatenate(self._pending))
        self._pending, self._waiting = [], 0
        if not len(self._ids):
            self._ids, self._counts = ids, counts
            return
        merged, place = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        total = np.zeros(len(merged), np.int64)
        total[place[: len(self._ids)]] = self._counts
        np.add.at(total, place[len(self._ids) :], counts)
        self._ids, self._counts = merged, total


def _count(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, ascending, and their counts, int64 both."""
    if ids.dtype in (np.uint8, np.uint16):  # a small table: counting beats sorting
        dense = np.bincount(ids)
        rows = np.flatnonzero(dense)
        return rows, dense[rows]
    rows, counts = np.unique(ids, return_counts=True)
    return rows.astype(np.int64), counts
