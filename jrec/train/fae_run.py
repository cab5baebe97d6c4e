"""Runs on hot and cold batches (FAE, section III): hot ones on the device alone, cold ones through the host pipeline.

A row has one home: a hot one the device (``jrec.host.resident``), where hot and cold batches read and update it, any
other the host. So nothing is copied between the two when the schedule switches, which the paper's replicas need, and
in whatever order hot and cold batches come, they compute the bits of a run on the same batches without hot rows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.batch import Batch
from jrec.checkpoint import Saved
from jrec.checkpoint.sources import Source
from jrec.host import HostTable
from jrec.host.pipeline_batch import tree_bytes
from jrec.host.resident import ResidentRows
from jrec.ops.layout import EmbeddingLayout
from jrec.train.config import TrainConfig
from jrec.train.fae_bytes import PlainBytes
from jrec.train.fae_data import FaeLoaders, resident_addresses
from jrec.train.host_run import HostStepper
from jrec.train.step import CompiledRun, HostRows, State

HotStep = Callable[[State, HostRows, Batch], tuple[State, HostRows, jax.Array, jax.Array]]


def fae_stepper(
    state: State,
    compiled: CompiledRun,
    loaders: FaeLoaders,
    *,
    config: TrainConfig,
    layout: EmbeddingLayout,
    tables: Mapping[str, HostTable],
    pad_rows: bool,
    folder: pathlib.Path,
) -> FaeStepper:
    """The stepper of a run on one device.

    Args:
      state, compiled: of the model; see ``compile_run``.
      loaders: of the batches.
      config: of the run.
      layout: of the model.
      tables: see ``host_tables``.
      pad_rows: whether the model pads stored rows.
      folder: of the run.
    """
    addresses = resident_addresses(loaders.packed, layout)
    resident = {name: ResidentRows(rows, tables[name], pad_rows=pad_rows) for name, rows in addresses.items()}
    numbers = {name: jnp.asarray(rows.astype(np.int32)) for name, rows in addresses.items()}  # modulo 2^32
    cold = HostStepper(
        state,
        compiled,
        loaders.cold,
        config=config,
        layout=layout,
        tables=tables,
        total=loaders.cold_batches,
        folder=folder,
        resident=resident,
    )

    def hot(state: State, rows: HostRows, batch: Batch) -> tuple[State, HostRows, jax.Array, jax.Array]:
        return compiled.step_on_resident(state, rows, numbers, batch)

    return FaeStepper(cold, hot, loaders, config=config, layout=layout, resident=resident)


class FaeStepper:
    """Steps of a run on an FAE folder; see ``jrec.train.stepper.Stepper``. Whoever drives it observes the losses.

    Args:
      cold: takes the steps of cold batches.
      hot: takes one of a hot batch: ``state, resident rows, batch -> state, resident rows, loss, logits``, donated.
      loaders: of the batches.
      config: of the run.
      layout: of the model.
      resident: by stack its hot rows, which ``cold`` uses too.

    Attributes:
      scheduler: which awaits a loss from time to time.
    """

    def __init__(
        self,
        cold: HostStepper,
        hot: HotStep,
        loaders: FaeLoaders,
        *,
        config: TrainConfig,
        layout: EmbeddingLayout,
        resident: Mapping[str, ResidentRows],
    ):
        self.scheduler = loaders.scheduler
        self._cold, self._hot, self._loaders, self._resident = cold, hot, loaders, resident
        host = config.tables.host
        self._plain = PlainBytes(layout, config.data.batch_size, host.cached_batches or host.queue, self._resident)
        self._steps = {"hot": 0, "cold": 0}
        self._switches_before = 0

    @property
    def state(self) -> State:
        """Of model and optimizer."""
        return self._cold.state

    @state.setter
    def state(self, state: State) -> None:
        self._cold.state = state

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """See ``Stepper``. Hot batches number the resident rows.

        Raises:
          RuntimeError: if the scheduler awaits a loss.
        """
        kind = self.scheduler.next()
        self._steps[kind] += 1
        if kind == "hot":
            loss, logits, batch = self._hot_step()
            self._plain.count({name: self._numbers_of(name, rows) for name, rows in _unique(batch).items()})
        else:
            loss, logits, batch = self._cold.step()
            self._plain.count(_unique(batch))
        return loss, logits, batch

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """See ``Stepper``."""
        return self._cold.predict(state, batch)

    def settle(self) -> None:
        """See ``Stepper``."""
        self._cold.settle()

    def position(self) -> dict[str, Any]:
        """See ``Stepper``: of both loaders and the scheduler."""
        return self._loaders.state(self._cold.position())

    def sources(self) -> Sequence[Source]:
        """See ``Stepper``."""
        return self._cold.sources()

    def restore(self, saved: Saved, state: State, position: dict[str, Any]) -> None:
        """See ``Stepper``."""
        self._loaders.restore(position)
        self._cold.restore(saved, state, position["cold"])
        self._switches_before = self.scheduler.switches

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """See ``Stepper``: cold batches alone pass through the stages, but rows and bytes are those of all batches."""
        return self._cold.pipeline(seconds)

    def close(self) -> None:
        """See ``Stepper``."""
        self._cold.close()
        self._loaders.close()
        self._plain.close()

    def summary(self) -> dict[str, Any]:
        """For the report: examples, rates and switches of the run; bytes of rows and slots of this process's steps."""
        packed, scheduler = self._loaders.packed, self.scheduler
        hot_bytes = sum(rows.addresses.size * rows.row_bytes for rows in self._resident.values())
        rows = self._cold.timeline.summary(0.0)
        moved = {key: sum(of[key] for of in rows["rows"].values()) for key in ("bytes_to_device", "bytes_to_host")}
        total, plain = sum(moved.values()), self._plain.totals()
        return {
            "hot_examples": packed.hot_examples,
            "cold_examples": packed.cold_examples,
            "hot_share": packed.hot_examples / (packed.hot_examples + packed.cold_examples),
            "hot_rows": {name: int(rows.addresses.size) for name, rows in self._resident.items()},
            "hot_row_bytes": hot_bytes,
            "steps": dict(self._steps),
            "switches": scheduler.switches,
            "rate": scheduler.rate,
            "rates": [schedule.rate for schedule in scheduler.history],
            "test_losses": [schedule.test_loss for schedule in scheduler.history],
            "test_split": self._loaders.split,
            "bytes": {
                **moved,
                "moved": total,
                "batches_to_device": rows["batch_bytes_to_device"],
                **plain,
                "paper_synchronization": (scheduler.switches - self._switches_before) * hot_bytes,
                "times_fewer_than_plain": plain["plain"] / total if total else None,
            },
        }

    def _hot_step(self) -> tuple[jax.Array, jax.Array, Batch]:
        assert self._loaders.hot is not None
        batch = next(self._loaders.hot)
        timeline = self._cold.timeline
        timeline.sent_batch(tree_bytes(batch))
        for name, rows in _unique(batch).items():
            timeline.rows(name, unique=rows.size, cached=rows.size, resident=rows.size)
        rows = {name: of.rows for name, of in self._resident.items()}
        self.state, rows, loss, logits = self._hot(self.state, rows, batch)
        for name, of in self._resident.items():
            of.rows = rows[name]
        return loss, logits, batch

    def _numbers_of(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self._resident[name].addresses[rows]


def _unique(batch: Batch) -> dict[str, np.ndarray]:
    """By stack the unique rows of a batch of NumPy arrays with casts."""
    found = {}
    for name, bags in batch.bags.items():
        assert bags.cast is not None, "both loaders make casts"
        found[name] = np.asarray(bags.cast.rows)[: int(bags.cast.num_unique)]
    return found
