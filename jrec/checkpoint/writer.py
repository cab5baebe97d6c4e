"""Writes one checkpoint, chunk by chunk, in a thread of its own while the caller's thread takes steps.

Rows that a step changes before their chunk was read are kept as they were (``jrec.checkpoint.undo``), so that all of
them are those of one step. The caller's thread only starts reads; this one waits for them and for the disk.
"""

from __future__ import annotations

import dataclasses
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrec.checkpoint import chunks
from jrec.checkpoint.files import sync_folder
from jrec.checkpoint.manifest import ROWS, TABLES, VALUES, ArrayRecord, PieceRecord, TableShape
from jrec.checkpoint.sources import Piece, Slice

_AHEAD = 2  # chunks that are read or written at a time; each takes memory


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A piece under way."""

    piece: Piece
    shape: TableShape
    record: PieceRecord
    folder: pathlib.Path


class Writer:
    """Writes the pieces of one checkpoint.

    Args:
      folder: The checkpoint's temporary folder, in which the tables' folders are.
      pieces: What to write, with the shapes of their tables and names of their folders.
      chunk_bytes: About how large a chunk becomes, all arrays together.
      finish: Called in the writing thread when all is written, with the pieces' records.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        pieces: Sequence[tuple[Piece, TableShape, str]],
        *,
        chunk_bytes: int,
        finish: Callable[[list[tuple[str, PieceRecord]]], None],
    ):
        self._open = [_opened(folder, *piece, chunk_bytes) for piece in pieces]
        self._slices = _in_order(self._open)
        self._next, self._finish = 0, finish
        self._queue: queue.Queue[tuple[Slice, Any] | None] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._done, self._stop = False, False
        self._thread = threading.Thread(target=self._run, name="jrec-checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether everything is written, or something went wrong."""
        return self._done

    def advance(self) -> None:
        """Starts the next reads, as many as there is room for; between two steps."""
        while self._next <= len(self._slices) and not self._queue.full():
            self._put()

    def wait(self) -> None:
        """Returns when everything is written; between two steps.

        Raises:
          Exception: What went wrong.
        """
        while self._next <= len(self._slices):
            self._put()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong, if something did."""
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Ends the thread, whatever is written."""
        self._stop = True
        while self._next <= len(self._slices):
            self._next = len(self._slices) + 1
            self._queue.put(None)
        self._thread.join()

    def _put(self) -> None:
        """Starts one read, or says that there are no more."""
        item = None
        if self._next < len(self._slices):
            at = self._slices[self._next]
            item = (at, self._open[at.piece].piece.begin(at.start, at.stop))
        self._next += 1
        self._queue.put(item)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if self._error is None and not self._stop:
                    self._guarded(self._write, *item)
            if self._error is None and not self._stop:
                self._guarded(self._seal)
        finally:
            self._done = True

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Goes on taking what the caller puts after a failure, so that it never waits for ever."""
        try:
            work(*args)
        except BaseException as error:
            self._error = error

    def _write(self, at: Slice, begun: Any) -> None:
        of = self._open[at.piece]
        arrays = of.piece.finish(begun, at.start, at.stop)
        if of.piece.rows is not None:
            arrays[ROWS] = of.piece.rows[at.start : at.stop].astype(of.shape.array(ROWS)[1])
        for name, record in of.record.arrays.items():
            record.chunks[at.number] = chunks.write_chunk(of.folder / name, at.number, arrays[name], of.record.chunk)

    def _seal(self) -> None:
        for of in self._open:
            for path in (*(of.folder / name for name in of.record.arrays), of.folder, of.folder.parent):
                sync_folder(path)
        self._finish([(of.shape.name, of.record) for of in self._open])


def _opened(folder: pathlib.Path, piece: Piece, shape: TableShape, name: str, chunk_bytes: int) -> _Open:
    names = [VALUES, *shape.slots, *([] if piece.rows is None else [ROWS])]
    row_bytes = sum(_size(*shape.array(name)) for name in names)
    # A reader that goes through a table keeps one chunk of every piece, and many of those hold some rows each.
    rows = chunks.chunk_rows(piece.count, row_bytes, chunk_bytes if piece.rows is None else max(1, chunk_bytes // 4))
    target = folder / TABLES / shape.folder / name
    target.mkdir()
    arrays = {}
    for array in names:
        tail, dtype = shape.array(array)
        metadata = chunks.write_metadata(target / array, (piece.count, *tail), dtype, rows)
        arrays[array] = ArrayRecord(metadata=metadata, chunks=[0] * -(-piece.count // rows))
    firsts = None if piece.rows is None else [int(row) for row in piece.rows[::rows]]
    record = PieceRecord(folder=name, count=piece.count, chunk=rows, firsts=firsts, arrays=arrays)
    return _Open(piece=piece, shape=shape, record=record, folder=target)


def _size(tail: tuple[int, ...], dtype: str) -> int:
    import jax.numpy as jnp

    return int(np.prod(tail, dtype=np.int64)) * jnp.dtype(dtype).itemsize


def _in_order(pieces: Sequence[_Open]) -> list[Slice]:
    """All chunks, those of the tables' first rows first: these change most often, and are sooner out of the way."""
    slices = []
    for number, of in enumerate(pieces):
        for chunk, start in enumerate(range(0, of.piece.count, of.record.chunk)):
            first = start if of.record.firsts is None else of.record.firsts[chunk]
            at = Slice(piece=number, number=chunk, start=start, stop=min(start + of.record.chunk, of.piece.count))
            slices.append((first, number, at))
    return [at for *_, at in sorted(slices, key=lambda entry: entry[:2])]
