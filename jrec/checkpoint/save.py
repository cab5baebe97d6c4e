"""One checkpoint being written: what is due, what is linked to, and how it comes to count."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from jrec.checkpoint.chunks import write_group
from jrec.checkpoint.files import write_arrays, write_json
from jrec.checkpoint.in_use import unread
from jrec.checkpoint.manifest import (
    ARRAYS,
    MANIFEST,
    TABLES,
    Manifest,
    PieceRecord,
    TableRecord,
    TableShape,
    complete_steps,
    read_manifest,
)
from jrec.checkpoint.sources import CheckpointSource, Piece
from jrec.checkpoint.writer import PieceToWrite, Writer, piece_to_write
from jrec.json_values import JsonObject
from jrec.outputs import sync, sync_all

_MOST_PIECES = 16  # of a table: a reader holds a chunk of each
_PART = "manifest-{:05}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A complete checkpoint.

    Attributes:
      step: Its number.
      blocking_seconds: For how long the thread that takes steps was held.
      seconds: How long it took until it was complete.
      bytes: How many this process wrote; what is linked to does not count.
      rows: How many rows these are.
      full: Whether it builds on no other.
    """

    step: int
    blocking_seconds: float
    seconds: float
    bytes: int
    rows: int
    full: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all checkpoints of a run have in common; see ``Checkpoints``.

    Attributes:
      first: Whether this process makes the folders and the manifest.
    """

    folder: pathlib.Path
    keep: int
    fingerprint: JsonObject
    chunk_bytes: int
    undo_bytes: int
    barrier: Callable[[str], None] | None
    first: bool


class Save:
    """One checkpoint under way.

    Args:
      settings: What it has in common with others.
      base: The checkpoint that the sources' changes are counted from.
      step: Its number.
      meta: JSON.
      protected: An earlier step whose checkpoint stays, though it is not among the latest.
    """

    def __init__(
        self,
        settings: Settings,
        base: Manifest | None,
        step: int,
        meta: JsonObject,
        *,
        protected: int | None = None,
    ):
        self.step, self.manifest = step, None
        self._protected = protected
        self._settings, self._base, self._meta = settings, base, meta
        self._target = settings.folder / f"{step}.partial"
        self._sources: Sequence[CheckpointSource] = ()
        self._shapes: dict[str, TableShape] = {}
        self._linked: dict[str, list[PieceRecord]] = {}
        self._pieces: list[PieceToWrite] = []
        self._others: list[tuple[str, PieceRecord]] = []  # what other processes wrote
        self._dense: dict[str, np.ndarray] = {}
        self._dense_bytes = 0
        self._records: list[JsonObject] = []
        self._writer: Writer | None = None
        self._begun, self._blocking = time.perf_counter(), 0.0

    def start(self, arrays: Mapping[str, ArrayLike], sources: Sequence[CheckpointSource], full: bool | None) -> None:
        """Decides what is to be written, as of now, and begins."""
        settings, self._sources = self._settings, sources
        self._shapes = {}
        for source in sources:  # of several of one table, that which does not write all its rows knows first values
            for name, shape in source.tables.items():
                if (known := self._shapes.get(name)) is None or known.first is None:
                    self._shapes[name] = shape
        self._dense = {path: np.array(array) for path, array in arrays.items()} if settings.first else {}
        self._dense_bytes = sum(array.nbytes for array in self._dense.values())
        # Every source begins here, between two steps: a later change counts for the next checkpoint, whenever rows are
        # read.
        whole = self._whole(full)
        for piece in [piece for source in sources for piece in source.begin(whole)]:
            shape = self._shapes[piece.table]
            self._pieces.append(piece_to_write(piece, shape, self._name(piece), settings.chunk_bytes))
        if settings.barrier is not None:
            # One process makes the folders, between two meetings: no other writes into them before they are there.
            self._meet("about to begin")
            if settings.first:
                self._prepare()
            self._meet("begun")
        self._writer = Writer(self._target, self._pieces, prepare=self._begin_writing, finish=self._written)
        self._writer.start()  # only now, when ``abort`` knows it

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts the time that the caller's thread spends here."""
        begin = time.perf_counter()
        yield
        self._blocking += time.perf_counter() - begin

    def advance(self) -> bool:
        """Whether it is complete."""
        writer = self._writer
        assert writer is not None
        writer.advance()
        while sum(source.undo_bytes for source in self._sources) > self._settings.undo_bytes:
            if not writer.put():
                break
        if writer.done:
            self.wait()
            return True
        return False

    def wait(self) -> None:
        """Returns when it is complete.

        Raises:
          Exception: What went wrong.
        """
        assert self._writer is not None
        self._writer.wait()
        if self._settings.barrier is not None:
            self._seal_together()
        for source in self._sources:
            source.end()

    def abort(self) -> None:
        """Takes back what is written of it."""
        if self._writer is not None:
            self._writer.abort()
        for source in self._sources:
            source.end()
        if self._settings.first:
            shutil.rmtree(self._target, ignore_errors=True)

    def report(self) -> Written:
        """What it was, now that it is complete."""
        return Written(
            step=self.step,
            blocking_seconds=self._blocking,
            seconds=time.perf_counter() - self._begun,
            bytes=sum(piece.bytes for piece in self._pieces) + self._dense_bytes,
            rows=sum(piece.record.count for piece in self._pieces),
            full=not self._linked,
        )

    def _can_link(self) -> bool:
        """Whether files of the checkpoint that this one builds on can be linked to here."""
        settings = self._settings
        if self._base is None or self._base.step >= self.step:
            return False
        if not settings.first:  # it makes the links
            return True
        trial = settings.folder / f"{self.step}.link"
        try:
            # Tried, since a filesystem does not say beforehand whether it has links.
            trial.unlink(missing_ok=True)
            # A file that every checkpoint has; on the file system where the links are to be.
            os.link(settings.folder / str(self._base.step) / ARRAYS, trial)
            trial.unlink()
        except OSError:  # a filesystem without links, or someone deleted that checkpoint
            return False
        return True

    def _whole(self, full: bool | None) -> set[str]:
        """The tables of which all rows are to be written; all processes decide alike."""
        counted: dict[str, np.ndarray] = {}
        for source in self._sources:
            for name, counts in source.changed().items():
                counted[name] = counted.get(name, 0) + np.array([*counts, 1])
        # One sum over the processes decides everything: how many of them can link, then by table its changed rows, its
        # rows and its writers. Rows are added to a base only where all processes can link to it.
        numbers = np.array([[not full and self._can_link(), 0, 0], *counted.values()], np.int64)
        processes = 1 if self._settings.barrier is None else jax.process_count()
        (linking, _, _), *summed = (numbers if processes == 1 else _over_processes(numbers)).tolist()
        links = linking == processes
        return {n for n, counts in zip(counted, summed, strict=True) if not (links and self._builds_on(n, *counts))}

    def _builds_on(self, name: str, changed: int, rows: int, writers: int) -> bool:
        """Takes over a table's pieces from the checkpoint before; False where all rows are to be written.

        Args:
          name: The table.
          changed: Its rows that changed since.
          rows: Its rows that a full checkpoint would hold.
          writers: The number of sources that have some of them.
        """
        base, shape = self._base, self._shapes[name]
        if base is None or name not in base.tables:
            return False
        record = base.tables[name]
        firsts = (record.shape.first, shape.first)
        alike = None in firsts or firsts[0] == firsts[1]
        if not alike or dataclasses.replace(record.shape, first=shape.first) != shape:
            return False
        rows = shape.rows if record.shape.first is None else rows
        # Rows that are there twice cost space, and each piece costs a reader a chunk: beyond these bounds all rows are
        # written anew.
        again = sum(piece.count for piece in record.pieces) + changed - rows  # that are there more than once
        if 2 * again > rows or len(record.pieces) >= _MOST_PIECES * writers:
            return False
        # Rows that no piece has are as they were first: of pieces with all rows there are none, whatever the tiers now.
        self._linked[name], self._shapes[name] = record.pieces, record.shape
        return True

    def _name(self, piece: Piece) -> str:
        """The next number among the table's pieces; with several processes also this one's."""
        own = sum(other.shape.name == piece.table for other in self._pieces)
        # Behind the linked pieces, whose folders have their numbers already.
        number = f"{len(self._linked.get(piece.table, [])) + own:04}"
        return number if self._settings.barrier is None else f"{number}-{jax.process_index():05}"

    def _prepare(self) -> None:
        folder, base = self._settings.folder, self._base
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.partial", "*.removed", "*.link"):  # of processes that were killed
            for path in folder.glob(pattern):
                # Of a link only the name goes: what it points to was not made here.
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        (self._target / TABLES).mkdir(parents=True)
        made = list[pathlib.Path]()
        for name, shape in self._shapes.items():
            table = pathlib.Path(TABLES) / shape.folder
            made.append(write_group(self._target / table, {"rows": shape.rows}))
            for piece in self._linked.get(name, ()):
                assert base is not None
                made += _link_tree(folder / str(base.step) / table / piece.folder, self._target / table / piece.folder)
        sync_all(made)

    def _begin_writing(self) -> None:
        if self._settings.barrier is None:
            self._prepare()
        if self._settings.first:
            self._records = write_arrays(self._target / ARRAYS, self._dense)
            self._dense = {}  # rows are read after them: memory holds both only for reads that have begun

    def _written(self) -> None:
        if self._settings.barrier is None:
            self._seal()

    def _seal(self) -> None:
        """Makes the checkpoint count."""
        settings, folder, target, linked = self._settings, self._settings.folder, self._target, self._linked
        # The order makes a checkpoint whole or absent, wherever a crash comes: rows and arrays are on the disk before a
        # manifest names them, the manifest before the folder has a number, and older ones go only behind that. Later
        # ones, of a run that was taken back, go before, or the newest number would be one of theirs.
        tables = {n: TableRecord(shape=s, pieces=[*linked.get(n, [])]) for n, s in self._shapes.items()}
        for name, record in [*((piece.shape.name, piece.record) for piece in self._pieces), *self._others]:
            tables[name].pieces.append(record)
        sync_all(target / TABLES / shape.folder for shape in self._shapes.values())
        self.manifest = Manifest(
            step=self.step, fingerprint=settings.fingerprint, meta=self._meta, arrays=self._records, tables=tables
        )
        write_json(target / MANIFEST, self.manifest.to_json())
        sync(target / TABLES)
        sync(target)
        replaced = [withdrawn(folder, later) for later in reversed(complete_steps(folder)) if later >= self.step]
        target.rename(folder / str(self.step))
        sync(folder)
        old = complete_steps(folder)[: -settings.keep or None]
        for step in old:
            with unread(folder / str(step)) as free:  # one that is read goes with a later checkpoint
                if free and step != self._protected:
                    replaced.append(withdrawn(folder, step))
        for path in replaced:
            shutil.rmtree(path)

    def _seal_together(self) -> None:
        """The same where several processes wrote their own rows."""
        settings = self._settings
        if not settings.first:
            # The first process writes the manifest, so the others leave it the records of what they wrote as files.
            tables = {piece.shape.name: TableRecord(shape=piece.shape, pieces=[]) for piece in self._pieces}
            for piece in self._pieces:
                tables[piece.shape.name].pieces.append(piece.record)
            own = Manifest(step=self.step, fingerprint={}, meta={}, arrays=[], tables=tables)
            write_json(self._target / _PART.format(jax.process_index()), own.to_json())
        self._meet("written")
        if settings.first:
            for process in range(1, jax.process_count()):
                part = _PART.format(process)
                for name, table in read_manifest(self._target, part).tables.items():
                    self._others += [(name, piece) for piece in table.pieces]
                (self._target / part).unlink()
            self._seal()
        self._meet("complete")
        if not settings.first:
            # Every process counts the next changes from the same manifest.
            self.manifest = read_manifest(settings.folder / str(self.step))

    def _meet(self, phase: str) -> None:
        if self._settings.barrier is not None:
            self._settings.barrier(f"checkpoint {self.step} {phase}")


def _over_processes(numbers: np.ndarray) -> np.ndarray:
    """The sum of all processes' numbers, int64 of one shape."""
    from jax.experimental import multihost_utils

    # As bytes, since JAX would make int32 of them.
    of_all = multihost_utils.process_allgather(numbers.reshape(-1).view(np.uint8))
    return np.asarray(of_all).view(np.int64).sum(axis=0).reshape(numbers.shape)


def _link_tree(source: pathlib.Path, target: pathlib.Path) -> list[pathlib.Path]:
    """The same files in a folder of their own names; returns the folders that it made, which are to be synced."""
    target.mkdir()
    made = [target]
    for path in sorted(source.iterdir()):
        if path.is_dir():
            made += _link_tree(path, target / path.name)
        else:
            os.link(path, target / path.name)
    return made


def withdrawn(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Takes away a checkpoint's name first, so that it is complete or not there."""
    # One step of the file system, where removing a folder is many: a kill leaves a name that nobody takes for a
    # checkpoint.
    return (folder / str(step)).rename(folder / f"{step}.removed")
