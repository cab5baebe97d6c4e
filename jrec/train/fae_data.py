"""The training batches of a run on an FAE folder: two loaders, and the scheduler of their order."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jrec.data.fae.manifest import MANIFEST_FILE, FaeManifest
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.errors import CheckpointError
from jrec.ops.layout import EmbeddingLayout
from jrec.train.config import TrainConfig
from jrec.train.loaders import train_loader
from jrec.train.shuffle_scheduler import ShuffleScheduler


class FaeLoaders:
    """Hot and cold batches, each kind shuffled anew in every epoch, and the scheduler that interleaves them.

    Args:
      config: The run's configuration.
      packed: The FAE folder.
      layout: The run's tables.

    Attributes:
      hot: Batches that read only hot rows; None where no example is hot.
      cold: Batches of the run's layout; None where all examples are hot.
      scheduler: The scheduler of their order.
      packed: The FAE folder.
      split: The split whose loss the scheduler observes.

    Raises:
      DatasetError: If the folder cannot be used.
    """

    def __init__(self, config: TrainConfig, packed: FaeManifest, layout: EmbeddingLayout):
        self.packed, self.split = packed, config.fae.split
        self.hot = self.cold = None
        if (schema := packed.hot_schema) is not None:
            self.hot = _loader(packed.hot_folder, config, schema, layout)
        if packed.cold_examples:
            self.cold = _loader(packed.cold_folder, config, packed.cold_schema, layout)
        batches, hot_batches = (0 if loader is None else loader.batches_per_epoch for loader in (self.cold, self.hot))
        self.scheduler = ShuffleScheduler(config.fae, cold=batches, hot=hot_batches, epochs=config.epochs)
        self._identity = packed.identity

    @property
    def total_batches(self) -> int:
        """Batches of all epochs."""
        return self.scheduler.total

    def state(self, positions: Mapping[str, Any]) -> dict[str, Any]:
        """The run's position in its batches, in JSON types.

        Args:
          positions: The positions of "hot" and "cold" batches after the last trained one; None for a kind without any.
        """
        return {"packed": self._identity, "scheduler": self.scheduler.state(), **positions}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the order of hot and cold batches; their feeds restore the batches' own positions.

        Raises:
          CheckpointError: If it was saved with another FAE folder, or another order.
        """
        if state.get("packed") != self._identity:
            raise CheckpointError(
                f"{self.packed.folder} is not the FAE folder of this run: its {MANIFEST_FILE} is another; resume with"
                " the folder that the run began with"
            )
        self.scheduler.restore(state["scheduler"])


def _loader(folder: pathlib.Path, config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> Loader:
    data = dataclasses.replace(config.data, path=str(folder))
    return train_loader(dataclasses.replace(config, data=data), schema, layout)
