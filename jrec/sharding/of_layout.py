"""The plan of a model's layout, for programs; ``jrec plan`` plans a dataset's tables."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrec.access.profile import AccessProfile, TableProfile
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizer, SlotShape, slot_bytes
from jrec.sharding.drift import describe
from jrec.sharding.hardware import Hardware, load_hardware
from jrec.sharding.plan_file import check_budget
from jrec.sharding.planner import PlanOptions, plan_placement
from jrec.sharding.plans import Plan, build_plan
from jrec.sharding.problem import DEFAULT_EXTRA, PlanTable, Problem, Purpose

SlotShapes = Mapping[str, SlotShape] | Callable[[str], Mapping[str, SlotShape]]
"""Slots of the row optimizer (``RowOptimizer.slots``), for all tables or by a table's name."""


def plan(
    layout: EmbeddingLayout,
    *,
    counts: AccessProfile | Mapping[str, np.ndarray] | None = None,
    examples: int | None = None,
    hardware: str | os.PathLike[str] | Hardware,
    devices: int | None = None,
    memory: int | Sequence[int] | None = None,
    batch_size: int,
    optimizer: RowOptimizer | None = None,
    extra_memory: float = DEFAULT_EXTRA,
    purpose: Purpose = "training",
    options: PlanOptions | None = None,
) -> Plan:
    """Where every uncompressed row of a layout's tables lives, near the optimum (OPER, sections 3 and 4).

      >>> plan = jrec.sharding.plan(layout, counts=counts, hardware="h200x8", devices=4, batch_size=65_536)
      >>> run = jrec.distribute(model, optimizer, mesh=jax.make_mesh((4,), ("devices",)), plan=plan)

    Args:
      layout: The tables and features.
      counts: How often the rows are accessed: a profile (``jrec.access``), or by table the (rows,) accesses of single
        rows in ``examples`` examples. None for rows that are all accessed alike.
      examples: The examples that ``counts`` by table were counted in.
      hardware: A preset of ``jrec.sharding.PRESETS``, a TOML file as `jrec plan --help` shows it, or the description.
      devices: The number of the hardware's devices to use, the first ones; None for all.
      memory: Bytes for tables on each device; None for what the hardware says.
      batch_size: Examples of one step over all devices together.
      optimizer: The optimizer of the rows, whose slots take memory where the row lives; None for one without slots.
      extra_memory: Memory for copies of rows, as a share of the tables' size.
      purpose: "training" or "inference".
      options: How hard to try, and what is allowed; None for the defaults.

    Raises:
      ConfigError: If ``examples`` is missing, or the hardware is unknown or has too few devices.
      PlanError: If the tables do not fit.
      ProfileError: If there are no counts of a table, or not as many as it has rows.
    """
    tables = plan_tables_of(layout.with_plan(), {} if optimizer is None else optimizer.slots)
    described = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    described = described if devices is None else described.first(devices)
    if memory is not None:
        described = described.with_memory(memory)
    problem = Problem(
        tables=tables,
        profile=_profile(tables, layout, counts, examples),
        hardware=described,
        batch_size=batch_size,
        purpose=purpose,
        extra_memory=extra_memory,
    )
    options = PlanOptions() if options is None else options
    planned = plan_placement(problem, options)
    made = build_plan(problem, planned.placement, describe(problem, options, planned))
    check_budget(made, problem.hardware.memory)
    return made


def _profile(
    tables: Sequence[PlanTable],
    layout: EmbeddingLayout,
    counts: AccessProfile | Mapping[str, np.ndarray] | None,
    examples: int | None,
) -> AccessProfile:
    if isinstance(counts, AccessProfile):
        return counts
    if counts is None:
        lookups = collections.Counter({table.name: 0 for table in tables})
        for config, _ in layout.features:
            lookups[config.table] += config.max_length
        alike = tuple(
            TableProfile(name=t.name, starts=np.array([0, t.rows]), counts=np.array([lookups[t.name] / t.rows]))
            for t in tables
        )
        return AccessProfile(tables=alike, examples=1, source="none", dataset=None)
    if examples is None or examples < 1:
        raise ConfigError(f"examples is {examples}; say in how many examples the rows were counted")
    if missing := sorted({table.name for table in tables} - counts.keys()):
        raise ConfigError(f"there are counts of {', '.join(counts) or 'no table'}, but none of {', '.join(missing)}")
    for table in tables:
        if np.shape(counts[table.name]) != (table.rows,):
            raise ConfigError(
                f"counts of table {table.name!r} have shape {np.shape(counts[table.name])}, but it has {table.rows:,}"
                " rows; give one number a row"
            )
    profiles = tuple(TableProfile.from_counts(table.name, np.asarray(counts[table.name])) for table in tables)
    return AccessProfile(tables=profiles, examples=examples, source="counts", dataset=None)


def plan_tables_of(layout: EmbeddingLayout, slots: SlotShapes | None = None) -> tuple[PlanTable, ...]:
    """The planned tables of a layout, stack by stack."""
    of_table = slots if callable(slots) else lambda _: slots or {}
    stacks_of_kind: collections.Counter[tuple[int, str, str]] = collections.Counter()
    tables = []
    for stack in layout.planned_stacks:
        kind = stack.dim, stack.dtype, stack.tables[0].group
        stacks_of_kind[kind] += 1
        tables += [
            PlanTable(
                name=table.name,
                rows=table.rows,
                dim=table.dim,
                dtype=table.dtype,
                slot_bytes=slot_bytes(of_table(table.name), table.dim),
                group=table.group,
                stack_number=stacks_of_kind[kind],
            )
            for table in stack.tables
        ]
    return tuple(tables)
