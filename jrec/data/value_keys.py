"""Keys of values in arrays, the same that ``jrec prepare`` gives a log's text (``jrec.data.readers.keys``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jrec.data.readers.keys import hash_texts, integer_keys


def value_keys(values: Any, seed: int) -> np.ndarray:
    """(n,) uint64 keys of integers or texts.

    Args:
      values: (n,) integers of NumPy, or texts as a LargeBinaryArray or LargeStringArray of Arrow, none of them null.
      seed: The seed of the hash of long texts.
    """
    if isinstance(values, np.ndarray):
        if not values.size or (int(values.min()) > -1_000_000 and int(values.max()) < 2**56):
            return integer_keys(values.astype(np.int64))
        import pyarrow as pa

        values = pa.array(values).cast(pa.large_string())
    return hash_texts(*text_bounds(values), np.uint64(seed))[0]


def text_bounds(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of texts, a LargeStringArray or LargeBinaryArray without nulls, and (texts + 1,) int64 bounds."""
    _, ends, content = texts.buffers()
    if not len(texts):
        return np.zeros(1, np.uint8), np.zeros(1, np.int64)
    bounds = np.array(np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1])
    if content is None or bounds[0] == bounds[-1]:
        return np.zeros(1, np.uint8), bounds - bounds[0]
    return np.frombuffer(content, np.uint8)[bounds[0] : bounds[-1]].copy(), bounds - bounds[0]
