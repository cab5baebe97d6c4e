"""Texts whose keys are hashes: kept on disk for the vocabulary, and checked so that no two ever share a key."""

from __future__ import annotations

import pathlib

import numpy as np

from jrec.data.readers.keys import is_text, mix64
from jrec.data.readers.parse import LongTexts
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled


@compiled
def _insert(keys, fingerprints, table_keys, table_fingerprints, table_ordinals, next_ordinal, fresh):
    """Inserts keys and marks in ``fresh`` those that were not there; the table has room for all of them.

    Returns:
      (the next ordinal, the index of a key that another fingerprint has already, or -1).
    """
    mask = np.uint64(table_keys.shape[0] - 1)
    for i in range(keys.shape[0]):
        slot = mix64(keys[i]) & mask
        while table_ordinals[slot] >= 0 and table_keys[slot] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if table_ordinals[slot] >= 0:
            if table_fingerprints[slot] != fingerprints[i]:
                return next_ordinal, i
            continue
        table_keys[slot] = keys[i]
        table_fingerprints[slot] = fingerprints[i]
        table_ordinals[slot] = next_ordinal
        next_ordinal += 1
        fresh[i] = True
    return next_ordinal, -1


@compiled
def _ordinals_of(keys, table_keys, table_ordinals):
    mask = np.uint64(table_keys.shape[0] - 1)
    out = np.empty(keys.shape[0], np.int64)
    for i in range(keys.shape[0]):
        slot = mix64(keys[i]) & mask
        while table_ordinals[slot] >= 0 and table_keys[slot] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        out[i] = table_ordinals[slot]
    return out


class TextStore:
    """The distinct long texts of one table. Up to 96 bytes of memory a text; the text itself is on disk.

    Attributes:
      remedy: What to do where two texts have one hash, for the message.
    """

    def __init__(self, path: pathlib.Path, table: str):
        self._table = table
        self.remedy = "run again with another --key-seed"
        self._path = path
        self._file = path.open("wb")
        self._ends: list[np.ndarray] = [np.zeros(1, np.int64)]
        self._bytes = 0
        self._texts = 0
        self._allocate(1 << 10)

    def _allocate(self, size: int) -> None:
        self._keys = np.zeros(size, np.uint64)
        self._fingerprints = np.zeros(size, np.uint64)
        self._ordinals = np.full(size, -1, np.int64)

    def _make_room(self, more: int) -> None:
        """Sees to it that at most half of the table is taken once ``more`` keys are in it."""
        size = len(self._keys)
        while size < 2 * (self._texts + more):
            size *= 2
        if size > len(self._keys):
            used = self._used()
            keys, fingerprints = self._keys[used], self._fingerprints[used]
            self._allocate(size)
            fresh = np.zeros(len(keys), np.bool_)
            _insert(keys, fingerprints, self._keys, self._fingerprints, self._ordinals, 0, fresh)

    def _used(self) -> np.ndarray:
        """Where texts stand in the table, in the order in which they were added."""
        used = np.flatnonzero(self._ordinals >= 0)
        return used[np.argsort(self._ordinals[used])]

    def add(self, texts: LongTexts) -> None:
        """Stores those that are new.

        Raises:
          DatasetError: If two different texts have the same 63-bit hash (one log in millions).
        """
        keys, fingerprints = np.ascontiguousarray(texts.keys), np.ascontiguousarray(texts.fingerprints)
        fresh = np.zeros(len(keys), np.bool_)
        self._make_room(len(keys))
        self._texts, clash = _insert(
            keys, fingerprints, self._keys, self._fingerprints, self._ordinals, self._texts, fresh
        )
        if clash >= 0:
            text = texts.buffer[texts.starts[clash] : texts.ends[clash]].tobytes().decode("utf-8", "replace")
            raise DatasetError(
                f"two values of table {self._table!r}, one of them {text!r}, have the same hash; {self.remedy}"
            )
        starts, ends = texts.starts[fresh], texts.ends[fresh]
        self._file.write(b"".join(texts.buffer[a:b].tobytes() for a, b in zip(starts, ends, strict=True)))
        self._ends.append(self._bytes + np.cumsum(ends - starts))
        self._bytes += int((ends - starts).sum())

    def close(self) -> None:
        """Ends adding, and makes the texts readable, also by another process that is given the store."""
        self._file.close()
        del self._file
        self._ends = [np.concatenate(self._ends)]

    def stored(self) -> LongTexts:
        """All texts of a closed store, for another one."""
        used = self._used()
        ends, none = self._ends[0], np.zeros(len(used), np.int32)
        buffer = np.fromfile(self._path, np.uint8)
        return LongTexts(none, self._keys[used], self._fingerprints[used], ends[:-1], ends[1:], buffer)

    def texts_of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The texts of the hashes among (n,) ``keys``: (hashes,) int64 ends, and uint8 bytes."""
        ordinals = _ordinals_of(keys[is_text(keys)], self._keys, self._ordinals)
        ends = self._ends[0]
        if not len(ordinals):
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        texts = np.memmap(self._path, np.uint8, "r")
        pieces = [texts[ends[o] : ends[o + 1]] for o in ordinals]
        return np.cumsum([len(p) for p in pieces], dtype=np.int64), np.concatenate(pieces)
