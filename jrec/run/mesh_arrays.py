"""Parts of a batch in the static sizes of the compiled step, one line a device, and on the mesh.

Sizes are buckets that grow with the batches, so that few programs are compiled and nothing is ever dropped. Of several
processes each sees its own devices' parts; they agree on the sizes of every batch (``Shapes.fit``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.batch import Batch
from jrec.host.pipeline_batch import BatchRows
from jrec.host.ring import bucket
from jrec.mesh.route import AXIS, Picks, Route
from jrec.mesh.routing import NO_ROW, Places, Room
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags
from jrec.run.partitioned_batch import DeviceBatch, PartitionedBatch, sending_bags, sending_features
from jrec.run.peers import Peers
from jrec.run.step import StepBatch
from jrec.sharding.plans import Plan
from jrec.sharding.router import Routed, Taken
from jrec.sharding.sent import SentLookups, send_route

_SLACK = 1.125  # on what a batch needed, when a size grows: the next one needs a little more


class Sizes(NamedTuple):
    """Static sizes of one stack's routes, or counts of rows that must fit them.

    Attributes:
      unique: Rows of a device's part.
      own, remote, replicated: Rows of it from its own shard, from each other device, and from the replicated array.
      lookups: Lookups sent to each other device.
      pooled: Bags with such lookups at each other device.
      host: Rows of host memory that a device has while the batch lasts.
    """

    unique: int = 0
    own: int = 0
    remote: int = 0
    replicated: int = 0
    lookups: int = 0
    pooled: int = 0
    host: int = 0

    def most(self, other: Sizes) -> Sizes:
        """The greater of each."""
        return Sizes(*map(max, self, other))


Ranges = tuple[jax.Array, jax.Array, jax.Array]
"""First addresses, sources and shifts of ``Places``, with an axis of devices in front."""
Growth = dict[str, tuple[Sizes, Sizes]]
"""By stack, sizes before and after."""


def agreed(needed: Mapping[str, Sizes], peers: Peers | None) -> dict[str, Sizes]:
    """The greatest needs of all processes, which call this together; None for one that is the only one."""
    if peers is None or not needed:
        return dict(needed)
    most = peers.most(np.array(list(needed.values()), np.int64))
    return {name: Sizes(*map(int, sizes)) for name, sizes in zip(needed, most, strict=True)}


def described(grown: Growth) -> dict[str, dict[str, list[int]]]:
    """By stack and kind, size before and after, of those that grew."""
    return {
        name: {kind: [old, new] for kind, old, new in zip(Sizes._fields, before, after, strict=True) if old != new}
        for name, (before, after) in grown.items()
    }


def counts(routed: Routed, device: int, sent: SentLookups | None = None) -> Sizes:
    """What one device's rows, and what it sends, need."""
    rows = routed.counts[: routed.devices]
    remote = [int(n) for other, n in enumerate(rows) if other != device]
    return Sizes(
        unique=routed.addresses.size,
        own=int(rows[device]),
        remote=max(remote, default=0),
        replicated=int(routed.counts[routed.devices]),
        lookups=0 if sent is None else int(np.diff(sent.starts).max()),
        pooled=0 if sent is None else int(np.diff(sent.bag_starts).max()),
    )


class Shapes:
    """The static sizes of all stacks, for parts of one size.

    Args:
      layout: The layout of the batches.
      plan: Where rows live.
      examples: The examples of a part.
      headroom: See ``MeshConfig``.
      send: The names of the features whose lookups of other devices' rows are sent.
      hot: Whether the batches read only replicated rows.
      processes: Processes that share the devices equally.
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
        self._each = plan.devices // processes
        self.plan, self.examples, self._headroom, self.send, self._hot = plan, examples, headroom, send, hot
        self.stacks = {stack.name: stack for stack in layout.planned_stacks}
        self.host_rows = {name: plan.host_rows(name) for name in self.stacks}
        self.limits = {name: self._limit(stack) for name, stack in self.stacks.items()}
        self.sizes = {name: self._bucketed(name, Sizes(), 1.0) for name in self.stacks}

    def _limit(self, stack: Stack) -> Sizes:
        """What no batch can pass."""
        name, most = stack.name, stack.unique_capacity(self.examples)
        host, replicated = self.host_rows[name], self.plan.replicated_rows(name)
        most = min(most, max(1, replicated)) if self._hot else most
        rows = 0 if self._hot else int(self.plan.shard_rows(name).max()) + host
        sending = sending_features(stack, self.send)
        read = 0 if self._hot else min(stack.unique_capacity(self.examples * len(self.plan.compute_devices)), host)
        asks = self.plan.devices > 1 and (len(sending) < len(stack.features) or host > 0)
        return Sizes(
            unique=most,
            own=min(most, rows),
            remote=min(most, rows) if asks else 0,
            replicated=min(most, replicated),
            lookups=self.examples * sum(f.config.max_length for f in sending),
            pooled=self.examples * len(sending),
            host=-(-read // self._each),
        )

    def _bucketed(self, name: str, needed: Sizes, factor: float) -> Sizes:
        limits = self.limits[name]
        sizes = Sizes(*(bucket(int(np.ceil(n * factor)), most) for n, most in zip(needed, limits, strict=True)))
        # XLA crashes on CPUs on arrays without elements; those that may have none are left out of a route instead.
        some = {kind: max(1, getattr(sizes, kind)) for kind in ("unique", "replicated", "lookups", "pooled")}
        return sizes._replace(**some)

    def places(self, name: str, ranges: Ranges) -> Places:
        """Where devices find the rows of a stack that they route themselves.

        Args:
          name: The stack.
          ranges: First addresses, sources and shifts, as each device reads them (``Router.ranges``).
        """
        stack, sizes, limits = self.stacks[name], self.sizes[name], self.limits[name]
        # Not no room for what the first batches only happened not to have.
        own, remote = (max(getattr(sizes, kind), min(1, getattr(limits, kind))) for kind in ("own", "remote"))
        replicated = sizes.replicated if own or remote else sizes.unique
        room = Room(unique=sizes.unique, own=own, remote=remote, replicated=replicated)
        flags, (begin, source, shift) = sending_bags(stack, self.send, self.examples), ranges
        return Places(
            begin=begin,
            source=source,
            shift=shift,
            rows=stack.rows,
            most=max(1, limits.unique),
            room=room,
            fits=all(getattr(room, kind) >= getattr(limits, kind) for kind in Room._fields),
            sends=() if flags is None else _spans(flags),
        )

    def host_rows_read(self, partitioned: PartitionedBatch) -> dict[str, BatchRows]:
        """By stack the rows that a batch reads from this process's host memory, and the room on its devices."""
        rows = {}
        for name, read in partitioned.host.items():
            most, room = self.limits[name].host * self._each, self.sizes[name].host * self._each
            rows[name] = BatchRows(addresses=read.addresses, most=most, room=room)
        return rows

    def fix(self, needed: dict[str, Sizes]) -> None:
        """Makes room for ``headroom`` times what the first batches needed; the same on all processes."""
        self.sizes = {name: self._bucketed(name, sizes, self._headroom) for name, sizes in needed.items()}

    def needed(self, partitioned: PartitionedBatch, devices: Sequence[int]) -> dict[str, Sizes]:
        """What some devices' parts of a batch need, all that it has."""
        routed = partitioned.parts[0].routes
        sizes = {n: Sizes(host=partitioned.host[n].lines if n in partitioned.host else 0) for n in routed}
        for part, device in zip(partitioned.parts, devices, strict=True):
            for name, routed in part.routes.items():
                sizes[name] = sizes[name].most(counts(routed, device, part.sends.get(name)))
        return sizes

    def most(self, batches: Iterable[PartitionedBatch], devices: Sequence[int]) -> dict[str, Sizes]:
        """What some devices' parts of any of these batches need."""
        sizes = dict.fromkeys(self.stacks, Sizes())
        for partitioned in batches:
            for name, needed in self.needed(partitioned, devices).items():
                sizes[name] = sizes[name].most(needed)
        return sizes

    def fit(self, partitioned: PartitionedBatch, devices: Sequence[int], peers: Peers | None = None) -> Growth:
        """Grows to a batch's parts on some devices, and on those that the peers call this with for the same batch."""
        return self.make_room(self.needed(partitioned, devices), peers)

    def make_room(self, needed: Mapping[str, Sizes], peers: Peers | None = None) -> Growth:
        """Grows to what some devices need, and to what the peers call this with at the same time.

        Raises:
          RuntimeError: Where rows would be left out all the same; a slip in the code.
        """
        needed = agreed(needed, peers)
        grown = self.grow(needed)
        self.check(needed)
        return grown

    def grow(self, needed: Mapping[str, Sizes]) -> Growth:
        """Makes room for these, and a little more, where there is none.

        Returns:
          By stack that had none, the sizes before and after.
        """
        grown = {}
        for name, sizes in needed.items():
            if (before := self.sizes[name]).most(sizes) != before:
                self.sizes[name] = before.most(self._bucketed(name, sizes, _SLACK))
                grown[name] = before, self.sizes[name]
        return grown

    def check(self, needed: Mapping[str, Sizes]) -> None:
        """Refuses what there is no room for, rather than drop any of it.

        Raises:
          RuntimeError: Naming the stack and both sizes; a slip in the code.
        """
        for name, sizes in needed.items():
            if self.sizes[name].most(sizes) != self.sizes[name]:
                raise RuntimeError(f"a batch needs {sizes} of stack {name}, but there is room for {self.sizes[name]}")


def _spans(flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The ranges in which flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(first), int(stop)) for first, stop in edges.reshape(-1, 2))


def stacked(parts: Sequence[DeviceBatch], devices: Sequence[int], shapes: Shapes) -> StepBatch:
    """Parts as one batch of NumPy arrays with an axis of (these) devices in front, padded to the sizes."""

    def together(trees: Iterable[Any]) -> Any:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    routes = {
        name: together(_route(part, device, name, shapes) for part, device in zip(parts, devices, strict=True))
        for name in parts[0].routes
    }
    return StepBatch(batch=together(_sized(part, shapes) for part in parts), routes=routes)


def _sized(part: DeviceBatch, shapes: Shapes) -> Batch:
    """The part's batch, casts of planned stacks numbering as many rows as there is room for."""
    bags = dict(part.batch.bags)
    for name in part.routes:
        bags[name] = _sized_bags(bags[name], shapes.sizes[name].unique)
    return dataclasses.replace(part.batch, bags=bags)


def _sized_bags(bags: Bags, unique: int) -> Bags:
    cast = bags.cast
    assert cast is not None  # Parts made it
    numbers = np.arange(unique, dtype=np.int32)
    numbers[int(cast.num_unique) :] = unique
    sized: Any = {"rows": numbers, "offsets": np.asarray(cast.offsets)[: unique + 1]}
    return dataclasses.replace(bags, cast=dataclasses.replace(cast, **sized))


def _route(part: DeviceBatch, device: int, name: str, shapes: Shapes) -> Route:
    sizes, stack, routed = shapes.sizes[name], shapes.stacks[name], part.routes[name]
    devices, sending = shapes.plan.devices, sending_features(stack, shapes.send)

    def picks(taken: Sequence[Taken], size: int) -> Picks:
        """The rows of some arrays, a line of ``size`` each."""
        rows = np.full((len(taken), size), NO_ROW, np.int32)
        at = np.full((len(taken), size), sizes.unique, np.int32)
        for line, of_array in enumerate(taken):
            rows[line, : of_array.rows.size], at[line, : of_array.at.size] = of_array
        return Picks(rows=rows, at=at)  # pyright: ignore[reportArgumentType]

    def one(taken: Taken, size: int) -> Picks:
        lines = picks([taken], size)
        return Picks(rows=lines.rows[0], at=lines.at[0])

    nothing = Taken(np.empty(0, np.int32), np.empty(0, np.int32))  # a device asks nothing of itself
    asked = [nothing if other == device else routed.shard(other) for other in range(devices)]
    send = None
    if sending:
        bags = stack.num_bags(shapes.examples)
        send = send_route(part.sends[name], num_bags=bags, room=sizes.lookups, pooled=sizes.pooled)
    addresses: Any = None
    if stack.dtype != "float32":
        addresses = np.zeros(sizes.unique, np.int32)
        addresses[: routed.addresses.size] = routed.addresses.astype(np.int32)  # modulo 2^32, as rounding counts
    return Route(
        capacity=sizes.unique,
        own=one(routed.shard(device), sizes.own) if sizes.own else None,
        replicated=one(routed.replicated, sizes.replicated),
        remote=picks(asked, sizes.remote) if sizes.remote else None,
        send=send,
        addresses=addresses,
    )


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Arrays whose first axis are this process's devices, as arrays over the mesh's."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    count, local = mesh.devices.size, sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    if local == count:  # all arrays at once, in half the time
        return jax.device_put(tree, sharding)

    def place(leaf: np.ndarray) -> jax.Array:
        shape = (leaf.shape[0] // local * count, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return jax.tree.map(place, tree)
