"""Files that are on the disk when they count, and errors that name the one that is damaged."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Buffer, Mapping

import jax.numpy as jnp
import numpy as np

from jrec.errors import CheckpointError
from jrec.json_values import JsonObject
from jrec.native.crc32c import crc32c

_SMALL = 1 << 20  # bytes of a file whose time on the disk is the waiting, not the writing


class DamagedError(CheckpointError):
    """A file of a checkpoint that is not what was written.

    Attributes:
      path: The file.
    """

    def __init__(self, path: pathlib.Path, reason: str, remedy: str = ""):
        super().__init__(f"{path} is damaged: {reason}{remedy}")
        self.path, self.reason = path, reason

    def advised(self, remedy: str) -> DamagedError:
        """The same error with what to do about it."""
        return DamagedError(self.path, self.reason, f"; {remedy}")


def write_file(path: pathlib.Path, *buffers: Buffer, later: bool = False) -> int:
    """Writes a new file, waits until it is on the disk, and returns its size in bytes.

    Args:
      path: The file.
      buffers: Its content.
      later: Whether the caller waits for it, if it is small, with many others at once (``jrec.outputs.sync_all``).
    """
    # Never over a file that is there: it may be a link that an older checkpoint shares.
    with path.open("xb", buffering=0) as file:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                # A file without a buffer may take less than it is given.
                view = view[file.write(view) :]
        size = file.tell()
        if not later or size > _SMALL:
            os.fsync(file.fileno())
    return size


def read_file(path: pathlib.Path, size: int) -> np.ndarray:
    """Reads a file of ``size`` bytes, as (size,) uint8.

    Raises:
      DamagedError: If it is missing or of another size.
    """
    try:
        with path.open("rb", buffering=0) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise DamagedError(path, f"it has {actual:,} bytes, but {size:,} were written")
            data = np.empty(size, np.uint8)  # only now: a size that is wrong may be huge
            view, at = memoryview(data), 0
            while at < size and (count := file.readinto(view[at:])):
                at += count
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from error
    return data


def read_checked(path: pathlib.Path, size: int, checksum: int) -> np.ndarray:
    """As ``read_file``, of a file whose bytes have this checksum."""
    data = read_file(path, size)
    if crc32c(data) != checksum:
        raise DamagedError(path, "its checksum differs from what was written")
    return data


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> list[JsonObject]:
    """Writes arrays one after the other; names, dtypes, shapes and checksums go to the manifest.

    So nothing in the file decides how it is read, and it cannot vouch for itself.
    """
    flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
    write_file(path, *flat.values())
    return [
        {"name": name, "dtype": arrays[name].dtype.name, "shape": list(arrays[name].shape), "crc32c": crc32c(data)}
        for name, data in flat.items()
    ]


def read_arrays(path: pathlib.Path, records: list[JsonObject]) -> dict[str, np.ndarray]:
    """What ``write_arrays`` wrote.

    Raises:
      DamagedError: If the file is missing, of another size, or an array is not what was written.
    """
    dtypes = [jnp.dtype(record["dtype"]) for record in records]
    sizes = [math.prod(record["shape"]) * dtype.itemsize for record, dtype in zip(records, dtypes, strict=True)]
    data, arrays, begin = read_file(path, sum(sizes)), {}, 0
    for record, dtype, size in zip(records, dtypes, sizes, strict=True):
        raw = data[begin : begin + size]
        if crc32c(raw) != record["crc32c"]:
            raise DamagedError(path, f"the checksum of {record['name']!r} differs from what was written")
        # A copy, so that each array is aligned, and one that is kept does not keep the whole file in memory.
        arrays[record["name"]] = raw.copy().view(dtype).reshape(record["shape"])
        begin += size
    return arrays


def write_json(path: pathlib.Path, content: Mapping[str, object]) -> None:
    """Writes a JSON object with the checksum of its own content."""
    write_file(path, json.dumps({**content, "checksum": _checksum(content)}).encode())


def read_json(path: pathlib.Path) -> JsonObject:
    """What ``write_json`` wrote.

    Raises:
      DamagedError: If it is missing or damaged.
    """
    try:
        content = json.loads(path.read_bytes())
        json.dumps(content, ensure_ascii=False).encode()  # an escape can be half of a character
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"it is no JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise DamagedError(path, "its content does not match its checksum")
    return content


def _checksum(content: Mapping[str, object]) -> int:
    """The checksum of a JSON object, whatever the order of its keys."""
    return crc32c(json.dumps(content, sort_keys=True).encode())
