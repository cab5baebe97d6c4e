"""The setup of a run with a plan, before it has a model: its mesh, its plan, and how batches are cut."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.errors import value_errors_are_config_errors
from jrec.mesh.communication import Communication
from jrec.mesh.exchange import Kind, check_kind
from jrec.mesh.route import AXIS
from jrec.mesh.routing import Places
from jrec.ops.layout import EmbeddingLayout
from jrec.random_keys import over_words
from jrec.run.batches import Batches
from jrec.run.host_owners import HostOwners
from jrec.run.lookup_modes import LookupModes
from jrec.run.mesh_arrays import Ranges, Shapes, on_mesh
from jrec.run.mesh_monitor import PlanMonitor
from jrec.run.mesh_rows import local_numbers
from jrec.run.options import MeshOptions
from jrec.run.partitioned_batch import BatchPartitioner, PartitionedBatch, host_stacks, plan_routers
from jrec.run.peers import Peers, connect
from jrec.run.processes import several
from jrec.sharding import Plan

FIRST_BATCHES = 4
"""The number of batches that decide the modes of lookups and the first sizes of routes, before the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSetup:
    """The setup of a run on a mesh, before it has a model.

    Attributes:
      layout: The tables' layout.
      mesh: The device mesh.
      plan: Where the rows of planned tables live.
      options: How rows travel between devices.
      cast: Whether tensor-train stacks get their casts on the host, too.
      monitor: The monitor of the plan's cost, where `jrec plan` made it; else None.
      training: Whether rows have slots.
      hot: Whether the batches read only rows that every device has.
      peers: Exchanges with the other processes, for the thread that takes steps; None with one process.
      peers_growing: Exchanges for the thread that gives keys of growing tables their rows, or None.
    """

    layout: EmbeddingLayout
    mesh: Mesh
    plan: Plan
    options: MeshOptions = dataclasses.field(default_factory=MeshOptions)
    cast: bool = True
    monitor: PlanMonitor | None = None
    training: bool = True
    hot: bool = False
    peers: Peers | None = None
    peers_growing: Peers | None = None

    @functools.cached_property
    def local(self) -> list[int]:
        """Numbers of the process's own devices."""
        return local_numbers(self.mesh)

    def for_hot_batches(self) -> MeshSetup:
        """The same mesh and plan for batches that read only rows that every device has."""
        return dataclasses.replace(self, hot=True)

    @property
    def communication(self) -> Communication:
        """How the devices work together in a step."""
        return Communication(reduce=self.options.reduce, exchange=self.exchange, computes=self.plan.computes)

    @property
    def host_stacks(self) -> list[str]:
        """Names of the stacks with rows in host memory."""
        return [stack.name for stack in host_stacks(self.layout, self.plan)]

    @functools.cached_property
    def owners(self) -> HostOwners:
        """How processes share the rows of host memory."""
        return HostOwners(processes=jax.process_count(), process=jax.process_index(), devices=len(self.local))

    @functools.cached_property
    def modes(self) -> LookupModes:
        """Which features' lookups are sent, once decided: all that can be, where some devices only keep tables."""
        chosen = self.options.form if not self.hot else "retrieve"
        return LookupModes(self.layout, "send" if chosen == "auto" and self.plan.computes is not None else chosen)

    @property
    def exchange(self) -> Kind:
        """How rows and sums travel."""
        chosen = self.options.exchange
        # Public reports have XLA's ragged all-to-all at 2 % of NVLink on 8 GPUs: padded, until both were measured here.
        return "padded" if chosen == "auto" else chosen

    @functools.cached_property
    def partitioner(self) -> BatchPartitioner:
        """Cuts this process's training batches."""
        return self._partitioner(self.local, self.local[0], len(self.local), together=several())

    @functools.cached_property
    def training_partitioner(self) -> BatchPartitioner:
        """Cuts this process's training batches, whose devices find the rows of ``device_routed`` stacks themselves."""
        return self._partitioner(
            self.local, self.local[0], len(self.local), together=several(), device_routed=self.device_routed
        )

    @functools.cached_property
    def device_routed(self) -> frozenset[str]:
        """The stacks whose rows the devices find by themselves: of 32-bit addresses, where no row is in host memory."""
        if self.hot or self.host_stacks:
            return frozenset()
        return frozenset(stack.name for stack in self.layout.planned_stacks if stack.address_dtype == np.int32)

    @functools.cached_property
    def _ranges(self) -> dict[str, Ranges]:
        """By stack that is routed on the devices, ``Places``'s ranges as each device reads them, on the mesh."""
        routers = plan_routers(self.layout, self.plan, self.local)
        return {name: on_mesh(routers[name].ranges(self.local), self.mesh) for name in self.device_routed}

    def places(self, shapes: Shapes) -> dict[str, Places]:
        """By stack that is routed on the devices, where its rows lie, for batches of these sizes."""
        return {name: shapes.places(name, ranges) for name, ranges in self._ranges.items()}

    @functools.cached_property
    def whole_partitioner(self) -> BatchPartitioner:
        """Cuts batches that every process reads whole."""
        return self._partitioner(range(self.plan.devices), 0, self.plan.devices)

    def _partitioner(
        self,
        devices: Sequence[int],
        first: int,
        count: int,
        *,
        together: bool = False,
        device_routed: Set[str] = frozenset(),
    ) -> BatchPartitioner:
        return BatchPartitioner(
            self.layout,
            self.plan,
            devices=devices,
            first=first,
            count=count,
            cast=self.cast,
            sending=lambda: self.modes.send,
            hot=self.hot,
            owners=self.owners,
            together=together,
            device_routed=device_routed,
        )

    def shapes(self, examples: int) -> Shapes:
        """Static sizes for batches of ``examples`` examples."""
        each = examples // len(self.plan.compute_devices)
        return Shapes(
            self.layout,
            self.plan,
            examples=each,
            headroom=self.options.headroom,
            send=self.modes.send,
            hot=self.hot,
            processes=jax.process_count(),
        )

    def decide_modes(self, loader: Batches) -> None:
        """Chooses the modes of lookups, once, from the run's first batches, whatever the loader's position.

        Args:
          loader: The loader of the training batches, cut into parts or whole.
        """
        if self.modes.decided:
            return
        batches: list[Any] = loader.first(FIRST_BATCHES)
        whole = (batch.batch if isinstance(batch, PartitionedBatch) else batch for batch in batches)
        partitioned = [self.partitioner(batch) for batch in whole]
        self.modes.decide([batch.parts for batch in partitioned], self.local)

    def decide_forms_without(self, batch: Batch) -> None:
        """Chooses the modes without training, from a whole batch to predict, the same in every process."""
        if not self.modes.decided:
            self.modes.decide([self.whole_partitioner(batch).parts], range(self.plan.devices), training=False)

    def decided_modes(self, loader: Batches) -> dict[str, Any]:
        """The modes of lookups for the run's report, decided first if need be (``decide_modes``)."""
        self.decide_modes(loader)
        return {} if (record := self.modes.record()) is None else {"forms": record}

    def sections(self, folder: pathlib.Path) -> dict[str, Any]:
        """The report's section about the plan, see ``jrec.train.report.writing``; writes the profile to ``folder``."""
        if self.monitor is None or jax.process_index() != 0:
            return {}
        return {"plan": self.monitor.summary(folder)}

    def peers_of_feed(self) -> Peers | None:
        """Exchanges for the thread of one feed; all processes call this at the same point. None with one process.

        Feeds that are open at once, as of hot and of cold batches, work ahead independently, so that they cannot share
        one; and closing a feed, which may wait in its exchange, ends that exchange.
        """
        return connect(1)[0] if several() else None

    def close(self) -> None:
        """Ends exchanges with other processes, even while a thread waits in one."""
        for peers in (self.peers, self.peers_growing):
            if peers is not None:
                peers.close()

    def everywhere(self, tree: Any) -> Any:
        """Puts arrays that every process has on all devices; abstract arrays get that sharding."""
        sharding = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: Any) -> jax.Array | jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            return over_words(functools.partial(_placed, sharding), leaf)

        return jax.tree.map(place, tree)

    def over_devices[T](self, tree: T) -> T:
        """Puts arrays that every process has, whose first axis is the mesh's devices, each line on its device."""
        return jax.tree.map(functools.partial(_placed, NamedSharding(self.mesh, PartitionSpec(AXIS))), tree)


def _placed(sharding: NamedSharding, array: Any) -> jax.Array:
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def connected(setup: MeshSetup, *, growing: bool) -> MeshSetup:
    """The setup of a run, connected with its other processes, which all call this.

    Args:
      setup: The setup, without exchanges.
      growing: Whether tables grow.

    Raises:
      ConfigError: If the devices do not exchange lines as the options say.
      ProcessError: If another process cannot be reached.
    """
    if setup.options.exchange != "auto":
        with value_errors_are_config_errors("mesh.exchange"):
            check_kind(setup.options.exchange, setup.mesh.devices.flat[0].platform)
    if not several():
        return setup
    if not (growing and setup.training):
        (peers,) = connect(1)
        return dataclasses.replace(setup, peers=peers)
    peers, peers_growing = connect(2)
    return dataclasses.replace(setup, peers=peers, peers_growing=peers_growing)
