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
    def among(cls, buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, seed: int) -> tuple[np.ndarray, LongTexts]:
        """(n,) uint64 keys of texts that begin and end there, and those texts whose keys are hashes."""
        keys, fingerprints = hash_texts(buffer, starts, ends, np.uint64(seed))
        long = np.flatnonzero(is_text(keys))
        return keys, cls(long, keys[long], fingerprints[long], starts[long], ends[long], buffer)

    @classmethod
    def joined(cls, pieces: Sequence[LongTexts]) -> LongTexts:
        """The texts of one or more, in one buffer."""
        # Columns of one block share its buffer, which is then taken over once, not once a column.
        buffers = {id(piece.buffer): piece.buffer for piece in pieces}
        begins = dict(zip(buffers, np.cumsum([0, *map(len, buffers.values())]).tolist(), strict=False))
        moved = [
            piece._replace(starts=piece.starts + begin, ends=piece.ends + begin, buffer=piece.buffer[:0])
            for piece in pieces
            for begin in [begins[id(piece.buffer)]]
        ]
        joined = cls(*(np.concatenate(arrays) for arrays in zip(*moved, strict=True)))
        return joined._replace(buffer=np.concatenate([*buffers.values()]) if len(buffers) > 1 else pieces[0].buffer)

    def take(self, which: np.ndarray | slice) -> LongTexts:
        """Some of them, in the same buffer."""
        parts = (array[which] for array in (self.field, self.keys, self.fingerprints, self.starts, self.ends))
        return LongTexts(*parts, buffer=self.buffer)
