"""Rows of a checkpoint of host tables, read by address where they lie in its files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrec.errors import CheckpointError
from jrec.host.checkpoint import manifests, step_folder
from jrec.host.shards import map_shard
from jrec.host.table import HostTable
from jrec.ops.layout import Stack

VALUES = "values"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedSlots:
    """What a table needs to know of its optimizer, as the checkpoint has it."""

    slots: Mapping[str, Any]
    initial: Mapping[str, float]

    def initial_slot(self, name: str) -> float:
        return self.initial[name]


class SavedRows:
    """Rows and slots of the host tables of one checkpoint, whatever lives where now; none come into memory to stay.

    Args:
      folder: of the checkpoints (``HostCheckpoints``).
      step: which.

    Raises:
      CheckpointError: if it, or one that it builds on, is missing or damaged.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        self._folder, self._chain = folder, manifests(folder, step)
        self._first: dict[str, HostTable] = {}
        self._shards: dict[str, list[dict[str, np.ndarray]]] = {}

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows at (n,) int32 ascending addresses: "values", or a slot; first values where no checkpoint has them.

        Raises:
          CheckpointError: if the checkpoint is damaged, or of other tables than the stack's.
        """
        if stack.name not in self._first:
            self._first[stack.name] = self._untouched(stack)
            self._shards[stack.name] = [
                map_shard(step_folder(self._folder, manifest["step"]), shard)
                for manifest in self._chain
                for shard in manifest["shards"]
                if shard["stack"] == stack.name and shard["rows"]
            ]
        found = self._first_values(self._first[stack.name], array, addresses)
        name = array if array == VALUES else f"slot:{array}"
        for shard in self._shards[stack.name]:  # later ones are written over earlier ones
            rows = shard["rows"]
            begin, stop = np.searchsorted(addresses, [rows[0], rows[-1] + 1])
            wanted = addresses[begin:stop]
            at = np.searchsorted(rows, wanted)
            here = np.flatnonzero(rows[at] == wanted)
            found[begin + here] = shard[name][at[here]]
        return found

    def _untouched(self, stack: Stack) -> HostTable:
        known = self._chain[-1]["tables"].get(stack.name)
        ours = {"dim": stack.dim, "dtype": stack.dtype, "tables": [[t.name, t.rows] for t in stack.tables]}
        if known is None or any(known[what] != value for what, value in ours.items()):
            raise CheckpointError(
                f"{step_folder(self._folder, self._chain[-1]['step'])} does not have the host rows of stack"
                f" {stack.name} of this run's tables; use the run's own configuration"
            )
        shapes = {name: shape for name, (shape, _) in known["slots"].items()}
        optimizer: Any = _SavedSlots(slots=shapes, initial={name: first for name, (_, first) in known["slots"].items()})
        keys = np.array(known["keys of initial rows"], np.uint32)
        return HostTable(stack, optimizer, keys, written=np.empty((0, 2), np.int64))

    def _first_values(self, table: HostTable, array: str, addresses: np.ndarray) -> np.ndarray:
        if array == VALUES:
            return table.read(addresses)
        shape = (addresses.size, table.dim)[: 1 + (table.optimizer.slots[array] == "element")]
        return np.full(shape, table.optimizer.initial_slot(array), np.float32)
