"""Runs whose tables lie in host memory, in whole or in part: steps through the pipeline."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jrec.batch import Batch
from jrec.checkpoint import HostRows, Saved
from jrec.checkpoint.sources import Source
from jrec.data.loader import Loader
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.pipeline_batch import Preparation, WholeBatches, read
from jrec.host.resident import ResidentRows
from jrec.host.ring import Rows, expand
from jrec.host.timeline import Timeline
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.row_optimizers import RowOptimizer
from jrec.train.checkpoint import before_step, device_rows
from jrec.train.config import TrainConfig
from jrec.train.run_folder import TRACE_FILE
from jrec.train.step import CompiledRun, State


def host_tables(config: TrainConfig, layout: EmbeddingLayout, optimizer: RowOptimizer) -> dict[str, HostTable]:
    """The rows of every stack of tier "host", as they begin: bit-identical to those of the same run on the device.

    Raises:
      ConfigError: if memory or ``tables.host.folder`` cannot hold them, or several processes train.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"tables of tier 'host' are updated by one process, but this is one of {jax.process_count()}; use tier"
            " 'device'"
        )
    stacks = [stack for stack in layout.members if stack.tier == "host"]
    key = nnx.Rngs(params=config.seed).params()  # the first of the stream is the collection's: models make it first
    host = config.tables.host
    folder, threads = host.folder or None, host.threads or None
    return {s.name: HostTable(s, optimizer, key, folder=folder, threads=threads) for s in stacks}


def host_predict(
    compiled: CompiledRun,
    layout: EmbeddingLayout,
    tables: Mapping[str, HostTable],
    resident: Mapping[str, ResidentRows] | None = None,
) -> Callable[[State, Batch], jax.Array]:
    """``state, batch -> logits`` with rows read from the host; makes none. Not while another thread writes rows.

    Args:
      compiled, layout: of the model.
      tables: by stack.
      resident: by stack, rows that are read from the device instead.
    """

    def predict(state: State, batch: Batch) -> jax.Array:
        batch, rows = with_rows(batch, layout, tables, resident or {})
        return compiled.predict_on_rows(state, rows, batch)

    return predict


def with_rows(
    batch: Batch, layout: EmbeddingLayout, tables: Mapping[str, HostTable], resident: Mapping[str, ResidentRows]
) -> tuple[Batch, dict[str, Rows]]:
    """A batch whose ids of host stacks number its unique rows; and these rows, without slots, by stack.

    Args:
      batch: NumPy arrays.
      layout: of the batch.
      tables: by host stack.
      resident: by stack, rows that are read from the device instead.
    """
    prepared = WholeBatches({name: layout.stacks[name] for name in tables}, lambda tree: tree).prepare(batch)
    return prepared.batch, read_rows(prepared.rows, tables, resident)


def read_rows(
    unique: Mapping[str, tuple[np.ndarray, int]],
    tables: Mapping[str, HostTable],
    resident: Mapping[str, ResidentRows],
) -> dict[str, Rows]:
    """A batch's rows from host memory, without slots, by stack.

    Args:
      unique: see ``Prepared.rows``.
      tables: by host stack.
      resident: by stack, rows that are read from the device instead.

    Returns:
      Zeros behind them, in a size that depends on the batch's alone.
    """
    rows = {}
    for name, (addresses, most) in unique.items():
        split = resident[name].split(addresses) if name in resident else None
        rows[name] = expand(read(tables[name], addresses, most, split), most)
        if split is not None:
            rows[name] = resident[name].fill(rows[name], split.padded(most))
    return rows


def restored_predict(
    config: TrainConfig, layout: EmbeddingLayout, compiled: CompiledRun, saved: Saved
) -> Callable[[State, Batch], jax.Array]:
    """``state, batch -> logits`` with the host rows of a run's checkpoint.

    Args:
      config: The run's configuration.
      layout: The model's tables.
      compiled: The model's functions.
      saved: The checkpoint.
    """
    tables = host_tables(config, layout, SGD(learning_rate=0.0))  # without slots: no step is taken
    for table in tables.values():
        HostRows(table).restore(saved, slots=False)
    return host_predict(compiled, layout, tables)


class HostStepper:
    """Steps of a model with tables in host memory; see ``jrec.train.stepper.Stepper``.

    Args:
      state, compiled: of the model; see ``compile_run``.
      loader: of the training batches; None where there are none.
      config: of the run.
      layout: of the model.
      tables: see ``host_tables``.
      total: of the loader's batches, the steps of the whole run, so that no batch is read that none will take.
      folder: of the run.
      resident: by stack, rows that stay on the device.
      preparation: of what the loader gives; see ``HostPipeline``.
    """

    def __init__(
        self,
        state: State,
        compiled: CompiledRun,
        loader: Loader | None,
        *,
        config: TrainConfig,
        layout: EmbeddingLayout,
        tables: Mapping[str, HostTable],
        total: int,
        folder: pathlib.Path,
        resident: Mapping[str, ResidentRows] | None = None,
        preparation: Preparation | None = None,
    ):
        self.state = state
        self.timeline = Timeline(trace=config.log.trace)
        self._compiled, self._loader, self._total = compiled, loader, total
        self._sources = {name: HostRows(table) for name, table in tables.items()}
        self._rows = device_rows(layout, next((t.optimizer for t in tables.values()), None), lambda: self.state)
        self._trace = folder / TRACE_FILE if config.log.trace else None
        self._tables, self._resident = tables, resident or {}
        self._predict = host_predict(compiled, layout, tables, self._resident)
        host = config.tables.host
        self._pipeline = HostPipeline(
            self._batches(),
            layout,
            tables,
            queue=host.queue,
            cached=host.cached_batches or None,
            resident=self._resident,
            timeline=self.timeline,
            preparation=preparation,
        )

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """See ``Stepper``."""
        ready = self._pipeline.get()
        if ready is None:
            raise RuntimeError(f"all {self._total} steps of the run are taken")
        before_step(self._rows, ready.planned.batch)
        self.state, rows, loss, logits = self._compiled.step_on_rows(self.state, ready.tables, ready.batch)
        self._pipeline.put_back(ready, rows)
        return loss, logits, ready.planned.batch

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """See ``Stepper``."""
        self.settle()
        return self._predict(state, batch)

    def settle(self) -> None:
        """See ``Stepper``."""
        self._pipeline.settle()

    def position(self) -> Any:
        """See ``Stepper``; None without a loader. The loader itself is ahead."""
        position = self._pipeline.position
        return self._loader.state() if position is None and self._loader is not None else position

    def sources(self) -> Sequence[Source]:
        """See ``Stepper``. Resident rows are written to the host too, so that the checkpoint is one of any host run."""
        self.settle()
        for name, rows in self._resident.items():
            rows.store(self._tables[name])
        return [*self._sources.values(), *self._rows.values()]

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """See ``Stepper``."""
        self.state = state
        if self._loader is not None:
            self._loader.restore(position)
        self._restore_rows(saved)

    def _restore_rows(self, saved: Saved) -> None:
        for source in self._sources.values():
            source.restore(saved)
        for name, rows in self._resident.items():
            rows.load(self._tables[name])

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """See ``Stepper``."""
        return self.timeline.summary(seconds)

    def close(self) -> None:
        """See ``Stepper``."""
        self._pipeline.close()
        if self._loader is not None:
            self._loader.close()
        if self._trace is not None:
            self.timeline.write_trace(self._trace)

    def _batches(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The run's remaining batches; runs in a thread of the pipeline."""
        loader = self._loader
        while loader is not None and loader.position < self._total:
            batch = next(loader)
            yield batch, loader.state()
