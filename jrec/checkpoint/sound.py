"""Whether a manifest makes sense: its checksum fits what some program wrote, which may have been wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jrec.checkpoint.files import DamagedError
from jrec.files import decode

if TYPE_CHECKING:
    from jrec.checkpoint.manifest import ArrayRecord, Manifest, PieceRecord, TableRecord, TableShape

_MOST_ROWS, _MOST_DIM, _MOST_BYTES = 2**40, 2**24, 2**50


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseRecord:
    """A dense array, as ``write_arrays`` describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32c: int


def check_sound(path: pathlib.Path, manifest: Manifest) -> None:
    """Refuses sizes, numbers and names with which nothing could be read.

    Args:
      path: The manifest's file, for messages.
      manifest: What it says.

    Raises:
      DamagedError: At the first thing that contradicts another.
    """
    for number, record in enumerate(manifest.arrays):
        dense = decode(
            record, _DenseRecord, where=f"arrays[{number}]", error=lambda said: DamagedError(path, said), remedy=""
        )
        if not _fits(dense.shape, dense.dtype):
            raise DamagedError(path, f"array {dense.name!r} is {dense.dtype}{list(dense.shape)}")
    for name, table in manifest.tables.items():
        if name != table.shape.name or not _sound_shape(table.shape):
            raise DamagedError(path, f"it contradicts itself on table {name!r}")
        for piece in table.pieces:
            if not _sound_piece(piece, table):
                raise DamagedError(path, f"it contradicts itself on piece {piece.folder!r} of table {name!r}")


def _fits(shape: tuple[int, ...], dtype: str) -> bool:
    try:
        size = jnp.dtype(dtype).itemsize
    except (TypeError, ValueError):
        return False
    return all(n >= 0 for n in shape) and math.prod(shape) * size < _MOST_BYTES


def _sound_shape(shape: TableShape) -> bool:
    first = shape.first
    return (
        0 <= shape.rows <= _MOST_ROWS
        and 1 <= shape.dim <= _MOST_DIM
        and _fits((shape.dim,), shape.dtype)
        and set(shape.slots.values()) <= {"row", "element"}
        and (
            first is None
            or (
                len(first.key) == 2
                and all(0 <= word < 2**32 for word in first.key)
                and shape.rows <= first.of_rows <= _MOST_ROWS
                and first.slots.keys() == shape.slots.keys()
            )
        )
    )


def _sound_piece(piece: PieceRecord, table: TableRecord) -> bool:
    shape = table.shape
    if not (0 <= piece.count <= shape.rows and piece.chunk >= 1 and piece.folder.replace("-", "").isalnum()):
        return False
    chunks, known = -(-piece.count // piece.chunk), {"values", "rows", *shape.slots}
    if not piece.arrays.keys() <= known or not all(_sound_array(a, chunks) for a in piece.arrays.values()):
        return False
    if piece.firsts is None:
        return piece.count == shape.rows
    ends = [*piece.firsts, shape.rows]
    ascending = all(a < b for a, b in itertools.pairwise(ends)) and all(first >= 0 for first in piece.firsts)
    return "rows" in piece.arrays and len(piece.firsts) == chunks and ascending


def _sound_array(array: ArrayRecord, chunks: int) -> bool:
    metadata = array.metadata
    return metadata.keys() == {"bytes", "crc32c"} and 0 <= metadata["bytes"] < 2**20 and len(array.chunks) == chunks
