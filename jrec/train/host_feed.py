"""Batches whose rows lie in host memory, in whole or in part, through the pipeline (EL-Rec, Figure 9)."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.pipeline_batch import Preparation, Prepared
from jrec.host.ring import Rows, head
from jrec.host.timeline import Timeline
from jrec.mesh.route import AXIS
from jrec.ops.layout import EmbeddingLayout
from jrec.train.config import TrainConfig
from jrec.train.feed import Ready
from jrec.train.mesh_arrays import Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Dealt, Parts
from jrec.train.mesh_setup import MeshSetup
from jrec.train.step import HostRows, Seen, StepBatch


class DealtBatches:
    """Batches cut into the devices' parts, for ``HostPipeline``, whose threads do all but the rows' own work.

    Args:
      setup: Mesh and plan.
      parts: Cuts batches that the loader did not.
      make_shapes: Static sizes for batches of so many examples; they grow.
    """

    def __init__(self, setup: MeshSetup, parts: Parts, make_shapes: Callable[[int], Shapes]):
        self._setup, self._parts, self._make_shapes = setup, parts, make_shapes
        self._shapes: dict[int, Shapes] = {}

    def prepare(self, item: Batch | Dealt) -> Prepared:
        """See ``jrec.host.pipeline_batch.Preparation``; what is sent is a ``StepBatch``."""
        dealt = item if isinstance(item, Dealt) else self._parts(item)
        local, examples = self._setup.local, len(dealt.batch.labels)
        if examples not in self._shapes:
            self._shapes[examples] = self._make_shapes(examples)
        shapes = self._shapes[examples]
        shapes.fit(dealt.parts, local)
        sent = stacked(dealt.parts, local, shapes)
        return Prepared(batch=dealt.batch, sent=sent, rows=shapes.host_rows_read(dealt))

    def send(self, sent: StepBatch) -> StepBatch:
        """See ``Preparation``."""
        return on_mesh(sent, self._setup.mesh)


class HostFeed:
    """A loader's batches, prepared ahead of the steps, their rows stored behind them; see ``Feed``.

    Args:
      loader: The training batches, whole or cut by ``setup.parts``.
      config: The run's configuration.
      layout: The tables.
      tables: By stack, those in host memory.
      total: How many batches the run takes, so that none is read that no step will take.
      trace: Where to write the trace of the stages; None for none.
      setup: Mesh and plan; None on one device without a plan.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        config: TrainConfig,
        layout: EmbeddingLayout,
        tables: Mapping[str, HostTable],
        total: int,
        trace: pathlib.Path | None = None,
        setup: MeshSetup | None = None,
    ):
        self.timeline = Timeline(trace=trace is not None)
        self._loader, self._total, self._trace, self._setup = loader, total, trace, setup
        preparation: Preparation | None = None
        if setup is not None:
            preparation = DealtBatches(setup, setup.parts, setup.shapes)
        host = config.tables.host
        self._pipeline = HostPipeline(
            self._batches(),
            layout,
            tables,
            queue=host.queue,
            cached=host.cached_batches or None,
            timeline=self.timeline,
            preparation=preparation,
        )
        self._out: Any = None

    def next(self) -> Ready:
        """See ``Feed``."""
        if self._setup is not None:
            self._setup.decide_forms(self._loader)  # before the first batch is cut
        ready = self._out = self._pipeline.get()
        if ready is None:
            raise RuntimeError(f"all {self._total} steps of the run are taken")
        batch = ready.planned.batch
        if self._setup is None:
            return Ready(batch=batch, given=StepBatch(batch=ready.batch), host=ready.tables)
        return Ready(batch=batch, given=ready.batch, host=dealt_rows(ready.tables, self._setup.mesh))

    def stepped(self, ready: Ready, host: HostRows, seen: Seen) -> Batch:
        """See ``Feed``."""
        del seen
        if self._setup is not None:
            host = {name: gathered_rows(rows, self._out.tables[name]) for name, rows in host.items()}
        self._pipeline.put_back(self._out, host)
        return ready.batch

    def forms(self) -> dict[str, Any] | None:
        """See ``Feed``."""
        if self._setup is None:
            return None
        self._setup.decide_forms(self._loader)
        return self._setup.forms.record()

    def settle(self) -> None:
        """See ``Feed``."""
        self._pipeline.settle()

    def position(self) -> Any:
        """See ``Feed``; the loader itself is ahead."""
        position = self._pipeline.position
        return self._loader.state() if position is None else position

    def restore(self, position: Any) -> None:
        """See ``Feed``."""
        self._loader.restore(position)

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """See ``Feed``."""
        return self.timeline.summary(seconds)

    def close(self) -> None:
        """See ``Feed``."""
        self._pipeline.close()
        self._loader.close()
        if self._trace is not None:
            self.timeline.write_trace(self._trace)

    def _batches(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The run's remaining batches; runs in a thread of the pipeline."""
        while self._loader.position < self._total:
            batch = next(self._loader)
            yield batch, self._loader.state()


def dealt_rows(rows: HostRows, mesh: Mesh) -> dict[str, Rows]:
    """A batch's rows with their owners, (N * K, dim) over the mesh: of N devices, row ``n`` is device ``n % N``'s."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return {name: jax.device_put(_dealt(of_stack, mesh.devices.size), sharding) for name, of_stack in rows.items()}


def gathered_rows(rows: Rows, like: Rows) -> Rows:
    """Rows that their owners had, on the device and in the order that they were in."""
    leaf = rows.values
    device = next(iter(like.values.devices()))
    devices, count = len(leaf.sharding.device_set), like.values.shape[0]
    return _in_order(jax.device_put(rows, device), devices, count)


@functools.partial(jax.jit, static_argnums=1)
def _dealt(rows: Rows, devices: int) -> Rows:
    def deal(array: jax.Array) -> jax.Array:
        missing = -array.shape[0] % devices
        padded = jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))
        lines = padded.reshape(-1, devices, *array.shape[1:])
        return lines.swapaxes(0, 1).reshape(padded.shape)

    return rows if devices == 1 else jax.tree.map(deal, rows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_order(rows: Rows, devices: int, count: int) -> Rows:
    def collect(array: jax.Array) -> jax.Array:
        lines = array.reshape(devices, -1, *array.shape[1:])
        return lines.swapaxes(0, 1).reshape(array.shape)

    return rows if devices == 1 else head(jax.tree.map(collect, rows), count)


def unique_rows(unique: Mapping[str, tuple[np.ndarray, int]], tables: Mapping[str, HostTable]) -> dict[str, Rows]:
    """A batch's rows from host memory, without slots, zeros behind them up to a size of the batch's alone.

    Args:
      unique: See ``Prepared.rows``.
      tables: By stack. Not while another thread writes rows.
    """
    rows = {}
    for name, (addresses, most) in unique.items():
        values = np.zeros((most, tables[name].dim), tables[name].dtype)
        values[: addresses.size] = tables[name].read(addresses)
        rows[name] = Rows(values=values, slots={})
    return rows
