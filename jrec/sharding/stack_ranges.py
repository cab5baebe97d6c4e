"""The ranges of a stack's addresses in a plan, and where one device reads the rows of each from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrec.sharding.contents import table_segments
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, SHARDED, TIER_NAMES, TT
from jrec.sharding.plans import Plan


class StackRanges:
    """Where the rows of one stack lie.

    Args:
      plan: The plan.
      tables: Name and first address of the stack's tables, ascending, without gaps.

    Attributes:
      begin: (ranges,) int64, ascending, the first address of each range.
      rows: The stack's rows.

    Raises:
      PlanError: If the plan keeps some of the rows in tensor-train cores.
    """

    def __init__(self, plan: Plan, tables: Sequence[tuple[str, int]]) -> None:
        self._plan = plan
        self._segments, self.begin = table_segments(plan, tables)
        self._tier = plan.tier[self._segments]
        last, base = tables[-1]
        self.rows = base + plan.tables[plan.number(last)].rows
        if (self._tier == TT).any():
            raise PlanError(
                f"rows of tables {', '.join(n for n, _ in tables)} are of tier {TIER_NAMES[TT]!r}: not routed"
            )

    def read_by(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Where a device reads the rows of every range.

        Returns:
          (ranges,) int64: the device whose shard it reads, which may hold a copy; the number of devices for the
          replicated array, one more for host memory. And (ranges,) int64, what turns an address into an offset there.
        """
        plan, segments = self._plan, self._segments
        elsewhere = np.where(self._tier == HOST, plan.devices + 1, plan.devices)
        source = np.where(self._tier == SHARDED, plan.path[plan.way[segments], device], elsewhere)
        shift = plan.offset[segments] - self.begin
        place = np.full(len(plan.start), -1)
        place[segments] = np.arange(len(segments))
        copies = np.flatnonzero(place[plan.copy_segment] >= 0)
        copied = place[plan.copy_segment[copies]]
        read = source[copied] == plan.copy_device[copies]
        # A device that has a copy of a range on the way reads it there, at the copy's own offset.
        shift[copied[read]] = plan.copy_offset[copies[read]] - self.begin[copied[read]]
        return source.astype(np.int64), shift

    def located(self, addresses: np.ndarray, device: int) -> tuple[np.ndarray, np.ndarray]:
        """The source and the offset, as of ``read_by``, of each of (n,) addresses, as a device reads them."""
        source, shift = self.read_by(device)
        ranges = np.searchsorted(self.begin, addresses, side="right") - 1
        return source[ranges], addresses + shift[ranges]

    def of_devices(self, devices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What devices find rows with: (devices, ranges) int32 first addresses, sources and shifts, modulo 2^32."""
        source, shift = (np.stack(arrays) for arrays in zip(*map(self.read_by, devices), strict=True))
        begin = np.broadcast_to(self.begin, source.shape)
        # Modulo 2^32 the sum of an address and its shift is right again: offsets themselves fit int32.
        return begin.astype(np.int32), source.astype(np.int32), shift.astype(np.int32)


def within(addresses: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Which of (n,) ascending addresses lie in (m, 2) ascending ranges, (n,) bool."""
    # +1 where a range begins, -1 where it ends: the running sum counts the ranges that an address is in.
    edges = np.zeros(addresses.size + 1, np.int32)
    begin, stop = np.searchsorted(addresses, ranges.T)
    np.add.at(edges, begin, 1)
    np.subtract.at(edges, stop, 1)
    return np.cumsum(edges[:-1]) > 0
