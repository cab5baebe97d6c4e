"""What preparation does to raw dense values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from jrec.data.keys import MISSING, integer_keys
from jrec.data.schema import DenseFeature
from jrec.prepare.readers.parse import ParsedBlock

TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "log1p": lambda x: np.log1p(np.maximum(x, 0)),
    "signed_log1p": lambda x: np.sign(x) * np.log1p(np.abs(x)),
}
STANDARDIZE = "standardize"  # the one transform that learns from the training examples
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def apply(feature: DenseFeature, values: np.ndarray) -> np.ndarray:
    """(n,) float32 of a feature.

    Args:
      feature: The feature; it knows its mean and deviation where it is standardized.
      values: (n,) float64 raw values, none of them missing.
    """
    if feature.transform != STANDARDIZE:
        return TRANSFORMS[feature.transform](values).astype(np.float32)
    assert feature.mean is not None
    assert feature.deviation is not None
    # A later log's value may lie so many deviations away that float32 would make it infinite.
    return np.clip((values - feature.mean) / feature.deviation, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)


def raw_of(feature: DenseFeature, mean: float) -> float:
    """The raw value that becomes a mean of transformed ones; the mean itself of raw ones that are standardized."""
    if feature.transform == "log1p":
        return math.expm1(mean)
    if feature.transform == "signed_log1p":
        return math.copysign(math.expm1(abs(mean)), mean)
    return mean


def bucket_keys(boundaries: Sequence[float], values: np.ndarray) -> np.ndarray:
    """(n,) uint64 keys of the buckets, "0" to the number of boundaries, of (n,) float64 values; NaN is missing."""
    # A value that equals a boundary is above it, here as in the counts that made the boundaries; NaN sorts last and is
    # masked below.
    keys = integer_keys(np.searchsorted(np.asarray(boundaries, np.float64), values, side="right"))
    return np.where(np.isnan(values), MISSING, keys)


def dense_column(parsed: ParsedBlock, name: str, feature: DenseFeature, missing: float | None) -> np.ndarray:
    """(rows,) of a dense feature: float32, or float64 raw values where its mean is yet to be learnt.

    log1p is the field's treatment of counts: log(1 + max(x, 0)), so that zero, negative and missing counts become 0
    (``missing`` 0). signed_log1p keeps the sign, none keeps the value.

    Args:
      parsed: Holds the float64 column; it must already be free of values that float32 cannot hold (``reject_dense``).
      name: The column's name.
      feature: What to make of it.
      missing: What stands for a blank, before the transform; None where blanks cannot occur.
    """
    values = parsed.numbers(name)
    if missing is not None:
        values = np.where(np.isnan(values), missing, values)
    return values if feature.unfitted else apply(feature, values)


def reject_dense(parsed: ParsedBlock, name: str, transform: str) -> None:
    """Rejects rows whose value float32 cannot hold."""
    if transform in ("none", STANDARDIZE):
        parsed.reject(np.abs(parsed.numbers(name)) > _FLOAT32_MAX, name, "is too large for float32")
