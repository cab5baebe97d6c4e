"""A table of rows in safetensors files: one tensor or numbered ones, with or without scales."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jrec.errors import CheckpointError
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

    def read(self, rows: np.ndarray) -> np.ndarray:
        values = self.values[rows]
        if self.scales is None:
            return values
        return dequantized(values, self.scales[rows // self.block[0]], (1, self.block[1]))


class StoredTable:
    """A table in safetensors files, of which only what is asked for is read.

    >>> jrec.table_files.write_tensors("engram", {"embed.weight": np.eye(4, 3, dtype=np.float32)})
    >>> table = StoredTable(Tensors("engram"), "embed.weight")
    >>> table.rows, table.dim, table.read([2, 0]).tolist()
    (4, 3, [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])

    Its rows go into a run, in whatever tier they live there, by ``for ids, rows in table.chunks():
    run.set_rows("ngram", ids, rows)``, and come back by ``write_table``.

    Attributes:
      rows: Rows of the table.
      dim: Elements of a row.
      dtype: Of the rows that ``read`` returns: the stored floats, or float32 of rows with scales.

    Args:
      tensors: ``Tensors``, or arrays by name.
      name: The tensor, (rows, dim); with "{}" for a number, the tensors of consecutive pieces, such as
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight" of Qwen3.8.
      scale: The tensor of the scales, which multiply the values: one for all, for each row, or for each block. Left
        out, it is the one that stands beside the tensor, its name with ".scale", ".weight_scale" or ".weight_scale_inv"
        in place of ".weight"; "" for none.
      block: Rows and elements that share a scale, where the shapes leave it open.

    Raises:
      CheckpointError: If a tensor is missing, or dtypes and shapes do not go together.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        name: str,
        *,
        scale: str | None = None,
        block: tuple[int, int] | None = None,
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
        """The files that the rows are read from; none where the tensors are arrays."""
        if not isinstance(self._tensors, Tensors):
            return []
        return sorted({self._tensors.file_of(name) for name in _piece_names(self._tensors, self.name)})

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
        return out

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows in order, ``rows`` of them at a time: their numbers, (n,) int64, and ``read`` of these."""
        for begin in range(0, self.rows, rows):
            ids = np.arange(begin, min(begin + rows, self.rows))
            yield ids, self.read(ids)

    def bytes_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows as they are stored, with the scales of the blocks of rows that begin among them, for ``write_table``.

        Args:
          ids: (n,) consecutive integers, whole blocks of rows but for the last ones of a piece, and of one piece.
        """
        [(piece, _, within)] = self._places(ids)
        if piece.scales is None:
            return piece.values[within], None
        return piece.values[within], piece.scales[within[:: piece.block[0]] // piece.block[0]]

    def _places(self, rows: np.ndarray) -> Iterator[tuple[_Piece, np.ndarray, np.ndarray]]:
        """Each piece that holds some of the rows, where these are among them, and their numbers in it."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            yield self._pieces[number], here, rows[here].astype(np.int64) - self._starts[number]


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
    for of in (base, of_all_pieces):
        for ending in (".scale", ".weight_scale", ".weight_scale_inv"):
            if f"{of}{ending}".replace("{}", "0") in tensors:
                return f"{of}{ending}"
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
