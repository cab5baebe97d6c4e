"""Reads safetensors files: eight bytes with the length of a JSON header, the header, and the tensors' bytes.

The ``safetensors`` package is not used: its NumPy reader copies every tensor into memory (800 MB for a table of 800 MB)
and its slices take no row numbers, so tables larger than memory would need a map and the header's offsets all the same.
What is left is a typed conversion by msgspec. Tests compare with the package, file by file.
"""

from __future__ import annotations

import json
import math
from typing import Annotated

import ml_dtypes
import msgspec
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 16 << 20  # of 100,000 tensors; decoded, it takes at most 20 times as much memory
_MOST_DIMS = 64
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMS)]
    data_offsets: tuple[_Count, _Count]


class SortedTensors(dict[str, np.ndarray]):
    """Tensors by name, of a format that sorts them: their order is not the model's."""


def is_safetensors(data: np.ndarray) -> bool:
    """Whether a file's bytes are meant to be this format: its header begins with a brace."""
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + 1]) == b"{"


def safetensors_of(data: np.ndarray) -> SortedTensors:
    """The tensors of a file, as views of its bytes.

    Args:
      data: The file's bytes, (size,) uint8.

    Raises:
      ValueError: If the header is damaged or does not fit the file.
    """
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES]), "little")
    if length > min(_MOST_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise ValueError(f"its header has {length:,} bytes, more than the file or than {_MOST_HEADER_BYTES:,}")
    entries = _entries(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    content = data[_LENGTH_BYTES + length :]
    tensors, end = SortedTensors(), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise ValueError(f"tensor {name[:100]} is of dtype {entry.dtype[:20]}; known are {', '.join(_DTYPES)}")
        if not end == begin <= stop <= len(content):
            raise ValueError(f"tensor {name[:100]} is cut off, or does not begin where the one before it ends")
        if math.prod(entry.shape) * np.dtype(dtype).itemsize != stop - begin:
            raise ValueError(f"tensor {name[:100]} of {entry.dtype} and shape {entry.shape} has {stop - begin:,} bytes")
        tensors[name] = content[begin:stop].view(dtype).reshape(entry.shape)
        end = stop
    if end != len(content):
        raise ValueError(f"{len(content) - end:,} bytes at its end belong to no tensor")
    return tensors


def _entries(header: bytes) -> dict[str, _Entry]:
    try:
        content = json.loads(header.decode(), object_pairs_hook=_unique)
        msgspec.convert(content.pop("__metadata__", None), dict[str, str] | None)
        return msgspec.convert(content, dict[str, _Entry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        raise ValueError("it has a key twice")
    return by_key
