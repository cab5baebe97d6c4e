"""A batch cut into one part a device: examples, casts, and the unique rows sorted by the device that keeps them.

All of this runs in the loader's threads. Parts are as long as their rows; ``jrec.train.mesh_arrays`` gives them the
static sizes of the compiled step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from jrec.batch import Batch
from jrec.data.packing import host_cast
from jrec.data.regroup import blank, gathered
from jrec.host.local import local_ids
from jrec.ops.layout import EmbeddingLayout, Stack, plan_name
from jrec.sharding.contents import shard_capacity
from jrec.sharding.plan import Plan
from jrec.sharding.router import Routed, Router
from jrec.sharding.sent import SentLookups, split_sent
from jrec.train.host_owners import HostOwners, HostRead, read_from_host, with_owners
from jrec.train.mesh_forms import Forms, sending_bags
from jrec.train.mesh_plan import planned_stacks
from jrec.train.mesh_rows import based
from jrec.train.peers import Peers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One device's part of a batch, NumPy arrays.

    Attributes:
      batch: the examples. Ids of planned stacks number their unique rows, 0 for the least address; their
        casts' rows are addresses still.
      routes: where these rows are read from, by such a stack. A row in host memory is one of its owner's shard, behind
        the rows that the owner keeps (``with_owners``).
      sends: lookups at other devices, which have no ids in the batch, by planned stack with features that send.
    """

    batch: Batch
    routes: dict[str, Routed]
    sends: dict[str, SentLookups] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
    """A batch and its parts.

    Attributes:
      batch: as the loader made it.
      parts: of some devices, in their order.
      host: By stack that has rows in host memory, those of the batch that this process reads from there.
      asked: By such a stack, (n,) ascending addresses of those that these parts read, where other processes have other
        parts: then ``host`` is empty, and the rows' places are unknown, until they are ``dealt_by_all``.
    """

    batch: Batch
    parts: tuple[Part, ...]
    host: dict[str, HostRead] = dataclasses.field(default_factory=dict)
    asked: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Parts:
    """Cuts batches into the parts of some of the mesh's devices. Thread-safe; call it in the loader's threads.

    Args:
      layout: of the batches.
      plan: where rows live (``run_plan``).
      devices: numbers of the devices whose parts are made.
      first: number of the first device that the batch is for.
      count: for how many devices it is, from that one on. Those of them that compute share it equally, in their order;
        parts of the others are blank.
      cast: whether tensor-train stacks get their casts here too.
      forms: which features' lookups are sent, as it stands when a batch is cut; None retrieves all.
      hot: Whether the batches read rows that every device has, and no others.
      owners: Who has the rows of host memory.
      together: Whether the parts of other devices are cut by other processes, from examples that this one has not.
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
        forms: Forms | None = None,
        hot: bool = False,
        owners: HostOwners | None = None,
        together: bool = False,
    ):
        self._owners, self._together = owners or HostOwners(processes=1, process=0, devices=plan.devices), together
        self.layout, self.devices, self._forms = layout, tuple(devices), forms
        self._askers = [d for d in plan.askers if first <= d < first + count]
        self._casts = {s.name for s in layout.members if cast or s.tier == "planned"}
        self._routers = plan_routers(layout, plan, self.devices)
        hosts = () if hot else host_stacks(layout, plan)
        self._hosts = {stack.name: stack for stack in hosts}
        self._firsts = {name: shard_capacity(plan, plan_name(name)) for name in self._hosts}  # where host rows begin

    def __call__(self, batch: Batch) -> Dealt:
        """The batch, and a part for each of the devices.

        Raises:
          ValueError: if the devices cannot share the examples equally.
        """
        count = len(self._askers)
        size, rest = divmod(len(batch.labels), count)
        if rest:
            raise ValueError(f"{len(batch.labels)} examples cannot be shared equally by {count} devices")
        parts, send = [], frozenset() if self._forms is None else self._forms.send
        for device in self.devices:
            part = self._examples(batch, device, size)
            parts.append(routed_part(self.layout, part, self._routers, device, self._casts, send))
        read = {name: read_from_host([part.routes[name] for part in parts]) for name in self._hosts}
        dealt = Dealt(batch=batch, parts=tuple(parts), asked=read)
        if self._together:
            return dealt
        return self._placed(dealt, {name: self._owners.whole(self._hosts[name], read[name]) for name in read})

    def dealt_by_all(self, dealt: Dealt, peers: Peers | None) -> Dealt:
        """Gives the rows of host memory that all parts of a batch read their places; all processes call it together.

        Args:
          dealt: The batch.
          peers: The other processes; None where they have no parts of it.
        """
        if not dealt.asked or peers is None:
            return dealt
        return self._placed(dealt, self._owners.dealt_by_all(self._hosts, dealt.asked, peers))

    def _placed(self, dealt: Dealt, places: Mapping[str, tuple[np.ndarray, np.ndarray, HostRead]]) -> Dealt:
        host = {}
        for name, (device, line, host[name]) in places.items():
            for part in dealt.parts:
                given = (dealt.asked[name], device, line, self._firsts[name])
                part.routes[name] = with_owners(part.routes[name], *given)
        return dataclasses.replace(dealt, host=host, asked={})

    def _examples(self, batch: Batch, device: int, size: int) -> Batch:
        if device not in self._askers:
            return blank(self.layout, batch, size)
        begin = self._askers.index(device) * size
        return gathered(self.layout, [(batch, begin, begin + size)])


def host_stacks(layout: EmbeddingLayout, plan: Plan) -> tuple[Stack, ...]:
    """The planned stacks of which some rows, or all, are in host memory."""
    return tuple(stack for stack in planned_stacks(layout) if plan.host_rows(plan_name(stack)))


def plan_routers(layout: EmbeddingLayout, plan: Plan, devices: Sequence[int] | None = None) -> dict[str, Router]:
    """By planned stack, for some devices, or for all."""
    return {stack.name: Router(plan, based(stack), devices) for stack in planned_stacks(layout)}


def routed_part(
    layout: EmbeddingLayout,
    batch: Batch,
    routers: Mapping[str, Router],
    device: int,
    casts: set[str],
    send: Set[str] = frozenset(),
) -> Part:
    """Casts a device's examples and routes their unique rows, or sends their lookups.

    Args:
      layout: of the batch.
      batch: NumPy arrays, without casts.
      routers: by stack.
      device: whose part it is.
      casts: the stacks to cast.
      send: names of the features whose lookups of other devices' rows are sent.
    """
    bags, routes, sends = dict(batch.bags), {}, {}
    for name, of in batch.bags.items():
        if name not in casts:
            continue
        stack, ids = layout.stacks[name], np.asarray(of.ids)
        cast = host_cast(stack, ids, None if of.offsets is None else np.asarray(of.offsets), len(batch.labels))
        bags[name] = dataclasses.replace(of, cast=cast)
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
                weights=None if of.weights is None else np.asarray(of.weights),
                with_addresses=stack.dtype != "float32",
            )
            local, cast, routes[name], sends[name] = split.local, split.cast, split.routed, split.sent
        bags[name] = dataclasses.replace(of, ids=local, cast=cast)
    return Part(batch=dataclasses.replace(batch, bags=bags), routes=routes, sends=sends)
