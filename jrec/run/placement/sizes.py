"""The static sizes of the compiled step on a mesh: what devices have room for, and the batch's rows of host memory.

Room for rows on devices is made once, from a run's first batches: a batch that needs more takes further windows
(``jrec.mesh.routing``). Rows of host memory need room before the step: sizes are buckets that grow with the batches, so
that few programs are compiled, and several processes agree on every batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import jax
import numpy as np

from jrec.host.ring import bucket
from jrec.mesh.routing import AddressMap, WindowCapacity
from jrec.ops.layout import EmbeddingLayout, Stack, StackedFeature
from jrec.run.placement.part_lookups import bags_of, poolable
from jrec.run.placement.peers import Peers
from jrec.sharding.plans import Plan

# Up to these, a step has room for whatever a batch can read, and no loop over further windows: a branch on the devices
# makes the host of GPUs wait, and doubles what is compiled.
_WHOLE_BYTES = 1 << 20  # of an exchange of rows, all lines together: no more than microseconds on the links
_WHOLE_FACTOR = 2  # times the room that batches needed: what is exchanged and summed grows as much
_SLACK = 1.125  # on what a batch needed, when a size grows: the next one needs a little more


class HostSizes(NamedTuple):
    """Sizes of one stack's rows of host memory, or counts that must fit them.

    Attributes:
      read: Rows that a process's parts of a batch read.
      lines: Rows that a device has while the batch lasts.
    """

    read: int = 0
    lines: int = 0

    def most(self, other: HostSizes) -> HostSizes:
        """The greater of each."""
        return HostSizes(*map(max, self, other))


Ranges = tuple[jax.Array, jax.Array, jax.Array]
"""First addresses, sources and shifts of ``AddressMap``, with an axis of devices in front."""


class MeshSizes:
    """The static sizes of all planned stacks, for parts of one size.

    Args:
      layout: The layout of the batches.
      plan: Where rows live.
      examples: The examples of a part.
      headroom: See ``MeshOptions``.
      send: The names of the features whose lookups of other devices' rows are sent.
      hot: Whether the batches read only replicated rows.
      processes: Processes that share the devices equally.

    Attributes:
      rooms: By stack, what a device's window has room for; nothing until ``make_room``.
      host: By stack with rows of host memory that batches read, the sizes of these.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        plan: Plan,
        *,
        examples: int,
        headroom: float,
        send: Set[str] = frozenset(),
        hot: bool = False,
        processes: int = 1,
    ):
        self._each, self._plan, self._examples = plan.devices // processes, plan, examples
        self._headroom, self._send, self._hot = headroom, send, hot
        self.stacks = {stack.name: stack for stack in layout.planned_stacks}
        self.limits = {name: self._limit(stack) for name, stack in self.stacks.items()}
        self.rooms: dict[str, WindowCapacity] = {}
        self.host_limits = {name: self._host_limit(s) for name, s in self.stacks.items() if self._host_rows(name)}
        self.host = {
            name: HostSizes(*(bucket(0, most) for most in limits)) for name, limits in self.host_limits.items()
        }

    def sending(self, name: str) -> np.ndarray | None:
        """Which bags of a part belong to features that send, (num_bags,) bool; None if no feature of the stack does."""
        if not (spans := self._sending_spans(name)):
            return None
        flags = np.zeros(self.stacks[name].num_bags(self._examples), bool)
        for span in spans:
            flags[span] = True
        return flags

    def _sending_spans(self, name: str) -> list[slice]:
        features = [] if self._hot else sending_features(self.stacks[name], self._send)
        return [bags_of(feature, self._examples) for feature in features]

    def make_room(self, needed: Mapping[str, WindowCapacity], peers: Peers | None = None) -> None:
        """Makes room for ``headroom`` times what some batches need, in all processes, which call this together.

        Args:
          needed: By stack, what the parts of this process need.
          peers: The other processes; None where they call this with the same.
        """
        for name, room in agreed(needed, peers).items():
            sizes, limits = {}, self.limits[name]
            # A bucket, not the count itself: runs with nearly the same needs share a compiled program.
            for kind, most in limits._asdict().items():
                sizes[kind] = bucket(int(np.ceil(getattr(room, kind) * self._headroom)), most)
            if self._affords(name, sizes):
                sizes = limits._asdict()
            # Some room for what the first batches only happened not to have.
            some = {kind: max(1, sizes[kind]) for kind in sizes if getattr(limits, kind)}
            self.rooms[name] = WindowCapacity(**{**sizes, **some, "unique": max(1, sizes["unique"])})

    def _affords(self, name: str, sizes: Mapping[str, int]) -> bool:
        """Whether room for whatever a batch can read costs little beside ``sizes``, by kind."""
        limits, dim = self.limits[name], self.stacks[name].dim
        numbers = max(limits.lookups, dim * max(limits.unique, limits.bags))
        little = 4 * self._plan.devices * numbers <= _WHOLE_BYTES
        return little or all(most <= _WHOLE_FACTOR * sizes[kind] for kind, most in limits._asdict().items())

    def places(self, name: str, ranges: Ranges) -> AddressMap:
        """Where devices find the rows of a stack.

        Args:
          name: The stack.
          ranges: First addresses, sources and shifts, as each device reads them (``StackRanges``).
        """
        stack, room, limits = self.stacks[name], self.rooms[name], self.limits[name]
        all_sent = len(sending_features(stack, self._send)) == len(stack.features) and not self._host_rows(name)
        # Every lookup of another device's row is sent, and there is room for as many as a batch can have: nothing is
        # retrieved then, so that this array need not exist.
        if all_sent and room.lookups >= limits.lookups and room.bags >= limits.bags:
            room, limits = room._replace(remote=0), limits._replace(remote=0)
        # Without rows from shards every unique row is a replicated one, so that both have one size. Elsewhere there is
        # at least one line: XLA crashes on CPUs when a program of several devices reads an empty array.
        alone = not (room.own or room.remote or room.lookups)
        room = room._replace(replicated=room.unique if alone else max(1, room.replicated))
        begin, source, shift = ranges
        return AddressMap(
            begin=begin,
            source=source,
            shift=shift,
            rows=stack.rows,
            wide=stack.wide,
            most=max(1, limits.unique),
            room=room,
            # Then the first window holds whatever a batch reads, and the step has no loop over windows.
            fits=all(getattr(room, kind) >= getattr(limits, kind) for kind in WindowCapacity._fields),
            sends=tuple((span.start, span.stop) for span in self._sending_spans(name)),
        )

    def fit_host(self, needed: Mapping[str, HostSizes], peers: Peers | None = None) -> None:
        """Grows to a batch's rows of host memory; all processes call this for the same batch.

        Args:
          needed: By stack of ``host``, what this process needs.
          peers: The other processes; None where they call this with the same.
        """
        for name, sizes in agreed(needed, peers).items():
            before, limits = self.host[name], self.host_limits[name]
            if before.most(sizes) != before:
                grown = (bucket(int(np.ceil(n * _SLACK)), most) for n, most in zip(sizes, limits, strict=True))
                # Sizes only grow, and only to buckets: that bounds the number of programs that a run compiles.
                self.host[name] = before.most(HostSizes(*grown))

    def _host_rows(self, name: str) -> int:
        # Hot batches read replicated rows only (FAE), whatever else a plan has.
        return 0 if self._hot else self._plan.host_rows(name)

    def _host_limit(self, stack: Stack) -> HostSizes:
        computing = len(self._plan.compute_devices)
        read = min(stack.unique_capacity(self._examples * computing), self._host_rows(stack.name))
        return HostSizes(read=read, lines=-(-read // self._each))

    def _limit(self, stack: Stack) -> WindowCapacity:
        """What no batch can pass."""
        name, most = stack.name, stack.unique_capacity(self._examples)
        host, replicated = self._host_rows(name), self._plan.replicated_rows(name)
        if self._hot:
            most = min(most, max(1, replicated))
            return WindowCapacity(unique=most, replicated=most)
        # A row of host memory lies behind some shard while the batch lasts; all of them may lie behind one.
        rows = int(self._plan.shard_rows(name).max()) + host
        features = sending_features(stack, self._send)
        several = self._plan.devices > 1
        return WindowCapacity(
            unique=most,
            own=min(most, rows),
            remote=min(most, rows) if several else 0,
            replicated=min(most, replicated),
            lookups=self._examples * sum(f.config.max_length for f in features) if several else 0,
            bags=self._examples * sum(f.config.bags_per_example for f in features) if several else 0,
        )


def agreed[S: (WindowCapacity, HostSizes)](needed: Mapping[str, S], peers: Peers | None) -> dict[str, S]:
    """The greatest needs of all processes, which call this together; ``needed`` where there are no peers."""
    if peers is None or not needed:
        return dict(needed)
    most = peers.most(np.array(list(needed.values()), np.int64))
    return {name: type(need)(*map(int, sizes)) for (name, need), sizes in zip(needed.items(), most, strict=True)}


def sending_features(stack: Stack, send: Set[str]) -> list[StackedFeature]:
    """The stack's features that send their lookups of other devices' rows."""
    return [f for f in poolable(stack) if f.config.name in send]
