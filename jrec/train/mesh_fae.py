"""Runs on hot and cold batches (FAE) by several devices of one process.

Every device holds the hot rows with their optimizer slots. A hot batch is dealt to the devices; its dense gradients and
those of its hot rows are summed over the devices inside the one compiled step, which every device then takes alike, in
place. A cold batch is put together on the first device, its hot rows taken from there, and shared out
(``jrec.train.mesh_host``); after its step every device sets its own copy of the hot rows from the sums that all have.
So the copies are equal to the bit, always, and nothing ever synchronizes them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, override

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.host import HostTable
from jrec.host.pipeline_batch import Ready
from jrec.host.resident import ResidentRows, Split, updated
from jrec.host.ring import Rows
from jrec.mesh.allreduce import Reduce
from jrec.mesh.route import AXIS, local_view
from jrec.nn import SparseOptimizer
from jrec.train.fae_data import FaeLoaders, hot_layout, resident_addresses
from jrec.train.fae_run import FaeStepper
from jrec.train.host_run import host_tables
from jrec.train.mesh_arrays import MeshBatch, Shapes
from jrec.train.mesh_batch import Parts
from jrec.train.mesh_host import DealtBatches, MeshHostStepper, first_copy
from jrec.train.mesh_run import MeshSetup, MeshStepper
from jrec.train.mesh_step import CompiledMesh, Seen, State, mesh_train_step
from jrec.train.step import HostRows

_EVERYWHERE = PartitionSpec()


def mesh_fae_stepper(
    model: Any, optimizer: SparseOptimizer, loaders: FaeLoaders, *, setup: MeshSetup, folder: pathlib.Path
) -> FaeStepper:
    """The stepper of a run on a mesh, as ``fae_stepper`` makes that of one device.

    Args:
      model, optimizer: as on one device.
      loaders: of the batches, whole.
      setup: mesh and plan.
      folder: of the run.

    Raises:
      ConfigError: see ``host_tables``.
    """
    config, layout = setup.config, setup.layout
    mesh = MeshStepper(model, optimizer, None, setup=setup, folder=folder, total=0)
    tables = host_tables(config, layout, optimizer.embedding)
    addresses = resident_addresses(loaders.packed, layout)
    resident = {name: ReplicatedRows(rows, tables[name], setup.mesh) for name, rows in addresses.items()}
    cold = _ColdStepper(mesh, loaders.cold, tables=tables, total=loaders.cold_batches, folder=folder, resident=resident)
    step = compile_hot(mesh.compiled, setup.mesh, reduce=config.mesh.reduce)
    dealing = _hot_dealing(loaders, setup, addresses)

    def hot(state: State, rows: HostRows, batch: Batch) -> tuple[State, HostRows, jax.Array, jax.Array]:
        state, seen = step(state, rows, dealing.send(dealing.prepare(batch).sent))
        return state, seen.host, seen.loss, seen.logits

    return FaeStepper(cold, hot, loaders, config=config, layout=layout, resident=resident)


def _hot_dealing(loaders: FaeLoaders, setup: MeshSetup, addresses: Mapping[str, np.ndarray]) -> DealtBatches:
    """Of hot batches, whose ids number the resident rows."""
    layout, plan = hot_layout(loaders.packed, setup.layout), setup.plan
    parts = Parts(layout, plan, devices=setup.local, first=0, count=plan.devices, cast=False, resident=addresses)

    def shapes(examples: int) -> Shapes:
        each, headroom = examples // plan.devices, setup.config.mesh.headroom
        return Shapes(layout, plan, examples=each, headroom=headroom)

    return DealtBatches(setup, parts, shapes)


def compile_hot(
    compiled: CompiledMesh, mesh: Mesh, *, reduce: Reduce = "local"
) -> Callable[[State, HostRows, MeshBatch], tuple[State, Seen]]:
    """The step of hot batches: ``state, rows, batch -> state, Seen``, whose host rows are the new ``rows``.

    Args:
      compiled: of the model.
      mesh: of devices.
      reduce: see ``MeshConfig``.

    Returns:
      A jitted function. State and rows, on all devices, are donated: they change in place on each.
    """

    def train(state: State, rows: HostRows, batch: MeshBatch) -> tuple[State, Seen]:
        model, optimizer = compiled.merge(state)
        _, seen = mesh_train_step(model, optimizer, {}, local_view(batch), resident=rows, reduce=reduce)
        return nnx.state((model, optimizer)), seen

    specs = (_EVERYWHERE, _EVERYWHERE, PartitionSpec(AXIS))
    mapped = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=_EVERYWHERE, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


class ReplicatedRows(ResidentRows):
    """Resident rows on all devices of a mesh, of the table's dtype: the mesh's step rounds rows itself.

    Args:
      addresses, table: see ``ResidentRows``.
      mesh: of devices.
    """

    def __init__(self, addresses: np.ndarray, table: HostTable, mesh: Mesh):
        mapped = jax.shard_map(updated, mesh=mesh, in_specs=_EVERYWHERE, out_specs=_EVERYWHERE, check_vma=False)
        self._update = jax.jit(mapped, donate_argnums=0)
        self._stepped: Rows | None = None
        super().__init__(addresses, table, device=NamedSharding(mesh, _EVERYWHERE))

    @override
    def load(self, table: HostTable) -> None:
        values, slots = table.fetch(self.addresses)
        self.rows = jax.device_put(Rows(values=values, slots=slots), self._device)

    def stepped(self, rows: Rows) -> None:
        """Takes all devices' copies of a batch's rows after its step, from which ``update`` sets theirs."""
        self._stepped = rows

    @override
    def update(self, rows: Rows, split: Split) -> None:
        """See ``ResidentRows``; ``rows`` is the first device's copy, and ``stepped`` came before."""
        everywhere, self._stepped = self._stepped, None
        if everywhere is None:
            raise RuntimeError("give all devices' rows to stepped first: every copy is to be set")
        self.rows = self._update(self.rows, everywhere, jax.device_put(split, self._device))

    @override
    def _here(self) -> Rows:
        return first_copy(self.rows)


class _ColdStepper(MeshHostStepper):
    """Steps of cold batches, whose hot rows every device keeps."""

    _resident: Mapping[str, ReplicatedRows]

    @override
    def _put_back(self, ready: Ready, stepped: Mapping[str, Rows]) -> None:
        for name, rows in self._resident.items():
            rows.stepped(stepped[name])
        super()._put_back(ready, stepped)
