"""Rows in 8 bits with a scale for each block of them: FP8 (e4m3) by powers of two, and INT8 by any float."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
POWERS_OF_TWO = np.dtype(ml_dtypes.float8_e8m0fnu)
"""ue8m0: the exponent of a float32, and nothing else."""
GREATEST = {FP8.name: 448.0, INT8.name: 127.0}
"""The greatest value of each dtype."""


def quantized(rows: np.ndarray, dtype: str, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in 8 bits, each block of them relative to its greatest absolute value.

    Args:
      rows: (n, dim) floats, finite.
      dtype: "float8_e4m3fn" or "int8".
      block: Rows and elements that share a scale: (1, 32) as DeepSeek-V4.1 has in its Engram tables, (32, 32) or
        (128, 128) as DeepSeek has in matrices, or (1, dim) for a scale a row. The last ones may be smaller.

    Returns:
      The values, (n, dim) of ``dtype``, and the scales, (blocks of rows, blocks of elements): of FP8 the least power of
      two by which a block fits, ``float8_e8m0fnu``; of INT8 the greatest value by 127, float32. ``value * scale`` is
      off by at most 1/16 of an element of FP8, where that is no less than 2^-6 of the scale, and half a scale of INT8.

    Raises:
      ValueError: If a value is not finite, or the dtype or the block is none of those.

    Example:
      >>> values, scales = quantized(np.array([[1.0, -3.0, 0.0, 448.5]]), "float8_e4m3fn", (1, 2))
      >>> scales.astype(np.float32).tolist(), dequantized(values, scales, (1, 2)).tolist()
      ([[0.0078125, 2.0]], [[1.0, -3.0, 0.0, 448.0]])
    """
    if dtype not in (FP8.name, INT8.name) or min(block) < 1:
        raise ValueError(f"dtype={dtype!r}, block={block}: choose {FP8.name!r} or 'int8', and sizes of at least 1")
    rows = rows.astype(np.float32)
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise ValueError(f"row {bad} of the rows to write is not finite; did the run diverge?")
    most = _greatest(np.abs(rows), block)
    if dtype == INT8.name:
        scales = (most / np.float32(GREATEST[INT8.name])).astype(np.float32)
        # Of a block of zeros, or of values so small that the scale is none: they are rounded to zero.
        scales[scales == 0] = 1
        steps = np.rint(rows / _spread(scales, block, rows.shape))
        return np.clip(steps, -GREATEST[INT8.name], GREATEST[INT8.name]).astype(INT8), scales
    # In float64 the quotient is 2^k exactly where the value is 448 * 2^k, so that no block is scaled up beyond 448.
    fraction, exponent = np.frexp(most.astype(np.float64) / GREATEST[FP8.name])
    exponent = np.clip(np.where(fraction == 0.5, exponent - 1, exponent), -127, 127)
    scales = np.ldexp(np.float32(1), np.where(most > 0, exponent, 0)).astype(POWERS_OF_TWO)
    return (rows / _spread(scales.astype(np.float32), block, rows.shape)).astype(FP8), scales


def by_scale(rows: np.ndarray, dtype: str, scale: float, ids: np.ndarray) -> np.ndarray:
    """Rows in 8 bits by a scale that is there already, (n, dim) of ``dtype``.

    Raises:
      ValueError: If a value does not fit, or is not finite, naming its row by ``ids``, (n,).
    """
    steps = rows.astype(np.float32) / np.float32(scale)
    # Less than half a step above the greatest value is rounded to it.
    fits = np.abs(steps) <= GREATEST[dtype] * (1 + 2.0**-8)
    if not fits.all():
        bad = int(np.flatnonzero(~fits.all(axis=1))[0])
        raise ValueError(
            f"row {ids[bad]} has the value {rows[bad][~fits[bad]][0]}, beyond {GREATEST[dtype]:g} times the table's one"
            f" scale, {scale:g}; write the table by a TableFormat with a scale for each block, or an overlay as floats"
        )
    steps = np.clip(steps, -GREATEST[dtype], GREATEST[dtype])
    # FP8 rounds as it is converted; int8 would be cut.
    return (steps if dtype == FP8.name else np.rint(steps)).astype(INT8 if dtype == INT8.name else FP8)


def dequantized(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The float32 rows, (n, dim), that values and scales of ``quantized`` stand for; scales are of any float dtype."""
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales may be infinite
        return _floats(values) * _spread(scale_values(scales), block, values.shape)


def _floats(values: np.ndarray) -> np.ndarray:
    """Values as float32; of 8 bits by a table of all 256, several times as fast as a conversion."""
    if values.dtype.itemsize > 1:
        return values.astype(np.float32)
    return np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)[values.view(np.uint8)]


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Stored scales as float32: floats as they are, and exponents of ue8m0, which some files have as uint8."""
    return (scales.view(POWERS_OF_TWO) if scales.dtype == np.uint8 else scales).astype(np.float32)


def block_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """The rows and elements that share a scale, by the shapes of a tensor and of its scales.

    Raises:
      ValueError: If the shapes do not fit each other, or several blocks are possible.
    """
    rows, dim = shape
    if not scales or set(scales) == {1}:
        return rows, dim
    if scales == (rows,):
        return 1, dim
    if len(scales) != 2:
        raise ValueError(f"scales of shape {list(scales)} fit no tensor of shape {list(shape)}")
    return _width(rows, scales[0], "rows"), _width(dim, scales[1], "elements")


def _width(size: int, blocks: int, name: str) -> int:
    if blocks in (1, size):
        return size // blocks
    possible = {k for k in (32, 128) if -(-size // k) == blocks} or ({size // blocks} if size % blocks == 0 else set())
    if len(possible) != 1:
        raise ValueError(
            f"{blocks} scales for {size:,} {name} say of no single size how many share one; give block=(rows, elements)"
        )
    return possible.pop()


def _greatest(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The greatest of each block, (blocks of rows, blocks of elements)."""
    if not values.size:
        return np.zeros((-(-values.shape[0] // block[0]), -(-values.shape[1] // block[1])), values.dtype)
    by_rows = np.maximum.reduceat(values, np.arange(0, values.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, values.shape[1], block[1]), axis=1)


def _spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element, or as many columns and rows of them as broadcast."""
    wide = scales if scales.shape[1] == 1 else np.repeat(scales, block[1], axis=1)[:, : shape[1]]
    return wide if block[0] == 1 or len(scales) == 1 else np.repeat(wide, block[0], axis=0)[: shape[0]]
