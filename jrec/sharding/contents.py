"""What a plan's arrays hold: the inverse of ``Plan.locate``.

Addresses are int32, or int64 where the stack has one of 2^31 or more there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED
from jrec.sharding.plans import Plan

MAX_SHARD_ROWS = 2**31 - 2  # offsets are int32, and one past the last row stands for padding


def shard_addresses(plan: Plan, tables: Sequence[tuple[str, int]], device: int, *, copies: bool = True) -> np.ndarray:
    """(rows,) integers: the addresses of what a device's array of sharded rows holds, in the order of offsets.

    Args:
      plan: The plan.
      tables: Name and first address of the stack's tables.
      device: The device whose array it is.
      copies: Whether the copies behind the device's own rows count, too.
    """
    held = (plan.tier == SHARDED) & (plan.owner == device)
    segments, first = table_segments(plan, tables)
    own = held[segments]
    ranges = [(plan.offset[segments[own]], first[own], segments[own])]
    if copies and len(plan.copy_segment):
        place = np.full(len(plan.start), -1, np.int64)
        place[segments] = first
        here = (plan.copy_device == device) & (place[plan.copy_segment] >= 0)
        ranges.append((plan.copy_offset[here], place[plan.copy_segment[here]], plan.copy_segment[here]))
    return _filled(plan, *(np.concatenate(column) for column in zip(*ranges, strict=True)))


def replicated_addresses(plan: Plan, tables: Sequence[tuple[str, int]]) -> np.ndarray:
    """(rows,) integers: the addresses of the replicated rows of a stack, in the order of offsets."""
    segments, first = table_segments(plan, tables)
    here = plan.tier[segments] == REPLICATED
    return _filled(plan, plan.offset[segments[here]], first[here], segments[here])


def host_ranges(plan: Plan, tables: Sequence[tuple[str, int]]) -> np.ndarray:
    """(n, 2) int64, ascending: begin and end of the ranges of a stack's addresses that are in host memory."""
    return _ranges_in(plan, tables, HOST)


def replicated_ranges(plan: Plan, tables: Sequence[tuple[str, int]]) -> np.ndarray:
    """(n, 2) int64, ascending: begin and end of the ranges of a stack's addresses that every device has."""
    return _ranges_in(plan, tables, REPLICATED)


def _ranges_in(plan: Plan, tables: Sequence[tuple[str, int]], tier: int) -> np.ndarray:
    segments, first = table_segments(plan, tables)
    here = plan.tier[segments] == tier
    return joined_ranges(first[here], (first + (plan.stop - plan.start)[segments])[here])


def joined_ranges(begin: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """(m, 2) begin and stop of the ranges that (n,) ascending, disjoint ones make up where neighbours touch."""
    fresh = np.append(True, begin[1:] != stop[:-1])[: begin.size]
    last = np.append(fresh[1:], True)[: begin.size]
    return np.stack([begin[fresh], stop[last]], axis=1)


def table_segments(plan: Plan, tables: Sequence[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of some tables' segments, (n,) int64, and the address that each begins with.

    Args:
      plan: The plan.
      tables: Name and first address of each table.
    """
    numbers = [plan.number(name) for name, _ in tables]
    by_table = [np.arange(plan.first[t], plan.first[t + 1]) for t in numbers]
    segments = np.concatenate(by_table)
    return segments, plan.start[segments] + np.repeat([base for _, base in tables], [len(s) for s in by_table])


def _filled(plan: Plan, offset: np.ndarray, first: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """Addresses by offset, of ranges that begin at ``offset`` with address ``first`` and tile an array."""
    order = np.argsort(offset, kind="stable")
    length = (plan.stop - plan.start)[segment[order]]
    ends = np.cumsum(length)
    if (offset[order] != ends - length).any():
        raise AssertionError("the ranges of an array overlap or leave gaps")
    total = int(ends[-1]) if len(ends) else 0
    # An offset is a place in the array: within a range both go up together.
    addresses = np.arange(total) + np.repeat(first[order] - offset[order], length)
    return addresses.astype(np.int32) if total == 0 or int((first[order] + length).max()) <= 2**31 else addresses


def shard_capacity(plan: Plan, stack: str) -> int:
    """S, the rows of every device's array: as many as the largest shard has, and at least one.

    Raises:
      PlanError: if offsets would not fit into int32.
    """
    rows = plan.shard_rows(stack)
    most = int(rows.max())
    if most > MAX_SHARD_ROWS:
        raise PlanError(
            f"the plan puts {most:,} rows of stack {stack} on device {int(rows.argmax())}, but offsets are int32 and a"
            f" shard holds {MAX_SHARD_ROWS:,} rows at most; plan for more devices"
        )
    return max(1, most)
