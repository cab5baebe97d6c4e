"""The plan of a run: given, or made without a profile, and cut down to the tables that the run places by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.access.profile import AccessProfile, TableProfile
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.sharding import BASELINES, Plan, Problem, build_plan
from jrec.sharding.contents import joined_ranges
from jrec.sharding.errors import PlanError
from jrec.sharding.hardware import grid
from jrec.sharding.of_layout import SlotShapes, plan_tables_of
from jrec.sharding.pieces import REPLICATED, SHARDED, TIER_NAMES, TT
from jrec.sharding.plan_file import check_budget
from jrec.sharding.plans import empty_plan

WHOLE = ("host", "replicated")
"""Tiers of tables whose rows are all there, whatever a plan says."""


def placed_plan(
    plan: Plan | None,
    layout: EmbeddingLayout,
    devices: int,
    slots: SlotShapes | None,
    *,
    everywhere: Mapping[str, np.ndarray] | None = None,
) -> Plan:
    """Where the rows of a layout's planned tables live; the plan has only these tables, and offsets without gaps.

    Args:
      plan: Where rows are, but for tables of tiers "host" and "replicated", which are there as a whole; None deals rows
        to the devices in turn.
      layout: The tables.
      devices: The number of devices.
      slots: The row optimizer's slots, which take memory; None to predict only.
      everywhere: By table, (n,) ascending rows that every device has, whatever the plan says.

    Raises:
      PlanError: If the devices cannot hold the rows, the plan lacks a table, or fetches rows from where they are not.
    """
    planned = layout.planned_stacks
    if not planned:
        return empty_plan(devices)
    tables = [table for stack in planned for table in stack.tables]
    whole_plan = default_plan(layout, devices, slots) if plan is None else plan
    _check_paths(whole_plan)
    placed = whole_plan
    for tier in WHOLE:
        whole = {table.name: np.array([[0, table.rows]]) for table in tables if table.tier == tier}
        placed = overlaid(placed, whole, TIER_NAMES.index(tier))
    names = {table.name for table in tables}
    # Last, so that these rows are on every device even where their table lies in host memory as a whole.
    shared = {name: ranges_of(rows) for name, rows in (everywhere or {}).items() if name in names}
    placed = overlaid(placed, shared, REPLICATED)
    held = planned_part(placed, layout, slots)
    if (memory := dict(whole_plan.info.get("hardware", {})).get("memory")) is not None:
        # ``planned_part`` drops the information, but tensor-train cores of the whole plan take the same memory.
        cores = dataclasses.replace(held, info={"core_bytes": whole_plan.info.get("core_bytes", 0.0)})
        check_budget(cores, memory)
    return held


def _check_paths(plan: Plan) -> None:
    """Refuses a plan by which a device fetches rows from one that does not hold them: it would get others.

    A holder besides the owner is named by ``Plan.copy_device``, and fetches the rows from itself (``Plan.laid_out``).
    """
    sharded = np.flatnonzero(plan.tier == SHARDED)
    fetched = plan.path[plan.way[sharded]]
    at, device = np.nonzero(fetched != plan.owner[sharded][:, None])
    source = fetched[at, device]
    holds = fetched[at, source] == source
    copies = plan.copy_segment.astype(np.int64) * plan.devices + plan.copy_device
    wrong = np.flatnonzero(~(holds & np.isin(sharded[at] * plan.devices + source, copies)))
    if wrong.size:
        segment = sharded[at[wrong[0]]]
        raise PlanError(
            f"the plan has device {device[wrong[0]]} fetch the rows from {plan.start[segment]:,} on of table"
            f" {plan.tables[plan.table[segment]].name!r} from device {source[wrong[0]]}, which does not hold them;"
            f" device {plan.owner[segment]} does: let Plan.path and Plan.owner agree"
        )


def check_tables(plan: Plan, layout: EmbeddingLayout) -> None:
    """Refuses a plan of other tables than the layout's.

    Raises:
      ConfigError: If a table has other rows there, or lies in tensor-train cores, which a layout says itself.
      PlanError: If a table is missing.
    """
    for stack in layout.planned_stacks:
        for table in stack.tables:
            number = plan.number(table.name)
            planned = plan.tables[number]
            ours = {"rows": table.rows, "dim": table.dim, "dtype": table.dtype}
            theirs = {
                "rows": min(planned.rows, table.rows) if table.is_part else planned.rows,
                "dim": planned.dim,
                "dtype": planned.dtype,
            }
            for field, own in ours.items():
                if own != theirs[field]:
                    raise ConfigError(
                        f"the plan places table {table.name!r} with {field} {theirs[field]}, but the layout has {own};"
                        " plan for this layout"
                    )
            segments = slice(plan.first[number], plan.first[number + 1])
            if (plan.tier[segments][plan.start[segments] < table.rows] == TT).any():
                raise ConfigError(
                    f"the plan puts rows of table {table.name!r} into tensor-train cores; give the layout a TableConfig"
                    " of tier 'tt' with a tt_shape for them, or plan without tensor trains"
                )


def ranges_of(rows: np.ndarray) -> np.ndarray:
    """(n, 2) int64, begin and end of the ranges that (m,) ascending rows make up."""
    rows = rows.astype(np.int64)
    return joined_ranges(rows, rows + 1)


def overlaid(plan: Plan, ranges: Mapping[str, np.ndarray], tier: int) -> Plan:
    """A plan with some rows in another tier, whose offsets and copies are yet to be found (``planned_part``).

    Args:
      plan: The plan.
      ranges: By table, (n, 2) int64 begin and end of the rows, ascending and apart.
      tier: Their new tier, ``HOST`` or ``REPLICATED``.
    """
    if not any(of_table.size for of_table in ranges.values()):
        return plan
    starts, old, covered = [], [], []
    for number, table in enumerate(plan.tables):
        own_start = plan.start[plan.first[number] : plan.first[number + 1]]
        cuts = ranges.get(table.name, np.empty((0, 2), np.int64))
        cuts = np.minimum(cuts[cuts[:, 0] < table.rows], table.rows)
        start = np.unique(np.concatenate([own_start, cuts.reshape(-1)]))
        start = start[start < table.rows]
        starts.append(start)
        old.append(plan.first[number] + np.searchsorted(own_start, start, side="right") - 1)
        # Segments were cut at the ranges' ends, so each lies within one range as a whole, or within none.
        inside = np.searchsorted(cuts[:, 0], start, side="right") - 1
        ends = np.append(cuts[:, 1], 0)  # the last is for rows before the first range
        covered.append(start < ends[inside])
    first = np.cumsum([0, *(len(start) for start in starts)])
    segment, moved = np.concatenate(old), np.concatenate(covered)
    none = empty_plan(plan.devices)
    return dataclasses.replace(
        plan,
        first=first,
        start=np.concatenate(starts),
        tier=np.where(moved, np.uint8(tier), plan.tier[segment]),
        owner=np.where(moved, np.int16(-1), plan.owner[segment]),
        offset=np.zeros(len(segment), np.int64),
        way=plan.way[segment],
        # Copies refer to the old segments by number; ``laid_out`` finds them, and the offsets, anew.
        copy_segment=none.copy_segment,
        copy_device=none.copy_device,
        copy_offset=none.copy_offset,
    )


def computing_of(plan: Plan, processes: Sequence[int]) -> list[int]:
    """How many devices of each process compute, process by process; ``processes`` has each device's process."""
    return [sum(processes[d] == p for d in plan.compute_devices) for p in sorted(set(processes))]


def default_plan(
    layout: EmbeddingLayout, devices: int, slots: SlotShapes | None = None, baseline: str = "row-wise"
) -> Plan:
    """A plan that needs no access profile: one of ``jrec.sharding.BASELINES``.

    Args:
      layout: The layout whose planned tables are placed.
      devices: The number of devices.
      slots: The row optimizer's slots; None without slots.
      baseline: The baseline's name. Rows descend by frequency, so dealing them in turn shares the frequent ones.
    """
    tables = plan_tables_of(layout, slots)
    flat = tuple(TableProfile(name=t.name, starts=np.array([0, t.rows]), counts=np.array([1.0])) for t in tables)
    profile = AccessProfile(tables=flat, examples=1, source="none", dataset=None)
    # No hardware is known, and none matters: a baseline deals rows by their numbers alone.
    machine = grid("any", devices=devices, memory=2**62, lookup=1.0, within=1.0, all_reduce=1.0)
    problem = Problem(tables=tables, profile=profile, hardware=machine, batch_size=devices)
    return build_plan(problem, BASELINES[baseline](problem))


def planned_part(plan: Plan, layout: EmbeddingLayout, slots: SlotShapes | None = None) -> Plan:
    """The part of a plan with only a layout's planned tables, in the layout's order, with offsets without gaps.

    Of a table in parts it has the ranges of the uncompressed rows. Copies of rows, in plans for inference, keep their
    devices.
    """
    tables = plan_tables_of(layout, slots)
    numbers = [plan.number(t.name) for t in tables]
    chosen = [np.arange(plan.first[n], plan.first[n + 1]) for n in numbers]
    chosen = [c[plan.start[c] < t.rows] for c, t in zip(chosen, tables, strict=True)]
    segments = np.concatenate([np.empty(0, np.int64), *chosen])
    return dataclasses.replace(
        plan,
        tables=tables,
        first=np.cumsum([0, *(len(of_table) for of_table in chosen)]),
        start=plan.start[segments],
        tier=plan.tier[segments],
        owner=plan.owner[segments],
        way=plan.way[segments],
        info={},
    ).laid_out()
