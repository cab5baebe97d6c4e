"""The unique rows of a batch, sorted by where one device finds them, at the loader's speed and without the GIL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TIER_NAMES
from jrec.sharding.plans import Plan
from jrec.sharding.router_kernel import route_rows


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

    def of(self, array: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and places of one array, numbered as in ``starts``."""
        chosen = slice(int(self.starts[array]), int(self.starts[array + 1]))
        return self.rows[chosen], self.at[chosen]

    @property
    def counts(self) -> np.ndarray:
        """(devices + 2,) int64, rows of every array."""
        return np.diff(self.starts)


class Router:
    """Routes rows of one stack. Thread-safe.

    Rows of a batch's cast ascend, so one pass over them and the plan's ranges finds all.

    Args:
      plan: The plan by which rows are routed.
      tables: Name and first address of the stack's tables, ascending, without gaps.
      devices: The devices whose rows are routed; None for all of the plan's. Of a plan without further copies of rows,
        which training has, all devices share one array of sources and one of offsets.

    Raises:
      PlanError: If the plan keeps some of the rows in tensor-train cores.
    """

    def __init__(self, plan: Plan, tables: Sequence[tuple[str, int]], devices: Iterable[int] | None = None) -> None:
        self.devices = plan.devices
        numbers = [plan.number(name) for name, _ in tables]
        by_table = [np.arange(plan.first[t], plan.first[t + 1]) for t in numbers]
        segments = np.concatenate(by_table)
        bases = np.repeat([base for _, base in tables], [len(s) for s in by_table])
        total = tables[-1][1] + plan.tables[numbers[-1]].rows
        self._ends = np.append(plan.start[segments] + bases, total)
        tier = plan.tier[segments]
        if not np.isin(tier, (SHARDED, REPLICATED, HOST)).all():
            other = TIER_NAMES[int(tier[~np.isin(tier, (SHARDED, REPLICATED, HOST))][0])]
            raise PlanError(f"rows of tables {', '.join(n for n, _ in tables)} are of tier {other!r}: not routed")
        host = np.where(tier == HOST, plan.devices + 1, plan.devices).astype(np.int16)
        sharded, shift = tier == SHARDED, plan.offset[segments] - self._ends[:-1]
        number = np.full(len(plan.start), -1)
        number[segments] = np.arange(len(segments))
        copied = np.flatnonzero(number[plan.copy_segment] >= 0)
        self._group: dict[int, np.ndarray] = {}
        self._shift: dict[int, np.ndarray] = {}
        before: np.ndarray | None = None
        for device in range(plan.devices) if devices is None else devices:
            group = np.where(sharded, plan.path[plan.way[segments], device], host)
            before = self._group[device] = before if before is not None and np.array_equal(before, group) else group
            self._shift[device] = shift
            copies = copied[group[number[plan.copy_segment[copied]]] == plan.copy_device[copied]]
            if copies.size:
                own = self._shift[device] = shift.copy()
                held = number[plan.copy_segment[copies]]
                own[held] = plan.copy_offset[copies] - self._ends[held]

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
        bad = int(route_rows(addresses, self._ends, self._group[device], self._shift[device], *places))  # pyright: ignore[reportCallIssue, reportArgumentType]
        if bad >= 0:
            raise PlanError(
                f"address {int(addresses[bad]):,}, at place {bad:,}, does not ascend or is not in a stack of"
                f" {int(self._ends[-1]):,} rows"
            )
        return routed
