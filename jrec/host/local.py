"""Lookups renumbered to the unique rows of their batch, for tables that hold only those rows."""

from __future__ import annotations

import numpy as np

from jrec.ops.types import Cast


def local_ids(cast: Cast, shape: tuple[int, ...]) -> np.ndarray:
    """The place of each lookup's row in ``cast.rows``; -1 for padding.

    Args:
      cast: The lookups' cast, NumPy arrays. Lookups of rows past its capacity count as padding.
      shape: The ids' shape.

    Returns:
      int32 of ``shape``.
    """
    offsets = np.asarray(cast.offsets)
    unique = min(int(cast.num_unique), offsets.size - 1)
    local = np.full(shape, -1, np.int32)
    numbers = np.repeat(np.arange(unique, dtype=np.int32), np.diff(offsets[: unique + 1]))
    local.reshape(-1)[np.asarray(cast.positions)[: numbers.size]] = numbers
    return local
