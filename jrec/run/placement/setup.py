"""The setup of a run with a plan, before it has a model: its mesh, its plan, and how batches are cut."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jrec.errors import value_errors_are_config_errors
from jrec.json_values import JsonObject
from jrec.mesh.communication import Communication
from jrec.mesh.exchange import Links, check_kind
from jrec.mesh.route import AXIS
from jrec.mesh.routing import AddressMap, WindowCapacity
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.random_keys import over_words
from jrec.run.feeds.batches import Batches
from jrec.run.feeds.partitioned_batch import BatchPartitioner, PartitionedBatch, host_stacks
from jrec.run.options import MeshOptions
from jrec.run.placement.host_owners import HostOwners
from jrec.run.placement.lookup_modes import LookupModes
from jrec.run.placement.monitor import PlanMonitor
from jrec.run.placement.part_lookups import PartLookups
from jrec.run.placement.peers import Peers, connect
from jrec.run.placement.rows import based, local_numbers, on_mesh
from jrec.run.placement.sizes import MeshSizes, Ranges
from jrec.run.processes import several
from jrec.sharding import Plan
from jrec.sharding.stack_ranges import StackRanges

FIRST_BATCHES = 4
"""The number of batches that decide the modes of lookups and what devices have room for, before the first step."""


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
        return Communication(reduce=self.options.reduce, links=self.links, computes=self.plan.computes)

    @property
    def host_stacks(self) -> tuple[Stack, ...]:
        """The planned stacks with rows in host memory that batches read."""
        return () if self.hot else host_stacks(self.layout, self.plan)

    @functools.cached_property
    def owners(self) -> HostOwners:
        """How processes share the rows of host memory."""
        return HostOwners(processes=jax.process_count(), process=jax.process_index(), devices=len(self.local))

    @functools.cached_property
    def modes(self) -> LookupModes:
        """Which features' lookups are sent, once decided: all that can be, where some devices only keep tables."""
        chosen = self.options.form if not self.hot else "retrieve"
        # Tensor Casting's memory-centric mode (section IV-C): devices that keep tables pool and update, so that only
        # sums and their gradients travel to those that compute.
        chosen = "send" if chosen == "auto" and self.plan.computes is not None else chosen
        return LookupModes(self.layout, chosen, links=self.links)

    @functools.cached_property
    def links(self) -> Links:
        """How rows, sums and gradients travel."""
        options = self.options
        return Links(
            # Public reports have XLA's ragged all-to-all at 2 % of NVLink on 8 GPUs: padded, until both were measured.
            kind="padded" if options.exchange == "auto" else options.exchange,
            rows=None if options.exchange_rows == "stored" else options.exchange_rows,
            gradients=None if options.exchange_gradients == "float32" else options.exchange_gradients,
        )

    @functools.cached_property
    def partitioner(self) -> BatchPartitioner:
        """Cuts this process's batches."""
        return self._partitioner(self.local[0], len(self.local))

    @functools.cached_property
    def whole_partitioner(self) -> BatchPartitioner:
        """Cuts batches that every process reads whole."""
        return self._partitioner(0, self.plan.devices)

    def _partitioner(self, first: int, count: int) -> BatchPartitioner:
        return BatchPartitioner(
            self.layout,
            self.plan,
            devices=self.local,
            first=first,
            count=count,
            cast=self.cast,
            hot=self.hot,
        )

    @functools.cached_property
    def _ranges(self) -> dict[str, StackRanges]:
        return {stack.name: StackRanges(self.plan, based(stack)) for stack in self.layout.planned_stacks}

    @functools.cached_property
    def _ranges_on_mesh(self) -> dict[str, Ranges]:
        return {name: on_mesh(ranges.of_devices(self.local), self.mesh) for name, ranges in self._ranges.items()}

    def places(self, sizes: MeshSizes) -> dict[str, AddressMap]:
        """By planned stack, where devices find rows, for batches of these sizes."""
        return {name: sizes.places(name, ranges) for name, ranges in self._ranges_on_mesh.items()}

    def sizes(self, examples: int) -> MeshSizes:
        """Static sizes for parts of ``examples`` examples."""
        return MeshSizes(
            self.layout,
            self.plan,
            examples=examples,
            headroom=self.options.headroom,
            send=self.modes.send,
            hot=self.hot,
            processes=jax.process_count(),
        )

    def needs(self, batches: Sequence[PartitionedBatch], sizes: MeshSizes) -> dict[str, WindowCapacity]:
        """By planned stack, the most that this process's parts of some batches need."""
        most = dict.fromkeys(sizes.stacks, WindowCapacity())
        for batch in batches:
            for name, parts in self._lookups(batch).items():
                sending, read = sizes.sending(name), batch.read.get(name)
                # Of several processes each knows only its own part, and so only about which device will bring a row.
                # That is enough for sizes: a batch that needs more takes further windows.
                brought = None if read is None else self.owners.whole(sizes.stacks[name], read)[0]
                for part in parts:
                    most[name] = most[name].most(part.needs(sending, read, brought))
        return most

    def decide_modes(self, loader: Batches) -> None:
        """Chooses the modes of lookups, once, from the run's first batches, whatever the loader's position.

        Args:
          loader: The loader of the training batches, cut into parts or whole.
        """
        if self.modes.decided:
            return
        batches: list[Any] = loader.first(FIRST_BATCHES)
        cut = [batch if isinstance(batch, PartitionedBatch) else self.partitioner(batch) for batch in batches]
        self.decide_modes_by(cut, training=self.training)

    def decide_modes_by(self, batches: Sequence[PartitionedBatch], *, training: bool) -> None:
        """Chooses the modes by some batches, which all processes give, unless they are decided."""
        if not self.modes.decided:
            examples = len(batches[0].parts[0].labels) if batches else 0
            self.modes.decide(map(self._lookups, batches), examples, training=training)

    def _lookups(self, batch: PartitionedBatch) -> dict[str, list[PartLookups]]:
        """By planned stack, the lookups of each of this process's parts."""
        parts = list(zip(batch.parts, self.local, strict=True))
        return {
            name: [
                PartLookups.of(part.bags[name], ranges, device=device, devices=self.plan.devices)
                for part, device in parts
            ]
            for name, ranges in self._ranges.items()
        }

    def decided_modes(self, loader: Batches) -> JsonObject:
        """The modes of lookups for the run's report, decided first if need be (``decide_modes``)."""
        self.decide_modes(loader)
        return {} if (record := self.modes.record()) is None else {"forms": record}

    def sections(self, folder: pathlib.Path) -> JsonObject:
        """The report's section about the plan, see ``jrec.app.report.writing``; writes the profile to ``folder``."""
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

    def everywhere(self, tree: PyTree) -> PyTree:
        """Puts arrays that every process has on all devices; abstract arrays get that sharding."""
        sharding = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            return over_words(functools.partial(_placed, sharding), leaf)

        return jax.tree.map(place, tree)

    def over_devices[T](self, tree: T) -> T:
        """Puts arrays that every process has, whose first axis is the mesh's devices, each line on its device."""
        return jax.tree.map(functools.partial(_placed, NamedSharding(self.mesh, PartitionSpec(AXIS))), tree)


def _placed(sharding: NamedSharding, array: ArrayLike) -> jax.Array:
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
    # Two threads work ahead of the steps then, each at its own batch: they cannot share the rounds of one exchange.
    peers, peers_growing = connect(2)
    return dataclasses.replace(setup, peers=peers, peers_growing=peers_growing)
