"""Lookups renumbered to the unique rows of their batch, for tables that hold those rows alone."""

from __future__ import annotations

import numpy as np

from jrec.ops.types import Cast


def local_ids(cast: Cast, shape: tuple[int, ...]) -> np.ndarray:
    """Where in ``cast.rows`` the row of each lookup is; -1 for padding.

    Args:
      cast: of the lookups, NumPy arrays. Lookups of rows past its capacity count as padding.
      shape: of the ids.

    Returns:
      int32 of ``shape``.
    """
    offsets = np.asarray(cast.offsets)
    unique = min(int(cast.num_unique), offsets.size - 1)
    local = np.full(shape, -1, np.int32)
    numbers = np.repeat(np.arange(unique, dtype=np.int32), np.diff(offsets[: unique + 1]))
    local.reshape(-1)[np.asarray(cast.positions)[: numbers.size]] = numbers
    return local
