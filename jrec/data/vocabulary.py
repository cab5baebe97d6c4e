"""From values to rows: vocabularies by frequency, tables capped by hashing, and the encoding of ids."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jrec.data.keys import buckets, count_buckets, mix64
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled

MAX_ROWS = 2**32 - 1
"""Of a table: row numbers are uint32, of which the last one stands for none."""
_HASHING_BYTES = 32  # of memory for each row of a hashed table, at the most: its counts, their order, and both sorted
COUNT_SLOTS = 1 << 22  # 16 bytes each: how large one table's hash table of counts may grow
_PARTITION_BITS = 10
_ONE = np.uint64(1)
_LAST_KEY = np.uint64(2**64 - 1)
_NO_ROW = np.uint32(0xFFFFFFFF)

KeyChunks = Callable[[], Iterable[np.ndarray]]
"""Iterates anew, at every call, the uint64 keys of all accesses to a table in the training split."""


@compiled
def _count(keys, start, table_keys, table_counts, used, limit, partition_bits, partition):
    """Counts keys of one partition from ``start`` on until ``limit`` slots are used; returns (how far, used)."""
    mask = np.uint64(table_keys.shape[0] - 1)
    for i in range(start, keys.shape[0]):
        key = keys[i]
        mixed = mix64(key)
        # By the upper bits, while slots are by the lower: within a partition keys still spread over the whole table.
        if partition_bits > 0 and np.int64(mixed >> np.uint64(64 - partition_bits)) != partition:
            continue
        slot = mixed & mask
        # By the count, since 0 is a key, the missing value's.
        while table_counts[slot] > 0 and table_keys[slot] != key:
            slot = (slot + _ONE) & mask
        if table_counts[slot] == 0:
            if used >= limit:
                return i, used
            table_keys[slot] = key
            used += 1
        table_counts[slot] += 1
    return keys.shape[0], used


@compiled
def _recount(old_keys, old_counts, table_keys, table_counts):
    mask = np.uint64(table_keys.shape[0] - 1)
    for i in range(old_keys.shape[0]):
        if old_counts[i] > 0:
            slot = mix64(old_keys[i]) & mask
            while table_counts[slot] > 0:
                slot = (slot + _ONE) & mask
            table_keys[slot] = old_keys[i]
            table_counts[slot] = old_counts[i]


@compiled
def _fill_index(keys, rows, index_keys, index_rows):
    mask = np.uint64(index_keys.shape[0] - 1)
    for i in range(keys.shape[0]):
        slot = mix64(keys[i]) & mask
        while index_rows[slot] != _NO_ROW:
            slot = (slot + _ONE) & mask
        index_keys[slot] = keys[i]
        index_rows[slot] = rows[i]


@compiled
def _look_up(keys, index_keys, index_rows, oov_row):
    mask = np.uint64(index_keys.shape[0] - 1)
    out = np.empty(keys.shape[0], np.uint32)
    for i in range(keys.shape[0]):
        slot = mix64(keys[i]) & mask
        while index_rows[slot] != _NO_ROW and index_keys[slot] != keys[i]:
            slot = (slot + _ONE) & mask
        row = index_rows[slot]
        out[i] = oov_row if row == _NO_ROW else row
    return out


@compiled
def count_rows(rows, counts):
    """Adds how often each of (n,) rows occurs to (table rows,) int64 counts, in place."""
    for i in range(rows.shape[0]):
        counts[rows[i]] += 1


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A row for every frequent value and one for all others.

    Attributes:
      keys: (rows,) uint64 in order of rows; the OOV row's means nothing.
      oov_row: The row of rare and unknown values.
      counts: (rows,) int64 accesses in training, descending; empty where they were not read.
    """

    keys: np.ndarray
    oov_row: int
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def rows(self) -> int:
        """The table's rows."""
        return len(self.keys)

    def encoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """A function from (n,) uint64 keys to (n,) uint32 rows."""
        size = 1 << max(4, (2 * len(self.keys) - 1).bit_length())
        index_keys, index_rows = np.zeros(size, np.uint64), np.full(size, _NO_ROW, np.uint32)
        known = np.arange(len(self.keys), dtype=np.uint32)
        known = known[known != self.oov_row]
        _fill_index(self.keys[known], known, index_keys, index_rows)
        oov_row = np.uint32(self.oov_row)
        return lambda keys: _look_up(keys, index_keys, index_rows, oov_row)


@dataclasses.dataclass(frozen=True)
class HashedTable:
    """A table capped at ``rows`` rows: a value gets the row of its hash bucket (``keys.buckets``).

    Attributes:
      rows: The table's rows, as many as there are buckets.
      row_of_bucket: (rows,) uint32; None where a bucket's number is its row.
      counts: (rows,) int64 accesses in training, descending; empty where they were not read.
    """

    rows: int
    row_of_bucket: np.ndarray | None = None
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    oov_row: None = None

    def encoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """A function from (n,) uint64 keys to (n,) uint32 rows."""
        if self.rows == 1:
            return lambda keys: np.zeros(len(keys), np.uint32)
        if (row_of_bucket := self.row_of_bucket) is None:
            return lambda keys: buckets(keys, self.rows)
        return lambda keys: row_of_bucket[buckets(keys, self.rows)]


@dataclasses.dataclass(frozen=True)
class KeyTable:
    """A table that grows: the examples hold its values' keys.

    Attributes:
      rows: How many values training has; at least 1.
    """

    rows: int
    oov_row: None = None

    def encoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """The identity: (n,) uint64 keys."""
        return lambda keys: keys


def count_keys(keys: KeyChunks, *, slots: int = COUNT_SLOTS) -> KeyTable:
    """Counts the values of a table that grows; arguments as of ``build_table``."""
    return KeyTable(max(1, sum(len(part) for part, _, _ in _partitions(keys, slots, 1))))


def build_table(
    table: str, keys: KeyChunks, *, min_count: int, max_rows: int | None, slots: int = COUNT_SLOTS
) -> Vocabulary | HashedTable:
    """Counts a table's accesses in training and gives its values rows in descending order of frequency.

    Values of equal frequency are in the order of their keys, the OOV row comes last among rows as frequent as itself.

    Args:
      table: Its name, for messages.
      keys: The accesses.
      min_count: A value with fewer accesses has no row of its own.
      max_rows: Hash the values of a table that would have more rows than this.
      slots: A power of two, the most that the hash table of counts may hold; a table with more distinct values is
        counted in several passes.

    Raises:
      DatasetError: If the table would have 2^32 rows or more, or memory cannot hold the counts of its hash buckets.
    """
    frequent_keys, frequent_counts, rare = [], [], 0
    kept_values = 0
    for part_keys, part_counts, part_rare in _partitions(keys, slots, min_count):
        rare += part_rare
        kept_values += len(part_keys)
        if max_rows is not None and kept_values + 1 > max_rows:
            _check_memory(table, max_rows)
            return _hash_table(keys, max_rows)
        if kept_values + 1 > MAX_ROWS:
            raise DatasetError(
                f"table {table!r} would have more than {MAX_ROWS:,} rows; cap it with --max-rows, or raise --min-count"
            )
        frequent_keys.append(part_keys)
        frequent_counts.append(part_counts)
    own_keys = np.concatenate([*frequent_keys, np.array([_LAST_KEY])])  # the OOV row's key comes behind all others
    own_counts = np.concatenate([*frequent_counts, np.array([rare])])
    del frequent_keys, frequent_counts  # here is where memory peaks
    # By count, then by key: the rows depend neither on the order of the log nor on how it was partitioned.
    order = np.lexsort((own_keys, -own_counts))
    oov_row = int(np.flatnonzero(order == len(order) - 1)[0])
    own_keys, own_counts = own_keys[order], own_counts[order]
    # Means nothing; but files of the same vocabulary are to be the same.
    own_keys[oov_row] = 0
    return Vocabulary(own_keys, oov_row, own_counts)


def _check_memory(table: str, rows: int) -> None:
    needed, memory = _HASHING_BYTES * rows, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise DatasetError(
            f"counting the {rows:,} hash buckets of table {table!r} takes {needed / 2**30:,.1f} GiB, but this machine"
            f" has {memory / 2**30:,.1f} GiB; give --max-rows of at most {memory // _HASHING_BYTES:,}"
        )


def _hash_table(keys: KeyChunks, rows: int) -> HashedTable:
    counts = np.zeros(rows, np.int64)
    for chunk in keys():
        if rows > 1:
            count_buckets(chunk, counts)
        else:
            counts += len(chunk)
    order = np.argsort(-counts, kind="stable")
    row_of_bucket = np.empty(rows, np.uint32)
    row_of_bucket[order] = np.arange(rows, dtype=np.uint32)
    return HashedTable(rows, row_of_bucket, counts[order])


class _TooManyError(Exception):
    """More distinct keys than slots."""


def _partitions(keys: KeyChunks, slots: int, min_count: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Distinct keys and their counts, and how often rarer keys occur, in as few passes as the slots allow."""
    bits, partition = 0, 0
    while partition < 1 << bits:
        try:
            yield _count_partition(keys, slots, bits, partition, min_count)
            partition += 1
        except _TooManyError:
            if bits >= _PARTITION_BITS:
                raise DatasetError("a table has too many distinct values to count; cap it with --max-rows") from None
            # Partitions already counted stay counted: each splits into four, by lower bits of the hash.
            bits += 2
            partition *= 4


def _count_partition(
    keys: KeyChunks, slots: int, bits: int, partition: int, min_count: int
) -> tuple[np.ndarray, np.ndarray, int]:
    size = min(1 << 12, slots)
    table_keys, table_counts, used = np.zeros(size, np.uint64), np.zeros(size, np.int64), 0
    for chunk in keys():
        at = 0
        while True:
            at, used = _count(chunk, at, table_keys, table_counts, used, len(table_keys) // 2, bits, partition)
            if at == len(chunk):
                break
            if len(table_keys) >= slots:
                raise _TooManyError
            old = (table_keys, table_counts)
            size = min(4 * len(table_keys), slots)
            table_keys, table_counts = np.zeros(size, np.uint64), np.zeros(size, np.int64)
            _recount(*old, table_keys, table_counts)
    # Empty slots have count 0, below any ``min_count``.
    kept = table_counts >= min_count
    return table_keys[kept], table_counts[kept], int(table_counts[~kept].sum())
