"""Hot and cold batches of a run on an FAE folder, interleaved by the Shuffle Scheduler (FAE, section III).

Hot rows are replicated rows of the run's plan. A hot batch reads only these, so that it needs no row of another device
or of host memory; a cold batch is a batch like any other. A row has one home, so a switch of the schedule copies
nothing, unlike with the paper's replicas. In any order of hot and cold batches, the results are bit-identical to a run
on the same batches under another plan, except for the order of sums over devices.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from jrec.app.config import TrainConfig
from jrec.app.loaders import train_loader
from jrec.app.shuffle_scheduler import ShuffleScheduler
from jrec.data.fae.manifest import MANIFEST_FILE, FaeManifest
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.errors import CheckpointError
from jrec.json_values import JsonMapping, JsonObject
from jrec.ops.layout import EmbeddingLayout
from jrec.run.feeds.batches import Position
from jrec.run.feeds.run_feed import FedBatch, RunFeed
from jrec.run.run import Run


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

    @property
    def total_batches(self) -> int:
        """Batches of all epochs."""
        return self.scheduler.total

    def restore(self, state: JsonObject) -> None:
        """Restores the order of hot and cold batches; their feeds restore the batches' own positions.

        Raises:
          CheckpointError: If it was saved with another FAE folder, or another order.
        """
        if state.get("packed") != self.packed.identity:
            raise CheckpointError(
                f"{self.packed.folder} is not the FAE folder of this run: its {MANIFEST_FILE} is another; resume with"
                " the folder that the run began with"
            )
        self.scheduler.restore(state["scheduler"])


class HotColdFeed:
    """Batches of both kinds for the steps of a run. The training loop tells the scheduler the losses that it awaits.

    Args:
      loaders: The scheduler of the order, and the loaders of both kinds.
      run: The run.
      open_feed: ``run.feed`` with the arguments of both kinds.
      position: Where to go on, from ``position``; None begins.

    Attributes:
      scheduler: The scheduler, which awaits a loss from time to time.

    Raises:
      CheckpointError: If the position is of another FAE folder, or another order.
    """

    def __init__(
        self, loaders: FaeLoaders, run: Run, open_feed: Callable[..., RunFeed], *, position: Position | None = None
    ):
        self.scheduler, self._loaders, self._plan = loaders.scheduler, loaders, run.plan
        if position is not None:
            loaders.restore(position)
        self._switches_before = self.scheduler.switches
        self._feeds: dict[str, RunFeed | None] = {}
        for kind, loader in (("hot", loaders.hot), ("cold", loaders.cold)):
            self._feeds[kind] = None
            if loader is not None:
                begin, total = None if position is None else position[kind], loader.total_batches
                self._feeds[kind] = open_feed(loader, hot=kind == "hot", position=begin, total=total)
        self._steps = {"hot": 0, "cold": 0}

    def __next__(self) -> FedBatch:
        """The next batch, hot or cold as the scheduler decides.

        Raises:
          RuntimeError: If the scheduler awaits a loss.
        """
        kind = self.scheduler.next()
        # Counted as they are fed: the scheduler's own counts go back to before this process began.
        self._steps[kind] += 1
        feed = self._feeds[kind]
        assert feed is not None, "the scheduler gives no batch of a kind that has none"
        return next(feed)

    def position(self) -> Position:
        """The positions of both feeds and the scheduler, in JSON types."""
        positions = {kind: None if feed is None else feed.position() for kind, feed in self._feeds.items()}
        return {"packed": self._loaders.packed.identity, "scheduler": self.scheduler.state(), **positions}

    def sections(self, seconds: float) -> JsonObject:
        """The sections of the cold batches, and "fae".

        "fae" has the run's examples, rates and switches, and bytes of rows and slots of this process's steps.
        """
        cold = {} if (feed := self._feeds["cold"]) is None else feed.sections(seconds)
        return {**cold, "fae": self._summary(cold.get("pipeline", {"rows": {}}))}

    def _summary(self, stages: JsonMapping) -> JsonObject:
        packed, scheduler = self._loaders.packed, self.scheduler
        assert self._plan is not None  # hot rows are replicated rows of it
        of_row = {t.name: t.memory_bytes for t in self._plan.tables}
        hot_bytes = sum(rows.size * of_row.get(name, 0) for name, rows in packed.hot_rows.items())
        keys = ("bytes_to_device", "bytes_to_host")
        moved = {key: sum(of_stack[key] for of_stack in stages["rows"].values()) for key in keys}
        return {
            "hot_examples": packed.hot_examples,
            "cold_examples": packed.cold_examples,
            "hot_share": packed.hot_examples / (packed.hot_examples + packed.cold_examples),
            "hot_rows": {name: int(rows.size) for name, rows in packed.hot_rows.items()},
            "hot_row_bytes": hot_bytes,
            "steps": dict(self._steps),
            "switches": scheduler.switches,
            "rate": scheduler.rate,
            "rates": [schedule.rate for schedule in scheduler.history],
            "test_losses": [schedule.test_loss for schedule in scheduler.history],
            "test_split": self._loaders.split,
            "bytes": {
                **moved,
                "moved": sum(moved.values()),
                "paper_synchronization": (scheduler.switches - self._switches_before) * hot_bytes,
            },
        }


def _loader(folder: pathlib.Path, config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> Loader:
    data = dataclasses.replace(config.data, path=str(folder))
    return train_loader(dataclasses.replace(config, data=data), schema, layout)
