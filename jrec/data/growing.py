"""Vocabularies that grow: 64-bit keys get rows of a table of fixed size as they come, and lose them to others.

A key is admitted once it has occurred often enough. When all rows are taken, the key that was used least recently, or
least frequently, loses its row. Time is counted in batches. What a batch changes depends on nothing but how often each
key occurs in it, and on the batches before.

This module imports no JAX. ``jrec.distribute(..., growing=...)`` trains with such a vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from jrec.data import growing_kernels as kernels
from jrec.data.keys import value_keys
from jrec.errors import CheckpointError

if TYPE_CHECKING:
    import pyarrow as pa

Evict = Literal["lru", "lfu"]
_MOST_ROWS = 2**31 - 1
_LEAST_QUEUE, _QUEUE_SHARE = 1024, 16  # a scan of all rows finds victims for a sixteenth of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth:
    """How a table grows.

    Attributes:
      capacity: The number of the table's rows, row 0 for keys without a row of their own among them.
      admit_after: How often a key must have occurred to get a row, 1 to 255. Occurrences are counted in a count-min
        sketch of 16 bytes a row or more, which may count too many, never too few.
      evict: Which key loses its row when all are taken: the least recently used ("lru"), or the least frequently used
        ("lfu"), of equally frequent ones the least recently used. Under "lfu" a key without a row gets one only from a
        key that has been used less often than it has occurred, unless it has occurred 255 times.

    Raises:
      ValueError: If a number is out of range.
    """

    capacity: int
    admit_after: int = 1
    evict: Evict = "lfu"

    def __post_init__(self) -> None:
        if not 2 <= self.capacity <= _MOST_ROWS:
            raise ValueError(f"capacity is {self.capacity:,}; it must be 2 to {_MOST_ROWS:,} rows")
        if not 1 <= self.admit_after <= kernels.MOST_COUNT:
            raise ValueError(f"admit_after is {self.admit_after}; it must be 1 to {kernels.MOST_COUNT} occurrences")
        if self.evict not in get_args(Evict):
            raise ValueError(f"evict is {self.evict!r}; choose one of {', '.join(get_args(Evict))}")


@dataclasses.dataclass(frozen=True, eq=False)
class NewRows:
    """Rows that other keys have from a batch on.

    Attributes:
      rows: (n,) int32, ascending.
      keys: (n,) uint64, their keys.
    """

    rows: np.ndarray
    keys: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthCounts:
    """What a vocabulary has done since it was made.

    Attributes:
      keys: Keys that have a row now.
      admitted, evicted: Keys that got a row, and that lost it.
      lookups: Keys in all batches.
      oov_lookups: Lookups that read row 0.
    """

    keys: int
    admitted: int
    evicted: int
    lookups: int
    oov_lookups: int


class _Scalars(NamedTuple):
    """All state but the arrays that change in place.

    ``queue`` are rows in the order in which they lose their keys, from ``begin`` on, as of the clock ``scanned``.
    """

    clock: int = 0
    stop: int = 1
    queue: np.ndarray = np.empty(0, np.int32)
    begin: int = 0
    scanned: int = 0
    admitted: int = 0
    evicted: int = 0
    lookups: int = 0
    oov_lookups: int = 0


class _Undo(NamedTuple):
    """What brings the state back to before one batch; see ``growing_kernels`` for what arrays mean."""

    before: _Scalars
    touched: np.ndarray
    words: np.ndarray
    renewed: np.ndarray
    entries: np.ndarray
    cells: np.ndarray
    cell_values: np.ndarray


_NUMBERS = ("clock", "stop", "scanned", "admitted", "evicted", "lookups", "oov_lookups")


class GrowingVocabulary:
    """The rows of a growing table's keys.

    It is a vocabulary for ``jrec.data.pack_batch`` too, which only looks values up.

    Args:
      growth: How the table grows.
      key_seed: The seed of the hash of long texts.
      canonical: Whether texts are brought into one form (``Schema.canonical``) before they are looked up.

    Attributes:
      growth: How the table grows.
      key_seed: The seed of the hash of long texts.
      canonical: Whether texts are brought into one form (``Schema.canonical``) before they are looked up.

    Example:
      >>> vocabulary = GrowingVocabulary(Growth(capacity=3, evict="lru"))
      >>> rows, new = vocabulary.map(np.array([7, 9, 7], np.uint64))
      >>> rows, new.rows
      (array([1, 2, 1], dtype=int32), array([1, 2], dtype=int32))
      >>> rows, new = vocabulary.map(np.array([7, 8], np.uint64))  # 9 was not used in this batch
      >>> rows, new.keys
      (array([1, 2], dtype=int32), array([8], dtype=uint64))
    """

    oov_row = 0
    complete = True

    def __init__(self, growth: Growth, *, key_seed: int = 0, canonical: bool = False):
        self.growth, self.key_seed, self.canonical = growth, key_seed, canonical
        self._entries = np.zeros((growth.capacity, 2), np.uint64)
        self._held_index: np.ndarray | None = None
        counts = growth.admit_after > 1 or growth.evict == "lfu"
        # Count-min: of 4 hashes the least counts, so that only a key that collides in all of them is overestimated.
        width = max(1024, 1 << (4 * growth.capacity - 1).bit_length()) if counts else 0
        self._sketch = np.zeros((kernels.DEPTH, width), np.uint8)
        self._now = _Scalars()
        self._undo: collections.deque[_Undo] = collections.deque()
        self._lock = threading.Lock()

    @property
    def clock(self) -> int:
        """Batches mapped so far."""
        return self._now.clock

    @property
    def counts(self) -> GrowthCounts:
        """What was done so far."""
        now = self._now
        return GrowthCounts(
            keys=now.stop - 1,
            admitted=now.admitted,
            evicted=now.evicted,
            lookups=now.lookups,
            oov_lookups=now.oov_lookups,
        )

    @property
    def oov_share(self) -> float | None:
        """The share of the values mapped so far that had no row; None before the first."""
        counts = self.counts
        return counts.oov_lookups / counts.lookups if counts.lookups else None

    @property
    def keys(self) -> np.ndarray:
        """(rows in use,) uint64, the key of each row; row 0 has none, and anything stands there."""
        with self._lock:
            return self._entries[: self._now.stop, 0].copy()

    def rows(self, values: np.ndarray | pa.Array) -> np.ndarray:
        """(n,) int64 rows of integers or texts, 0 for those without a row; nothing is counted."""
        return self.rows_of_keys(value_keys(values, self.key_seed, canonical=self.canonical))

    def rows_of_keys(self, keys: np.ndarray) -> np.ndarray:
        """(n,) int64 rows of (n,) uint64 keys, 0 for those without a row; nothing is counted."""
        rows = np.empty(len(keys), np.int64)
        with self._lock:
            kernels.look_up(_keys(keys), self._entries, self._index(), rows)
        return rows

    def of_keys(self) -> StoredKeys:
        """The vocabulary for columns of keys, as a dataset with growing tables holds them."""
        return StoredKeys(self)

    def map(self, keys: np.ndarray) -> tuple[np.ndarray, NewRows]:
        """Gives the keys of the next batch their rows.

        Args:
          keys: (n,) uint64 in any order, of all features that read the table.

        Returns:
          (n,) int32 rows, 0 for keys without one, and the rows that other keys have from this batch on. What the sketch
          has counted of a key that loses its row stays counted.
        """
        keys = _keys(keys)
        with self._lock:
            return self._map(keys)

    def at(self, clock: int) -> GrowingVocabulary:
        """An independent copy as it was after ``clock`` batches.

        Raises:
          ValueError: If they were not mapped yet, or what followed them was forgotten.
        """
        copy = object.__new__(GrowingVocabulary)
        copy.growth, copy.key_seed, copy.canonical = self.growth, self.key_seed, self.canonical
        copy._undo, copy._lock = collections.deque(), threading.Lock()
        with self._lock:
            later = [undo for undo in self._undo if undo.before.clock >= clock]
            if clock != self._now.clock and (not later or later[0].before.clock != clock):
                known = [undo.before.clock for undo in self._undo] + [self._now.clock]
                raise ValueError(f"there is no state after {clock} batches; it is kept for {known[0]} to {known[-1]}")
            copy._entries, copy._sketch, copy._now = self._entries.copy(), self._sketch.copy(), self._now
            copy._held_index = None  # a checkpoint needs none
        for undo in reversed(later):
            # Newest first: each brings back what the batch before it had left.
            copy._take_back(undo)
        return copy

    def forget(self, clock: int) -> None:
        """Drops what is needed to go back before ``clock`` batches."""
        with self._lock:
            while self._undo and self._undo[0].before.clock < clock:
                self._undo.popleft()

    def state(self) -> dict[str, np.ndarray]:
        """All state as arrays by name, for a checkpoint."""
        with self._lock:
            now = self._now
            return {
                "entries": self._entries[: now.stop].copy(),
                "sketch": self._sketch.copy(),
                "queue": now.queue[now.begin :].copy(),
                "numbers": np.array([self.growth.capacity, *(getattr(now, name) for name in _NUMBERS)], np.int64),
            }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores a ``state()`` of a vocabulary of this capacity; ``admit_after`` and ``evict`` may differ.

        Raises:
          CheckpointError: If the arrays are of another capacity, or no such state.
        """
        if missing := sorted({"entries", "sketch", "queue", "numbers"} - arrays.keys()):
            raise CheckpointError(f"the checkpoint of a growing table has no {missing[0]!r}; it is damaged")
        capacity, *numbers = (int(number) for number in arrays["numbers"])
        if capacity != self.growth.capacity:
            raise CheckpointError(
                f"the checkpoint's growing table has {capacity:,} rows, but this one {self.growth.capacity:,}; set the"
                " capacity to that"
            )
        queue = np.array(arrays["queue"], np.int32)
        with self._lock:
            self._now = _Scalars(**dict(zip(_NUMBERS, numbers, strict=True)), queue=queue)
            self._undo.clear()
            self._entries[:] = 0
            self._entries[: self._now.stop] = arrays["entries"]
            # Of a run that did not count there is none: counts begin anew, and rows stay.
            self._sketch[:] = arrays["sketch"] if arrays["sketch"].shape == self._sketch.shape else 0
            self._held_index = None

    def _map(self, keys: np.ndarray) -> tuple[np.ndarray, NewRows]:
        before, clock, index = self._now, np.uint64(self._now.clock + 1), self._index()
        rows, unknown = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
        touched, words = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint64)
        missing, used = kernels.use(keys, clock, self._entries, index, rows, unknown, touched, words)
        renewed, new_keys, old = np.empty(0, np.int32), np.empty(0, np.uint64), np.empty((0, 2), np.uint64)
        cells, cell_values = np.empty(0, np.int64), np.empty(0, np.uint8)
        self._now = before._replace(clock=int(clock))
        if missing:
            places = unknown[:missing]
            unique, counts, inverse = kernels.unique_counts(keys, places)
            candidates, frequency = np.arange(unique.size), counts
            if self._sketch.size:
                cells = np.empty(unique.size * kernels.DEPTH, np.int64)
                cell_values = np.empty(cells.size, np.uint8)
                estimates = kernels.count_in_sketch(unique, counts, self._sketch, cells, cell_values)
                candidates = np.flatnonzero(estimates >= self.growth.admit_after)
                frequency = estimates if self.growth.evict == "lfu" else counts
            candidates = candidates[np.argsort(-frequency[candidates], kind="stable")]  # unique ones ascend
            renewed, taken = self._free_rows(frequency[candidates])
            candidates = candidates[: renewed.size]
            new_keys, old = unique[candidates], self._entries[renewed]
            kernels.give(renewed, new_keys, frequency[candidates], clock, self._entries, index, taken)
            row_of = np.zeros(unique.size, np.int32)
            row_of[candidates] = renewed
            rows[places] = row_of[inverse]
        self._undo.append(
            _Undo(
                before=before,
                touched=touched[:used].copy(),
                words=words[:used].copy(),
                renewed=renewed,
                entries=old,
                cells=cells,
                cell_values=cell_values,
            )
        )
        oov = int(np.count_nonzero(rows == 0)) if missing else 0
        self._now = self._now._replace(
            admitted=before.admitted + renewed.size,
            lookups=before.lookups + len(keys),
            oov_lookups=before.oov_lookups + oov,
        )
        if self._now.evicted > before.evicted:  # new rows ascend
            order = np.argsort(renewed)
            renewed, new_keys = renewed[order], new_keys[order]
        return rows, NewRows(renewed.copy(), new_keys)  # the other is kept, for the way back

    def _free_rows(self, frequency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows for other keys, (n,) int32, at most one for each of these, and whether each has had a key, (n,) bool.

        Args:
          frequency: (keys,) int64, how often each key that wants a row has occurred, descending.
        """
        now, wanted, guarded = self._now, frequency.size, self.growth.evict == "lfu"
        fresh = min(wanted, self.growth.capacity - now.stop)
        rows, count = np.empty(wanted, np.int32), fresh
        rows[:fresh] = np.arange(now.stop, now.stop + fresh)
        queue, begin, scanned = now.queue, now.begin, now.scanned
        while count < wanted:
            more, begin, refused = kernels.next_victims(
                queue, begin, np.uint64(scanned), self._entries, rows[count:], frequency[count:], guarded
            )
            count += more
            if refused:
                break
            if count < wanted:
                queue, begin, scanned = self._scan(now.clock, rows[:count]), 0, now.clock
                if not queue.size:
                    break
        self._now = now._replace(
            stop=now.stop + fresh,
            queue=queue,
            begin=begin,
            scanned=scanned,
            evicted=now.evicted + count - fresh,
        )
        return rows[:count].copy(), np.arange(count) >= fresh

    def _scan(self, clock: int, chosen: np.ndarray) -> np.ndarray:
        """Rows that this batch has not used and that are not chosen yet, the first to lose its key first: (n,) int32.

        Of all rows the first ones in that order, so that a scan serves many batches.
        """
        words = self._entries[:, 1]
        # Not of keys of this very batch, whose rows its step reads.
        free = (words >> np.uint64(32)) < np.uint64(clock)
        free[0] = False
        free[self._now.stop :] = False
        free[chosen] = False
        rows = np.flatnonzero(free)
        ranks = words[rows]
        if self.growth.evict == "lru":
            ranks = ranks >> np.uint64(32)
        else:
            ranks = (ranks << np.uint64(32)) | (ranks >> np.uint64(32))
        count = max(_LEAST_QUEUE, self.growth.capacity // _QUEUE_SHARE)
        if rows.size > count:
            # Exactly ``count`` rows, and of equal ranks the first ones: what is evicted must not depend on how a
            # partition leaves ties.
            last = np.partition(ranks, count - 1)[count - 1]
            lower, equal = np.flatnonzero(ranks < last), np.flatnonzero(ranks == last)
            kept = np.sort(np.concatenate([lower, equal[: count - lower.size]]))
            rows, ranks = rows[kept], ranks[kept]
        return rows[np.argsort(ranks, kind="stable")].astype(np.int32)

    def _take_back(self, undo: _Undo) -> None:
        self._entries[undo.touched, 1] = undo.words
        self._entries[undo.renewed] = undo.entries
        flat = self._sketch.reshape(-1)
        flat[undo.cells[::-1]] = undo.cell_values[::-1]  # of a cell that changed twice the first value is written last
        self._now = undo.before

    def _index(self) -> np.ndarray:
        if self._held_index is None:
            self._held_index = np.full(1 << (2 * self.growth.capacity - 1).bit_length(), -1, np.int32)
            kernels.fill_index(self._entries, self._now.stop, self._held_index)
        return self._held_index


@dataclasses.dataclass(frozen=True)
class StoredKeys:
    """A growing vocabulary whose values are keys already; for ``jrec.data.make_loader`` and ``dataset_packer``."""

    vocabulary: GrowingVocabulary
    oov_row: int | None = 0
    complete: bool = True

    def rows(self, values: np.ndarray) -> np.ndarray:
        """(n,) int64 rows of (n,) uint64 keys, 0 for those without one."""
        return self.vocabulary.rows_of_keys(values)


def _keys(keys: np.ndarray) -> np.ndarray:
    return np.require(keys, np.uint64, ["C", "W"])  # kernels are compiled for one kind
