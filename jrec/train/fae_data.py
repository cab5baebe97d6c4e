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
from jrec.train.shuffle_scheduler import ShuffleScheduler


class FaeLoaders:
    """Hot and cold batches, each kind shuffled anew in every epoch, and the scheduler that interleaves them.

    Args:
      config: of the run.
      packed: the FAE folder.
      layout: of the model: every stack of tier "host".

    Attributes:
      hot: batches whose ids number the resident rows (``resident_addresses``); None where no example is hot.
      cold: batches of ``layout``; None where all examples are hot.
      scheduler: of their order.
      packed: the FAE folder.
      split: whose loss the scheduler is told.

    Raises:
      ConfigError: if a table of the model does not live in host memory.
      DatasetError: if the folder cannot be used.
    """

    def __init__(self, config: TrainConfig, packed: FaeManifest, layout: EmbeddingLayout):
        _check_tiers(layout)
        self.packed, self.split = packed, config.fae.split
        self.hot = self.cold = None
        if (schema := packed.hot_schema) is not None:
            # Packing checked every id; an OOV row need not be among the hot ones.
            self.hot = _loader(config, str(packed.hot_folder), schema, hot_layout(packed, layout), on_bad_id="raise")
        if packed.cold_examples:
            self.cold = _loader(config, str(packed.cold_folder), packed.cold_schema, layout)
        cold, hot = (0 if loader is None else loader.batches_per_epoch for loader in (self.cold, self.hot))
        self.scheduler = ShuffleScheduler(config.fae, cold=cold, hot=hot, epochs=config.epochs)
        self._identity = packed.identity

    @property
    def total_batches(self) -> int:
        """Of all epochs."""
        return self.scheduler.total

    @property
    def cold_batches(self) -> int:
        """Of all epochs."""
        return 0 if self.cold is None else self.cold.total_batches or 0

    def state(self, cold: dict[str, Any] | None) -> dict[str, Any]:
        """Where the run is, in JSON types.

        Args:
          cold: the position behind the last cold batch that was trained; the loader itself is ahead.
        """
        hot = None if self.hot is None else self.hot.state()
        return {"packed": self._identity, "scheduler": self.scheduler.state(), "hot": hot, "cold": cold}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved position, but for the cold loader, which is its taker's.

        Raises:
          CheckpointError: if it was saved with another FAE folder, or another order.
        """
        if state.get("packed") != self._identity:
            raise CheckpointError(
                f"{self.packed.folder} is not the FAE folder of this run: its {MANIFEST_FILE} is another; resume with"
                " the folder that the run began with"
            )
        self.scheduler.restore(state["scheduler"])
        if self.hot is not None:
            self.hot.restore(state["hot"])

    def close(self) -> None:
        """Stops the hot loader's threads; the cold loader is its taker's."""
        if self.hot is not None:
            self.hot.close()


def hot_layout(packed: FaeManifest, layout: EmbeddingLayout) -> EmbeddingLayout:
    """The layout of hot batches: the stacks of ``layout``, of every table the hot rows alone."""
    return layout.with_rows({table.name: max(table.hot, 1) for table in packed.tables})


def resident_addresses(packed: FaeManifest, layout: EmbeddingLayout) -> dict[str, np.ndarray]:
    """By stack the addresses of its hot rows, (n,) of its ``address_dtype``, ascending.

    Entry ``i`` is row ``i`` of ``hot_layout``'s stack.

    A table without hot rows has one in ``hot_layout``, which no hot example reads: its row 0 is resident then.
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


def _loader(config: TrainConfig, path: str, schema: Schema, layout: EmbeddingLayout, **data_keys: Any) -> Loader:
    # The cast is made on the host in any case: the rows of a batch must be known before it is on the device.
    data = dataclasses.replace(config.data, path=path, cast="host", **data_keys)
    return train_loader(dataclasses.replace(config, data=data), schema, layout)


def _check_tiers(layout: EmbeddingLayout) -> None:
    elsewhere: Mapping[str, str] = {t.name: t.tier for s in layout.members for t in s.tables if t.tier != "host"}
    if elsewhere:
        name, tier = next(iter(elsewhere.items()))
        raise ConfigError(
            f"schedule is 'fae', which keeps every table's hot rows on the device and the others in host memory, but"
            f" table {name} is of tier {tier!r}; leave out tables.overrides.{name} and [tables.tt]"
        )
