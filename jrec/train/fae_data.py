"""The training batches of a run on an FAE folder: two loaders, and who is next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrec.data.fae.manifest import MANIFEST_FILE, FaeManifest
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.errors import CheckpointError, ConfigError
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
      hot: batches whose ids number the hot rows (``hot_addresses``); None where no example is hot.
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
            self.hot = _loader(config, str(packed.hot_folder), schema, hot, on_bad_id="raise")
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


def hot_layout(packed: FaeManifest, layout: EmbeddingLayout) -> EmbeddingLayout:
    """The layout of hot batches: the stacks of ``layout``, of every table the hot rows alone.

    Raises:
      ConfigError: If a table is a tensor train.
    """
    _check_tiers(layout)
    return layout.with_rows({table.name: max(table.hot, 1) for table in packed.tables})


def hot_addresses(packed: FaeManifest, layout: EmbeddingLayout) -> dict[str, np.ndarray]:
    """By stack the addresses of its hot rows, (n,) of its ``address_dtype``, ascending.

    Entry ``i`` is row ``i`` of ``hot_layout``'s stack.

    A table without hot rows has one in ``hot_layout``, which no hot example reads: row 0 stands for it.
    """

    def addresses(name: str, base: int) -> np.ndarray:
        rows = packed.hot_rows[name]
        return base + (rows if rows.size else np.zeros(1, np.uint32)).astype(np.int64)

    return {
        name: np.concatenate(
            [addresses(t.name, base) for t, base in zip(stack.tables, stack.bases, strict=True)]
        ).astype(stack.address_dtype)
        for name, stack in layout.stacks.items()
    }


def _loader(config: TrainConfig, path: str, schema: Schema, setup: MeshSetup, **data_keys: Any) -> Loader:
    data = dataclasses.replace(config.data, path=path, **data_keys)
    return train_loader(dataclasses.replace(config, data=data), schema, setup.layout, transform=setup.parts)


def _check_tiers(layout: EmbeddingLayout) -> None:
    cores = [table.name for stack in layout.members for table in stack.tables if stack.tier == "tt"]
    if cores:
        raise ConfigError(
            f"schedule is 'fae', which keeps every table's hot rows on all devices, but table {cores[0]} is a tensor"
            f" train; leave out tables.overrides.{cores[0]} and [tables.tt]"
        )
