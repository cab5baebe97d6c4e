"""Arrays of an export's files: exactly what the manifest says, mapped into memory or read."""

from __future__ import annotations

import pathlib

import numpy as np

from jrec.native.batched_lookup import quantized_dtype
from jrec.serving.format import ExportError

BFLOAT16 = np.dtype("V2")  # NumPy's files have no name for it and call it two bytes


def row_array(dtype: str, rows: int | None, dim: int) -> tuple[np.dtype, tuple[int | None, ...]]:
    """Dtype and shape of a file of rows; ``rows`` None for any number."""
    if dtype in ("int8", "int4"):
        return quantized_dtype(int(dtype[3:]), dim), (rows,)
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype), (rows, dim)


def mapped(path: pathlib.Path, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
    """A file's array, mapped into memory: writes stay in this process.

    Args:
      path: The file.
      dtype: What it must hold; ``BFLOAT16`` is returned as bfloat16.
      shape: The shape that it must have; None for a length that only the file says.

    Raises:
      ExportError: If the file cannot be read, or is another array, or longer or shorter than it.
    """
    return _named(_memmap(path, np.dtype(dtype), shape))


def loaded(path: pathlib.Path, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
    """A file's array in memory of its own; see ``mapped``."""
    outline = _memmap(path, np.dtype(dtype), shape)
    try:  # not a copy of the mapping: an error of the disk ends a process that touches a mapping
        values = np.fromfile(path, outline.dtype, offset=outline.offset).reshape(outline.shape)
    except (OSError, ValueError) as problem:
        raise ExportError(f"{path} cannot be read ({problem}); copy the export again") from problem
    return _named(values)


def _memmap(path: pathlib.Path, dtype: np.dtype, shape: tuple[int | None, ...]) -> np.memmap:
    try:
        # Copy on write: deltas write rows into the mapping, and the export's own file stays as its checksum says.
        array, size = np.lib.format.open_memmap(path, mode="c"), path.stat().st_size
    except MemoryError:
        raise
    except Exception as problem:  # NumPy parses a header as Python, whose errors are of many kinds
        raise ExportError(f"{path} cannot be read ({problem}); copy the export again") from problem
    fits = len(shape) == array.ndim and all(n is None or n == m for n, m in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits or not array.flags.c_contiguous or size != array.offset + array.nbytes:
        raise ExportError(
            f"{path} is an array of {array.dtype}{list(array.shape)} in a file of {size:,} bytes, but the manifest says"
            f" {dtype}{['any' if n is None else n for n in shape]}; copy the export again"
        )
    return array


def _named(array: np.ndarray) -> np.ndarray:
    if array.dtype != BFLOAT16:
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)
