"""Batches whose rows lie in host memory, in whole or in part, through the pipeline (EL-Rec, Figure 9)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.pipeline_batch import BatchRows
from jrec.host.ring import Rows
from jrec.host.table import files_section
from jrec.host.timeline import Timeline
from jrec.json_values import JsonObject
from jrec.mesh.route import AXIS
from jrec.ops.layout import EmbeddingLayout
from jrec.run.feeds.batches import Batches, Position
from jrec.run.feeds.feed import Ready, remaining
from jrec.run.feeds.partitioned import MeshBatches
from jrec.run.options import HostOptions
from jrec.run.placement.new_lines import FirstRows
from jrec.run.placement.setup import MeshSetup
from jrec.run.step import HostRows, StepBatch, StepResults


class HostFeed:
    """A loader's batches, prepared ahead of the steps, their rows stored behind them; see ``Feed``.

    Args:
      loader: The training batches, whole or cut by ``setup.partitioner``.
      layout: The tables.
      tables: By stack, those in host memory.
      host: How batches travel.
      total: How many batches the run takes, so that none is read that no step will take; None for all.
      trace: Where to write the trace of the stages; None for none.
      setup: Mesh and plan; None on one device without a plan.
      first_rows: Makes the first values of rows of growing tables.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        layout: EmbeddingLayout,
        tables: Mapping[str, HostTable],
        host: HostOptions,
        total: int | None,
        trace: pathlib.Path | None = None,
        setup: MeshSetup | None = None,
        first_rows: FirstRows | None = None,
    ):
        self.timeline = Timeline(trace=trace is not None)
        self._loader, self._total, self._trace, self._setup, self._tables = loader, total, trace, setup, tables
        self._partitioned = None if setup is None else MeshBatches(setup)
        self._pipeline = HostPipeline(
            remaining(loader, total),
            layout,
            tables,
            queue=host.queue,
            cached=host.cached_batches or None,
            timeline=self.timeline,
            preparation=self._partitioned,
            device=None if setup is None else setup.mesh.devices.flat[setup.local[0]],
        )
        self._out: Any = None
        self._position: Position | None = None
        self._first_rows = first_rows

    def next(self) -> Ready:
        """The next batch, ready for its step; see ``Feed``."""
        if self._position is None:
            if self._partitioned is not None:
                # Before the pipeline's first read: no thread may read the loader while its first batches are looked at.
                self._partitioned.begin(self._loader, self._total)
            self._position = self._loader.state()
        # Kept until ``stepped``: the pipeline takes back the batch that it gave out, with its rows after the step.
        ready = self._out = self._pipeline.get()
        if ready is None:
            raise StopIteration
        batch, (_, grown) = ready.located.batch, ready.located.position
        tables = ready.tables
        if grown is not None and self._first_rows is not None:
            # Where the batch gave a row to another key, what was fetched, or lay in the ring, is the old key's row.
            read = {name: plan.rows for name, plan in ready.located.reads.items()}
            tables = {name: self._first_rows.among(name, rows, read[name], grown) for name, rows in tables.items()}
            # ``among`` was given the old arrays' memory (they are donated), so nothing may refer to them any more.
            self._out = dataclasses.replace(ready, tables=tables)
        if self._setup is None:
            return Ready(batches=(batch,), prepared=StepBatch(batch=ready.batch), host=tables, grown=grown)
        return Ready(batches=(batch,), prepared=ready.batch, host=rows_on_mesh(tables, self._setup.mesh), grown=grown)

    def stepped(self, ready: Ready, host: HostRows, results: StepResults) -> None:
        """Takes back a batch after its step; see ``Feed``."""
        if self._setup is not None:
            # The pipeline knows the rows on one device, in ascending order of addresses: they go back as they came.
            host = {name: gathered_rows(rows, self._out.tables[name]) for name, rows in host.items()}
        self._pipeline.put_back(self._out, host)
        self._position = self._pipeline.position[0]

    def flush(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        self._pipeline.flush()

    def position(self) -> Position:
        """The position after the last step, JSON; the loader itself is ahead."""
        return self._loader.state() if self._position is None else self._position

    def restore(self, position: Position) -> None:
        """Continues from a ``position()``. Call before the first batch."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> JsonObject:
        """The feed's sections of the report; see ``Feed``."""
        modes = {} if self._setup is None else self._setup.decided_modes(self._loader)
        return {"pipeline": self.timeline.summary(seconds), **files_section(self._tables.values()), **modes}

    def close(self) -> None:
        """Ends threads: no more batches."""
        if self._partitioned is not None:
            self._partitioned.close()  # a stage may wait in it,
        self._loader.close()  # or here
        self._pipeline.close()
        if self._trace is not None:
            self.timeline.write_trace(self._trace)


def rows_on_mesh(rows: HostRows, mesh: Mesh) -> dict[str, Rows]:
    """The rows that a batch reads from this process's host memory, on the process's devices, as rows over the mesh.

    Args:
      rows: By stack, (D * K, dim) NumPy arrays, or arrays on one device; K is equal in all processes.
      mesh: The mesh of N devices, of which this process has D.

    Returns:
      (N * K, dim) over the mesh: row ``i`` of ``rows`` is row ``i // D`` of the process's device ``i % D``.
    """
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def place(array: jax.Array) -> jax.Array:
        if len(own) == mesh.devices.size:
            return jax.device_put(array, sharding)
        pieces = [jax.device_put(piece, device) for piece, device in zip(jnp.split(array, len(own)), own, strict=True)]
        shape = (array.shape[0] // len(own) * mesh.devices.size, *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    return {name: jax.tree.map(place, _dealt(of_stack, len(own))) for name, of_stack in rows.items()}


def gathered_rows(rows: Rows, like: Rows) -> Rows:
    """The rows that this process's devices had, on the device and in the order that they were in."""
    device = next(iter(like.values.devices()))

    def collect(array: jax.Array) -> jax.Array:
        if array.is_fully_addressable:
            return jax.device_put(array, device)
        # In the order of the devices, by which ``_in_order`` undoes what ``_dealt`` did.
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return jnp.concatenate([jax.device_put(shard.data, device) for shard in shards])

    return _in_order(jax.tree.map(collect, rows), len(rows.values.addressable_shards))


@functools.partial(jax.jit, static_argnums=1)
def _dealt(rows: Rows, devices: int) -> Rows:
    def deal(array: jax.Array) -> jax.Array:
        # Row i belongs to device i % D (``HostOwners``), but a sharded array has the rows of a device next to each
        # other.
        return array.reshape(-1, devices, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)

    return rows if devices == 1 else jax.tree.map(deal, rows)


@functools.partial(jax.jit, static_argnums=1)
def _in_order(rows: Rows, devices: int) -> Rows:
    def collect(array: jax.Array) -> jax.Array:
        return array.reshape(devices, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)

    return rows if devices == 1 else jax.tree.map(collect, rows)


def unique_rows(read: Mapping[str, BatchRows], tables: Mapping[str, HostTable]) -> dict[str, Rows]:
    """A batch's rows from host memory, zeros behind them up to a static size; slots only where lookups read them.

    Args:
      read: By stack.
      tables: By stack. Not while another thread writes rows.
    """
    rows = {}
    for name, of_stack in read.items():
        size, table = of_stack.most if of_stack.room is None else of_stack.room, tables[name]

        def padded(array: np.ndarray, size: int = size) -> np.ndarray:
            return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])

        if table.optimizer is not None and table.optimizer.has_tail:
            values, slots = table.read_all(of_stack.addresses)
        else:
            values, slots = table.read(of_stack.addresses), {}
        rows[name] = Rows(values=padded(values), slots={slot: padded(array) for slot, array in slots.items()})
    return rows
