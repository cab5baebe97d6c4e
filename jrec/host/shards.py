"""Files of arrays with a checksum each: what checkpoints of host tables are made of.

A shard is its arrays' bytes one after the other. Names, dtypes, shapes and checksums stand in the manifest, which is
written last: so nothing in a shard decides how it is read, and a shard cannot vouch for itself.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrec.errors import CheckpointError

_DIFFERS = "the checksum of {!r} differs from what was written"


def write_shard(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Writes C-contiguous arrays and waits until they are on the disk.

    Returns:
      The manifest's record of the shard.
    """
    records = []
    with path.open("xb") as file:
        for name, array in arrays.items():
            data = array.reshape(-1).view(np.uint8)
            file.write(data)
            record = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "crc32": zlib.crc32(data)}
            records.append(record)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"file": path.name, "bytes": size, "arrays": records}


def read_shard(folder: pathlib.Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a shard.

    Raises:
      CheckpointError: if the file is missing, of another size, or an array of it is not what was written.
    """
    path = folder / record["file"]
    try:
        size = path.stat().st_size
        if size != record["bytes"]:
            raise damaged(path, f"it has {size:,} bytes, but {record['bytes']:,} were written")
        with path.open("rb") as file:
            return {array["name"]: _read_array(path, file, array) for array in record["arrays"]}
    except OSError as error:
        raise damaged(path, str(error)) from error


def map_shard(folder: pathlib.Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """As ``read_shard``, but read-only arrays that stay in the file, for a few rows of many.

    Raises:
      CheckpointError: see ``read_shard``.
    """
    path, arrays, begin = folder / record["file"], {}, 0
    try:
        raw = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if raw.size != record["bytes"]:
        raise damaged(path, f"it has {raw.size:,} bytes, but {record['bytes']:,} were written")
    for array in record["arrays"]:
        dtype = jnp.dtype(array["dtype"])
        data = raw[begin : begin + math.prod(array["shape"]) * dtype.itemsize]
        if zlib.crc32(data) != array["crc32"]:
            raise damaged(path, _DIFFERS.format(array["name"]))
        arrays[array["name"]] = data.view(dtype).reshape(array["shape"])
        begin += data.size
    return arrays


def _read_array(path: pathlib.Path, file: Any, record: Mapping[str, Any]) -> np.ndarray:
    array = np.empty(record["shape"], jnp.dtype(record["dtype"]))
    data = array.reshape(-1).view(np.uint8)
    if file.readinto(data) != math.prod(data.shape) or zlib.crc32(data) != record["crc32"]:
        raise damaged(path, _DIFFERS.format(record["name"]))
    return array


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object with the checksum of its own content."""
    with path.open("x", encoding="utf-8") as file:
        json.dump({**content, "checksum": checksum(content)}, file)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """What ``write_json`` wrote.

    Raises:
      CheckpointError: if it is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(content, dict) or content.pop("checksum", None) != checksum(content):
        raise damaged(path, "its content does not fit its checksum")
    return content


def checksum(content: Mapping[str, Any]) -> int:
    """Of a JSON object, whatever the order of its keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def sync_folder(path: pathlib.Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(path: pathlib.Path, reason: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(
        f"{path} is damaged: {reason}; bring it back from a copy, or delete the folder {path.parent} and those of later"
        " steps to fall back to an earlier checkpoint"
    )
