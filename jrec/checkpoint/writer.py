"""Writes one checkpoint, chunk by chunk, in a thread of its own while the caller's thread takes steps.

Rows that a step changes before their chunk is read are kept as they were (``jrec.checkpoint.undo``), so that all of
them belong to one step. The caller's thread only starts reads; this one waits for them and for the disk.
"""

from __future__ import annotations

import dataclasses
import pathlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrec.checkpoint import chunks
from jrec.checkpoint.manifest import ROWS, TABLES, VALUES, ArrayRecord, PieceRecord, TableShape
from jrec.checkpoint.sources import Piece
from jrec.outputs import sync_all

_AHEAD = 2  # reads that wait to be taken; each takes memory
_READ_BYTES = 4 << 20
"""Bytes that are read at a time, of which a chunk takes several. Memory for 32 MB comes fresh from the system each
time, page by page: 2.3 GB of rows on 2 CPU cores held steps 1.7 s in reads of 32 MB, 0.8 s in reads of 4 MB."""


@dataclasses.dataclass(kw_only=True)
class PieceToWrite:
    """A piece to write."""

    piece: Piece
    shape: TableShape
    record: PieceRecord

    @property
    def bytes(self) -> int:
        """Bytes of its chunks."""
        return len(self.record.arrays[VALUES].chunks) * self.record.chunk * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all arrays."""
        return sum(_size(*self.shape.array(name)) for name in self.record.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    """Rows ``start`` to ``stop`` of a piece, some of its chunk ``number``, or the ``last`` of it."""

    piece: PieceToWrite
    number: int
    start: int
    stop: int
    last: bool


class Writer:
    """Writes the pieces of one checkpoint.

    An interrupt may come anywhere in the caller's thread. So the two threads share only flags and instances of
    ``queue.SimpleQueue``, whose calls happen whole or not at all (an interrupted ``Thread.join`` takes the thread for
    dead in Python 3.12), and the writing thread knows what is to come: it seals after every read, in order.

    Args:
      folder: The checkpoint's temporary folder.
      pieces: What to write, see ``piece_to_write``.
      prepare: Called first in the writing thread; makes the tables' folders.
      finish: Called last in the writing thread, when all is on the disk.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        pieces: Sequence[PieceToWrite],
        *,
        prepare: Callable[[], None],
        finish: Callable[[], None],
    ):
        self._folder, self._pieces = folder, pieces
        self._reads, self._next = _in_order(pieces), 0
        self._prepare, self._finish = prepare, finish
        self._begun: queue.SimpleQueue[Any] = queue.SimpleQueue()  # what pieces' ``begin`` returned, in order
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each read that may be begun
        for _ in range(_AHEAD):
            self._free.put(None)
        self._chunk: dict[str, np.ndarray] = {}  # room for one, always the same memory
        self._error: BaseException | None = None
        self._stop = self._running = self._over = False
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry once the thread is over
        self._thread = threading.Thread(target=self._run, name="jrec-checkpoint", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether everything is written, or something went wrong."""
        return self._error is not None or self._over

    def advance(self) -> None:
        """Starts the next reads, as many as there is room for; between two steps."""
        while not self._free.empty() and self.put():
            pass

    def put(self) -> bool:
        """Starts the next read, as soon as there is room for it; between two steps.

        Returns:
          Whether it did; False where all are started or something went wrong.
        """
        if self._error is not None or self._next == len(self._reads):
            return False
        at = self._reads[self._next]
        try:
            # Waits for the writing thread, which gives room back whatever happens to it (``_run``).
            self._free.get()
            self._begun.put(at.piece.piece.begin(at.start, at.stop))
            self._next += 1
        except BaseException as error:
            self._error = error  # a read that was begun cannot be begun again: later steps change its rows
            raise
        return True

    def wait(self) -> None:
        """Returns when everything is written; between two steps.

        Raises:
          BaseException: What went wrong.
        """
        while self.put():
            pass
        if self._error is None:
            self._join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Ends the thread, whatever is written; may be called again where it was interrupted."""
        # Before the entry that wakes the thread, which looks at the flag next.
        self._stop = True
        self._begun.put(None)
        if self._running:  # a thread that has not come so far will see that it is to stop
            self._join()

    def _join(self) -> None:
        while not self._over:
            self._ended.get()

    def _run(self) -> None:
        self._running = True
        self._guarded(self._begin)
        for at in self._reads:
            begun = self._begun.get()
            if self._stop:
                break
            # Room is given back before the write, so that the next read goes on meanwhile.
            self._free.put(None)
            self._guarded(self._write, at, begun)
        self._guarded(self._seal)
        self._over = True
        self._ended.put(None)

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        """After a failure nothing is done any more, but what the caller puts is taken, so that it never waits."""
        if self._error is None and not self._stop:
            try:
                work(*args)
            except BaseException as error:
                self._error = error

    def _begin(self) -> None:
        self._prepare()
        for piece in self._pieces:
            target = self._target(piece)
            target.mkdir()
            for name, record in piece.record.arrays.items():
                tail, dtype = piece.shape.array(name)
                shape = (piece.record.count, *tail)
                record.metadata.update(chunks.write_metadata(target / name, shape, dtype, piece.record.chunk))

    def _write(self, at: _Read, begun: object) -> None:
        piece, record = at.piece.piece, at.piece.record
        arrays = piece.finish(begun, at.start, at.stop)
        if piece.rows is not None:
            arrays[ROWS] = piece.rows[at.start : at.stop]
        first = at.number * record.chunk
        for name, checked in record.arrays.items():
            chunk = self._room(name, record.chunk, *at.piece.shape.array(name))
            # Reads are parts of a chunk, which is written, and summed up, as a whole.
            chunk[at.start - first : at.stop - first] = arrays[name]
            if at.last:
                folder = self._target(at.piece) / name
                checked.chunks[at.number] = chunks.write_chunk(
                    folder, at.number, chunk[: at.stop - first], record.chunk
                )

    def _room(self, name: str, rows: int, tail: tuple[int, ...], dtype: str) -> np.ndarray:
        size = rows * _size(tail, dtype)
        if name not in self._chunk or self._chunk[name].size < size:
            self._chunk[name] = np.empty(size, np.uint8)
        return self._chunk[name][:size].view(jnp.dtype(dtype)).reshape(rows, *tail)

    def _seal(self) -> None:
        folders = [self._target(piece) for piece in self._pieces]
        arrays = [
            folder / name for folder, piece in zip(folders, self._pieces, strict=True) for name in piece.record.arrays
        ]
        # Files, and the folders, in which their names are.
        sync_all([*(file for array in arrays for file in array.iterdir()), *arrays, *folders])
        self._finish()

    def _target(self, piece: PieceToWrite) -> pathlib.Path:
        return self._folder / TABLES / piece.shape.folder / piece.record.folder


def piece_to_write(piece: Piece, shape: TableShape, folder: str, chunk_bytes: int) -> PieceToWrite:
    """How a piece is cut into chunks of about ``chunk_bytes``, its arrays together; the checksums are to come."""
    names = [VALUES, *shape.slots, *([] if piece.rows is None else [ROWS])]
    row_bytes = sum(_size(*shape.array(name)) for name in names)
    # A reader that goes through a table keeps a chunk of every piece, and there may be many of those with some rows.
    rows = chunks.chunk_rows(piece.count, row_bytes, chunk_bytes if piece.rows is None else max(1, chunk_bytes // 4))
    arrays = {name: ArrayRecord(metadata={}, chunks=[0] * -(-piece.count // rows)) for name in names}
    firsts = None if piece.rows is None else [int(row) for row in piece.rows[::rows]]
    record = PieceRecord(folder=folder, count=piece.count, chunk=rows, firsts=firsts, arrays=arrays)
    return PieceToWrite(piece=piece, shape=shape, record=record)


def _size(tail: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(tail, dtype=np.int64)) * jnp.dtype(dtype).itemsize


def _in_order(pieces: Sequence[PieceToWrite]) -> list[_Read]:
    """All reads, the tables' first rows first: these change most often, and are sooner out of the way."""
    reads = []
    for number, piece in enumerate(pieces):
        chunk, count = piece.record.chunk, piece.record.count
        most = chunks.chunk_rows(chunk, piece.row_bytes, _READ_BYTES)
        for index, begin in enumerate(range(0, count, chunk)):
            first, end = begin if piece.record.firsts is None else piece.record.firsts[index], min(begin + chunk, count)
            for start in range(begin, end, most):
                stop = min(start + most, end)
                read = _Read(piece=piece, number=index, start=start, stop=stop, last=stop == end)
                reads.append((first, number, read))
    # All reads of a chunk share a key that no other chunk has, and sorting is stable: they stay together and in order,
    # as they must, since they fill one buffer (``_room``) and the last of them writes it.
    return [read for *_, read in sorted(reads, key=lambda entry: entry[:2])]
