"""Batches whose rows lie in host memory, in whole or in part, through the pipeline (EL-Rec, Figure 9)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.pipeline_batch import BatchRows, Preparation, Prepared
from jrec.host.ring import Rows
from jrec.host.timeline import Timeline
from jrec.mesh.route import AXIS
from jrec.ops.layout import EmbeddingLayout
from jrec.run.batches import Batches
from jrec.run.feed import Ready
from jrec.run.first_rows import FirstRows
from jrec.run.mesh_arrays import Shapes, on_mesh, stacked
from jrec.run.mesh_batch import Dealt
from jrec.run.mesh_setup import MeshSetup
from jrec.run.options import HostOptions
from jrec.run.step import HostRows, Seen, StepBatch


class DealtBatches:
    """Batches cut into the devices' parts, for ``HostPipeline``, whose threads do all but the rows' own work.

    Of several processes each prepares its own parts, and they agree on rows and sizes here, batch by batch
    (``jrec.run.host_owners``), ahead of the steps.

    Args:
      setup: Mesh and plan.
    """

    def __init__(self, setup: MeshSetup):
        self._setup = setup
        self._shapes: dict[int, Shapes] = {}

    def prepare(self, item: Dealt) -> Prepared:
        """See ``jrec.host.pipeline_batch.Preparation``; what is sent is a ``StepBatch``."""
        setup = self._setup
        dealt, examples = setup.parts.dealt_by_all(item, setup.peers_ahead), len(item.batch.labels)
        if examples not in self._shapes:
            self._shapes[examples] = setup.shapes(examples * jax.process_count())
        shapes = self._shapes[examples]
        shapes.fit(dealt, setup.local, setup.peers_ahead)
        sent = stacked(dealt.parts, setup.local, shapes)
        return Prepared(batch=dealt.batch, sent=sent, rows=shapes.host_rows_read(dealt))

    def send(self, sent: StepBatch) -> StepBatch:
        """The prepared batch on the mesh; see ``Preparation``."""
        return on_mesh(sent, self._setup.mesh)


class HostFeed:
    """A loader's batches, prepared ahead of the steps, their rows stored behind them; see ``Feed``.

    Args:
      loader: The training batches, whole or cut by ``setup.parts``.
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
        self._loader, self._total, self._trace, self._setup = loader, total, trace, setup
        preparation: Preparation | None = None
        if setup is not None:
            preparation = DealtBatches(setup)
        self._pipeline = HostPipeline(
            self._batches(),
            layout,
            tables,
            queue=host.queue,
            cached=host.cached_batches or None,
            timeline=self.timeline,
            preparation=preparation,
            device=None if setup is None else setup.mesh.devices.flat[setup.local[0]],
        )
        self._out: Any = None
        self._first_rows = first_rows

    def next(self) -> Ready:
        """The next batch, ready for its step; see ``Feed``."""
        if self._setup is not None:
            self._setup.decide_forms(self._loader)  # before the first batch is cut
        ready = self._out = self._pipeline.get()
        if ready is None:
            raise StopIteration
        batch, (_, grown) = ready.planned.batch, ready.planned.position
        tables = ready.tables
        if grown is not None and self._first_rows is not None:
            read = {name: plan.rows for name, plan in ready.planned.plans.items()}
            tables = {name: self._first_rows.among(name, rows, read[name], grown) for name, rows in tables.items()}
            self._out = dataclasses.replace(ready, tables=tables)
        if self._setup is None:
            return Ready(batch=batch, prepared=StepBatch(batch=ready.batch), host=tables, grown=grown)
        return Ready(batch=batch, prepared=ready.batch, host=dealt_rows(tables, self._setup.mesh), grown=grown)

    def stepped(self, ready: Ready, host: HostRows, results: Seen) -> None:
        """Takes back a batch after its step; see ``Feed``."""
        if self._setup is not None:
            host = {name: gathered_rows(rows, self._out.tables[name]) for name, rows in host.items()}
        self._pipeline.put_back(self._out, host)

    def settle(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        self._pipeline.settle()

    def position(self) -> Any:
        """The position after the last step, JSON; the loader itself is ahead."""
        position = self._pipeline.position
        return self._loader.state() if position is None else position[0]

    def restore(self, position: Any) -> None:
        """Goes to a ``position()``; before the first batch."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        forms = {} if self._setup is None else self._setup.decided_forms(self._loader)
        return {"pipeline": self.timeline.summary(seconds), **forms}

    def close(self) -> None:
        """Ends threads: no more batches."""
        if self._setup is not None and self._setup.peers_ahead is not None:
            self._setup.peers_ahead.close()  # a stage may wait in it
        self._pipeline.close()
        self._loader.close()
        if self._trace is not None:
            self.timeline.write_trace(self._trace)

    def _batches(self) -> Iterator[tuple[Any, tuple[dict[str, Any], Any]]]:
        """The run's remaining batches; runs in a thread of the pipeline."""
        while self._total is None or self._loader.position < self._total:
            try:
                batch = next(self._loader)
            except StopIteration:
                return
            yield batch, (self._loader.state(), self._loader.aside)


def dealt_rows(rows: HostRows, mesh: Mesh) -> dict[str, Rows]:
    """The rows that a batch reads from this process's host memory, on the process's devices, as rows over the mesh.

    Args:
      rows: By stack, (D * K, dim) NumPy arrays, or arrays on one device; K is equal in all processes.
      mesh: Of N devices, of which this process has D.

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
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return jnp.concatenate([jax.device_put(shard.data, device) for shard in shards])

    return _in_order(jax.tree.map(collect, rows), len(rows.values.addressable_shards))


@functools.partial(jax.jit, static_argnums=1)
def _dealt(rows: Rows, devices: int) -> Rows:
    def deal(array: jax.Array) -> jax.Array:
        return array.reshape(-1, devices, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)

    return rows if devices == 1 else jax.tree.map(deal, rows)


@functools.partial(jax.jit, static_argnums=1)
def _in_order(rows: Rows, devices: int) -> Rows:
    def collect(array: jax.Array) -> jax.Array:
        return array.reshape(devices, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)

    return rows if devices == 1 else jax.tree.map(collect, rows)


def unique_rows(read: Mapping[str, BatchRows], tables: Mapping[str, HostTable]) -> dict[str, Rows]:
    """A batch's rows from host memory, without slots, zeros behind them up to a static size.

    Args:
      read: By stack.
      tables: By stack. Not while another thread writes rows.
    """
    rows = {}
    for name, of_stack in read.items():
        size, table = of_stack.most if of_stack.room is None else of_stack.room, tables[name]
        values = np.zeros((size, table.dim), table.dtype)
        values[: of_stack.addresses.size] = table.read(of_stack.addresses)
        rows[name] = Rows(values=values, slots={})
    return rows
