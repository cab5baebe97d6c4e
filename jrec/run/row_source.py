"""What rows are read from when a run's arrays are filled."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jrec.ops.layout import Stack


class RowSource(Protocol):
    """Rows by address: a checkpoint (``jrec.checkpoint.Saved``), or a model (``jrec.run.model_rows``)."""

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows of "values", or of a slot, at (n,) addresses of a stack, in any order."""
        ...
