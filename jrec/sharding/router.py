"""The unique rows of a batch, sorted by where one device finds them, at the loader's speed and without the GIL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrec.kernel_cache import compiled
from jrec.sharding.contents import table_segments
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, SHARDED, TIER_NAMES, TT
from jrec.sharding.plans import Plan


class Taken(NamedTuple):
    """The rows that are read from one array.

    Attributes:
      rows: (m,) int32 offsets in the array.
      at: (m,) int32, ascending, which of the route's addresses each is.
    """

    rows: np.ndarray
    at: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """The unique rows of one stack in one device's part of a batch.

    Attributes:
      addresses: (n,) int32, or int64 of a stack of 2^31 rows or more, ascending.
      rows: (n,) int32, offsets in the array that each is read from: of device 0, of device 1 and so on, then of the
        replicated array and of host memory.
      at: (n,) int32, which of the addresses each is; ascending within an array.
      starts: (devices + 3,) int64, where the offsets of each array begin.
    """

    addresses: np.ndarray
    rows: np.ndarray
    at: np.ndarray
    starts: np.ndarray

    @staticmethod
    def joined(addresses: np.ndarray, shards: Sequence[Taken], replicated: Taken, host: Taken) -> Routed:
        """The route that reads these rows, ``shards`` by device."""
        rows, at = zip(*shards, replicated, host, strict=True)
        starts = np.cumsum([0, *(of_array.size for of_array in rows)])
        return Routed(addresses=addresses, rows=np.concatenate(rows), at=np.concatenate(at), starts=starts)

    @property
    def devices(self) -> int:
        """How many devices have a shard."""
        return len(self.starts) - 3

    @property
    def counts(self) -> np.ndarray:
        """(devices + 2,) int64, rows of every array."""
        return np.diff(self.starts)

    def shard(self, device: int) -> Taken:
        """The rows of a device's shard."""
        return self._taken(device)

    @property
    def replicated(self) -> Taken:
        """The rows of the replicated array."""
        return self._taken(self.devices)

    @property
    def host(self) -> Taken:
        """The rows in host memory."""
        return self._taken(self.devices + 1)

    def owners(self, *, but: int) -> tuple[np.ndarray, np.ndarray]:
        """The device other than ``but`` that keeps each address, (n,) int32, or -1; and the offset there."""
        owner, offset = np.full(self.addresses.size, -1, np.int32), np.empty(self.addresses.size, np.int32)
        for device in range(self.devices):
            if device != but:
                rows, at = self.shard(device)
                owner[at], offset[at] = device, rows
        return owner, offset

    def _taken(self, array: int) -> Taken:
        chosen = slice(int(self.starts[array]), int(self.starts[array + 1]))
        return Taken(self.rows[chosen], self.at[chosen])


class Router:
    """Routes rows of one stack. Thread-safe.

    Rows of a batch's cast ascend, so one pass over them and the plan's ranges finds all.

    Args:
      plan: The plan by which rows are routed.
      tables: Name and first address of the stack's tables, ascending, without gaps.
      devices: The devices whose rows are routed; None for all of the plan's.

    Raises:
      PlanError: If the plan keeps some of the rows in tensor-train cores.
    """

    def __init__(self, plan: Plan, tables: Sequence[tuple[str, int]], devices: Iterable[int] | None = None) -> None:
        self.devices = plan.devices
        segments, begin = table_segments(plan, tables)
        last, base = tables[-1]
        self._ends = np.append(begin, base + plan.tables[plan.number(last)].rows)
        tier = plan.tier[segments]
        if (tier == TT).any():
            raise PlanError(
                f"rows of tables {', '.join(n for n, _ in tables)} are of tier {TIER_NAMES[TT]!r}: not routed"
            )
        # Without copies of rows, as in training, all devices share one array of sources and one of shifts.
        self._source: dict[int, np.ndarray] = {}
        self._shift: dict[int, np.ndarray] = {}
        elsewhere = np.where(tier == HOST, plan.devices + 1, plan.devices).astype(np.int16)
        owned = plan.offset[segments] - begin
        copied, copies = _copies_of(plan, segments)
        before: np.ndarray | None = None
        for device in range(plan.devices) if devices is None else devices:
            source = np.where(tier == SHARDED, plan.path[plan.way[segments], device], elsewhere)
            before = source if before is None or not np.array_equal(before, source) else before
            self._source[device], self._shift[device] = before, owned
            read = source[copied] == plan.copy_device[copies]
            if read.any():
                self._shift[device] = owned.copy()
                self._shift[device][copied[read]] = plan.copy_offset[copies[read]] - begin[copied[read]]

    def ranges(self, devices: Sequence[int]) -> Any:
        """What some devices route by themselves with: (devices, ranges) int32 first addresses, sources and shifts."""
        begin = np.tile(self._ends[:-1], (len(devices), 1))
        source, shift = (np.stack([of[device] for device in devices]) for of in (self._source, self._shift))
        return begin.astype(np.int32), source.astype(np.int32), shift.astype(np.int32)

    def route(self, addresses: np.ndarray, device: int) -> Routed:
        """Sorts addresses by where one device reads them.

        Args:
          addresses: (n,) int32 or int64, ascending.
          device: One of those that the router was made for.

        Raises:
          PlanError: On addresses outside of the stack, or that do not ascend.
        """
        addresses = np.ascontiguousarray(addresses, np.int64 if addresses.dtype == np.int64 else np.int32)
        n = addresses.size
        routed = Routed(
            addresses=addresses,
            rows=np.empty(n, np.int32),
            at=np.empty(n, np.int32),
            starts=np.empty(self.devices + 3, np.int64),
        )
        segments = np.empty(n, np.int32)
        places = (segments, routed.starts, routed.rows, routed.at)
        bad = int(_route_rows(addresses, self._ends, self._source[device], self._shift[device], *places))  # pyright: ignore[reportCallIssue, reportArgumentType]
        if bad >= 0:
            raise PlanError(
                f"address {int(addresses[bad]):,}, at place {bad:,}, does not ascend or is not in a stack of"
                f" {int(self._ends[-1]):,} rows"
            )
        return routed


def _copies_of(plan: Plan, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plan's further copies of some segments: the place of the segment among these, and the number of the copy."""
    place = np.full(len(plan.start), -1)
    place[segments] = np.arange(len(segments))
    copies = np.flatnonzero(place[plan.copy_segment] >= 0)
    return place[plan.copy_segment[copies]], copies


@compiled
def _route_rows(addresses, ends, group, shift, segments, starts, rows, at):
    """Locates ascending rows and sorts them by group, stably.

    Args:
      addresses: (n,) int32 or int64, ascending.
      ends: (segments + 1,) int64, first addresses of segments, then the stack's rows.
      group: (segments,) int16, the array that each segment is read from, numbered as in ``Routed.starts``.
      shift: (segments,) int64, what turns an address into an offset.
      segments: (n,) int32, filled: the segment of each row.
      starts: (groups + 1,) int64, filled: where each group begins.
      rows: (n,) int32, filled: offsets by group.
      at: (n,) int32, filled: which of the addresses each is.

    Returns:
      The place of the first address that is not in the stack or does not ascend, -1 if there is none.
    """
    groups = starts.size - 1
    starts[:] = 0
    segment, last, previous = 0, ends.size - 2, -1
    for k in range(addresses.size):
        row = addresses[k]
        if row <= previous or row >= ends[last + 1]:
            return k
        previous = row
        # Rows ascend: the segment is near the one before, so search in doubling steps from there.
        step = 1
        low = segment
        while low + step <= last and ends[low + step] <= row:
            low += step
            step *= 2
        high = min(low + step, last + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if ends[middle] <= row:
                low = middle
            else:
                high = middle
        segment = low
        segments[k] = segment
        starts[group[segment] + 1] += 1
    for g in range(groups):
        starts[g + 1] += starts[g]
    for k in range(addresses.size):
        segment = segments[k]
        place = starts[group[segment]]
        starts[group[segment]] += 1
        rows[place] = addresses[k] + shift[segment]
        at[place] = k
    for g in range(groups, 0, -1):
        starts[g] = starts[g - 1]
    starts[0] = 0
    return -1
