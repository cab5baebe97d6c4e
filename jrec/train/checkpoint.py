"""Checkpoints of a run: parameters, slots, loader position and progress, written whole or not at all.

    RUN/checkpoints/STEP/state    arrays by path (Orbax, tensorstore; no format here can run code when loaded)
    RUN/checkpoints/STEP/progress running metrics, NumPy arrays
    RUN/checkpoints/STEP/meta     JSON: format version, fingerprint of the model, loader position, counters

Orbax marks a checkpoint as complete only after everything is on disk, so a killed run leaves its last complete one.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrec.errors import CheckpointError

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    step: int
    state: Any
    progress: dict[str, np.ndarray]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder, of which the latest ``keep`` are kept."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int, fingerprint: dict[str, Any]):
        self._folder = pathlib.Path(folder).absolute()
        self._fingerprint = fingerprint
        self._keep = keep
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "progress": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, *, progress: Mapping[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Writes ``state`` (a pytree of arrays), ``progress`` and ``meta`` (JSON) as the checkpoint of ``step``.

        Raises:
          CheckpointError: if they cannot be written, such as on a full disk; older checkpoints stay.
        """
        meta = {"version": VERSION, "fingerprint": self._fingerprint, **meta}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(flatten(state)),
            progress=ocp.args.StandardSave(dict(progress)),
            meta=ocp.args.JsonSave(meta),
        )
        try:
            self._manager.save(step, args=args, force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error};"
                " earlier checkpoints are untouched"
            ) from error

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint into the structure of ``like``.

        Args:
          like: a pytree of arrays or ``jax.ShapeDtypeStruct`` of what is expected; NumPy arrays come back as such.
          step: which; the latest complete one by default.

        Raises:
          CheckpointError: if there is none, it is damaged, of another format version, or of another model.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self._manager.all_steps():
            have = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise CheckpointError(f"{self._folder} has no complete checkpoint of step {step}; steps there: {have}")
        meta = self._read_meta(step)
        expected = flatten(like)
        abstract = {
            path: leaf if isinstance(leaf, np.ndarray) else ocp.utils.to_shape_dtype_struct(leaf)
            for path, leaf in expected.items()
        }
        self._check_arrays(step, abstract)
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.StandardRestore())
            restored = self._manager.restore(step, args=args)
        except Exception as error:
            raise self._damaged(step, error) from error
        return Restored(step=step, state=unflatten(like, restored["state"]), progress=restored["progress"], meta=meta)

    def stored(self, step: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every array of a checkpoint's state, by path.

        Raises:
          CheckpointError: if there is none, or it is damaged.
        """
        if step not in self._manager.all_steps():
            have = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise CheckpointError(f"{self._folder} has no complete checkpoint of step {step}; steps there: {have}")
        try:
            tree = self._manager.item_metadata(step)["state"].tree
            return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in tree.items()}
        except Exception as error:
            raise self._damaged(step, error) from error

    def _read_meta(self, step: int) -> dict[str, Any]:
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            version, fingerprint = meta["version"], meta["fingerprint"]
        except Exception as error:
            raise self._damaged(step, error) from error
        if version != VERSION:
            raise CheckpointError(
                f"{self._folder / str(step)} is of format version {version}, but this jrec reads version {VERSION}"
            )
        if differing := _differences(fingerprint, self._fingerprint):
            raise CheckpointError(
                f"{self._folder / str(step)} is a checkpoint of another model: {'; '.join(differing)}."
                " Use its own configuration, or another run folder"
            )
        return meta

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        reason = str(error).split(" [", 1)[0]  # tensorstore appends its whole specification
        return CheckpointError(
            f"{self._folder / str(step)} is damaged: {reason}; delete that folder to fall back to an earlier checkpoint"
        )

    def _check_arrays(self, step: int, abstract: Mapping[str, Any]) -> None:
        try:
            stored = self._manager.item_metadata(step)["state"].tree
        except Exception as error:
            raise self._damaged(step, error) from error
        for path in sorted(set(stored) | set(abstract)):
            if path not in stored or path not in abstract:
                where = "this run" if path not in stored else "the checkpoint"
                raise CheckpointError(f"{self._folder / str(step)}: array {path} exists only in {where}")
            if tuple(stored[path].shape) != abstract[path].shape:
                raise CheckpointError(
                    f"{self._folder / str(step)}: array {path} has shape {tuple(stored[path].shape)}, but this run"
                    f" expects {abstract[path].shape}"
                )

    def close(self) -> None:
        """Releases the manager's threads."""
        self._manager.close()


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by readable path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def unflatten(like: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of ``flatten`` for the structure of ``like``."""
    paths = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in jax.tree_util.tree_leaves_with_path(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in paths])


def _differences(stored: Any, expected: Any, prefix: str = "") -> list[str]:
    """Human-readable differences of two JSON-like values; tuples equal lists."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        keys = sorted(set(stored) | set(expected))
        return [d for k in keys for d in _differences(stored.get(k), expected.get(k), f"{prefix}.{k}" if prefix else k)]
    if isinstance(expected, tuple | list) and isinstance(stored, tuple | list):
        return [] if list(expected) == list(stored) else [f"{prefix} was {list(stored)} and is {list(expected)}"]
    return [] if stored == expected else [f"{prefix} was {stored!r} and is {expected!r}"]
