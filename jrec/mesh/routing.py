"""Routing on the devices: a device finds by itself where the rows of its part of a batch lie, whatever the batch.

The host only hands over ids. A plan is a few thousand ranges of a stack's addresses, so an owner is found by a binary
search. Only rows of host memory have other places in every batch: the host brings them, and tells where
(``HostAddressMap``). Arrays have static sizes, measured once, and no row is ever lost: a step takes its unique rows in
*windows* of addresses, which the devices agree on so that each one's rows fit. Nearly always one window holds all of
them. The gradients of a row from all devices meet in its window, so that it takes one optimizer step; they are summed
in one order, so that runs repeat to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrec.mesh.route import AXIS, GatherMap, Route, SendRoute
from jrec.ops.dispatch import Implementation
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.tensor_cast import tensor_cast, tensor_cast_of_words
from jrec.ops.types import Bags, Cast

NO_ROW = 2**31 - 1
"""A row of no array: padding."""
ON_HOST = 1
"""What is added to the number of devices in ``AddressMap.source`` of rows in host memory."""


class WindowCapacity(NamedTuple):
    """How many of a stack's rows in a device's part of a batch a window has room for.

    Attributes:
      unique: Unique rows.
      own, remote, replicated: Unique rows from the device's own shard, from each other device's, and from the
        replicated array. No room, 0, where there are never such rows.
      lookups: Lookups that are sent to each other device; what has no room is retrieved.
      bags: Bags of the lookups that are sent to each other device.
    """

    unique: int = 0
    own: int = 0
    remote: int = 0
    replicated: int = 0
    lookups: int = 0
    bags: int = 0

    def most(self, other: WindowCapacity) -> WindowCapacity:
        """The greater of each."""
        return WindowCapacity(*map(max, self, other))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HostAddressMap:
    """Where a batch's rows of host memory are on the devices: behind the rows of one's shard.

    Attributes:
      addresses: (n,) int32, ascending, as ``AddressMap.begin``; the greatest number that there is in padding.
      device: (n,) int32, the device that has the row while the batch lasts.
      offset: (n,) int32, the row's offset in that device's shard.
    """

    addresses: jax.Array
    device: jax.Array
    offset: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressMap:
    """Where the rows of a stack lie, as one device reads them: ranges of addresses.

    Attributes:
      begin: (ranges,) int32, ascending, the first address of each; of a wide stack modulo 2^32.
      source: (ranges,) int32, the device whose shard has the rows; the number of devices for the replicated array, and
        ``ON_HOST`` more for rows in host memory.
      shift: (ranges,) int32, what turns an address into an offset in that array, modulo 2^32.
      host: The batch's rows of host memory; None where the batch reads none.
      rows: The stack's rows.
      wide: Whether addresses reach 2^31. The bags' addresses are then modulo 2^32, and only -1 is padding.
      most: The most unique rows that a device's part of a batch can have.
      room: How many rows a window has room for.
      fits: Whether one window has room for whatever a batch reads.
      sends: First bag, and one past the last, of the features whose lookups of other devices' rows are sent.
    """

    begin: jax.Array
    source: jax.Array
    shift: jax.Array
    host: HostAddressMap | None = None
    rows: int = dataclasses.field(metadata={"static": True})
    wide: bool = dataclasses.field(default=False, metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    room: WindowCapacity = dataclasses.field(metadata={"static": True})
    fits: bool = dataclasses.field(metadata={"static": True})
    sends: tuple[tuple[int, int], ...] = dataclasses.field(default=(), metadata={"static": True})

    def compared(self, addresses: jax.Array) -> jax.Array:
        """Addresses in a type whose order is theirs: of a wide stack uint32."""
        return jax.lax.bitcast_convert_type(addresses, jnp.uint32) if self.wide else addresses

    def located(self, addresses: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The source and the offset of (n,) ``compared`` addresses of the stack."""
        piece = _searched(self.compared(self.begin), addresses, side="right") - 1
        # The sum wraps in int32, and so it should: addresses and shifts of a wide
        # stack are modulo 2^32, and an offset in one device's array is below 2^31.
        source, offset = self.source[piece], addresses.astype(jnp.int32) + self.shift[piece]
        if self.host is None:
            return source, offset
        # The host brings every row of the batch that the plan has there, so that each of these is found.
        there = self.compared(self.host.addresses)
        line = _searched(there, addresses, side="left")
        brought = source == jax.lax.axis_size(AXIS) + ON_HOST
        device, host_offset = (of_row.at[line].get(mode="clip") for of_row in (self.host.device, self.host.offset))
        return jnp.where(brought, device, source), jnp.where(brought, host_offset, offset)

    def routed(self, bags: Bags, implementation: Implementation | None) -> Routing:
        """Casts and routes a device's bags of addresses; inside ``shard_map``."""
        # Depends on ids alone, on no row and no step: all of it may run before the step (``routed_ahead``).
        sent, ids = None, bags.ids
        if self.sends:
            sent, leaves = self._sent(bags)
            # Before the cast: what owners pool must not be retrieved, nor take room of unique rows.
            ids = jnp.where(leaves.reshape(ids.shape), -1, ids)
        if self.wide:
            # No int32 holds the number of rows, which marks padding in ``tensor_cast``. Sorted as uint32 words, the
            # addresses ascend and padding, -1, is the greatest.
            cast = tensor_cast_of_words(ids, bags.offsets, unique_capacity=self.most)
        else:
            options: dict[str, Any] = {"unique_capacity": self.most, "implementation": implementation}
            cast = tensor_cast(ids, bags.offsets, num_rows=self.rows, **options)
        return Routing.of(self, dataclasses.replace(bags, cast=cast), sent)

    def _sent(self, bags: Bags) -> tuple[SendRoute, jax.Array]:
        """The lookups that are sent, and which these are, (lookups,) bool."""
        devices, ids, room = jax.lax.axis_size(AXIS), bags.ids.reshape(-1), self.room
        bag_of = _bags_of_lookups(bags)
        # One place more, for lookups of no bag: ``bag_of`` numbers them ``num_bags``.
        sending = np.zeros(bags.num_bags + 1, bool)
        for first, stop in self.sends:
            sending[first:stop] = True
        # In a wide stack the upper half of the addresses is negative as int32.
        real = ids != -1 if self.wide else ids >= 0
        # Rows of host memory are not sent: owners pool what their shards keep.
        owner, offset = dataclasses.replace(self, host=None).located(self.compared(jnp.where(real, ids, 0)))
        away = real & (owner < devices) & (owner != jax.lax.axis_index(AXIS)) & jnp.asarray(sending)[bag_of]
        order, begin = _by_number(jnp.where(away, owner, devices), devices)
        taken, sent = _lines(order, begin[:-1], begin[1:], room.lookups)  # bag by bag, since the order is stable
        # A line's lookups lie bag by bag, so a bag begins where the number changes; its rank is its place in the line.
        fresh = bag_of[taken[:, 1:]] != bag_of[taken[:, :-1]]
        rank = jnp.cumsum(jnp.pad(fresh, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
        # What has no room stays in ``ids`` and is retrieved: sizes are static, and no lookup is lost.
        sent &= rank < room.bags

        def lines(values: jax.Array, fill: int) -> jax.Array:
            return jnp.where(sent, values[taken], jnp.asarray(fill, values.dtype))

        of_bag, ranks = lines(bag_of, bags.num_bags), jnp.where(sent, rank, room.bags)
        of_rank = jnp.arange(room.bags, dtype=jnp.int32)
        starts = jax.vmap(lambda line: jnp.searchsorted(line, of_rank))(ranks).astype(jnp.int32)
        at = jnp.take_along_axis(of_bag, jnp.minimum(starts, room.lookups - 1), axis=1)
        route = SendRoute(
            rows=lines(offset, -1),
            starts=starts,
            at=jnp.where(starts < jnp.sum(sent, axis=1, keepdims=True), at, bags.num_bags),
            weights=None if bags.weights is None else lines(bags.weights.reshape(-1), 0),
            addresses=lines(ids, 0),
            num_bags=bags.num_bags,
        )
        # Places past the lookups are dropped: those of padding, and of lookups that found no room.
        everywhere = jnp.zeros(ids.size, bool)
        return route, everywhere.at[jnp.where(sent, taken, ids.size)].set(True, mode="drop")


class Window(NamedTuple):
    """Unique rows of a device that a step takes together.

    Attributes:
      first, stop: () int32, numbers of the first one, and one past the last.
      before: (devices + 2,) int32, how many rows of each source are before the first.
      behind: (devices + 2,) int32, how many rows of each source are before ``stop``.
      low, high: (), the ``compared`` addresses that all devices' windows hold: ``low`` to ``high``, without it.
    """

    first: jax.Array
    stop: jax.Array
    before: jax.Array
    behind: jax.Array
    low: jax.Array
    high: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The unique rows of a device's part of a batch, and where each lies; inside ``shard_map``.

    Attributes:
      room, fits: As of the ``AddressMap`` that routed; ``fits`` also where one window is known to hold this batch.
      bags: The bags, ids as addresses, and the cast of all lookups that read unique rows.
      numbers: (lookups,) int32, the number of each lookup's unique row; -1 for none.
      source, offset: (n,) int32, where each unique row lies; in padding the source is the number of devices + 1.
      rank: (n,) int32, how many rows of the same source are before each.
      order: (n,) int32, the numbers of unique rows, source by source, ascending.
      starts: (devices + 3,) int32, where the rows of each source begin in ``order``.
      sent: The lookups that are sent, or None.
    """

    room: WindowCapacity = dataclasses.field(metadata={"static": True})
    fits: bool = dataclasses.field(metadata={"static": True})
    bags: Bags
    numbers: jax.Array
    source: jax.Array
    offset: jax.Array
    rank: jax.Array
    order: jax.Array
    starts: jax.Array
    sent: SendRoute | None

    @staticmethod
    def of(places: AddressMap, bags: Bags, sent: SendRoute | None) -> Routing:
        """Routes cast bags."""
        cast, devices = _cast(bags), jax.lax.axis_size(AXIS)
        n = cast.rows.shape[0]
        real = jnp.arange(n, dtype=jnp.int32) < cast.num_unique
        source, offset = places.located(cast.rows)
        source = jnp.where(real, source, devices + 1)
        # Unique rows ascend by address, and the order is stable: within a source rows ascend, too, so any window of
        # addresses is one piece of every source's rows.
        order, starts = _by_number(source, devices + 2)
        place = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
        segments = segment_of_entries(cast.offsets, cast.positions.shape[0])
        # Behind the last offset is padding, and what did not fit; it reads no unique row.
        numbers = jnp.where(jnp.arange(segments.shape[0]) < cast.offsets[-1], segments, -1)
        return Routing(
            room=places.room,
            fits=places.fits,
            bags=bags,
            numbers=jnp.zeros_like(numbers).at[cast.positions].set(numbers, unique_indices=True),
            source=source,
            offset=offset,
            rank=place - starts[source],
            order=order,
            starts=starts,
            sent=sent,
        )

    def first(self) -> Window:
        """The first window, of nearly always all rows."""
        return self.after(self._nothing())

    def overflows(self) -> jax.Array:
        """() bool, whether the first window has no room for all rows of this device."""
        return jnp.any(self._left_out(self._nothing()))

    def _nothing(self) -> Window:
        """What is before the first window."""
        before = jnp.zeros(jax.lax.axis_size(AXIS) + 2, jnp.int32)
        none, lowest = jnp.int32(0), jnp.zeros((), _cast(self.bags).rows.dtype)
        return Window(none, none, before, before, lowest, lowest)

    def _left_out(self, window: Window) -> jax.Array:
        """(n,) bool, the rows behind a window for which this device has no room in the next one."""
        devices, room, cast = jax.lax.axis_size(AXIS), self.room, _cast(self.bags)
        number = jnp.arange(self.source.shape[0], dtype=jnp.int32)
        # By source: other devices' shards, the own one, the replicated array, and padding, which is never too much.
        most = jnp.full(devices, room.remote, jnp.int32).at[jax.lax.axis_index(AXIS)].set(room.own)
        most = jnp.concatenate([most, jnp.array([room.replicated, NO_ROW], jnp.int32)])
        # A row fits if fewer rows of its source than there is room lie between it and the window's begin.
        within = self.rank - window.behind[self.source] < most[self.source]
        # The first row behind a window always fits, since there is room for at least one row of every source that a
        # plan has (``MeshSizes.make_room``): each window takes a row on some device, so the loop over windows ends.
        left_out = (number >= window.stop) & (number < cast.num_unique)
        return left_out & ((number - window.stop >= room.unique) | ~within)

    def after(self, window: Window) -> Window:
        """The next window: as many addresses as every device has room for."""
        cast = _cast(self.bags)
        number, highest = jnp.arange(self.source.shape[0], dtype=jnp.int32), _highest(cast.rows)
        # The window ends before the first row that does not fit, on any device: all must end at the same address, or a
        # row's gradients from two devices would come in two windows, and in two optimizer steps.
        bound = jnp.min(jnp.where(self._left_out(window), cast.rows, highest), initial=highest)
        # Where everything always fits, even this small collective is saved.
        high = highest if self.fits else jax.lax.pmin(bound, AXIS)
        # Both conditions: a cast's padding is the table's number of rows, which is below the greatest number. A device
        # that has room for more takes fewer all the same, up to the address that all agree on.
        stop = jnp.sum((cast.rows < high) & (number < cast.num_unique), dtype=jnp.int32)
        # How many rows of every source are below ``stop``: a count over ``order``, read at the sources' begins.
        upto = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(self.order < stop, dtype=jnp.int32)])
        behind = upto[self.starts[1:]] - upto[self.starts[:-1]]
        return Window(window.stop, stop, window.behind, behind, window.high, high)

    def more(self, window: Window) -> jax.Array:
        """() bool, whether a device has rows behind the window; the same on all."""
        # No row has the greatest number, so only the last window reaches it. ``high`` is agreed on: so is the answer,
        # and no device leaves a loop with collectives before the others.
        return window.high < _highest(window.high)

    def bags_of(self, window: Window, *, first: bool = False) -> Bags:
        """The bags' lookups of a window's rows, which they number from 0; with their cast.

        Args:
          window: The window.
          first: Whether it is the first one, whose cast is the beginning of the whole cast.
        """
        cast, room = _cast(self.bags), self.room.unique
        inside = (self.numbers >= window.first) & (self.numbers < window.stop)
        # Lookups of other windows' rows are absent here, and their bags sum them there.
        count, ids = window.stop - window.first, jnp.where(inside, self.numbers - window.first, -1)
        number = jnp.arange(room, dtype=jnp.int32)
        # A window's rows are neighbours in the cast, so its cast is a slice
        # of the whole one; places past ``stop`` become empty segments.
        offsets = cast.offsets.at[window.first + jnp.arange(room + 1, dtype=jnp.int32)].get(mode="clip")
        offsets, sources, positions = jnp.minimum(offsets, cast.offsets[window.stop]), cast.sources, cast.positions
        # The first window begins at entry 0: nothing has to be moved in the case that is nearly every case.
        if not first:
            begin = offsets[0]
            entries = begin + jnp.arange(sources.shape[0], dtype=jnp.int32)
            # Behind the last entry this repeats it, so that positions are no permutation: nobody reads behind the last
            # offset.
            sources, positions = (array.at[entries].get(mode="clip") for array in (sources, positions))
            offsets = offsets - begin
        rows = Cast(
            rows=jnp.where(number < count, number, room),
            offsets=offsets,
            sources=sources,
            positions=positions,
            num_unique=count,
            num_bags=cast.num_bags,
        )
        return dataclasses.replace(self.bags, ids=ids.reshape(self.bags.ids.shape), cast=rows)

    def route_of(self, window: Window) -> Route:
        """Where a window's rows come from; only the first one has sent lookups."""
        devices, room = jax.lax.axis_size(AXIS), self.room
        me = jax.lax.axis_index(AXIS)

        def picks(source: jax.Array, size: int) -> GatherMap:
            """(len(source), size) rows of some sources."""
            begin = self.starts[source]
            number, real = _lines(self.order, begin + window.before[source], begin + window.behind[source], size)
            return GatherMap(
                rows=jnp.where(real, self.offset[number], NO_ROW),
                at=jnp.where(real, number - window.first, room.unique),
            )

        def of_one(source: jax.Array | int, size: int) -> GatherMap:
            return jax.tree.map(lambda leaf: leaf[0], picks(jnp.asarray(source, jnp.int32)[None], size))

        remote = None
        if room.remote:
            every = jnp.arange(devices, dtype=jnp.int32)
            # Source ``devices + 1`` is the padding behind the last unique row, of which no window has any.
            remote = picks(jnp.where(every == me, devices + 1, every), room.remote)  # nothing of itself
        return Route(
            capacity=room.unique,
            own=of_one(me, room.own) if room.own else None,
            replicated=of_one(devices, room.replicated),
            remote=remote,
            send=self.sent,
            # Of a wide stack modulo 2^32, as rounding counts.
            addresses=_cast(self.bags)
            .rows.at[window.first + jnp.arange(room.unique, dtype=jnp.int32)]
            .get(mode="clip")
            .astype(jnp.int32),
        )

    def following[T](self, value: T, window: Window, body: Callable[[T, Window], T]) -> T:
        """``body`` of every window after one, in their order; all devices take as many."""
        # Known when the program is compiled: the second copy of ``body``, and the loop around it, are then left out.
        if self.fits:
            return value

        def step(carry: tuple[T, Window]) -> tuple[T, Window]:
            value, window = carry[0], self.after(carry[1])
            return body(value, window), window

        # All devices leave together, since ``more`` is agreed on: the collectives of ``body`` are entered by all or by
        # none.
        carry: Any = jax.lax.while_loop(lambda carry: self.more(carry[1]), step, (value, window))
        return carry[0]


def routed_ahead(
    places: Mapping[str, AddressMap], bags: Mapping[str, Bags], implementation: Implementation | None
) -> tuple[dict[str, Routing], jax.Array]:
    """Routes the bags of several steps before the first of them; inside ``shard_map``.

    Where rows lie depends on ids alone, and so does whether one window holds them: the host, which is asked wherever a
    program on GPUs branches, is asked once for all steps.

    Args:
      places: By stack, where its rows lie: the same for all steps.
      bags: By stack, the bags of all steps, with an axis of steps in front.
      implementation: See ``tensor_cast``.

    Returns:
      The routings by stack, with an axis of steps in front, and () bool, the same on all devices: whether any step
      needs further windows.
    """

    def of_step(bags: Mapping[str, Bags]) -> tuple[dict[str, Routing], jax.Array]:
        routed = {name: of_stack.routed(bags[name], implementation) for name, of_stack in places.items()}
        return routed, jnp.stack([routing.overflows() for routing in routed.values()])

    # One collective for all steps, the ``pmax`` below: routing itself exchanges nothing.
    routed, overflows = jax.lax.map(of_step, {name: bags[name] for name in places})
    return routed, jax.lax.pmax(jnp.any(overflows).astype(jnp.int32), AXIS) > 0


def _cast(bags: Bags) -> Cast:
    assert bags.cast is not None  # ``AddressMap.routed`` made it
    return bags.cast


def _searched(ascending: jax.Array, values: jax.Array, *, side: Literal["left", "right"]) -> jax.Array:
    """The place of each value among ascending ones, (n,) int32."""

    def by(method: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return functools.partial(jnp.searchsorted, side=side, method=method)

    # A plan has a few thousand ranges: a dozen steps of a binary search. GPUs run them unrolled in one kernel; on CPUs
    # each would be compiled as two functions, a third of what a small step takes.
    return jax.lax.platform_dependent(ascending, values, cpu=by("scan"), default=by("scan_unrolled"))


def _highest(addresses: jax.Array) -> jax.Array:
    """The greatest number of their type, past every address."""
    return jnp.array(jnp.iinfo(addresses.dtype).max, addresses.dtype)


def _by_number(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The places of (n,) values in stable ascending order, and where each of 0 to ``count`` begins in it."""
    # Devices are few: counting compares every value with each of
    # them, which needs neither atomics nor the sorted values.
    starts = jnp.sum(values[None, :] < jnp.arange(count + 1)[:, None], axis=1, dtype=jnp.int32)
    return jnp.argsort(values, stable=True).astype(jnp.int32), starts


def _lines(order: jax.Array, begin: jax.Array, stop: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(lines, size) entries of ``order`` from the begin of each line on, and whether each is before its stop."""
    line = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return order.at[line].get(mode="clip"), line < stop[:, None]


def _bags_of_lookups(bags: Bags) -> jax.Array:
    """(lookups,) int32, the bag of each; ``num_bags`` of those past the last."""
    if bags.offsets is None:
        return jnp.repeat(jnp.arange(bags.num_bags, dtype=jnp.int32), bags.ids.shape[1])
    return segment_of_entries(bags.offsets, bags.capacity)
