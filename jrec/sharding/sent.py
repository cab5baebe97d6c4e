"""Lookups that are pooled where other devices keep the rows, found at the loader's speed and without the GIL."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jrec.kernel_cache import compiled
from jrec.mesh.send import SendRoute
from jrec.ops.types import Cast
from jrec.sharding.router import Routed

_NO_WEIGHTS, _NO_ADDRESSES = np.empty(0, np.float32), np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SentLookups:
    """Lookups of one stack, in one device's part of a batch, at other devices: device by device, bag by bag.

    Attributes:
      rows: (n,) int32 offsets in the shard of the device.
      starts: (devices + 1,) int64, where the lookups of each device begin.
      bags: (p,) int32, the bags with lookups at each device, ascending within a device.
      firsts: (p,) int32, the first lookup of each bag, counted from the first of its device.
      bag_starts: (devices + 1,) int64, where the bags of each device begin.
      weights: (n,) float32, or None for ones.
      addresses: (n,) int32 of the rows in the stack, or None.
    """

    rows: np.ndarray
    starts: np.ndarray
    bags: np.ndarray
    firsts: np.ndarray
    bag_starts: np.ndarray
    weights: np.ndarray | None = None
    addresses: np.ndarray | None = None

    def line(self, device: int) -> slice:
        """The lookups at one device."""
        return slice(int(self.starts[device]), int(self.starts[device + 1]))

    def bags_of(self, device: int) -> slice:
        """The bags with lookups at one device."""
        return slice(int(self.bag_starts[device]), int(self.bag_starts[device + 1]))

    @staticmethod
    def of(
        bags: np.ndarray,
        owners: np.ndarray,
        offsets: np.ndarray,
        *,
        devices: int,
        weights: np.ndarray | None = None,
        addresses: np.ndarray | None = None,
    ) -> SentLookups:
        """Sorts lookups by device, stably.

        Args:
          bags: (n,) int32, ascending: the bag of each lookup.
          owners: (n,) int32, the device of its row.
          offsets: (n,) int32, the row of that device's shard.
          devices: How many devices there are.
          weights: (n,) float32, or None.
          addresses: (n,) int32 of the rows in the stack, or None.

        Raises:
          ValueError: If bags do not ascend, or an owner is none of the devices.
        """
        columns = [np.ascontiguousarray(a, np.int32) for a in (bags, owners, offsets)]
        beside: list[np.ndarray] = [
            _NO_WEIGHTS if weights is None else np.ascontiguousarray(weights, np.float32),
            _NO_ADDRESSES if addresses is None else np.ascontiguousarray(addresses, np.int32),
        ]
        starts, bag_starts = (np.empty(devices + 1, np.int64) for _ in range(2))
        rows, sent_bags, firsts = (np.empty(bags.size, np.int32) for _ in range(3))
        filled = [np.empty_like(array) for array in beside]
        arguments: Any = (*columns, *beside, starts, rows, *filled, sent_bags, firsts, bag_starts)
        bad = int(_sort_by_owner(*arguments))
        if bad >= 0:
            raise ValueError(
                f"lookup {bad:,} is of bag {int(bags[bad])} at device {int(owners[bad])}; bags must ascend, and there"
                f" are {devices} devices"
            )
        count = int(bag_starts[-1])
        return SentLookups(
            rows=rows,
            starts=starts,
            bags=sent_bags[:count],
            firsts=firsts[:count],
            bag_starts=bag_starts,
            weights=None if weights is None else filled[0],
            addresses=None if addresses is None else filled[1],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """A stack's lookups in a part of a batch: those that read unique rows, and those that are sent.

    Attributes:
      cast: The cast of the lookups that are not sent; its rows are addresses.
      local: The number of each lookup's unique row, -1 where it is sent or padding; of the ids' shape.
      routed: The route of the unique rows of ``cast``.
      sent: The other lookups.
    """

    cast: Cast
    local: np.ndarray
    routed: Routed
    sent: SentLookups


def split_sent(
    cast: Cast,
    routed: Routed,
    sends: np.ndarray,
    *,
    device: int,
    shape: tuple[int, ...],
    weights: np.ndarray | None,
    with_addresses: bool,
) -> Split:
    """Takes lookups of other devices' rows out of a cast.

    Args:
      cast: The cast of all lookups, NumPy arrays.
      routed: The route of its unique rows.
      sends: (num_bags,) bool, the bags whose lookups of other devices' rows are sent.
      device: The device whose lookups these are.
      shape: The ids' shape.
      weights: The lookups' weights, of the ids' shape; None for none.
      with_addresses: Whether lookups keep their rows' addresses.
    """
    n, unique = cast.positions.size, int(cast.num_unique)
    kept: Any = {
        "rows": np.full(np.shape(cast.rows), np.iinfo(np.int32).max, np.int32),
        "offsets": np.empty(np.shape(cast.offsets), np.int32),
        "sources": np.empty(n, np.int32),
        "positions": np.empty(n, np.int32),
    }
    owner, offset = routed.owners(but=device)
    number, local = np.empty(unique, np.int32), np.full(n, -1, np.int32)
    taken = {name: np.empty(n, np.int32) for name in ("bags", "owners", "offsets", "addresses")}
    flat = _NO_WEIGHTS if weights is None else np.asarray(weights).reshape(-1)
    of_lookups = np.empty(n if weights is not None else 0, np.float32)
    of_cast = [np.asarray(a) for a in (cast.rows, cast.offsets, cast.sources, cast.positions)]
    filled = (*kept.values(), number, local, *taken.values(), of_lookups)
    arguments: Any = (*of_cast, unique, owner, offset, sends, flat, *filled)
    count, left = _take_sent(*arguments)
    cut = {name: array[:count] for name, array in taken.items()}
    addresses = cut.pop("addresses")
    sent = SentLookups.of(
        **cut,
        devices=routed.devices,
        weights=None if weights is None else of_lookups[:count],
        addresses=addresses if with_addresses else None,
    )
    kept["num_unique"] = np.array(left, np.int32)
    return Split(cast=Cast(**kept), local=local.reshape(shape), routed=_filtered(routed, number, int(left)), sent=sent)


def _filtered(routed: Routed, number: np.ndarray, left: int) -> Routed:
    """The route of those rows that have a number, -1 saying that a row has none."""
    kept = Routed(
        addresses=routed.addresses[number >= 0],
        rows=np.empty(left, np.int32),
        at=np.empty(left, np.int32),
        starts=np.empty_like(routed.starts),
    )
    _filter_routed(routed.rows, routed.at, routed.starts, number, kept.rows, kept.at, kept.starts)
    return kept


def send_route(lookups: SentLookups, *, num_bags: int, room: int, pooled: int) -> SendRoute:
    """A device's route, in NumPy arrays of static sizes. It runs on the host.

    Args:
      lookups: The lookups of one device.
      num_bags: How many bags that device has.
      room: L, the most lookups at one device.
      pooled: P, the most bags with lookups at one device.

    Raises:
      ValueError: Where a line has more lookups or bags than there is room for.
    """
    devices = len(lookups.starts) - 1
    rows = np.full((devices, room), -1, np.int32)
    beside = {"weights": lookups.weights, "addresses": lookups.addresses}
    made = {k: None if a is None else np.zeros((devices, room), a.dtype) for k, a in beside.items()}
    starts, at = np.empty((devices, pooled), np.int32), np.full((devices, pooled), num_bags, np.int32)
    for device in range(devices):
        line, bags = lookups.line(device), lookups.bags_of(device)
        size, count = line.stop - line.start, bags.stop - bags.start
        for counted, needed, most in (("lookups", size, room), ("bags with lookups", count, pooled)):
            if needed > most:
                raise ValueError(f"there are {needed:,} {counted} at device {device}, but room for {most:,}")
        rows[device, :size] = lookups.rows[line]
        for name, array in beside.items():
            if (out := made[name]) is not None and array is not None:
                out[device, :size] = array[line]
        starts[device], starts[device, :count] = size, lookups.firsts[bags]
        at[device, :count] = lookups.bags[bags]
    arrays: Any = made | {"rows": rows, "starts": starts, "at": at}
    return SendRoute(num_bags=num_bags, **arrays)


@compiled
def _sort_by_owner(
    bags, owners, offsets, weights, addresses, starts, rows, of_rows, at_rows, sent_bags, firsts, bag_starts
):
    """Sorts lookups by owner, stably, and finds the bags of every owner's.

    Args:
      bags: (n,) int32, ascending.
      owners: (n,) int32.
      offsets: (n,) int32.
      weights: (n,) float32, or empty.
      addresses: (n,) int32, or empty.
      starts: (devices + 1,) int64, filled: where the lookups of each owner begin.
      rows, of_rows, at_rows: Filled with offsets, weights and addresses, owner by owner.
      sent_bags: (n,) int32, filled in its first places: the bags of every owner's lookups, owner by owner.
      firsts: (n,) int32, filled alike: the first lookup of each, counted from its owner's first.
      bag_starts: (devices + 1,) int64, filled: where the bags of each owner begin.

    Returns:
      The first lookup whose bag is before its predecessor's or whose owner is no device, -1 if there is none.
    """
    devices = starts.size - 1
    starts[:] = 0
    for k in range(bags.size):
        if owners[k] < 0 or owners[k] >= devices or (k > 0 and bags[k] < bags[k - 1]):
            return k
        starts[owners[k] + 1] += 1
    for d in range(devices):
        starts[d + 1] += starts[d]
    place_of = starts.copy()
    for k in range(bags.size):
        place = place_of[owners[k]]
        place_of[owners[k]] = place + 1
        rows[place] = offsets[k]
        sent_bags[place] = bags[k]
        if weights.size:
            of_rows[place] = weights[k]
        if addresses.size:
            at_rows[place] = addresses[k]
    count = 0
    for d in range(devices):
        bag_starts[d] = count
        for j in range(starts[d], starts[d + 1]):
            bag = sent_bags[j]
            if j == starts[d] or bag != sent_bags[count - 1]:
                sent_bags[count] = bag  # in place: no bag is moved behind its lookup
                firsts[count] = j - starts[d]
                count += 1
    bag_starts[devices] = count
    return -1


@compiled
def _take_sent(
    rows,
    offsets,
    sources,
    positions,
    unique,
    owner,
    offset,
    sends,
    weights,
    kept_rows,
    kept_offsets,
    kept_sources,
    kept_positions,
    number,
    local,
    bags,
    owners,
    shard_rows,
    addresses,
    of_lookups,
):
    """Splits a cast into lookups that are sent, in the order of their positions, and the cast of the others.

    Args:
      rows, offsets, sources, positions: The cast's arrays.
      unique: How many unique rows it has.
      owner: (unique,) int32, the other device that keeps each; -1 where none does.
      offset: (unique,) int32, the row in that device's shard.
      sends: (num_bags,) bool.
      weights: (n,) float32 of the lookups, or empty.
      kept_rows, kept_offsets, kept_sources, kept_positions: As the cast's, filled; ``kept_rows`` only in its
        first places.
      number: (unique,) int32, filled: which kept row each is, -1 for none.
      local: (n,) int32, -1 all of it, filled: the kept row of each lookup that is not sent.
      bags, owners, shard_rows, addresses: (n,) int32, filled in their first places: the sent lookups.
      of_lookups: (n,) float32 or empty, filled alike.

    Returns:
      How many lookups are sent, and how many rows are kept.
    """
    n = positions.size
    left, kept = 0, 0
    for u in range(unique):
        begin = kept
        away = owner[u] >= 0
        for k in range(offsets[u], offsets[u + 1]):
            p, bag = positions[k], sources[k]
            if away and sends[bag]:
                local[p] = -2 - u
                bags[p] = bag
            else:
                local[p] = left
                kept_sources[kept] = bag
                kept_positions[kept] = p
                kept += 1
        number[u] = -1
        if kept > begin:
            kept_rows[left] = rows[u]
            kept_offsets[left] = begin
            number[u] = left
            left += 1
    kept_offsets[left:] = kept
    sent = 0
    for p in range(n):
        if local[p] >= 0:
            continue
        kept_sources[kept] = sends.size
        kept_positions[kept] = p
        kept += 1
        if local[p] == -1:
            continue
        u = -2 - local[p]
        local[p] = -1
        bags[sent] = bags[p]  # in place: no lookup is moved behind itself
        owners[sent] = owner[u]
        shard_rows[sent] = offset[u]
        addresses[sent] = rows[u]
        if weights.size:
            of_lookups[sent] = weights[p]
        sent += 1
    return sent, left


@compiled
def _filter_routed(rows, at, starts, number, kept_rows, kept_at, kept_starts):
    """The rows of a route that are kept, under their new numbers.

    Args:
      rows, at, starts: The route's arrays.
      number: (unique,) int32, -1 for rows that are not kept; ascending otherwise.
      kept_rows, kept_at, kept_starts: filled.
    """
    count = 0
    for g in range(starts.size - 1):
        kept_starts[g] = count
        for k in range(starts[g], starts[g + 1]):
            if number[at[k]] >= 0:
                kept_rows[count] = rows[k]
                kept_at[count] = number[at[k]]
                count += 1
    kept_starts[starts.size - 1] = count
