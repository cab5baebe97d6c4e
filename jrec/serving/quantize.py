"""Rows in fewer bits: a scale and a bias a row, and 8 or 4 bits a value (rowwise asymmetric quantization)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jrec.native.batched_lookup import quantized_dtype


def quantize(rows: np.ndarray, bits: int) -> np.ndarray:
    """Quantizes rows, each to the range of its own values: ``value = scale * q + bias`` with q in [0, 2^bits - 1].

    Args:
      rows: (n, dim) floats, finite.
      bits: 8 or 4.

    Returns:
      (n,) of ``quantized_dtype(bits, dim)``. An element is off by at most half a step, (max - min) / (2^bits - 1) / 2
      of its row, and float32's rounding.

    Raises:
      ValueError: If a value is NaN or infinite, or ``bits`` is neither 8 nor 4.

    Example:
      >>> quantized = quantize(np.array([[0.0, 1.0, 255.0]]), 8)
      >>> quantized["values"].tolist(), dequantize(quantized, 8, 3).tolist()
      ([[0, 1, 255]], [[0.0, 1.0, 255.0]])
    """
    count, dim = rows.shape
    out = np.zeros(count, quantized_dtype(bits, dim))
    if not rows.size:
        return out
    values = rows.astype(np.float32)
    low, high = values.min(axis=1), values.max(axis=1)
    if not (np.isfinite(low) & np.isfinite(high)).all():  # of NaN both are NaN; their sum may overflow by itself
        bad = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise ValueError(f"row {bad} of the rows to quantize holds {values[bad][~np.isfinite(values[bad])][0]}")
    most = 2**bits - 1
    scale = (high.astype(np.float64) - low) / most
    # A row of one value has no range: its numbers are 0, and the bias is the value.
    steps = np.where(scale > 0, scale, 1)[:, None]
    numbers = np.clip(np.rint((values - low[:, None].astype(np.float64)) / steps), 0, most).astype(np.uint8)
    out["scale"], out["bias"] = scale, low
    if bits == 4:
        padded = np.zeros((count, 2 * out.dtype["values"].shape[0]), np.uint8)
        padded[:, :dim] = numbers
        numbers = padded[:, 0::2] | (padded[:, 1::2] << 4)
    out["values"] = numbers
    return out


def exported_rows(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows, (n, dim) floats, as an export of a dtype keeps them: ``quantize`` of "int8" and "int4"."""
    if dtype in ("int8", "int4"):
        return quantize(rows, int(dtype[3:]))
    return np.asarray(rows, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


def dequantize(rows: np.ndarray, bits: int, dim: int) -> np.ndarray:
    """The float32 rows, (n, dim), that quantized ones stand for."""
    values = rows["values"]
    if bits == 4:
        # The width is said, not left to NumPy: of no rows it cannot be told.
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(len(rows), 2 * values.shape[1])[:, :dim]
    return values * rows["scale"][:, None] + rows["bias"][:, None]
