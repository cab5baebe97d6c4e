"""Texts whose keys are hashes: kept on disk for the vocabulary, and checked so that no two ever share a key."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jrec.data.keys import gather_texts, is_text, mix64
from jrec.data.long_texts import LongTexts
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled

BUDGET = 64 << 20
"""About how many bytes of memory the stores of all tables of a log take together."""
LEAST = 16 << 20
"""The least that one of them takes."""
_SLOT_BYTES, _TEXT_BYTES = 16, 24  # of a hash table's slot, and of a text in a run beside its own bytes
_TEXT_KEYS = 1 << 63  # from here on keys are hashes, which are spread evenly


@compiled
def _insert(keys, fingerprints, table_keys, table_fingerprints, fresh):
    """Inserts keys and marks in ``fresh`` those that were not there; the table has room for all of them.

    An empty slot has key 0, which is no text's. Returns the index of a key that another fingerprint has already, or -1.
    """
    mask = np.uint64(table_keys.shape[0] - 1)
    for i in range(keys.shape[0]):
        slot = mix64(keys[i]) & mask
        while table_keys[slot] != 0 and table_keys[slot] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if table_keys[slot] == 0:
            table_keys[slot], table_fingerprints[slot] = keys[i], fingerprints[i]
            fresh[i] = True
        elif table_fingerprints[slot] != fingerprints[i]:
            return i
    return -1


class TextStore:
    """The distinct long texts of one table, on disk.

    New texts are collected in memory up to a budget and then written as a run, sorted by key. ``merge`` makes one run
    of all, a range of keys at a time, so that memory does not grow with the number of texts.

    Args:
      path: What the store's files are called, but for their suffixes.
      table: The table's name, for messages.
      budget: About how many bytes of memory the store may take.

    Attributes:
      remedy: What to do where two texts have one hash, for the message.
    """

    def __init__(self, path: pathlib.Path, table: str, *, budget: int = BUDGET):
        self._table = table
        self.remedy = "run again with another --key-seed"
        self._path = path
        self._share = budget // 4  # of the hash table, a run, a range to merge: sorting takes three times as much
        self._slots = 1 << ((self._share // _SLOT_BYTES).bit_length() - 1)
        self._runs = [0]  # where each begins, and the last one ends, in texts
        self._bytes = 0  # of all runs
        self._open(1 << 10)
        _empty(path)

    def _open(self, slots: int) -> None:
        """Begins a run."""
        self._keys, self._fingerprints = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._pieces: list[tuple[np.ndarray, ...]] = []
        self._held = self._held_bytes = 0

    def add(self, texts: LongTexts) -> None:
        """Stores those that are new, and some of those that are not.

        Raises:
          DatasetError: If two different texts are seen to have the same 63-bit hash (one log in millions).
        """
        # In steps that an empty table surely holds, whatever a block brings.
        step = self._slots // 8
        for start in range(0, len(texts.keys), step):
            self._add(texts.take(slice(start, start + step)))

    def _add(self, texts: LongTexts) -> None:
        keys, fingerprints = np.ascontiguousarray(texts.keys), np.ascontiguousarray(texts.fingerprints)
        starts, ends, buffer = texts.starts, texts.ends, texts.buffer
        if self._held + len(keys) > self._slots // 2 or self._held_bytes > self._share:
            self._write_run()
        while self._held + len(keys) > len(self._keys) // 2:
            old = self._keys != 0
            old_keys, old_fingerprints = self._keys[old], self._fingerprints[old]
            slots = 2 * len(self._keys)
            self._keys, self._fingerprints = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
            _insert(old_keys, old_fingerprints, self._keys, self._fingerprints, np.zeros(len(old_keys), np.bool_))
        fresh = np.zeros(len(keys), np.bool_)
        clash = _insert(keys, fingerprints, self._keys, self._fingerprints, fresh)
        if clash >= 0:
            raise self._same_hash(buffer[starts[clash] : ends[clash]])
        starts, ends = starts[fresh], ends[fresh]
        self._pieces.append((keys[fresh], fingerprints[fresh], ends - starts, gather_texts(buffer, starts, ends)))
        self._held, self._held_bytes = self._held + len(starts), self._held_bytes + int((ends - starts).sum())
        self._held_bytes += _TEXT_BYTES * len(starts)

    def _same_hash(self, text: np.ndarray) -> DatasetError:
        shown = text.tobytes().decode("utf-8", "replace")
        return DatasetError(
            f"two values of table {self._table!r}, one of them {shown!r}, have the same hash; {self.remedy}"
        )

    def _write_run(self) -> None:
        """Writes what is in memory."""
        if self._held:
            del self._keys, self._fingerprints
            keys, fingerprints, lengths, content = (np.concatenate(p) for p in zip(*self._pieces, strict=True))
            self._pieces.clear()
            ends = np.cumsum(lengths)
            # A run has each key once, so that the sort need not be stable.
            order = np.argsort(keys)
            content = gather_texts(content, (ends - lengths)[order], ends[order])
            run = _Run(keys[order], fingerprints[order], self._bytes + np.cumsum(lengths[order]), content)
            run.append_to(self._path)
            self._runs.append(self._runs[-1] + len(keys))
            self._bytes += len(content)
        self._open(1 << 10)

    def close(self) -> None:
        """Ends adding, also for another process that is given the store."""
        self._write_run()

    def stored(self) -> Iterator[LongTexts]:
        """All texts of a closed store, for another one, in pieces."""
        for start, stop in itertools.pairwise(self._runs):
            keys, fingerprints, ends, content = _Run.read(self._path, start, stop)
            yield LongTexts(np.zeros(len(keys), np.int32), keys, fingerprints, ends[:-1], ends[1:], content)

    def merge(self) -> None:
        """Makes one run of a closed store's, in which texts can be looked up.

        Raises:
          DatasetError: If two different texts have the same hash.
        """
        if len(self._runs) > 2:
            self._merge(list(itertools.pairwise(self._runs)))
        rows = self._runs[-1]
        self._piece = max(1, rows * self._share // max(self._bytes + 16 * rows, 1))
        self._firsts = np.zeros(1, np.uint64)
        if rows:
            self._firsts = np.array(_Run.mapped(self._path, 0, rows).keys[:: self._piece])

    def _merge(self, runs: list[tuple[int, int]]) -> None:
        size = self._bytes + _TEXT_BYTES * self._runs[-1]
        parts = -(-size // self._share)
        # Hashes are spread evenly, so that ranges of equal width hold about equally many texts, and each fits the
        # share.
        limits = np.array([_TEXT_KEYS + part * (_TEXT_KEYS // parts) for part in range(1, parts)], np.uint64)
        bounds = []
        for a, b in runs:
            keys = _Run.mapped(self._path, a, b).keys
            bounds.append([a, *(a + np.searchsorted(keys, limits)).tolist(), b])
        merged = self._path.with_name(f"{self._path.name}.merged")
        _empty(merged)
        texts = written = 0
        for part in range(parts):
            run = self._merged([_Run.read(self._path, places[part], places[part + 1]) for places in bounds])
            run._replace(ends=run.ends + written).append_to(merged)
            texts, written = texts + len(run.keys), written + len(run.content)
        for name in _SUFFIXES:
            _file(merged, name).replace(_file(self._path, name))
        self._runs, self._bytes = [0, texts], written

    def _merged(self, pieces: list[_Run]) -> _Run:
        """The texts of one range of keys, each once; ``ends`` are those in its own content."""
        keys, fingerprints = (np.concatenate([piece[k] for piece in pieces]) for k in (0, 1))
        places = np.cumsum([0, *(len(piece.content) for piece in pieces)])
        starts = np.concatenate([piece.ends[:-1] + at for piece, at in zip(pieces, places, strict=False)])
        ends = np.concatenate([piece.ends[1:] + at for piece, at in zip(pieces, places, strict=False)])
        content = np.concatenate([piece.content for piece in pieces])
        order = np.argsort(keys, kind="stable")
        keys, fingerprints, starts, ends = keys[order], fingerprints[order], starts[order], ends[order]
        again = keys[1:] == keys[:-1]
        # In memory a key was compared with those of its own run only: here two runs' texts of one key meet.
        if (clash := again & (fingerprints[1:] != fingerprints[:-1])).any():
            k = int(clash.argmax()) + 1
            raise self._same_hash(content[starts[k] : ends[k]])
        kept = np.concatenate([np.ones(min(len(keys), 1), np.bool_), ~again])
        starts, ends = starts[kept], ends[kept]
        return _Run(keys[kept], fingerprints[kept], np.cumsum(ends - starts), gather_texts(content, starts, ends))

    def texts_of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The texts of the hashes among (n,) ``keys``: (hashes,) int64 ends, and uint8 bytes; the store is merged.

        Files are mapped a piece at a time, so that their pages do not stay in the process's memory.
        """
        hashes = keys[is_text(keys)]
        order = np.argsort(hashes)
        ordered = hashes[order]
        # From the left: a key that begins a piece is looked up in it, not in the piece before.
        bounds = [0, *np.searchsorted(ordered, self._firsts[1:]).tolist(), len(hashes)]
        gathered, lengths = [np.empty(0, np.uint8)], np.empty(len(hashes), np.int64)
        for piece, (a, b) in enumerate(itertools.pairwise(bounds)):
            if a < b:
                first = piece * self._piece
                stored = _Run.mapped(self._path, first, min(first + self._piece, self._runs[-1]))
                at = np.searchsorted(stored.keys, ordered[a:b])
                starts, ends = stored.ends[at] - stored.ends[0], stored.ends[at + 1] - stored.ends[0]
                gathered.append(gather_texts(stored.content, starts, ends))
                lengths[a:b] = ends - starts
        ends, place = np.cumsum(lengths), np.empty_like(order)
        place[order] = np.arange(len(order))
        ends, lengths = ends[place], lengths[place]
        return np.cumsum(lengths), gather_texts(np.concatenate(gathered), ends - lengths, ends)


def budget_of(tables: int) -> int:
    """Each store's budget in bytes, where there are ``tables`` stores."""
    return max(BUDGET // max(tables, 1), LEAST)


class _Run(NamedTuple):
    """Texts sorted by their keys: (n,) uint64 keys and fingerprints, int64 ends, and the uint8 bytes.

    ``ends`` are (n,) as they are written, and (n + 1,) with the first one's start as they are read.
    """

    keys: np.ndarray
    fingerprints: np.ndarray
    ends: np.ndarray
    content: np.ndarray

    def append_to(self, path: pathlib.Path) -> None:
        """Writes the texts behind those that a store's files have."""
        for name, array in zip(_SUFFIXES, self, strict=True):
            with _file(path, name).open("ab") as file:
                array.tofile(file)

    @classmethod
    def read(cls, path: pathlib.Path, start: int, stop: int) -> _Run:
        """Some texts of a store's files; ``ends`` begin with 0."""

        def part(name: str, dtype: type, begin: int, end: int) -> np.ndarray:
            size = np.dtype(dtype).itemsize
            return np.fromfile(_file(path, name), dtype, end - begin, offset=begin * size)

        ends = part("ends", np.int64, start, stop + 1)
        keys, fingerprints = (part(name, np.uint64, start, stop) for name in ("keys", "fingerprints"))
        return cls(keys, fingerprints, ends - ends[0], part("content", np.uint8, int(ends[0]), int(ends[-1])))

    @classmethod
    def mapped(cls, path: pathlib.Path, start: int, stop: int) -> _Run:
        """Some texts of a store's files, at least one, read as they are needed; without fingerprints."""

        def part(name: str, dtype: type, begin: int, end: int) -> np.ndarray:
            size = np.dtype(dtype).itemsize
            whole = np.memmap(_file(path, name), dtype, "r", begin * size, (end - begin,))
            return whole.view(np.ndarray)

        keys, ends = part("keys", np.uint64, start, stop), part("ends", np.int64, start, stop + 1)
        content = part("content", np.uint8, int(ends[0]), int(ends[-1]))
        return cls(keys, np.empty(0, np.uint64), ends, content)


_SUFFIXES = _Run._fields


def _file(path: pathlib.Path, name: str) -> pathlib.Path:
    return path.with_name(f"{path.name}.{name}")


def _empty(path: pathlib.Path) -> None:
    """Makes a store's files, without texts."""
    for name in _SUFFIXES:
        _file(path, name).write_bytes(b"\0" * 8 if name == "ends" else b"")
