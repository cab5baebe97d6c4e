"""Checkpoints of a run: one folder each, complete or not there, whatever tiers the tables' rows are in.

    FOLDER/1200/manifest.json    format, step, fingerprint, loader position, all files and their checksums; written last
    FOLDER/1200/arrays           dense parameters, tensor-train cores and caches, their optimizers' slots, metrics
    FOLDER/1200/tables/NAME/0000/{values,SLOT}/         rows of a table in zarr 3 (``jrec.checkpoint.chunks``)
    FOLDER/1200/tables/NAME/0001/{rows,values,SLOT}/    those that changed since, and their numbers; and so on

A checkpoint that only adds what changed has hard links to the files that it builds on: so each is complete by itself,
and deleting one is deleting its folder. It is made under a temporary name and renamed when everything is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrec.checkpoint.chunks import write_group
from jrec.checkpoint.files import DamagedError, read_json, sync_folder, write_arrays, write_json
from jrec.checkpoint.manifest import (
    ARRAYS,
    MANIFEST,
    OLD_FORMAT,
    TABLES,
    Manifest,
    PieceRecord,
    TableRecord,
    TableShape,
    is_old,
    table_records,
)
from jrec.checkpoint.saved import Saved
from jrec.checkpoint.sources import Piece, Source
from jrec.checkpoint.writer import Writer
from jrec.errors import CheckpointError

CHUNK_BYTES = 32 << 20
_MOST_PIECES = 16  # of a table: a reader holds a chunk of each
_PART = "manifest-{:05}.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: Their folder; made when the first is written.
      keep: How many of the latest are kept.
      fingerprint: What must agree between a checkpoint and the run that loads it, JSON.
      chunk_bytes: About how large a file of rows becomes.
      barrier: Returns when all processes have called it with the same text; of a run of several processes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        fingerprint: Mapping[str, Any] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        barrier: Callable[[str], None] | None = None,
    ):
        self._folder = pathlib.Path(folder).absolute()
        self._keep, self._fingerprint, self._chunk_bytes = keep, dict(fingerprint or {}), chunk_bytes
        self._barrier = barrier if barrier is not None and jax.process_count() > 1 else None
        self._first = self._barrier is None or jax.process_index() == 0
        self._base: Manifest | None = None  # of the checkpoint that changes are counted from
        self._save: _Save | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(int(p.parent.name) for p in self._folder.glob(f"*/{MANIFEST}") if p.parent.name.isdigit())

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint.

        Raises:
          CheckpointError: If there is none, but some of an earlier jrec.
        """
        if not (steps := self.steps()) and (old := _old(self._folder)) is not None:
            raise CheckpointError(f"{old} {OLD_FORMAT}")
        return steps[-1] if steps else None

    def open(self, step: int | None = None) -> Saved:
        """A checkpoint, of which nothing but the manifest is read yet.

        Args:
          step: Which; None for the latest complete one.

        Raises:
          CheckpointError: If there is none, its manifest is damaged, or it is of another model.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self.steps():
            if step is not None and is_old(self._folder / str(step)):
                raise CheckpointError(f"{self._folder / str(step)} {OLD_FORMAT}")
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self._folder} has no complete checkpoint of step {step}; steps there: {have}")
        saved = Saved(self._folder / str(step))
        if differing := _differences(saved.manifest.fingerprint, self._fingerprint):
            raise CheckpointError(
                f"{saved.folder} is a checkpoint of another model: {'; '.join(differing)}."
                " Use its own configuration, or another run folder"
            )
        return saved

    @contextlib.contextmanager
    def reading(self, step: int, remedy: Callable[[int | None], str]) -> Iterator[None]:
        """Says of files that turn out damaged inside which earlier checkpoint is whole.

        Args:
          step: The checkpoint that is read.
          remedy: From the newest older step that is complete and undamaged, None if there is none, what to do.
        """
        try:
            yield
        except DamagedError as error:
            raise error.advised(remedy(self.newest_whole(step))) from error

    def newest_whole(self, before: int) -> int | None:
        """The newest step before this one whose checkpoint is complete and undamaged; reads all of its files."""
        for step in reversed([step for step in self.steps() if step < before]):
            with contextlib.suppress(CheckpointError):
                Saved(self._folder / str(step)).verify()
                return step
        return None

    def drop_after(self, step: int) -> None:
        """Deletes checkpoints of later steps, as a run that goes on from this one needs."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(_withdrawn(self._folder, later))

    def restored(self, saved: Saved) -> None:
        """Says that all sources' rows are those of a checkpoint, so that the next one holds what changed since.

        Not of one that several devices wrote: where its rows are now is another question.
        """
        pieces = [piece for table in saved.manifest.tables.values() for piece in table.pieces]
        self._base = saved.manifest if all(piece.folder.isdigit() for piece in pieces) else None

    def save(
        self,
        step: int,
        *,
        arrays: Mapping[str, Any],
        sources: Sequence[Source] = (),
        meta: Mapping[str, Any] | None = None,
        full: bool | None = None,
        wait: bool = True,
    ) -> None:
        """Writes a checkpoint.

        Checkpoints of this and of later steps, left by a run that went on from an earlier one, are removed.

        Args:
          step: Its number.
          arrays: Dense arrays by path, NumPy or JAX; copied at once.
          sources: Where the tables' rows are.
          meta: JSON.
          full: Whether to write all rows; None does so where it is due, see ``_MOST_PIECES``.
          wait: Whether to return only when it is written. Otherwise call ``between_steps`` before every step, and
            ``finish`` at the end; while several processes train it is written at once in any case.

        Raises:
          CheckpointError: If it cannot be written, such as on a full disk; older checkpoints stay. Where it is not
            waited for, one of the next calls raises.
        """
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        self.finish()
        self._save = _Save(self, step, dict(meta or {}))
        with self._failing():
            self._save.start(arrays, sources, full)
        if wait or self._barrier is not None:
            self.finish()

    def between_steps(self) -> None:
        """Goes on with a checkpoint under way; call it before each step, when nothing writes to the sources' rows.

        Raises:
          CheckpointError: If it could not be written.
        """
        if self._save is not None:
            with self._failing():
                if self._save.advance():
                    self._completed()

    def finish(self) -> None:
        """Returns when the checkpoint under way, if there is one, is complete.

        Raises:
          CheckpointError: If it could not be written.
        """
        if self._save is not None:
            with self._failing():
                self._save.wait()
                self._completed()

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._save is not None

    def close(self) -> None:
        """Ends the writing thread; a checkpoint that is not complete vanishes."""
        if self._save is not None:
            self._save.abort()
            self._save = None

    def _completed(self) -> None:
        assert self._save is not None
        self._base, self._save = self._save.manifest, None

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            save, self._save, self._base = self._save, None, None
            if save is not None:
                save.abort()
                if isinstance(error, OSError):
                    raise CheckpointError(
                        f"the checkpoint of step {save.step} could not be written to {self._folder}: {error}; earlier"
                        " checkpoints are untouched"
                    ) from error
            raise


class _Save:
    """One checkpoint under way."""

    def __init__(self, of: Checkpoints, step: int, meta: dict[str, Any]):
        self.step, self.manifest = step, None
        self._of, self._meta = of, meta
        self._target = of._folder / f"{step}.partial"
        self._sources: Sequence[Source] = ()
        self._shapes: dict[str, TableShape] = {}
        self._linked: dict[str, list[PieceRecord]] = {}
        self._written: list[tuple[str, PieceRecord]] = []
        self._records: list[dict[str, Any]] = []
        self._writer: Writer | None = None

    def start(self, arrays: Mapping[str, Any], sources: Sequence[Source], full: bool | None) -> None:
        of, self._sources = self._of, sources
        self._shapes = {name: shape for source in sources for name, shape in source.tables.items()}
        dense = {path: np.array(array) for path, array in arrays.items()} if of._first else {}
        if of._first:
            self._make_folders()
        self._meet("begun")
        whole: set[str] = set()
        for source in sources:
            for name, (changed, rows) in source.changed().items():
                if full or not self._link(name, changed, rows):
                    whole.add(name)
        pieces = [piece for source in sources for piece in source.begin(whole)]
        named = [(piece, self._shapes[piece.table], self._name(piece)) for piece in pieces]

        def finish(written: list[tuple[str, PieceRecord]]) -> None:
            self._written = written
            if of._first:
                self._records = write_arrays(self._target / ARRAYS, dense)
            if of._barrier is None:
                self._seal()

        self._writer = Writer(self._target, named, chunk_bytes=of._chunk_bytes, finish=finish)

    def advance(self) -> bool:
        """Whether it is complete."""
        assert self._writer is not None
        self._writer.advance()
        if self._writer.done:
            self.wait()
            return True
        return False

    def wait(self) -> None:
        assert self._writer is not None
        self._writer.wait()
        if self._of._barrier is not None:
            self._seal_together()
        for source in self._sources:
            source.end()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
        if self._of._first:
            shutil.rmtree(self._target, ignore_errors=True)

    def _make_folders(self) -> None:
        folder = self._of._folder
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.partial", "*.removed"):  # of processes that were killed
            for path in folder.glob(pattern):
                shutil.rmtree(path)
        (self._target / TABLES).mkdir(parents=True)
        for shape in self._shapes.values():
            write_group(self._target / TABLES / shape.folder, {"rows": shape.rows})

    def _link(self, name: str, changed: int, rows: int) -> bool:
        """Takes over the pieces of the checkpoint before; False where all rows are to be written."""
        base, shape = self._of._base, self._shapes[name]
        if base is None or name not in base.tables or base.step >= self.step:
            return False
        pieces = [piece for piece in base.tables[name].pieces if piece.folder.isdigit()]  # devices write all of theirs
        since = sum(piece.count for piece in pieces[1:]) + changed
        if base.tables[name].shape != shape or 2 * since > rows or len(pieces) >= _MOST_PIECES:
            return False
        source, target = (path / TABLES / shape.folder for path in (self._of._folder / str(base.step), self._target))
        try:
            for piece in pieces:
                _link_tree(source / piece.folder, target / piece.folder)
        except OSError:  # another filesystem, or one without links, or someone deleted it
            for piece in pieces:
                shutil.rmtree(target / piece.folder, ignore_errors=True)
            return False
        self._linked[name] = pieces
        return True

    def _name(self, piece: Piece) -> str:
        last = self._linked.get(piece.table, [])
        return piece.folder or f"{int(last[-1].folder) + 1 if last else 0:04}"

    def _seal(self) -> None:
        """Makes the checkpoint count."""
        folder, target = self._of._folder, self._target
        tables = {
            name: TableRecord(shape=shape, pieces=self._linked.get(name, [])[:]) for name, shape in self._shapes.items()
        }
        for name, record in self._written:
            tables[name].pieces.append(record)
        self.manifest = Manifest(
            step=self.step,
            fingerprint=self._of._fingerprint,
            meta=self._meta,
            arrays=self._records,
            tables=tables,
        )
        for shape in self._shapes.values():
            sync_folder(target / TABLES / shape.folder)
        write_json(target / MANIFEST, self.manifest.to_json())
        sync_folder(target / TABLES)
        sync_folder(target)
        replaced = [_withdrawn(folder, later) for later in reversed(self._of.steps()) if later >= self.step]
        target.rename(folder / str(self.step))
        sync_folder(folder)
        replaced += [_withdrawn(folder, step) for step in self._of.steps()[: -self._of._keep or None]]
        for path in replaced:
            shutil.rmtree(path)

    def _seal_together(self) -> None:
        """The same where several processes wrote their own rows."""
        of = self._of
        part = self._target / _PART.format(jax.process_index())
        if not of._first:
            tables = {name: TableRecord(shape=self._shapes[name], pieces=[]) for name, _ in self._written}
            for name, record in self._written:
                tables[name].pieces.append(record)
            write_json(part, Manifest(step=self.step, fingerprint={}, meta={}, arrays=[], tables=tables).to_json())
        self._meet("written")
        if of._first:
            for process in range(1, jax.process_count()):
                path = self._target / _PART.format(process)
                for name, table in table_records(read_json(path)).items():
                    self._written += [(name, piece) for piece in table.pieces]
                path.unlink()
            self._seal()
        self._meet("complete")

    def _meet(self, what: str) -> None:
        if self._of._barrier is not None:
            self._of._barrier(f"checkpoint {self.step} {what}")


def _link_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """The same files in a folder of their own names."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _link_tree(path, target / path.name)
        else:
            os.link(path, target / path.name)
    sync_folder(target)


def _withdrawn(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Takes away a checkpoint's name first, so that it is complete or not there."""
    return (folder / str(step)).rename(folder / f"{step}.removed")


def _old(folder: pathlib.Path) -> pathlib.Path | None:
    """A checkpoint of an earlier jrec."""
    numbered = sorted(path for path in folder.glob("*") if path.name.isdigit())
    return next((path for path in numbered if is_old(path)), None)


def _differences(stored: Any, expected: Any, prefix: str = "") -> list[str]:
    """Human-readable differences of two JSON-like values; tuples equal lists."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        keys = sorted(set(stored) | set(expected))
        return [d for k in keys for d in _differences(stored.get(k), expected.get(k), f"{prefix}.{k}" if prefix else k)]
    if isinstance(expected, tuple | list) and isinstance(stored, tuple | list):
        return [] if list(expected) == list(stored) else [f"{prefix} was {list(stored)} and is {list(expected)}"]
    return [] if stored == expected else [f"{prefix} was {stored!r} and is {expected!r}"]
