"""What preparation does to raw dense values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jrec.data.readers.parse import ParsedBlock

TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "log1p": lambda x: np.log1p(np.maximum(x, 0)),
    "signed_log1p": lambda x: np.sign(x) * np.log1p(np.abs(x)),
}
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def dense_column(parsed: ParsedBlock, name: str, transform: str, missing: float | None) -> np.ndarray:
    """(rows,) float32 of a dense feature.

    log1p is the field's treatment of counts: log(1 + max(x, 0)), so that zero, negative and missing counts become 0
    (``missing`` 0). signed_log1p keeps the sign, none keeps the value.

    Args:
      parsed: Holds the float64 column; it must already be free of values that float32 cannot hold (``reject_dense``).
      name: The column's name.
      transform: A key of ``TRANSFORMS``.
      missing: What stands for a blank, before the transform; None where blanks cannot occur.
    """
    values = parsed.numbers(name)
    if missing is not None:
        values = np.where(np.isnan(values), missing, values)
    return TRANSFORMS[transform](values).astype(np.float32)


def reject_dense(parsed: ParsedBlock, name: str, transform: str) -> None:
    """Rejects rows whose value float32 cannot hold."""
    if transform == "none":
        parsed.reject(np.abs(parsed.numbers(name)) > _FLOAT32_MAX, name, "is too large for float32")
