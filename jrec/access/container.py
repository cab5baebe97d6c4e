r"""Small checksummed files of a JSON header and NumPy arrays, for access profiles and plans.

    KIND VERSION\n | length of the header, 8 bytes little-endian | header, JSON | arrays, zlib | SHA-256 of all before

Nothing in such a file can run code when it is read. Files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.errors import JrecError
from jrec.files import parse_json
from jrec.json_values import JsonMapping, JsonObject
from jrec.outputs import write_file

_DIGEST = 32
_LENGTH = struct.Struct("<Q")
_KINDS = "iufb"  # of dtypes: integers, floats, booleans
_MOST_COMPRESSED = 1032  # zlib's limit: bytes out for a byte in


def write_container(
    path: str | os.PathLike[str],
    *,
    kind: str,
    version: int,
    header: JsonMapping,
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Writes a file atomically.

    Args:
      path: The file to write.
      kind: What the file is, e.g. "jrec-plan".
      version: The version of its format.
      header: JSON types.
      arrays: Integers, floats or booleans of any shape.
    """
    entries, bodies = [], []
    for name, array in arrays.items():
        # By name, so that the file, and its checksum, are the same on every machine.
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        body = zlib.compress(little.tobytes(), 6)
        entries.append({"name": name, "dtype": little.dtype.str, "shape": little.shape, "bytes": len(body)})
        bodies.append(body)
    text = json.dumps({"header": header, "arrays": entries}, allow_nan=False).encode()
    content = b"".join((f"{kind} {version}\n".encode(), _LENGTH.pack(len(text)), text, *bodies))
    write_file(path, content + hashlib.sha256(content).digest())


def read_container(
    path: str | os.PathLike[str], *, kind: str, version: int | tuple[int, ...], error: type[JrecError], remedy: str
) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """Reads and checks a file.

    Args:
      path: The file to read.
      kind: The kind that the file has to be.
      version: The version of the format that the file has to have, or several that will do.
      error: Raised with a message that ends in ``remedy``.
      remedy: How to get a good file, e.g. "make it again with `jrec plan`".

    Returns:
      The header, and the arrays by name.

    Raises:
      error: If the file cannot be read, is of another kind or version, truncated or damaged.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}); {remedy}") from problem
    if not content.startswith(kind.encode() + b" "):
        raise error(f"{path} is no {kind} file; {remedy}")
    first, _, rest = content.partition(b"\n")
    version_read = first.removeprefix(kind.encode() + b" ").decode("ascii", "replace")
    known = [str(v) for v in (version if isinstance(version, tuple) else (version,))]
    if version_read not in known and version_read.isdigit():
        raise error(
            f"{path} is of {kind} version {version_read}, but this jrec reads version {' or '.join(known)}; {remedy}"
        )
    if len(rest) < _LENGTH.size + _DIGEST or hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise error(f"{path} is truncated or damaged: its checksum does not fit; {remedy}")
    try:
        (length,) = _LENGTH.unpack_from(rest)
        body = memoryview(rest)[_LENGTH.size : -_DIGEST]
        described = parse_json(bytes(body[:length]))
        return described["header"], _arrays(described["arrays"], body[length:])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as problem:
        raise error(f"{path} does not hold what a {kind} file holds ({problem!r}); {remedy}") from problem


def check_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
    *,
    error: type[JrecError],
    remedy: str,
) -> None:
    """Refuses a file whose arrays are not these, or not one-dimensional numbers.

    Args:
      path: The file, for the message.
      arrays: What it holds.
      names: What it has to hold.
      error: What is raised.
      remedy: What the message advises.

    Raises:
      JrecError: As ``error``; the message names an array.
    """
    if odd := sorted(set(names) ^ set(arrays)):
        raise error(f"{path} {'lacks' if odd[0] in names else 'has an odd'} array {odd[0]}; {remedy}")
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise error(f"{path}: array {name} is {array.dtype}{list(array.shape)}, no list of numbers; {remedy}")


def _arrays(entries: list[JsonObject], body: memoryview) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    at = 0
    for entry in entries:
        name, shape, size = str(entry["name"]), tuple(entry["shape"]), entry["bytes"]
        dtype = np.dtype(str(entry["dtype"]))
        if dtype.kind not in _KINDS or name in arrays:
            raise ValueError(f"array {name} has dtype {dtype}, or is there twice")
        if any(type(n) is not int or n < 0 for n in (*shape, size)) or at + size > len(body):
            raise ValueError(f"array {name} has shape {shape} in {size} bytes")
        expected = math.prod(shape) * dtype.itemsize
        if expected > _MOST_COMPRESSED * size:  # before room is made for it
            raise ValueError(f"array {name} of shape {shape} cannot be in {size} bytes")
        unpacker = zlib.decompressobj()
        # One byte more than expected is enough to tell that there are too many, however many there are.
        raw = unpacker.decompress(body[at : at + size], expected + 1)
        if len(raw) != expected or not unpacker.eof or unpacker.unused_data:
            raise ValueError(f"array {name} has other bytes than its shape {shape} says")
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape).astype(dtype.newbyteorder("="))
        at += size
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes behind the last array")
    return arrays
