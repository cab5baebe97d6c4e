"""A plan: where every row of every table lives, as ranges of rows, and the vectorized way from rows to addresses.

A device holds, of each stack (tables of equal dim and dtype), one array of sharded rows, its own first, then its copies
of others' rows; and one array of replicated rows, which is the same on every device. Host memory holds one array of
each stack, and a tensor-train table numbers its own rows. An *offset* is a row of such an array.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from jrec.data.identity import Identity
from jrec.json_values import JsonMapping
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TIER_NAMES, TT, Pieces, Placement
from jrec.sharding.problem import PlanTable, Problem, Purpose

ARRAYS = {
    "first": np.int64, "start": np.int64, "tier": np.uint8, "owner": np.int16, "offset": np.int64, "path": np.int16,
    "way": np.int32, "copy_segment": np.int32, "copy_device": np.int16, "copy_offset": np.int64,
}  # fmt: skip
"""The arrays of a plan and their dtypes."""


class Located(NamedTuple):
    """Where rows live.

    Attributes:
      tier: (n,) uint8, positions in ``TIER_NAMES``.
      owner: (n,) int16, the device of sharded rows; -1 in other tiers.
      offset: (n,) int64, row of the array of this tier, stack and owner.
    """

    tier: np.ndarray
    owner: np.ndarray
    offset: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A placement of rows, by range.

    Attributes:
      tables: The tables that are placed, in order.
      devices: How many devices it is made for.
      purpose: "training" or "inference".
      dataset: The identity of the dataset whose row order it relies on; None where there is none.
      first: (tables + 1,) int64, positions of each table's segments.
      start: (segments,) int64, the row each begins with; it ends where the table's next one begins.
      tier: (segments,) uint8.
      owner: (segments,) int16, -1 in other tiers than "sharded".
      offset: (segments,) int64, of the first row.
      path: (paths, devices) int16, the ways to fetch that segments use: device ``i`` takes it from ``path[w, i]``; -1
        in tiers that are not fetched.
      way: (segments,) int32, positions in ``path``.
      copy_segment, copy_device, copy_offset: (copies,) the further holders of sharded segments, in inference, and the
        offset of the segment's first row there.
      info: What the plan was made from, in JSON types.
      computes: (devices,) which devices have examples and run the dense model, while the others keep all the rows; None
        where every device does both.
    """

    tables: tuple[PlanTable, ...]
    devices: int
    purpose: Purpose
    dataset: Identity | None
    first: np.ndarray
    start: np.ndarray
    tier: np.ndarray
    owner: np.ndarray
    offset: np.ndarray
    path: np.ndarray
    way: np.ndarray
    copy_segment: np.ndarray
    copy_device: np.ndarray
    copy_offset: np.ndarray
    info: JsonMapping = dataclasses.field(default_factory=dict)
    computes: tuple[bool, ...] | None = None

    @functools.cached_property
    def stop(self) -> np.ndarray:
        """(segments,) int64, the row after each segment's last."""
        # The last segment of a table ends where the table does, not where the next table's first begins.
        ends = np.append(self.start[1:], 0)
        ends[self.first[1:] - 1] = [t.rows for t in self.tables]
        return ends

    @functools.cached_property
    def table(self) -> np.ndarray:
        """(segments,) int32, each one's table."""
        return np.repeat(np.arange(len(self.tables), dtype=np.int32), np.diff(self.first))

    @property
    def compute_devices(self) -> tuple[int, ...]:
        """Numbers of the devices that have examples."""
        return tuple(d for d in range(self.devices) if self.computes is None or self.computes[d])

    def number(self, name: str) -> int:
        """The position of a table.

        Raises:
          PlanError: If the plan has none of this name.
        """
        names = [t.name for t in self.tables]
        if name not in names:
            raise PlanError(f"the plan has no table {name!r}; it has {', '.join(names)}")
        return names.index(name)

    def segments_of(self, table: int, rows: np.ndarray) -> np.ndarray:
        """The segments of (n,) rows of a table.

        Raises:
          PlanError: On rows outside of the table.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.tables[table].rows:
            raise PlanError(
                f"rows {int(rows.min()):,} to {int(rows.max()):,} are not all in table {self.tables[table].name!r} of"
                f" {self.tables[table].rows:,} rows"
            )
        low, high = self.first[table], self.first[table + 1]
        return low + np.searchsorted(self.start[low:high], rows, side="right") - 1

    def locate(self, table: str, rows: np.ndarray) -> Located:
        """Where (n,) rows of a table live.

        Raises:
          PlanError: On an unknown table or rows outside of it.
        """
        rows = np.asarray(rows, np.int64)
        segment = self.segments_of(self.number(table), rows)
        return Located(self.tier[segment], self.owner[segment], self.offset[segment] + rows - self.start[segment])

    def route(self, table: str, rows: np.ndarray, device: int) -> Located:
        """As ``locate``, but by the source that one device fetches from, which may be a copy, its own or another's."""
        rows = np.asarray(rows, np.int64)
        if not 0 <= device < self.devices:
            raise PlanError(f"device {device} is not one of the plan's {self.devices}")
        segment = self.segments_of(self.number(table), rows)
        tier = self.tier[segment]
        source = np.where(tier == SHARDED, self.path[self.way[segment], device], -1).astype(np.int16)
        offset = self.offset[segment]
        copied = np.flatnonzero((tier == SHARDED) & (source != self.owner[segment]))
        if copied.size:
            # Copies are listed by segment, then by device (``np.nonzero`` in ``laid_out``), so that the keys ascend.
            at = np.searchsorted(self._copy_keys, segment[copied] * self.devices + source[copied])
            offset[copied] = self.copy_offset[at]
        return Located(tier, source, offset + rows - self.start[segment])

    @functools.cached_property
    def _copy_keys(self) -> np.ndarray:
        return self.copy_segment.astype(np.int64) * self.devices + self.copy_device

    @functools.cached_property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks, in order of first use."""
        return tuple(dict.fromkeys(t.stack for t in self.tables))

    def shard_rows(self, stack: str) -> np.ndarray:
        """(devices,) int64: rows of a stack in each device's array of sharded rows, copies included."""
        length = self.stop - self.start
        sharded = self._in(stack) & (self.tier == SHARDED)
        rows = np.bincount(self.owner[sharded], length[sharded], self.devices)
        copied = sharded[self.copy_segment]
        rows += np.bincount(self.copy_device[copied], length[self.copy_segment[copied]], self.devices)
        return rows.astype(np.int64)

    def replicated_rows(self, stack: str) -> int:
        """Rows of a stack that every device has."""
        return int((self.stop - self.start)[self._in(stack) & (self.tier == REPLICATED)].sum())

    def host_rows(self, stack: str) -> int:
        """Rows of a stack in host memory."""
        return int((self.stop - self.start)[self._in(stack) & (self.tier == HOST)].sum())

    def rows_in(self, tier: str) -> int:
        """Rows of all tables in a tier."""
        return int((self.stop - self.start)[self.tier == TIER_NAMES.index(tier)].sum())

    def _in(self, stack: str) -> np.ndarray:
        if stack not in self.stacks:
            raise PlanError(f"the plan has no stack {stack!r}; it has {', '.join(self.stacks)}")
        return np.array([t.stack == stack for t in self.tables])[self.table]

    def laid_out(self) -> Plan:
        """The plan with offsets and copies that follow from its tiers, owners and ways: arrays without gaps.

        A device that fetches a sharded row of another owner from itself holds a copy of it, behind its own rows.
        """
        stack = np.array([self.stacks.index(t.stack) for t in self.tables], np.int64)[self.table]
        length, owner, sharded = self.stop - self.start, self.owner, self.tier == SHARDED
        # One array for each stack and owner of sharded rows, each stack of replicated or host rows, each other table.
        array = np.where(self.tier == TT, len(self.stacks) + self.table, stack) * (self.devices + 1) + owner + 1
        every = np.arange(self.devices)
        copied, device = np.nonzero((self.path[self.way] == every) & sharded[:, None] & (every != owner[:, None]))
        shard = stack * self.devices + owner
        own = np.bincount(shard[sharded], length[sharded], len(self.stacks) * self.devices).astype(np.int64)
        behind = stack[copied] * self.devices + device
        return dataclasses.replace(
            self,
            offset=running_offsets(array * len(TIER_NAMES) + self.tier, length),
            copy_segment=copied.astype(np.int32),
            copy_device=device.astype(np.int16),
            copy_offset=own[behind] + running_offsets(behind, length[copied]),
        )

    def placement(self, problem: Problem) -> Placement:
        """The plan as a placement under a problem's accesses, so that ``evaluate`` tells what it costs now.

        Pieces are the plan's segments; their ``start`` and ``stop`` are rows, not ranks.
        """
        if [(t.name, t.rows) for t in problem.tables] != [(t.name, t.rows) for t in self.tables]:
            raise PlanError("the problem has other tables than the plan")
        if problem.devices != self.devices:
            raise PlanError(f"the plan is for {self.devices} devices, not the {problem.devices} of this hardware")
        rows, fetched = self.stop - self.start, np.empty(len(self.start))
        for t, ranked in enumerate(problem.by_row):
            segments = slice(self.first[t], self.first[t + 1])
            mass = ranked.mass_before(self.stop[segments]) - ranked.mass_before(self.start[segments])
            fetched[segments] = mass * problem.row_bytes[t]
        pieces = Pieces(
            table=self.table,
            start=self.start,
            stop=self.stop,
            memory=rows * problem.memory_bytes[self.table].astype(np.float64),
            fetched=fetched,
        )
        return Placement(
            pieces=pieces,
            tier=self.tier,
            owner=self.owner,
            path=self.path[self.way],
            core_bytes=float(self.info.get("core_bytes", 0.0)),
            core_seconds=float(self.info.get("core_seconds", 0.0)),
        )


def build_plan(problem: Problem, placement: Placement, info: JsonMapping | None = None) -> Plan:
    """Turns a placement of ranks into ranges of rows with offsets; neighbouring ranges that live alike are joined."""
    problem = problem.cut(placement.cuts)
    # Few ways are there of many pieces: a plan stores each once.
    paths, way_of_piece = np.unique(placement.path, axis=0, return_inverse=True)
    table, start, piece = _row_ranges(problem, placement.pieces)
    way = way_of_piece.reshape(-1)[piece]
    lives = np.stack([table, placement.tier[piece], placement.owner[piece], way])
    fresh = np.append(True, (lives[:, 1:] != lives[:, :-1]).any(axis=0))
    table, tier, owner, way = lives[:, fresh]
    arrays = {
        "first": np.searchsorted(table, np.arange(len(problem.tables) + 1)),
        "start": start[fresh],
        "tier": tier,
        "owner": owner,
        "path": paths,
        "way": way,
    }
    plan = empty_plan(problem.devices, problem.purpose)
    return dataclasses.replace(
        plan,
        tables=problem.tables,
        dataset=problem.profile.dataset,
        info=dict(info or {}) | {"core_bytes": placement.core_bytes, "core_seconds": placement.core_seconds},
        computes=problem.computes,
        **{name: array.astype(ARRAYS[name]) for name, array in arrays.items()},
    ).laid_out()


def empty_plan(devices: int, purpose: Purpose = "training") -> Plan:
    """A plan without tables."""
    arrays: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in ARRAYS.items()}
    arrays |= {"first": np.zeros(1, np.int64), "path": np.empty((0, devices), np.int16)}
    return Plan(tables=(), devices=devices, purpose=purpose, dataset=None, **arrays)


def running_offsets(group: np.ndarray, length: np.ndarray) -> np.ndarray:
    """(n,) int64: how much the earlier members of each one's group take."""
    order = np.argsort(group, kind="stable")
    total = np.cumsum(length[order]) - length[order]
    new = np.append(True, group[order][1:] != group[order][:-1]) if len(order) else np.empty(0, bool)
    base = np.repeat(total[new], np.diff(np.append(np.flatnonzero(new), len(order))))
    out = np.empty(len(order), np.int64)
    out[order] = total - base
    return out


def _row_ranges(problem: Problem, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(table, first row, piece) of ranges that cover every table in row order."""
    tables, rows, members = [], [], []
    for t, ranked in enumerate(problem.ranked):
        own = np.flatnonzero(pieces.table == t)
        own = own[np.argsort(pieces.start[own], kind="stable")]
        bounds = np.append(pieces.start[own], pieces.stop[own[-1]] if len(own) else 0)
        whole = len(own) and bounds[0] == 0 and bounds[-1] == problem.tables[t].rows
        if not whole or (pieces.stop[own] != bounds[1:]).any():
            raise PlanError(f"the placement does not hold every row of table {problem.tables[t].name!r} exactly once")
        # Ranks are rows in runs: a range of rows begins with a piece or with a run that does not go on from the last.
        jump = ranked.first_row[1:] != ranked.first_row[:-1] + np.diff(ranked.starts)[:-1]
        ranks = np.union1d(bounds[:-1], ranked.starts[1:-1][jump])
        run = np.searchsorted(ranked.starts, ranks, side="right") - 1
        row = ranked.first_row[run] + ranks - ranked.starts[run]
        member = own[np.searchsorted(bounds, ranks, side="right") - 1]
        order = np.argsort(row)
        tables.append(np.full(len(ranks), t, np.int64))
        rows.append(row[order])
        members.append(member[order])
    return np.concatenate(tables), np.concatenate(rows), np.concatenate(members)
