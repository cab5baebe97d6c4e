"""Arrays in chunks of whole rows, as zarr 3 describes them: uncompressed, little endian, each with its CRC-32C.

Any program that reads zarr 3 reads them. A chunk that is missing would there be filled with NaN, and one of another
array would pass its own checksum: so the manifest has every chunk's checksum too, and reads here go by the manifest.
"""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np

from jrec.checkpoint.files import DamagedError, read_checked, read_file, write_file
from jrec.native.crc32c import crc32c

METADATA = "zarr.json"
_TRAILER = 4  # bytes of a chunk's own checksum


def chunk_rows(rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """Rows of a chunk of about ``chunk_bytes``; the last of equal chunks is padded by less than a row per chunk."""
    most = max(1, chunk_bytes // row_bytes)
    # Equal chunks, as zarr has them, of as few rows as fill the fewest chunks: padding is less than with full ones.
    return -(-rows // -(-rows // most))


def write_metadata(folder: pathlib.Path, shape: tuple[int, ...], dtype: str, rows: int) -> dict[str, int]:
    """Makes an array's folder, with ``zarr.json``, for chunks of ``rows`` rows; returns the file's record.

    It is to be synced, as the folder and chunks (``write_file``).
    """
    folder.mkdir()
    number = dtype.startswith("int")
    text = json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (rows, *shape[1:])}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": -1 if number else "NaN",
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": {},
        }
    ).encode()
    return {"bytes": write_file(folder / METADATA, text, later=True), "crc32c": crc32c(text)}


def write_group(folder: pathlib.Path, attributes: dict[str, object]) -> pathlib.Path:
    """Makes a folder that zarr takes for a group; returns its file, which, as the folder, is to be synced."""
    folder.mkdir()
    content = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    write_file(folder / METADATA, json.dumps(content).encode(), later=True)
    return folder / METADATA


def chunk_path(folder: pathlib.Path, dims: int, number: int) -> pathlib.Path:
    """The file of a chunk of an array with ``dims`` dimensions."""
    return folder / ".".join(["c", str(number), *["0"] * (dims - 1)])


def write_chunk(folder: pathlib.Path, number: int, data: np.ndarray, rows: int) -> int:
    """Writes a chunk of ``rows`` rows, padded with zeros if ``data`` has less; returns its checksum."""
    if len(data) < rows:
        data = np.concatenate([data, np.zeros((rows - len(data), *data.shape[1:]), data.dtype)])
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    checksum = crc32c(raw)
    write_file(chunk_path(folder, data.ndim, number), raw, checksum.to_bytes(_TRAILER, "little"), later=True)
    return checksum


def read_chunk(folder: pathlib.Path, number: int, shape: tuple[int, ...], dtype: str, checksum: int) -> np.ndarray:
    """A chunk, (rows, ...) as ``shape`` says, with its padding.

    Raises:
      DamagedError: If it is missing or not what was written.
    """
    path, kind = chunk_path(folder, len(shape), number), jnp.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    data = read_file(path, size + _TRAILER)
    # The manifest's checksum tells this chunk from one of another array, the trailer is what other programs check.
    if crc32c(data[:size]) != checksum or int.from_bytes(data[size:].tobytes(), "little") != checksum:
        raise DamagedError(path, "its checksum differs from what was written")
    return data[:size].view(kind).reshape(shape)


def check_metadata(folder: pathlib.Path, record: dict[str, int]) -> None:
    """Reads ``zarr.json`` only to compare its checksum: jrec reads by the manifest.

    Raises:
      DamagedError: If it is missing or not what was written.
    """
    read_checked(folder / METADATA, record["bytes"], record["crc32c"])
