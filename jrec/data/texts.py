"""Texts whose keys are hashes: kept on disk for the vocabulary, and checked so that no two ever share a key."""

from __future__ import annotations

import pathlib

import numpy as np

from jrec.data.readers.keys import is_text, mix64
from jrec.data.readers.parse import LongTexts
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled


@compiled
def _insert(keys, fingerprints, table_keys, table_fingerprints, table_ordinals, next_ordinal, start, fresh):
    """Inserts keys from ``start`` on until the table is half full.

    Returns:
      (how far it came, the next ordinal, the index of a key that another fingerprint has already, or -1).
    """
    mask = np.uint64(table_keys.shape[0] - 1)
    limit = table_keys.shape[0] // 2
    for i in range(start, keys.shape[0]):
        if next_ordinal >= limit:
            return i, next_ordinal, -1
        slot = mix64(keys[i]) & mask
        while table_ordinals[slot] >= 0 and table_keys[slot] != keys[i]:
            slot = (slot + np.uint64(1)) & mask
        if table_ordinals[slot] >= 0:
            if table_fingerprints[slot] != fingerprints[i]:
                return i, next_ordinal, i
            continue
        table_keys[slot] = keys[i]
        table_fingerprints[slot] = fingerprints[i]
        table_ordinals[slot] = next_ordinal
        next_ordinal += 1
        fresh[i] = True
    return keys.shape[0], next_ordinal, -1


@compiled
def _rehash(old_keys, old_fingerprints, old_ordinals, keys, fingerprints, ordinals):
    mask = np.uint64(keys.shape[0] - 1)
    for i in range(old_keys.shape[0]):
        if old_ordinals[i] >= 0:
            slot = mix64(old_keys[i]) & mask
            while ordinals[slot] >= 0:
                slot = (slot + np.uint64(1)) & mask
            keys[slot] = old_keys[i]
            fingerprints[slot] = old_fingerprints[i]
            ordinals[slot] = old_ordinals[i]


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

    def add(self, texts: LongTexts) -> None:
        """Stores those that are new.

        Raises:
          DatasetError: If two different texts have the same 63-bit hash (one log in millions).
        """
        keys, fingerprints = np.ascontiguousarray(texts.keys), np.ascontiguousarray(texts.fingerprints)
        fresh = np.zeros(len(keys), np.bool_)
        at = 0
        while True:
            at, self._texts, clash = _insert(
                keys, fingerprints, self._keys, self._fingerprints, self._ordinals, self._texts, at, fresh
            )
            if clash >= 0:
                text = texts.buffer[texts.starts[clash] : texts.ends[clash]].tobytes().decode("utf-8", "replace")
                raise DatasetError(
                    f"two values of table {self._table!r}, one of them {text!r}, have the same hash; {self.remedy}"
                )
            if at == len(keys):
                break
            old = (self._keys, self._fingerprints, self._ordinals)
            self._allocate(4 * len(self._keys))
            _rehash(*old, self._keys, self._fingerprints, self._ordinals)
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
        used = np.flatnonzero(self._ordinals >= 0)
        used = used[np.argsort(self._ordinals[used])]
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
