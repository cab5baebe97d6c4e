"""The checkpoints of a run: written while its steps go on, and read by a run on any mesh and plan."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from jrec.checkpoint import Checkpoints, Saved
from jrec.checkpoint.save import Written
from jrec.checkpoint.settled import SETTLED
from jrec.json_values import JsonMapping, JsonObject
from jrec.outputs import check_output, kind_of
from jrec.run.checkpoint import dense_arrays, restore_state
from jrec.run.identity import Description, check_identity, meta_of
from jrec.run.processes import wait_for_all
from jrec.run.state import RunState

CHECKPOINT_FOLDER = "checkpoints"
"""Of the folder of a run of ``jrec train``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """What came with a checkpoint beside the state of its run.

    Attributes:
      meta: What ``Run.save`` was given as ``meta``.
      arrays: What it was given as ``arrays``, and the arrays of growing tables.
    """

    meta: JsonObject
    arrays: dict[str, np.ndarray]


class RunCheckpoints:
    """Writes and reads a run's checkpoints, in one folder at a time.

    Args:
      state: The run's state, whose rows in host memory are flushed before it is saved.
      identity: What a checkpoint must be of (``identity_of``).
    """

    def __init__(self, state: RunState, identity: JsonMapping):
        self._state, self._identity = state, dict(identity)
        self._checkpoints: Checkpoints | None = None

    def between_steps(self) -> None:
        """Raises what a checkpoint that is written meanwhile has met."""
        if self._checkpoints is not None:
            self._checkpoints.between_steps()

    def save(
        self,
        step: int,
        folder: pathlib.Path,
        about: JsonMapping,
        *,
        arrays: Mapping[str, np.ndarray],
        keep: int,
        protected: int | None,
        wait: bool,
    ) -> None:
        """Writes a checkpoint of a step, ``about`` in its manifest; see ``Run.save``."""
        if self._checkpoints is None or self._checkpoints.folder != folder:
            self.finish()
            if not (folder.name == CHECKPOINT_FOLDER and kind_of(folder.parent) == "run"):
                check_output(folder / "step")  # a dataset or an export takes no checkpoints
            self._checkpoints = self._open(folder)
        state = self._state
        if settled := state.settled():
            about = {**about, SETTLED: {table: of_table.meta() for table, of_table in settled.items()}}
        self._checkpoints.save(
            step,
            arrays=dense_arrays(state.state, {**arrays, **state.growing.state()}, state.layout),
            sources=state.sources(),
            meta=about,
            keep=keep,
            protected=protected,
            wait=wait,
        )

    def load(
        self,
        saved: Saved,
        *,
        goes_on: bool,
        slots: bool,
        rows: bool,
        dense_optimizer: bool,
        expected: Description,
    ) -> Loaded:
        """Takes over a checkpoint; see ``Run.load``."""
        check_identity(saved, {**self._identity, **expected}, optimizers=self._state.training)
        self.finish()
        # What comes next is written to the folder of the checkpoint that the run goes on from, or to another one.
        self._checkpoints = None
        # Rows that an exact optimizer of another run left at rest are made current, and settled again as this run's has
        # them.
        opened, saved = saved, saved.read_by(self._state.optimizer_of_table)
        if any(self._state.optimizer_of_table(table) is not None for table in saved.manifest.meta.get(SETTLED, {})):
            slots = True  # lookups read them
        state, arrays = restore_state(
            saved,
            self._state.state,
            self._state.layout,
            slots=slots and rows,
            rows=rows,
            dense_optimizer=dense_optimizer,
            streams=dense_optimizer and self._state.training,
        )
        self._state.growing.restore(arrays)
        self._state.restore(saved, state, rows=rows)
        # The next checkpoint there holds only what changes from now on.
        if goes_on:
            self._checkpoints = self._open(saved.folder.parent)
            if saved is opened:  # else the next checkpoint is whole: other learning rates store all rows otherwise
                self._checkpoints.restored(saved)
        return Loaded(meta=meta_of(saved), arrays=arrays)

    def written(self) -> Written | None:
        """What the last checkpoint was, once it is complete; None where there is none since the last call."""
        return None if self._checkpoints is None else self._checkpoints.written()

    def finish(self) -> None:
        """Returns when the checkpoint under way, if there is one, is complete."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def close(self) -> None:
        """Gives up the checkpoint under way."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _open(self, folder: pathlib.Path) -> Checkpoints:
        return Checkpoints(folder, fingerprint=self._identity, barrier=wait_for_all)
