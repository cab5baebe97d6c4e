"""A table of rows in safetensors files: one tensor or numbered ones, with or without scales."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jrec.errors import CheckpointError
from jrec.outputs import Place
from jrec.table_files.overlay_file import Overlay, digest_of_rows
from jrec.table_files.safetensors import Tensors
from jrec.table_files.scales import FP8, INT8, POWERS_OF_TWO, block_of, dequantized, scale_values

CHUNK_ROWS = 65_536
"""Rows that are in memory at once, of a table that is read or written as a whole."""

FLOATS = ("float32", "bfloat16", "float16")
_SCALED = (FP8.name, INT8.name)
SCALE_DTYPES = {FP8.name: (POWERS_OF_TWO.name, "uint8", "float32"), INT8.name: ("float32",)}
"""Of scales of blocks as they are written, the default first; one scale for a whole table is a float."""
_FLOAT_SCALES = ("float32", "bfloat16")
_KNOWN = (*FLOATS, *_SCALED, "float8_e5m2", POWERS_OF_TWO.name)
_ROWS_OF_A_BLOCK = 4096  # that a writer takes at once
_SAMPLED_ROWS = 1024  # of a fingerprint, which is to be had in a moment of a table of any size


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How a table lies in its files.

    Attributes:
      name: The tensor; with "{}" in it, the tensors of its pieces, numbered from 0.
      dtype: "float32", "bfloat16" or "float16"; or "float8_e4m3fn" or "int8", with scales.
      piece_rows: Rows of each piece, but for the last; None for a single tensor.
      scale: The tensor of the scales, with "{}" where ``name`` has it and blocks have scales; "" without scales.
      scale_dtype: Of FP8, "float8_e8m0fnu", the default, "uint8", the same bytes, or "float32"; of INT8, "float32". A
        single scale is "float32", the default, or "bfloat16".
      block: Rows and elements that share a scale; see ``quantized``. None for one scale of the whole table, as Qwen3.8
        has in FP8.

    Raises:
      ValueError: If these do not go together.
    """

    name: str
    dtype: str = "bfloat16"
    piece_rows: int | None = None
    scale: str = ""
    scale_dtype: str | None = None
    block: tuple[int, int] | None = (1, 32)

    def __post_init__(self) -> None:
        if self.dtype not in (*FLOATS, *_SCALED):
            raise ValueError(f"dtype={self.dtype!r} of a table; choose one of {', '.join((*FLOATS, *_SCALED))}")
        in_pieces = "{}" in self.name
        scales_in_pieces = in_pieces and bool(self.scale) and self.block is not None
        if in_pieces != (self.piece_rows is not None) or scales_in_pieces != ("{}" in self.scale):
            raise ValueError(
                f"name={self.name!r}, scale={self.scale!r}, piece_rows={self.piece_rows}: a table in pieces has {{}} in"
                " each name but a single scale's, and their rows"
            )
        if (self.dtype in _SCALED) != bool(self.scale):
            raise ValueError(f"dtype={self.dtype!r} and scale={self.scale!r}: name the scales of 8 bits, and only them")
        dtypes = () if not self.scale else _FLOAT_SCALES if self.block is None else SCALE_DTYPES[self.dtype]
        if self.scale and self.scale_dtype not in (None, *dtypes):
            raise ValueError(f"scale_dtype={self.scale_dtype!r} of dtype={self.dtype!r}; choose one of {dtypes}")
        height, width = (1, 1) if self.block is None else self.block
        if self.scale and not (1 <= height <= _ROWS_OF_A_BLOCK and width >= 1):
            raise ValueError(
                f"block={self.block}: from 1 to {_ROWS_OF_A_BLOCK:,} rows share a scale as they are written"
            )
        if self.piece_rows is not None and (self.piece_rows < 1 or (self.scale and self.piece_rows % height)):
            raise ValueError(f"piece_rows={self.piece_rows} must be whole blocks of {height} rows")

    @property
    def height(self) -> int:
        """Rows that are encoded together."""
        return self.block[0] if self.scale and self.block is not None else 1


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor of rows, with its scales where it has some."""

    values: np.ndarray
    scales: np.ndarray | None
    block: tuple[int, int]

    def stored(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return self.values[rows], None if self.scales is None else self.scales[rows // self.block[0]]

    def read(self, rows: np.ndarray) -> np.ndarray:
        values, scales = self.stored(rows)
        return values if scales is None else dequantized(values, scales, (1, self.block[1]))


class StoredRows(NamedTuple):
    """Rows as a table's files, and the overlays over them, hold them.

    Attributes:
      values: (n, dim) of the table's stored dtype.
      scales: (n, blocks of elements), for each row; None without scales.
      encoded: (n,) bool, whether ``values`` are the rows; where not, an overlay has them as floats.
    """

    values: np.ndarray
    scales: np.ndarray | None
    encoded: np.ndarray


class StoredTable:
    """A table in safetensors files, of which only what is asked for is read.

    >>> jrec.table_files.write_tensors("engram", {"embed.weight": np.eye(4, 3, dtype=np.float32)})
    >>> table = StoredTable(Tensors("engram"), "embed.weight")
    >>> table.rows, table.dim, table.read([2, 0]).tolist()
    (4, 3, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])

    Its rows go into a run, in whatever tier they live there, by ``for ids, rows in table.chunks():
    run.set_rows("ngram", ids, rows)``, and come back by ``write_table``, or, only those that changed, by
    ``write_overlay``. With ``overlays`` the table has their rows in place of its own; without them it is what it was.

    Attributes:
      rows: Rows of the table.
      dim: Elements of a row.
      dtype: Of the rows that ``read`` returns: the stored floats, or float32 of rows with scales, and where an overlay
        has other floats.

    Args:
      tensors: ``Tensors``, or arrays by name.
      name: The tensor, (rows, dim); with "{}" for a number, the tensors of consecutive pieces, such as
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight" of Qwen3.8.
      scale: The tensor of the scales, which multiply the values: one for all, for each row, or for each block. Left
        out, it is the one that stands beside the tensor, its name with ".scale", ".weight_scale" or ".weight_scale_inv"
        in place of ".weight"; "" for none.
      block: Rows and elements that share a scale, where the shapes leave it open.
      overlays: A file of ``write_overlay``, or several in the order in which they were made: of rows in several the
        last counts.

    Raises:
      CheckpointError: If a tensor is missing, or dtypes and shapes do not go together; if an overlay is damaged, of
        another table, or changes rows that are not as they were when it was made.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        name: str,
        *,
        scale: str | None = None,
        block: tuple[int, int] | None = None,
        overlays: Place | Sequence[Place] = (),
    ):
        self._tensors, self.name = tensors, name
        names = _piece_names(tensors, name)
        self._scale = _scale_name(tensors, name, tensors[names[0]].dtype) if scale is None else scale
        self._pieces = [
            _piece(tensors, piece, self._scale.replace("{}", str(number)), block) for number, piece in enumerate(names)
        ]
        first = self._pieces[0]
        for piece, stored in zip(names, self._pieces, strict=True):
            if stored.values.shape[1] != first.values.shape[1] or stored.values.dtype != first.values.dtype:
                raise CheckpointError(
                    f"tensor {piece} is {_described(stored.values)}, but {names[0]} {_described(first.values)};"
                    " the pieces of a table have rows of one size and dtype"
                )
        self._starts = [0, *itertools.accumulate(len(piece.values) for piece in self._pieces)]
        self.rows, self.dim = self._starts[-1], first.values.shape[1]
        self.dtype = first.values.dtype if first.scales is None else np.dtype(np.float32)
        self._overlays: list[Overlay] = []
        for path in [overlays] if isinstance(overlays, (str, os.PathLike)) else overlays:
            overlay = Overlay.open(pathlib.Path(path))
            self._check_fits(overlay)
            self._overlays.append(overlay)
            if not self._in_format(overlay) and overlay.values.dtype != self.dtype:
                self.dtype = np.dtype(np.float32)

    @property
    def format(self) -> TableFormat:
        """How the table lies in its files, for another one like it.

        Raises:
          CheckpointError: If ``write_table`` writes no such table, such as pieces of several sizes.
        """
        first, in_pieces = self._pieces[0], "{}" in self.name
        sizes = [len(piece.values) for piece in self._pieces]
        if set(sizes[:-1]) - {sizes[0]} or sizes[-1] > sizes[0]:
            raise CheckpointError(
                f"the pieces {self.name} have several sizes; write the table by a TableFormat of your own"
            )
        scaled = {}
        if first.scales is not None:
            block = None if self.single_scale is not None else first.block
            scaled = {"scale": self._scale, "scale_dtype": first.scales.dtype.name, "block": block}
        piece_rows = len(first.values) if in_pieces else None
        try:
            return TableFormat(name=self.name, dtype=first.values.dtype.name, piece_rows=piece_rows, **scaled)
        except ValueError as error:
            raise CheckpointError(f"{self.name}: {error}; write the table by a TableFormat of your own") from error

    @property
    def single_scale(self) -> float | None:
        """The one scale of all rows; None where there is none, or several."""
        scales = self._pieces[0].scales
        if scales is None or scales.size > 1 or (len(self._pieces) > 1 and "{}" in self._scale):
            return None
        return float(scale_values(np.asarray(scales))[0, 0])

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that the rows are read from, overlays last; without these none where the tensors are arrays."""
        overlays = [overlay.path for overlay in self._overlays]
        if not isinstance(self._tensors, Tensors):
            return overlays
        return [*sorted({self._tensors.file_of(name) for name in _piece_names(self._tensors, self.name)}), *overlays]

    @property
    def overlaid(self) -> np.ndarray:
        """The numbers of the rows that overlays hold, (n,) int64, ascending."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(overlay.ids for overlay in self._overlays)]))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the table without its overlays: of name, shapes, dtypes, pieces, and of 1,024 of its rows."""
        pieces = [
            (piece.values.shape, piece.values.dtype.name, piece.scales is not None and piece.scales.dtype.name)
            for piece in self._pieces
        ]
        digest = hashlib.sha256(json.dumps([self.name, self._pieces[0].block, pieces]).encode())
        # The stored bytes, not the floats: two tables may stand for the same rows by other scales.
        sample = np.unique(np.linspace(0, self.rows - 1, _SAMPLED_ROWS).astype(np.int64))
        for piece, _, within in self._places(sample):
            for array in piece.stored(within):
                digest.update(b"" if array is None else np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def read(self, ids: object) -> np.ndarray:
        """Rows by their numbers, (n, dim) of ``dtype``.

        Args:
          ids: (n,) integers.

        Raises:
          ValueError: If they are no integers of one axis, or one is no row.
        """
        rows = np.asarray(ids, None if np.size(ids) else np.int64)  # type: ignore[arg-type]
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise ValueError(f"rows are read by integers of shape (n,), not by {rows.dtype}{list(rows.shape)}")
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise ValueError(f"rows {rows.min()} to {rows.max()} of {self.name}, which has {self.rows:,}")
        out = np.empty((rows.size, self.dim), self.dtype)
        for piece, here, within in self._places(rows):
            out[here] = piece.read(within)
        for overlay in self._overlays:
            # In the order in which they were made: of rows in several the last is written last.
            here, places = overlay.find(rows)
            out[here] = overlay.read(places, self._pieces[0].block[1], self.single_scale)
        return out

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows in order, ``rows`` of them at a time: their numbers, (n,) int64, and ``read`` of these."""
        for begin in range(0, self.rows, rows):
            ids = np.arange(begin, min(begin + rows, self.rows))
            yield ids, self.read(ids)

    def stored(self, ids: np.ndarray) -> StoredRows:
        """Rows by their numbers, (n,) integers, as they are stored, for ``write_table`` and ``write_overlay``."""
        first = self._pieces[0]
        values = np.empty((ids.size, self.dim), first.values.dtype)
        scales = None if first.scales is None else np.empty((ids.size, first.scales.shape[1]), first.scales.dtype)
        encoded = np.ones(ids.size, bool)
        for piece, here, within in self._places(ids):
            values[here], of_rows = piece.stored(within)
            if scales is not None and of_rows is not None:
                scales[here] = of_rows
        for overlay in self._overlays:
            here, places = overlay.find(ids)
            encoded[here] = self._in_format(overlay)
            if not self._in_format(overlay):
                continue
            values[here] = overlay.values[places]
            if scales is not None and overlay.scales is not None:
                scales[here] = overlay.scales[places]
        return StoredRows(values, scales, encoded)

    def _in_format(self, overlay: Overlay) -> bool:
        """Whether an overlay has rows as the table's files would have them."""
        return overlay.values.dtype == self._pieces[0].values.dtype

    def _check_fits(self, overlay: Overlay) -> None:
        """Refuses an overlay that is to lie over the table and the overlays that it has already."""
        path, first = overlay.path, self._pieces[0]
        if overlay.base != self.fingerprint:
            raise CheckpointError(
                f"{path} is an overlay of another table than {self._described()}: that was {overlay.table[:200]!r}, and"
                " name, pieces, dtypes or rows differ; give the files that it was made over, not those that it was"
                " merged into"
            )
        if overlay.ids.size and not 0 <= overlay.ids[0] <= overlay.ids[-1] < self.rows:
            raise CheckpointError(
                f"{path} changes rows {overlay.ids[0]} to {overlay.ids[-1]} of {self.name}, which has {self.rows:,};"
                " write the overlay again"
            )
        scaled = self._in_format(overlay) and first.scales is not None and self.single_scale is None
        wanted = (overlay.ids.size, first.scales.shape[1]) if scaled and first.scales is not None else None
        shape, scales = overlay.values.shape, overlay.scales
        known = self._in_format(overlay) or overlay.values.dtype.name in FLOATS
        same_dtype = scales is None or (first.scales is not None and scales.dtype == first.scales.dtype)
        if not known or shape[1] != self.dim or (None if scales is None else scales.shape) != wanted or not same_dtype:
            raise CheckpointError(
                f"{path} has values {_described(overlay.values)} and scales"
                f" {None if scales is None else _described(scales)}, which are no rows of {self._described()}; write"
                " the overlay again"
            )
        if overlay.before != digest_of_rows(self.read(some) for some in pieces_of(overlay.ids)):
            raise CheckpointError(f"{path} {self._conflict(overlay)}")

    def _conflict(self, overlay: Overlay) -> str:
        """Why the rows that an overlay changes are not those that it was made over."""
        for below in reversed(self._overlays):
            if (shared := np.intersect1d(below.ids, overlay.ids, assume_unique=True)).size:
                return (
                    f"was not made over {below.path}, and both change row {shared[0]:,}; give overlays in the order in"
                    " which they were made, or leave one of the two out"
                )
        return (
            f"was made when the {overlay.ids.size:,} rows that it changes had other values, such as row"
            f" {overlay.ids[0]:,}; give the overlay that lay below it, too, or the table's files as they were"
        )

    def _described(self) -> str:
        where = self._tensors.path if isinstance(self._tensors, Tensors) else "arrays"
        return f"{self.name} in {where}, {_described(self._pieces[0].values)}"

    def _places(self, rows: np.ndarray) -> Iterator[tuple[_Piece, np.ndarray, np.ndarray]]:
        """Each piece that holds some of the rows, where these are among them, and their numbers in it."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            yield self._pieces[number], here, rows[here].astype(np.int64) - self._starts[number]


def pieces_of(ids: np.ndarray, rows: int = CHUNK_ROWS) -> Iterator[np.ndarray]:
    """Row numbers, ``rows`` of them at a time."""
    return (ids[begin : begin + rows] for begin in range(0, ids.size, rows))


def _piece_names(tensors: Mapping[str, np.ndarray], name: str) -> list[str]:
    """The tensors of a table, in the order of its rows."""
    if "{}" not in name:
        names, wanted = [name], name
    else:
        before, _, behind = name.partition("{}")
        pattern = re.compile(f"{re.escape(before)}(0|[1-9][0-9]{{0,8}}){re.escape(behind)}")
        numbers = sorted(int(match[1]) for match in map(pattern.fullmatch, tensors) if match)
        names = [name.replace("{}", str(number)) for number in range(len(numbers))] or [name.replace("{}", "0")]
        wanted = f"{name} in {len(numbers)} pieces" if numbers else name
    for piece in names:
        if piece not in tensors:
            near = [other for other in tensors if other.rpartition(".")[2] == name.rpartition(".")[2]][:5]
            where = f"{tensors.path} has" if isinstance(tensors, Tensors) else "there is"
            raise CheckpointError(
                f"{where} no tensor {piece!r}, of table {wanted}; some of those there: {near or list(tensors)[:5]}"
            )
    return names


def _scale_name(tensors: Mapping[str, np.ndarray], name: str, dtype: np.dtype) -> str:
    """The tensor of the scales that stands beside the values, with "{}" where each piece has its own; "" for none."""
    if dtype.name not in (*_SCALED, "float8_e5m2"):
        return ""
    base = name.removesuffix(".weight")
    of_all_pieces = ".".join(part for part in base.split(".") if "{}" not in part)
    for stem in (base, of_all_pieces):
        for ending in (".scale", ".weight_scale", ".weight_scale_inv"):
            if f"{stem}{ending}".replace("{}", "0") in tensors:
                return f"{stem}{ending}"
    raise CheckpointError(
        f"the rows of {name} are {dtype}, but no scales stand beside them; name the tensor that has them: scale=…"
    )


def _piece(tensors: Mapping[str, np.ndarray], name: str, scale: str, block: tuple[int, int] | None) -> _Piece:
    values = tensors[name]
    if values.ndim != 2 or not values.size or (values.dtype.kind != "f" and values.dtype.name not in _KNOWN):
        raise CheckpointError(
            f"tensor {name} is {_described(values)}; a table has rows of floats, or of int8 with scales"
        )
    if not scale:
        return _Piece(values, None, (1, values.shape[1]))
    if scale not in tensors:
        raise CheckpointError(f"there is no tensor {scale!r}, the scales of {name}; name them: scale=…")
    scales = tensors[scale]
    if scales.dtype.kind != "f" and scales.dtype.name not in (*_KNOWN, "uint8"):
        raise CheckpointError(f"tensor {scale} is {_described(scales)}; scales are floats, or exponents of 8 bits")
    try:
        block = block_of(values.shape, scales.shape) if block is None else block
    except ValueError as error:
        raise CheckpointError(f"{name} and {scale}: {error}") from error
    blocks = -(-values.shape[0] // block[0]), -(-values.shape[1] // block[1])
    if scales.size != blocks[0] * blocks[1]:
        raise CheckpointError(
            f"tensor {scale} is {_described(scales)}, but {name}, {_described(values)}, has {blocks[0]:,} x"
            f" {blocks[1]:,} blocks of {block[0]} rows and {block[1]} elements"
        )
    return _Piece(values, scales.reshape(blocks), block)


def _described(tensor: np.ndarray) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
