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
import copy
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.typing import ArrayLike

from jrec.checkpoint.files import DamagedError
from jrec.checkpoint.manifest import OLD_FORMAT, Manifest, complete_steps, is_old
from jrec.checkpoint.save import Save, Settings, Written, withdrawn
from jrec.checkpoint.saved import Saved
from jrec.checkpoint.sources import CheckpointSource
from jrec.errors import CheckpointError
from jrec.outputs import check_local, locked

CHUNK_BYTES = 32 << 20
UNDO_BYTES = 256 << 20


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: Their folder; made when the first is written.
      keep: How many of the latest are kept.
      fingerprint: What its checkpoints record of the run, JSON; the run that loads them compares it.
      chunk_bytes: About how large a file of rows becomes.
      undo_bytes: How many bytes of rows, that steps changed before they were written, are kept until steps wait.
      barrier: Returns when all processes have called it with the same text; of a run of several processes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        fingerprint: Mapping[str, object] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        undo_bytes: int = UNDO_BYTES,
        barrier: Callable[[str], None] | None = None,
    ):
        check_local(folder)
        barrier = barrier if jax.process_count() > 1 else None
        self._settings = Settings(
            folder=pathlib.Path(folder).absolute(),
            keep=keep,
            fingerprint=dict(fingerprint or {}),
            chunk_bytes=chunk_bytes,
            undo_bytes=undo_bytes,
            barrier=barrier,
            first=barrier is None or jax.process_index() == 0,
        )
        self._base: Manifest | None = None  # of the checkpoint that changes are counted from
        self._save: Save | None = None
        self._held = contextlib.ExitStack()  # the lock of the folder, while a checkpoint is under way
        self._written: Written | None = None

    @property
    def folder(self) -> pathlib.Path:
        """Where they are."""
        return self._settings.folder

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return complete_steps(self.folder)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint.

        Raises:
          CheckpointError: If there is none, but some of an earlier jrec.
        """
        if not (steps := self.steps()) and (old := _old(self.folder)) is not None:
            raise CheckpointError(f"{old} {OLD_FORMAT}")
        return steps[-1] if steps else None

    def open(self, step: int | None = None) -> Saved:
        """A checkpoint, of which nothing but the manifest is read yet.

        Args:
          step: Which; None for the latest complete one.

        Raises:
          CheckpointError: If there is none, or its manifest is damaged.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self.steps():
            if step is not None and is_old(self.folder / str(step)):
                raise CheckpointError(f"{self.folder / str(step)} {OLD_FORMAT}")
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder} has no complete checkpoint of step {step}; steps there: {have}")
        return Saved(self.folder / str(step))

    @contextlib.contextmanager
    def reading(self, step: int, remedy: Callable[[int | None], str]) -> Iterator[None]:
        """Says of files that turn out damaged inside which earlier checkpoint is whole.

        Args:
          step: The checkpoint that is read.
          remedy: Says what to do, given the newest older step that is complete and undamaged, or None.

        Raises:
          CheckpointError: If the checkpoint was removed meanwhile, as by a run that goes on.
        """
        try:
            yield
        except DamagedError as error:
            if not (path := self.folder / str(step)).exists():
                raise CheckpointError(
                    f"{path} was removed while it was read: a run goes on there, and keeps only its latest; try again,"
                    " or have the run keep more (checkpoint.keep)"
                ) from error
            raise error.advised(remedy(self.newest_whole(step))) from error

    def newest_whole(self, before: int) -> int | None:
        """The newest step before this one whose checkpoint is complete and undamaged; reads all of its files."""
        for step in reversed([step for step in self.steps() if step < before]):
            with contextlib.suppress(CheckpointError):
                Saved(self.folder / str(step)).verify()
                return step
        return None

    def drop_after(self, step: int) -> None:
        """Deletes checkpoints of later steps, as a run that goes on from this one needs.

        Raises:
          OutputError: If another process is writing one there.
        """
        with locked(self.folder):
            for later in self.steps():
                if later > step:
                    shutil.rmtree(withdrawn(self.folder, later))

    def restored(self, saved: Saved) -> None:
        """Says that all sources' rows come from this checkpoint, so that the next one holds only what changed since.

        Wherever the rows lay when it was written: pieces are by table and row number.
        """
        self._base = saved.manifest

    def save(
        self,
        step: int,
        *,
        arrays: Mapping[str, ArrayLike],
        sources: Sequence[CheckpointSource] = (),
        meta: Mapping[str, object] | None = None,
        full: bool | None = None,
        wait: bool = True,
        keep: int | None = None,
        protected: int | None = None,
    ) -> None:
        """Writes a checkpoint.

        Checkpoints of this and of later steps, left by a run that went on from an earlier one, are removed.

        Args:
          step: Its number.
          arrays: Dense arrays by path, NumPy or JAX; copied at once.
          sources: Where the tables' rows are.
          meta: JSON; copied at once.
          full: Whether to write all rows; None does so for tables of which half has changed, or
            that came in many pieces.
          wait: Whether to return only when it is written. Otherwise call ``between_steps`` before every step, and
            ``finish`` at the end; while several processes train it is written at once in any case.
          keep: How many of the latest stay, from now on; None for as many as before.
          protected: A step whose checkpoint stays, though it is not among the latest; None for none.

        Raises:
          CheckpointError: If it cannot be written, such as on a full disk; older checkpoints stay. Where it is not
            waited for, one of the next calls raises.
          OutputError: If another process is writing one there.
        """
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        self.finish()
        if keep is not None:
            self._settings = dataclasses.replace(self._settings, keep=keep)
        save = Save(self._settings, self._base, step, copy.deepcopy(dict(meta or {})), protected=protected)
        if self._settings.first:
            # Until the checkpoint is complete, or has vanished: ``_completed`` and ``close`` give it back.
            self._held.enter_context(locked(self.folder))
        self._save = save
        with self._failing(), save.blocking():
            save.start(arrays, sources, full)
        if wait or self._settings.barrier is not None:
            self.finish()

    def between_steps(self) -> None:
        """Goes on with a checkpoint under way; call it before each step, in the thread that takes the steps.

        It waits for the disk only where the rows that must be kept as they were take more than ``undo_bytes``.

        Raises:
          CheckpointError: If it could not be written.
        """
        if (save := self._save) is not None:
            with self._failing(), save.blocking():
                completed = save.advance()
            if completed:
                self._completed(save)

    def finish(self) -> None:
        """Returns when the checkpoint under way, if there is one, is complete.

        Raises:
          CheckpointError: If it could not be written.
        """
        if (save := self._save) is not None:
            with self._failing(), save.blocking():
                save.wait()
            self._completed(save)

    def written(self) -> Written | None:
        """What the last checkpoint was, once it is complete; None where there is none since the last call."""
        written, self._written = self._written, None
        return written

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._save is not None

    def close(self) -> None:
        """Ends the writing thread; a checkpoint that is not complete vanishes."""
        with self._held:
            if self._save is not None:
                self._save.abort()
                self._save = None

    def _completed(self, save: Save) -> None:
        # Only a complete checkpoint is built upon: the sources count changes from it already.
        self._base, self._save, self._written = save.manifest, None, save.report()
        self._held.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The sources have begun to count anew, so what changed since the base is known no longer: without a base
            # the next checkpoint has all rows.
            save, self._base = self._save, None
            if save is not None:
                self.close()
                if isinstance(error, OSError):
                    raise CheckpointError(
                        f"the checkpoint of step {save.step} could not be written to {self.folder}: {error};"
                        " earlier checkpoints are untouched"
                    ) from error
            raise


def _old(folder: pathlib.Path) -> pathlib.Path | None:
    """A checkpoint of an earlier jrec."""
    numbered = sorted(path for path in folder.glob("*") if path.name.isdigit())
    return next((path for path in numbered if is_old(path)), None)
