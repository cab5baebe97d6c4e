"""What a checkpoint consists of: its manifest, which is written last and names every file with its checksum."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from urllib.parse import quote

import jax.numpy as jnp

from jrec.checkpoint.files import DamagedError, read_json
from jrec.errors import CheckpointError
from jrec.files import decode
from jrec.json_values import JsonObject

FORMAT, VERSION = "jrec-checkpoint", 2
MANIFEST, ARRAYS, TABLES = "manifest.json", "arrays", "tables"
VALUES, ROWS = "values", "rows"
_MOST_ROWS, _MOST_DIM, _MOST_BYTES = 2**40, 2**24, 2**50
OLD_FORMAT = (
    "is a checkpoint of an earlier jrec (format version 1, by Orbax), which this one does not read: finish that run"
    " with the jrec that began it, or start anew with --overwrite"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """The files of one array of a piece.

    Attributes:
      metadata: Size and checksum of ``zarr.json``.
      chunks: The checksum of every chunk.
    """

    metadata: dict[str, int]
    chunks: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceRecord:
    """Some rows of a table with their slots, written at one time.

    Attributes:
      folder: Its folder's name in the table's.
      count: How many rows.
      chunk: Rows of a chunk.
      firsts: The first row of every chunk; None where the piece has all rows of the table in their order.
      arrays: By "values", slot, and "rows" (ascending int32, int64 for a table of 2^31 rows or more) unless it has all.
    """

    folder: str
    count: int
    chunk: int
    firsts: list[int] | None
    arrays: dict[str, ArrayRecord]

    @property
    def whole(self) -> bool:
        """Whether it has all rows of the table."""
        return self.firsts is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstValues:
    """What a row is that no piece has.

    Attributes:
      key: The two words of the table's key of initial rows.
      of_rows: Rows of the table with all its parts.
      slots: What each slot starts as.
      bound: The table's ``initial_bound``, None for 1/sqrt(rows), as in checkpoints of versions without it.
    """

    key: list[int]
    of_rows: int
    slots: dict[str, float]
    bound: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableShape:
    """What a checkpoint knows of a table beside its rows.

    Attributes:
      name: The table's name.
      rows: How many uncompressed rows it has.
      dim: Elements of a row.
      dtype: The rows' dtype; slots are float32.
      slots: "row" or "element" for each slot's name, as in ``RowOptimizer.slots``.
      first: What a row is that no piece has; None where pieces have all rows.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    slots: dict[str, str]
    first: FirstValues | None = None

    def array(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape behind the first axis and dtype of "values", "rows" or a slot."""
        if name == VALUES:
            return (self.dim,), self.dtype
        if name == ROWS:
            return (), "int32" if self.rows < 2**31 else "int64"
        return ((self.dim,) if self.slots[name] == "element" else ()), "float32"

    @property
    def folder(self) -> str:
        """The table's folder in a checkpoint: its name, with what a file's name may not have as %XX."""
        # A dot, too, so that no table is called as a parent folder, or as a file that is being written.
        return quote(self.name, safe=" ").replace(".", "%2E")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table of a checkpoint; later pieces are written over earlier ones."""

    shape: TableShape
    pieces: list[PieceRecord]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's manifest.

    Attributes:
      step: Steps taken.
      fingerprint: What must agree with the run that loads it.
      meta: The loader's position and counters, JSON.
      arrays: Records of the file of dense arrays.
      tables: The tables' records, by name.
    """

    step: int
    fingerprint: JsonObject
    meta: JsonObject
    arrays: list[JsonObject]
    tables: dict[str, TableRecord]

    def to_json(self) -> JsonObject:
        """The manifest's content."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}


def read_manifest(folder: pathlib.Path, name: str = MANIFEST) -> Manifest:
    """The manifest of one checkpoint's folder, or the part of it that another process left there under ``name``.

    Raises:
      CheckpointError: If it is missing or damaged, or of another format.
    """
    path = folder / name
    if not path.is_file() and is_old(folder):
        raise CheckpointError(f"{folder} {OLD_FORMAT}")
    content = read_json(path)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {content.get('format')!r}, version {content.get('version')!r}, but this jrec reads"
            f" {FORMAT!r}, version {VERSION}; use the jrec that began the run, or start anew with --overwrite"
        )
    del content["format"], content["version"]
    # What the run says of itself is its own affair: any JSON, also numbers that are not finite.
    own = {key: content.get(key) for key in ("fingerprint", "meta")}
    if not all(isinstance(value, dict) for value in own.values()):
        raise DamagedError(path, "its fingerprint or meta is no table")
    content |= {"fingerprint": {}, "meta": {}}
    # Partial: an earlier jrec wrote no key that has a default by now.
    manifest = decode(content, Manifest, where="it", error=lambda e: DamagedError(path, e), remedy="", partial=True)
    _check_sound(path, manifest)
    return dataclasses.replace(manifest, **own)


def complete_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    # One that is being written or removed has no number for a name, and so does not count, manifest or not.
    return sorted(int(path.parent.name) for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def is_old(folder: pathlib.Path) -> bool:
    """Whether a folder is a checkpoint that Orbax wrote."""
    return (folder / "_CHECKPOINT_METADATA").exists() or (folder / "state").is_dir()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseRecord:
    """A dense array, as ``write_arrays`` describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32c: int


def _check_sound(path: pathlib.Path, manifest: Manifest) -> None:
    """Refuses what fits its checksum, but was written wrongly: sizes, numbers, names with which nothing could be read.

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
