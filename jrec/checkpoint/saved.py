"""One checkpoint, opened: dense arrays, and rows read by table and number, each chunk checked before it is used."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jrec.checkpoint import chunks
from jrec.checkpoint.files import read_arrays
from jrec.checkpoint.in_use import keep_while_read
from jrec.checkpoint.manifest import ARRAYS, ROWS, TABLES, VALUES, Manifest, PieceRecord, TableRecord, read_manifest
from jrec.checkpoint.settled import SETTLED, Conversion, Settled
from jrec.errors import CheckpointError
from jrec.ops.layout import Stack
from jrec.row_optimizers import RowOptimizer

if TYPE_CHECKING:
    from jrec.host.table import HostTable

_AT_ONCE = 1 << 16  # rows that are read to be converted


class Saved:
    """A complete checkpoint. While this object lives, a run that keeps only its latest does not remove it.

    Args:
      folder: RUN/checkpoints/STEP.

    Raises:
      CheckpointError: If it is missing, damaged, or of another format.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        keep_while_read(folder, self)
        self.manifest: Manifest = read_manifest(folder)
        self._tables: dict[str, SavedTable] = {}
        self._conversions: Mapping[str, Conversion] = {}

    def read_by(self, optimizers: Callable[[str], RowOptimizer | None]) -> Saved:
        """The checkpoint as a run reads it: rows that exact optimizers stored are then as it needs them.

        Args:
          optimizers: By table, the optimizer that goes on with its rows and slots; None to read current rows.

        Returns:
          The checkpoint itself if it is so already.
        """
        stored = {name: Settled.from_meta(meta) for name, meta in self.manifest.meta.get(SETTLED, {}).items()}
        readings = {name: settled.read_by(optimizers(name)) for name, settled in stored.items()}
        conversions = {name: conversion for name, conversion in readings.items() if conversion is not None}
        if not conversions:
            return self
        converted = Saved(self.folder)
        converted._conversions = conversions
        return converted

    def current(self) -> Saved:
        """The checkpoint, read by whoever only predicts (``read_by``)."""
        return self.read_by(lambda table: None)

    @property
    def step(self) -> int:
        """Steps taken before it."""
        return self.manifest.step

    def arrays(self) -> dict[str, np.ndarray]:
        """The dense arrays by path.

        Raises:
          CheckpointError: If they are damaged.
        """
        return read_arrays(self.folder / ARRAYS, self.manifest.arrays)

    def table(self, name: str) -> SavedTable:
        """A table's rows.

        Raises:
          CheckpointError: If the checkpoint has no such table.
        """
        if name not in self._tables:
            if name not in self.manifest.tables:
                raise CheckpointError(
                    f"{self.folder} has no rows of table {name!r}, only of {', '.join(self.manifest.tables) or 'none'};"
                    " use the run's own configuration"
                )
            record = self.manifest.tables[name]
            folder = self.folder / TABLES / record.shape.folder
            self._tables[name] = SavedTable(folder, record, self._conversions.get(name))
        return self._tables[name]

    def stack_tables(self, stack: Stack) -> list[SavedTable]:
        """The tables of a stack, whatever they were stacked with when they were saved.

        Raises:
          CheckpointError: If one is missing, or has other rows.
        """
        tables = []
        for config in stack.tables:
            table = self.table(config.name)
            shape = table.record.shape
            if (shape.rows, shape.dim, shape.dtype) != (config.rows, config.dim, config.dtype):
                raise CheckpointError(
                    f"{self.folder}: table {config.name!r} is {shape.rows:,} x {shape.dim} of {shape.dtype} there, but"
                    f" this run expects {config.rows:,} x {config.dim} of {config.dtype}"
                )
            tables.append(table)
        return tables

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows of "values", or of a slot, at (n,) addresses of a stack, in any order.

        Raises:
          CheckpointError: If the checkpoint is damaged, or of other tables.
        """
        tables, unique, inverse = self.stack_tables(stack), addresses, None
        if addresses.size > 1 and not (addresses[1:] > addresses[:-1]).all():
            unique, inverse = np.unique(addresses, return_inverse=True)
        shape, dtype = tables[0].record.shape.array(array)
        out = np.empty((unique.size, *shape), jnp.dtype(dtype))
        bounds = np.searchsorted(unique, [*stack.bases, stack.rows])
        for table, base, begin, stop in zip(tables, stack.bases, bounds, bounds[1:], strict=False):
            if stop > begin:
                table.read_into(array, unique[begin:stop].astype(np.int64) - base, out[begin:stop])
        return out if inverse is None else out[inverse]

    def verify(self) -> None:
        """Reads everything.

        Raises:
          CheckpointError: If something is missing or damaged.
        """
        self.arrays()
        for name in self.manifest.tables:
            self.table(name).verify()


class SavedTable:
    """The rows of one table of a checkpoint.

    Args:
      folder: The table's folder.
      record: What the manifest says of it.
      conversion: What is done to rows that are read; None to read them as they are stored.
    """

    def __init__(self, folder: pathlib.Path, record: TableRecord, conversion: Conversion | None = None):
        self.record, self._folder, self._conversion = record, folder, conversion
        self._pieces = [_Piece(folder / piece.folder, piece, record) for piece in record.pieces]

    def read(self, array: str, rows: np.ndarray) -> np.ndarray:
        """Rows of "values", or of a slot, at (n,) int64 ascending numbers; first values where no piece has them."""
        shape, dtype = self.record.shape.array(array)
        out = np.empty((rows.size, *shape), jnp.dtype(dtype))
        self.read_into(array, rows, out)
        return out

    def read_into(self, array: str, rows: np.ndarray, out: np.ndarray) -> None:
        """As ``read``, into an array of the shape and dtype that it returns."""
        if self._conversion is None:
            self._read_stored(array, rows, out)
        else:
            for begin in range(0, rows.size, _AT_ONCE):
                some = slice(begin, begin + _AT_ONCE)
                out[some] = self._conversion(self._all_stored(rows[some]))[array]

    def _all_stored(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        arrays = {}
        for array in (VALUES, *self.record.shape.slots):
            shape, dtype = self.record.shape.array(array)
            arrays[array] = np.empty((rows.size, *shape), jnp.dtype(dtype))
            self._read_stored(array, rows, arrays[array])
        return arrays

    def _read_stored(self, array: str, rows: np.ndarray, out: np.ndarray) -> None:
        # First values everywhere, over which pieces write what they have.
        self._fill_first(array, rows, out)
        read = np.zeros(rows.size, bool)
        for piece in self._pieces:
            # In the order in which they were written: what a later piece has is newer.
            piece.read_into(array, rows, out, read)
        if self.record.shape.first is None and not read.all():
            raise CheckpointError(
                f"{self._folder}: {np.count_nonzero(~read):,} of {rows.size:,} rows of table"
                f" {self.record.shape.name!r} are in no piece of this checkpoint; go on from an earlier one"
            )

    def written(self, arrays: list[str]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """What was written, chunk by chunk, later pieces after earlier ones: rows' numbers and arrays by name."""
        if (conversion := self._conversion) is not None:
            names = [VALUES, *self.record.shape.slots]
            chunks = self._every(names) if conversion.moves_first_values else self._written(names)
            for rows, stored in chunks:
                converted = conversion(stored)
                yield rows, {name: converted[name] for name in arrays}
            return
        yield from self._written(arrays)

    def _every(self, arrays: list[str]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All rows, whether they were written or not."""
        for begin in range(0, self.record.shape.rows, _AT_ONCE):
            rows = np.arange(begin, min(begin + _AT_ONCE, self.record.shape.rows))
            stored = self._all_stored(rows)
            yield rows, {name: stored[name] for name in arrays}

    def _written(self, arrays: list[str]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for piece in self._pieces:
            for number in range(piece.chunks):
                yield piece.rows(number), {name: piece.chunk(name, number) for name in arrays}

    def rows_since(self, before: TableRecord) -> np.ndarray | None:
        """(n,) int64 ascending numbers of the rows that were written after another checkpoint; None if that is unknown.

        Args:
          before: The table in that checkpoint. This one tells what came after it where it only added to its pieces, and
            rows change only where they are written.
        """
        # Pieces are only added, unless all rows were written anew: then the first ones differ.
        count = len(before.pieces)
        added = self._pieces[count:]
        if self._conversion is not None or self.record.pieces[:count] != before.pieces:
            return None
        rows = [piece.rows(number) for piece in added for number in range(piece.chunks)]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64))

    def verify(self) -> None:
        """Reads all files, for their checksums."""
        for piece in self._pieces:
            piece.verify()

    def _fill_first(self, array: str, rows: np.ndarray, out: np.ndarray) -> None:
        shape = self.record.shape
        if any(piece.whole for piece in self.record.pieces) or shape.first is None:
            return
        if array == VALUES:
            out[...] = self._unwritten.read(rows if shape.rows >= 2**31 else rows.astype(np.int32))
        else:
            out[...] = shape.first.slots[array]

    @functools.cached_property
    def _unwritten(self) -> HostTable:
        """A table in host memory of which no row is made."""
        from jrec.host.table import HostTable
        from jrec.ops import SGD
        from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

        shape, first = self.record.shape, self.record.shape.first
        assert first is not None
        of_rows = None if first.of_rows == shape.rows else first.of_rows
        config = TableConfig(
            name=shape.name,
            rows=shape.rows,
            dim=shape.dim,
            dtype=shape.dtype,
            tier="host",
            of_rows=of_rows,
            initial_bound=first.bound,
        )
        alone = [TableConfig(name=shape.name, rows=shape.rows, dim=shape.dim, dtype=shape.dtype, tier="host")]
        layout = EmbeddingLayout.build(alone, [FeatureConfig(name=shape.name, table=shape.name)])
        stack = dataclasses.replace(layout.members[0], tables=(config,))
        key = np.array([first.key], np.uint32)
        return HostTable(stack, SGD(learning_rate=0.0), key, written=np.empty((0, 2), np.int64))


class _Piece:
    """Reads one piece; of every array the chunk read last is kept."""

    def __init__(self, folder: pathlib.Path, record: PieceRecord, table: TableRecord):
        self._folder, self._record, self._table = folder, record, table
        self._last: dict[str, tuple[int, np.ndarray]] = {}

    @property
    def chunks(self) -> int:
        return -(-self._record.count // self._record.chunk)

    def chunk(self, array: str, number: int) -> np.ndarray:
        """A chunk without its padding."""
        if array not in self._record.arrays:
            raise CheckpointError(f"{self._folder} has no {array!r}; use the run's own optimizer")
        if array not in self._last:
            chunks.check_metadata(self._folder / array, self._record.arrays[array].metadata)
        elif self._last[array][0] == number:
            return self._last[array][1]
        self._last.pop(array, None)  # before the next one takes memory
        record, (shape, dtype) = self._record, self._table.shape.array(array)
        checksum = record.arrays[array].chunks[number]
        data = chunks.read_chunk(self._folder / array, number, (record.chunk, *shape), dtype, checksum)
        data = data[: record.count - number * record.chunk]
        self._last[array] = (number, data)
        return data

    def rows(self, number: int) -> np.ndarray:
        """The numbers of a chunk's rows, (n,) ascending."""
        begin = number * self._record.chunk
        if self._record.whole:
            return np.arange(begin, min(begin + self._record.chunk, self._record.count))
        return self.chunk(ROWS, number)

    def read_into(self, array: str, rows: np.ndarray, out: np.ndarray, read: np.ndarray) -> None:
        """Reads the rows of ascending ``rows`` that this piece holds into ``out``; marks them in ``read``."""
        record = self._record
        firsts = range(0, record.count, record.chunk) if record.firsts is None else record.firsts
        # Pieces ascend, so a chunk has only rows from its first one to below the next chunk's: no other file is opened.
        bounds = np.searchsorted(rows, [*firsts, np.iinfo(np.int64).max])
        for number in np.flatnonzero(bounds[1:] > bounds[:-1]):
            begin, stop = int(bounds[number]), int(bounds[number + 1])
            self._read_chunk(array, int(number), rows[begin:stop], out[begin:stop], read[begin:stop])

    def _read_chunk(self, array: str, number: int, rows: np.ndarray, out: np.ndarray, read: np.ndarray) -> None:
        if self._record.whole:
            begin, count = int(rows[0]) - number * self._record.chunk, rows.size
            data = self.chunk(array, number)
            if int(rows[-1]) - int(rows[0]) == count - 1:
                out[...] = data[begin : begin + count]
            else:
                np.take(data, rows - number * self._record.chunk, axis=0, out=out)
            read[...] = True
            return
        here = self.rows(number)
        at = np.minimum(np.searchsorted(here, rows), here.size - 1)
        wanted = np.flatnonzero(here[at] == rows)
        if wanted.size:
            out[wanted] = self.chunk(array, number)[at[wanted]]
            read[wanted] = True

    def verify(self) -> None:
        for array in self._record.arrays:
            for number in range(self.chunks):
                self.chunk(array, number)
        self._last.clear()
