r"""Small checksummed files of a JSON header and NumPy arrays, for access profiles and plans.

    KIND VERSION\n | length of the header, 8 bytes little-endian | header, JSON | arrays, zlib | SHA-256 of all before

Nothing in such a file can run code when it is read. Files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrec.errors import JrecError

_DIGEST = 32
_LENGTH = struct.Struct("<Q")
_KINDS = "iufb"  # of dtypes: integers, floats, booleans


def write_container(
    path: str | os.PathLike[str],
    *,
    kind: str,
    version: int,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Writes a file atomically.

    Args:
      path: where.
      kind: what it is, e.g. "jrec-plan".
      version: of its format.
      header: JSON types.
      arrays: integers, floats or booleans of any shape.
    """
    entries, bodies = [], []
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        body = zlib.compress(little.tobytes(), 6)
        entries.append({"name": name, "dtype": little.dtype.str, "shape": little.shape, "bytes": len(body)})
        bodies.append(body)
    text = json.dumps({"header": header, "arrays": entries}, allow_nan=False).encode()
    content = b"".join((f"{kind} {version}\n".encode(), _LENGTH.pack(len(text)), text, *bodies))
    target = pathlib.Path(path)
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def read_container(
    path: str | os.PathLike[str], *, kind: str, version: int | tuple[int, ...], error: type[JrecError], remedy: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads and checks a file.

    Args:
      path: where.
      kind: what it has to be.
      version: that it has to be of, or any of several.
      error: raised with a message that ends in ``remedy``.
      remedy: how to get a good file, e.g. "make it again with `jrec plan`".

    Returns:
      The header, and the arrays by name.

    Raises:
      error: if the file is of another kind or version, truncated or damaged.
      OSError: if it cannot be opened.
    """
    content = pathlib.Path(path).read_bytes()
    if not content.startswith(kind.encode() + b" "):
        raise error(f"{path} is no {kind} file; {remedy}")
    first, _, rest = content.partition(b"\n")
    found = first.removeprefix(kind.encode() + b" ").decode("ascii", "replace")
    known = [str(v) for v in (version if isinstance(version, tuple) else (version,))]
    if found not in known and found.isdigit():
        raise error(f"{path} is of {kind} version {found}, but this jrec reads version {' or '.join(known)}; {remedy}")
    if len(rest) < _LENGTH.size + _DIGEST or hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
        raise error(f"{path} is truncated or damaged: its checksum does not fit; {remedy}")
    try:
        (length,) = _LENGTH.unpack_from(rest)
        body = rest[_LENGTH.size : -_DIGEST]
        described = json.loads(body[:length])
        return described["header"], _arrays(described["arrays"], body[length:])
    except (ValueError, KeyError, TypeError, zlib.error) as problem:
        raise error(f"{path} does not hold what a {kind} file holds ({problem!r}); {remedy}") from problem


def _arrays(entries: list[dict[str, Any]], body: bytes) -> dict[str, np.ndarray]:
    found, at = {}, 0
    for entry in entries:
        dtype = np.dtype(entry["dtype"])
        if dtype.kind not in _KINDS:
            raise ValueError(f"array {entry['name']} has dtype {dtype}")
        raw = zlib.decompress(body[at : at + entry["bytes"]])
        found[entry["name"]] = np.frombuffer(raw, dtype).reshape(entry["shape"]).astype(dtype.newbyteorder("="))
        at += entry["bytes"]
    return found
