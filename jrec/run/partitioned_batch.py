"""A batch cut into one part per device: examples, casts, and the unique rows sorted by the device that keeps them.

All of this runs in the loader's threads. Parts are as long as their rows; ``jrec.run.mesh_arrays`` gives them the
static sizes of the compiled step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jrec.batch import Batch
from jrec.data.regroup import blank, gathered
from jrec.host.table import local_ids
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import EmbeddingLayout, Stack, StackedFeature
from jrec.run.host_owners import HostOwners, HostRead, read_from_host, with_owners
from jrec.run.mesh_rows import based
from jrec.run.peers import Peers
from jrec.sharding.contents import shard_capacity
from jrec.sharding.plans import Plan
from jrec.sharding.router import Routed, Router
from jrec.sharding.sent import SentLookups, split_sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """One device's part of a batch, NumPy arrays.

    Attributes:
      batch: The examples. Ids of planned stacks number their unique rows, 0 for the least address; their casts' rows
        are still addresses.
      routes: Where these rows are read from, by planned stack. A row in host memory is a row of its owner's shard,
        after the rows that the owner keeps (``with_owners``).
      sends: Lookups at other devices, which have no ids in the batch, by planned stack with features that send.
    """

    batch: Batch
    routes: dict[str, Routed]
    sends: dict[str, SentLookups] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedBatch:
    """A batch and its parts.

    Attributes:
      batch: The batch from the loader.
      parts: The parts of some devices, in their order.
      host: The batch's rows that this process reads from its host memory, by stack with rows there.
      asked: (n,) ascending addresses of the rows of host memory that these parts read, by stack with rows there, where
        other processes have other parts: then ``host`` is empty, and the rows' places are unknown, until
        ``placed_by_all``.
    """

    batch: Batch
    parts: tuple[DeviceBatch, ...]
    host: dict[str, HostRead] = dataclasses.field(default_factory=dict)
    asked: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class BatchPartitioner:
    """Cuts batches into the parts of some of the mesh's devices. Thread-safe; call it in the loader's threads.

    Args:
      layout: The batches' layout.
      plan: Where rows live (``placed_plan``).
      devices: Numbers of the devices whose parts are made.
      first: The number of the first device that shares the batch.
      count: The number of devices that share the batch, from ``first`` on. Those that compute get equal parts, in their
        order; parts of the others are blank.
      cast: Whether tensor-train stacks get their casts here too.
      sending: Gives the names of the features whose lookups are sent, when a batch is cut.
      hot: Whether the batches read only rows that every device has.
      owners: How processes share the rows of host memory.
      together: Whether other processes cut the parts of other devices, from examples that this process does not have.
      device_routed: Planned stacks whose parts keep their addresses, and get neither casts nor routes.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        plan: Plan,
        *,
        devices: Sequence[int],
        first: int,
        count: int,
        cast: bool,
        sending: Callable[[], Set[str]] = frozenset,
        hot: bool = False,
        owners: HostOwners | None = None,
        together: bool = False,
        device_routed: Set[str] = frozenset(),
    ):
        self._owners, self._together = owners or HostOwners(processes=1, process=0, devices=plan.devices), together
        self.layout, self.devices, self._sending = layout, tuple(devices), sending
        self._compute_devices = [d for d in plan.compute_devices if first <= d < first + count]
        self._casts = {s.name for s in (layout.members if cast else layout.planned_stacks)} - device_routed
        routers = plan_routers(layout, plan, self.devices)
        self._routers = {name: router for name, router in routers.items() if name not in device_routed}
        hosts = () if hot else host_stacks(layout, plan)
        self._hosts = {stack.name: stack for stack in hosts}
        self._firsts = {name: shard_capacity(plan, name) for name in self._hosts}  # where host rows begin

    def __call__(self, batch: Batch) -> PartitionedBatch:
        """The batch, and a part for each of the devices.

        Raises:
          ValueError: If the devices cannot share the examples equally.
        """
        count = len(self._compute_devices)
        size, rest = divmod(len(batch.labels), count)
        if rest:
            raise ValueError(f"{len(batch.labels)} examples cannot be shared equally by {count} devices")
        parts, send = [], self._sending()
        for device in self.devices:
            part = self._examples(batch, device, size)
            parts.append(routed_batch(self.layout, part, self._routers, device, self._casts, send))
        # Only row numbers are needed for owners; of several processes none knows what the others' parts read.
        read = {name: read_from_host([part.routes[name] for part in parts]) for name in self._hosts}
        partitioned = PartitionedBatch(batch=batch, parts=tuple(parts), asked=read)
        if self._together:
            return partitioned
        return self._placed(partitioned, {name: self._owners.whole(self._hosts[name], read[name]) for name in read})

    def placed_by_all(self, partitioned: PartitionedBatch, peers: Peers | None) -> PartitionedBatch:
        """Places the rows of host memory that all parts of a batch read; all processes call it together.

        Args:
          partitioned: The batch.
          peers: The other processes; None where they have no parts of it.
        """
        if not partitioned.asked or peers is None:
            return partitioned
        return self._placed(partitioned, self._owners.placed_by_all(self._hosts, partitioned.asked, peers))

    def _placed(
        self, partitioned: PartitionedBatch, places: Mapping[str, tuple[np.ndarray, np.ndarray, HostRead]]
    ) -> PartitionedBatch:
        host = {}
        for name, (device, line, host[name]) in places.items():
            for part in partitioned.parts:
                part.routes[name] = with_owners(
                    part.routes[name], partitioned.asked[name], device, line, self._firsts[name]
                )
        return dataclasses.replace(partitioned, host=host, asked={})

    def _examples(self, batch: Batch, device: int, size: int) -> Batch:
        if device not in self._compute_devices:
            return blank(self.layout, batch, size)
        begin = self._compute_devices.index(device) * size
        return gathered(self.layout, [(batch, begin, begin + size)])


def host_stacks(layout: EmbeddingLayout, plan: Plan) -> tuple[Stack, ...]:
    """The planned stacks with rows in host memory."""
    return tuple(stack for stack in layout.planned_stacks if plan.host_rows(stack.name))


def plan_routers(layout: EmbeddingLayout, plan: Plan, devices: Sequence[int] | None = None) -> dict[str, Router]:
    """The routers of some devices, or of all, by planned stack."""
    return {stack.name: Router(plan, based(stack), devices) for stack in layout.planned_stacks}


def routed_batch(
    layout: EmbeddingLayout,
    batch: Batch,
    routers: Mapping[str, Router],
    device: int,
    casts: set[str],
    send: Set[str] = frozenset(),
) -> DeviceBatch:
    """Casts a device's examples and routes their unique rows, or sends their lookups.

    Args:
      layout: The batch's layout.
      batch: NumPy arrays, without casts.
      routers: The routers, by stack.
      device: The number of the part's device.
      casts: The stacks to cast.
      send: Names of the features whose lookups of other devices' rows are sent.
    """
    bags, routes, sends = dict(batch.bags), {}, {}
    for name, own_bags in batch.bags.items():
        if name not in casts:
            continue
        stack, ids = layout.stacks[name], np.asarray(own_bags.ids)
        bags[name] = casted = with_cast(own_bags, stack)
        cast: Any = casted.cast
        if name not in routers:
            continue
        unique = np.asarray(cast.rows)[: int(cast.num_unique)]
        routes[name] = routers[name].route(unique, device)
        local: Any
        if (sending := sending_bags(stack, send, len(batch.labels))) is None:
            local = local_ids(cast, ids.shape)
        else:
            split = split_sent(
                cast,
                routes[name],
                sending,
                device=device,
                shape=ids.shape,
                weights=None if own_bags.weights is None else np.asarray(own_bags.weights),
                with_addresses=stack.dtype != "float32",
            )
            local, cast, routes[name], sends[name] = split.local, split.cast, split.routed, split.sent
        bags[name] = dataclasses.replace(own_bags, ids=local, cast=cast)
    return DeviceBatch(batch=dataclasses.replace(batch, bags=bags), routes=routes, sends=sends)


def poolable(stack: Stack) -> list[StackedFeature]:
    """The features whose bags are (weighted) sums of uncompressed rows, of which each owner can pool its part."""
    return [] if stack.compressed else [f for f in stack.features if not f.config.unpooled]


def sending_features(stack: Stack, send: Set[str]) -> list[StackedFeature]:
    """The stack's features that send their lookups of other devices' rows."""
    return [f for f in poolable(stack) if f.config.name in send]


def sending_bags(stack: Stack, send: Set[str], examples: int) -> np.ndarray | None:
    """Which bags of ``examples`` examples belong to features that send, (num_bags,) bool; None if no feature does."""
    features = sending_features(stack, send)
    if not features:
        return None
    flags = np.zeros(stack.num_bags(examples), bool)
    for feature in features:
        flags[bags_of(feature, examples)] = True
    return flags


def bags_of(feature: StackedFeature, examples: int) -> slice:
    """A feature's bags in a batch of ``examples`` examples."""
    first = feature.first_bag * examples
    return slice(first, first + feature.config.bags_per_example * examples)
