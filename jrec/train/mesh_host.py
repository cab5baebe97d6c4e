"""Rows in host memory, trained by several devices of one process (EL-Rec, Figure 9).

Tables may lie there whole, or a plan may keep their coldest rows there. The pipeline of a single device
(``jrec.host.pipeline``) prepares the batch: the rows that any device reads of host memory leave it once and come back
once. They are shared out among the devices, which gather them from one another inside the step; every device learns
from its part of the batch, and all take the same step of the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.checkpoint import HostRows, Saved
from jrec.checkpoint.sources import Source
from jrec.data.loader import Loader
from jrec.host import HostTable
from jrec.host.pipeline_batch import Prepared, Ready
from jrec.host.resident import ResidentRows
from jrec.host.ring import Rows, head
from jrec.mesh.route import AXIS
from jrec.train.host_run import HostStepper, read_rows
from jrec.train.mesh_arrays import MeshBatch, Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Dealt, Parts
from jrec.train.mesh_host_rows import load_host_rows
from jrec.train.mesh_plan import plan_stack
from jrec.train.mesh_run import MeshSetup, MeshStepper
from jrec.train.mesh_step import State


class DealtBatches:
    """Batches cut into the devices' parts, for ``HostPipeline``, whose threads do all but the rows' own work.

    Args:
      setup: mesh and plan.
      parts: cuts batches that the loader did not.
      make_shapes: static sizes for batches of so many examples; they grow.
    """

    def __init__(self, setup: MeshSetup, parts: Parts, make_shapes: Callable[[int], Shapes]):
        self._setup, self._parts, self._make_shapes = setup, parts, make_shapes
        self._shapes: dict[int, Shapes] = {}

    def prepare(self, item: Batch | Dealt) -> Prepared:
        """See ``jrec.host.pipeline_batch.Preparation``; what is sent is a ``MeshBatch`` without host rows."""
        dealt = item if isinstance(item, Dealt) else self._parts(item)
        local, examples = self._setup.local, len(dealt.batch.labels)
        if examples not in self._shapes:
            self._shapes[examples] = self._make_shapes(examples)
        shapes = self._shapes[examples]
        shapes.fit(dealt.parts, local)
        rows = {name: (found, self._most(name, examples)) for name, found in dealt.host.items()}
        return Prepared(batch=dealt.batch, sent=stacked(dealt.parts, local, shapes), rows=rows)

    def send(self, sent: MeshBatch) -> MeshBatch:
        """See ``Preparation``."""
        return on_mesh(sent, self._setup.mesh)

    def _most(self, name: str, examples: int) -> int:
        """How many host rows of a stack a batch may read."""
        stack = self._setup.layout.stacks[name]
        most = stack.unique_capacity(examples)
        return most if stack.tier == "host" else min(most, self._setup.plan.host_rows(plan_stack(stack)))


class MeshHostStepper(HostStepper):
    """Steps of a model on a mesh, of which some rows lie in host memory; see ``jrec.train.stepper.Stepper``.

    Args:
      mesh: of the same model, for what is on the devices.
      loader: of the training batches, whole or dealt by ``setup.parts``; None to predict only.
      tables: by host stack.
      total: of the loader's batches.
      folder: of the run.
      planned: by planned stack, rows that the plan keeps in host memory (``planned_host_tables``).
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
        planned: Mapping[str, HostTable] | None = None,
        resident: Mapping[str, ResidentRows] | None = None,
    ):
        setup = mesh.setup
        compiled: Any = mesh.compiled
        self.mesh, self._planned, self._whole = mesh, dict(planned or {}), dict(tables)
        partly = {n: t for n, t in self._planned.items() if setup.plan.host_rows(plan_stack(n))}
        super().__init__(
            mesh.state,
            compiled,
            loader,
            config=setup.config,
            layout=setup.layout,
            tables={**tables, **partly},
            total=total,
            folder=folder,
            resident=resident,
            preparation=DealtBatches(setup, setup.parts, setup.shapes),
        )
        self._sources = {name: HostRows(table) for name, table in tables.items()}
        self._planned_sources = {name: HostRows(table) for name, table in self._planned.items()}
        self._predictions = DealtBatches(setup, setup.all_parts, setup.shapes)
        self._predict = self._predict_on_mesh

    @override
    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        self._decide_forms()  # before the first batch is cut
        ready = self._pipeline.get()
        if ready is None:
            raise RuntimeError("all steps of the run are taken")
        batch = ready.planned.batch
        self.mesh.observe(batch)
        self.state, seen = self.mesh.step_on(self.state, with_rows(ready.batch, ready.tables, self.mesh.setup.mesh))
        self._put_back(ready, seen.host)
        return seen.loss, seen.logits, batch

    def _put_back(self, ready: Ready, stepped: Mapping[str, Rows]) -> None:
        sizes = {name: rows.values.shape[0] for name, rows in ready.tables.items()}  # without what filled the shares
        self._pipeline.put_back(ready, {name: head(first_copy(rows), sizes[name]) for name, rows in stepped.items()})

    def _predict_on_mesh(self, state: State, batch: Batch) -> jax.Array:
        setup = self.mesh.setup
        self._decide_forms()
        setup.decide_forms_without(batch)
        prepared = self._predictions.prepare(batch)
        rows = read_rows(prepared.rows, self._tables, self._resident)
        return self.mesh.predict_on(state, with_rows(self._predictions.send(prepared.sent), rows, setup.mesh))

    def _decide_forms(self) -> None:
        if self._loader is not None:
            self.mesh.setup.decide_forms(self._loader)

    def forms(self) -> dict[str, Any] | None:
        """See ``MeshStepper``."""
        self._decide_forms()
        return self.mesh.setup.forms.record()

    @override
    def sources(self) -> Sequence[Source]:
        return [*self.mesh.sources(), *super().sources(), *self._planned_sources.values()]

    @override
    def restore(self, saved: Saved, state: State, position: Any) -> None:
        self.mesh.load(saved)
        load_host_rows(self._planned, self.mesh.setup.plan, saved)
        super().restore(saved, state, position)

    def monitored(self, folder: pathlib.Path) -> dict[str, Any] | None:
        """See ``MeshStepper``."""
        return self.mesh.monitored(folder)


def with_rows(batch: MeshBatch, rows: Mapping[str, Rows], mesh: Mesh) -> MeshBatch:
    """A batch on the mesh with its host rows, of which every device gets an equal share: (N, K / N, ...)."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    shared = {name: jax.device_put(_in_shares(of, mesh.devices.size), sharding) for name, of in rows.items()}
    return dataclasses.replace(batch, host=shared)


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
