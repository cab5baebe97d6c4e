"""Tables in host memory, trained by several devices of one process (EL-Rec, Figure 9).

The pipeline of a single device (``jrec.host.pipeline``) prepares the whole batch: its unique rows leave host memory
once and come back once. They are shared out among the devices, which gather them from one another inside the step;
every device learns from its part of the batch, and all take the same step of the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.data.packing import unique_capacity
from jrec.data.regroup import gathered
from jrec.host import HostTable
from jrec.host.local import local_ids
from jrec.host.pipeline_batch import Ready
from jrec.host.resident import ResidentRows
from jrec.host.ring import Rows, head
from jrec.native import host as native
from jrec.ops.layout import Stack
from jrec.ops.types import Bags
from jrec.sharding.router import Routed
from jrec.sharding.runtime.route import AXIS
from jrec.train.host_run import HostStepper, with_rows
from jrec.train.mesh_arrays import MeshBatch, Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Part, routed_part, routers
from jrec.train.mesh_checkpoint import RowSource
from jrec.train.mesh_run import MeshStepper
from jrec.train.mesh_step import State


class MeshHostStepper(HostStepper):
    """Steps of a model on a mesh, of which some stacks lie in host memory; see ``jrec.train.stepper.Stepper``.

    Args:
      mesh: of the same model, for what is on the devices.
      loader: of the training batches, whole; None to predict only.
      tables: by host stack.
      total: of the loader's batches.
      folder: of the run.
      resident: by stack, rows that stay on the devices.
    """

    def __init__(
        self,
        mesh: MeshStepper,
        loader: Loader | None,
        *,
        tables: Mapping[str, HostTable],
        total: int,
        folder: pathlib.Path,
        resident: Mapping[str, ResidentRows] | None = None,
    ):
        setup = mesh.setup
        compiled: Any = mesh.compiled
        super().__init__(
            mesh.state,
            compiled,
            loader,
            config=setup.config,
            layout=setup.layout,
            tables=tables,
            total=total,
            folder=folder,
            resident=resident,
        )
        self.mesh = mesh
        self._shapes: dict[int, Shapes] = {}
        self._routers = routers(setup.layout, setup.plan)
        self._predict = self._predict_on_mesh

    @override
    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        ready = self._pipeline.get()
        if ready is None:
            raise RuntimeError("all steps of the run are taken")
        if self._loader is not None:
            self.mesh.setup.decide_forms(self._loader)
        planned = ready.planned
        self.mesh.observe(planned.batch)
        addresses = {name: plan.rows for name, plan in planned.plans.items()}
        batch = self._dealt(planned.batch, addresses, ready.tables)
        self.state, seen = self.mesh.step_on(self.state, batch)
        self._put_back(ready, seen.host)
        return seen.loss, seen.logits, planned.batch

    def _put_back(self, ready: Ready, stepped: Mapping[str, Rows]) -> None:
        sizes = {name: rows.values.shape[0] for name, rows in ready.tables.items()}  # without what filled the shares
        self._pipeline.put_back(ready, {name: head(first_copy(rows), sizes[name]) for name, rows in stepped.items()})

    def _predict_on_mesh(self, state: State, batch: Batch) -> jax.Array:
        batch, rows, addresses = with_rows(batch, self.mesh.setup.layout, self._tables, self._resident)
        dealt = self._dealt(batch, addresses, rows)
        return self.mesh.predict_on(state, dealt)

    def _dealt(self, batch: Batch, addresses: Mapping[str, np.ndarray], rows: Mapping[str, Rows]) -> MeshBatch:
        """A batch whose ids of host stacks number ``addresses``, with its rows, on the mesh."""
        examples = len(batch.labels)
        if examples not in self._shapes:
            self._shapes[examples] = self.mesh.setup.shapes(examples)
        dealt = self.dealt(batch, addresses, self._shapes[examples])
        return dataclasses.replace(dealt, host={name: self._shared_out(of) for name, of in rows.items()})

    def dealt(self, batch: Batch, addresses: Mapping[str, np.ndarray], shapes: Shapes) -> MeshBatch:
        """A batch whose ids of host stacks number ``addresses``, on the mesh without rows of these.

        Args:
          batch: NumPy arrays, whole.
          addresses: by host stack, (n,) int32 ascending.
          shapes: of such batches; they grow.
        """
        setup, size = self.mesh.setup, len(batch.labels) // self.mesh.setup.plan.devices
        pieces = [gathered(setup.layout, [(batch, d * size, (d + 1) * size)]) for d in setup.local]
        parts = [self._part(piece, addresses, d) for piece, d in zip(pieces, setup.local, strict=True)]
        shapes.fit(parts, setup.local)
        return on_mesh(stacked(parts, setup.local, shapes), setup.mesh)

    def _part(self, batch: Batch, addresses: Mapping[str, np.ndarray], device: int) -> Part:
        setup = self.mesh.setup
        casts = {s.name for s in setup.layout.members if s.tier == "planned"}
        part = routed_part(setup.layout, batch, self._routers, device, casts, setup.forms.send)
        bags, routes = dict(part.batch.bags), dict(part.routes)
        for name, of in addresses.items():
            stack = setup.layout.stacks[name]
            bags[name], numbers = _renumbered(bags[name], stack, len(batch.labels), of.size)
            starts = np.zeros(setup.plan.devices + 3, np.int64)
            starts[-1] = numbers.size
            at = np.arange(numbers.size, dtype=np.int32)
            routes[name] = Routed(addresses=of[numbers], rows=numbers, at=at, starts=starts)
        return dataclasses.replace(part, batch=dataclasses.replace(part.batch, bags=bags), routes=routes)

    def _shared_out(self, rows: Rows) -> Rows:
        """(N, K / N, ...): the same share of the rows for every device."""
        devices = self.mesh.setup.plan.devices
        sharding = NamedSharding(self.mesh.setup.mesh, PartitionSpec(AXIS))
        return jax.device_put(_in_shares(rows, devices), sharding)

    @override
    def save(self, step: int) -> None:
        super().save(step)
        self.mesh.save(step)

    @override
    def saved(self, steps: list[int]) -> None:
        super().saved(steps)
        self.mesh.saved(steps)

    def forms(self) -> dict[str, Any] | None:
        """See ``MeshStepper``."""
        if self._loader is not None:
            self.mesh.setup.decide_forms(self._loader)
        return self.mesh.setup.forms.record()

    def monitored(self, folder: pathlib.Path) -> dict[str, Any] | None:
        """See ``MeshStepper``."""
        return self.mesh.monitored(folder)

    def load(self, source: RowSource) -> None:
        """Takes the planned rows of a checkpoint."""
        self.mesh.load(source)


def _renumbered(bags: Bags, stack: Stack, examples: int, rows: int) -> tuple[Bags, np.ndarray]:
    """Bags whose ids, numbers of a batch's rows, number those that this part reads; and these, ascending."""
    offsets = None if bags.offsets is None else np.asarray(bags.offsets)
    ids = np.asarray(bags.ids)
    cast = native.tensor_cast(
        ids, offsets, num_rows=max(1, rows), unique_capacity=unique_capacity(stack, examples), threads=1
    )
    local: Any = local_ids(cast, ids.shape)
    return dataclasses.replace(bags, ids=local, cast=cast), np.asarray(cast.rows)[: int(cast.num_unique)]


@functools.partial(jax.jit, static_argnums=1)
def _in_shares(rows: Rows, devices: int) -> Rows:
    def shares(array: jax.Array) -> jax.Array:
        missing = -array.shape[0] % devices
        padded = jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(devices, -1, *array.shape[1:])

    return jax.tree.map(shares, rows)


def first_copy(rows: Rows) -> Rows:
    """The first device's copy of rows that all devices of a mesh have."""
    return jax.tree.map(lambda array: array.addressable_shards[0].data, rows)
