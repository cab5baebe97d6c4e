"""Texts too long to be their own keys, beside the hashes that are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jrec.data.keys import hash_texts, is_text


class LongTexts(NamedTuple):
    """Texts whose keys are hashes: of which field, (n,) uint64 keys and fingerprints, and the texts."""

    field: np.ndarray
    keys: np.ndarray
    fingerprints: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    buffer: np.ndarray

    @classmethod
    def among(cls, buffer: np.ndarray, ends: np.ndarray, seed: int) -> tuple[np.ndarray, LongTexts]:
        """(n,) uint64 keys of the texts between successive ``ends``, and those texts whose keys are hashes."""
        keys, fingerprints = hash_texts(buffer, ends, np.uint64(seed))
        long = np.flatnonzero(is_text(keys))
        return keys, cls(long, keys[long], fingerprints[long], ends[long], ends[long + 1], buffer)

    @classmethod
    def joined(cls, pieces: Sequence[LongTexts]) -> LongTexts:
        """The texts of one or more, in one buffer."""
        if len(pieces) == 1:
            return pieces[0]
        begins = np.cumsum([0, *(len(piece.buffer) for piece in pieces[:-1])])
        moved = [
            piece._replace(starts=piece.starts + begin, ends=piece.ends + begin)
            for piece, begin in zip(pieces, begins, strict=True)
        ]
        return cls(*(np.concatenate(arrays) for arrays in zip(*moved, strict=True)))

    def take(self, which: np.ndarray | slice) -> LongTexts:
        """Some of them, in the same buffer."""
        parts = (array[which] for array in (self.field, self.keys, self.fingerprints, self.starts, self.ends))
        return LongTexts(*parts, buffer=self.buffer)
