"""The training batches of a run on an FAE folder: two loaders, and who is next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrec.data.fae.manifest import MANIFEST_FILE, FaeManifest
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.errors import CheckpointError
from jrec.ops.layout import EmbeddingLayout
from jrec.train.config import TrainConfig
from jrec.train.loaders import train_loader
from jrec.train.mesh_setup import MeshSetup
from jrec.train.shuffle_scheduler import ShuffleScheduler


class FaeLoaders:
    """Hot and cold batches, each kind shuffled anew in every epoch, and the scheduler that interleaves them.

    Args:
      config: of the run.
      packed: the FAE folder.
      cold: mesh and plan of the run.
      hot: the same for hot batches (``jrec.train.hot_cold_feed.hot_setup``).

    Attributes:
      hot: batches that read hot rows alone; None where no example is hot.
      cold: batches of the run's layout; None where all examples are hot.
      scheduler: of their order.
      packed: the FAE folder.
      split: whose loss the scheduler is told.
      hot_setup: mesh and plan of the hot batches.

    Raises:
      DatasetError: if the folder cannot be used.
    """

    def __init__(self, config: TrainConfig, packed: FaeManifest, *, cold: MeshSetup, hot: MeshSetup):
        self.packed, self.split, self.hot_setup = packed, config.fae.split, hot
        self.hot = self.cold = None
        if (schema := packed.hot_schema) is not None:
            # Packing checked every id; an OOV row need not be among the hot ones.
            orders = _orders(packed, hot.layout)
            self.hot = _loader(config, str(packed.hot_folder), schema, hot, on_bad_id="raise", orders=orders)
        if packed.cold_examples:
            self.cold = _loader(config, str(packed.cold_folder), packed.cold_schema, cold)
        batches, hot_batches = (0 if loader is None else loader.batches_per_epoch for loader in (self.cold, self.hot))
        self.scheduler = ShuffleScheduler(config.fae, cold=batches, hot=hot_batches, epochs=config.epochs)
        self._identity = packed.identity

    @property
    def total_batches(self) -> int:
        """Of all epochs."""
        return self.scheduler.total

    def state(self, positions: Mapping[str, Any]) -> dict[str, Any]:
        """Where the run is, in JSON types.

        Args:
          positions: Of the "hot" and the "cold" batches, behind the last that was trained; None where there are none.
        """
        return {"packed": self._identity, "scheduler": self.scheduler.state(), **positions}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back the order of hot and cold batches; the batches' own positions are their takers'.

        Raises:
          CheckpointError: if it was saved with another FAE folder, or another order.
        """
        if state.get("packed") != self._identity:
            raise CheckpointError(
                f"{self.packed.folder} is not the FAE folder of this run: its {MANIFEST_FILE} is another; resume with"
                " the folder that the run began with"
            )
        self.scheduler.restore(state["scheduler"])


def _loader(config: TrainConfig, path: str, schema: Schema, setup: MeshSetup, **how: Any) -> Loader:
    orders = how.pop("orders", None)
    data = dataclasses.replace(config.data, path=path, **how)
    of_kind = dataclasses.replace(config, data=data)
    return train_loader(of_kind, schema, setup.layout, transform=setup.parts, orders=orders)


def _orders(packed: FaeManifest, layout: EmbeddingLayout) -> dict[str, np.ndarray]:
    """By table of which not all rows are hot, (hot,) uint32, the row that each id of a hot example is.

    A table without hot rows has one there, which no hot example reads: row 0 stands for it.
    """
    used, none = {table.name for stack in layout.members for table in stack.tables}, np.zeros(1, np.uint32)
    numbered = [table for table in packed.tables if table.name in used and not table.whole]
    return {table.name: none if table.placeholder else packed.hot_rows[table.name] for table in numbered}
