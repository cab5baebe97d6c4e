"""The plan of a configured run: its file read and checked against the configuration, in the configuration's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jrec.app.config import TrainConfig
from jrec.data.fae import FaeManifest
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.run.placement.plan import WHOLE, computing_of, placed_plan
from jrec.sharding import Plan
from jrec.sharding.of_layout import SlotShapes
from jrec.sharding.pieces import TT
from jrec.sharding.plan_file import check_dataset, check_devices


def run_plan(
    plan: Plan | None,
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    slots: SlotShapes | None,
    *,
    packed: FaeManifest | None = None,
) -> Plan:
    """Where the rows of a run's planned tables live; it has only these tables.

    Rows are where the run's plan file has them or, without one, dealt to the devices in turn; tables of tiers "host"
    and "replicated" are there as a whole; and every device has the hot rows of an FAE folder.

    Args:
      plan: What the configuration names (``RunData.plan``).
      config: The run's configuration.
      schema: The dataset.
      layout: The tables.
      slots: The row optimizer's slots (``RowOptimizer.slots``), which take memory; None to predict only, which also
        accepts plans for inference.
      packed: Hot and cold examples, and the hot rows.

    Raises:
      PlanError: If the plan file is for another dataset or another number of devices, or its devices cannot hold it.
      ConfigError: If the plan has other tables than the run, or is for inference, or nothing of it would be used.
    """
    check_plan(plan, config, schema, layout, training=slots is not None)
    return placed_plan(
        plan, layout, max(1, config.mesh.devices), slots, everywhere=None if packed is None else packed.hot_rows
    )


def check_plan(
    plan: Plan | None, config: TrainConfig, schema: Schema, layout: EmbeddingLayout, *, training: bool
) -> None:
    """Refuses a plan that does not fit the run, in the configuration's words; see ``run_plan``."""
    if plan is None:
        return
    devices = max(1, config.mesh.devices)
    check_dataset(plan, schema, config.plan)
    check_devices(plan, devices, config.plan)
    if training and plan.purpose != "training":
        raise ConfigError(
            f"plan: {config.plan} is for {plan.purpose}: its copies of rows would not follow the updates; plan with"
            " `jrec plan DATA --for training`"
        )
    _check_tables(plan, layout, config, schema.growing)
    tables = [table for stack in layout.planned_stacks for table in stack.tables]
    if not planned_trains(plan) and all(table.tier in WHOLE for table in tables):
        raise ConfigError(
            f"plan: {config.plan} places rows on {devices} devices, but by [tables] all tables lie in host memory,"
            " on every device or in cores, so nothing of it would be used; leave out plan, or tables.tier and"
            " tables.overrides.NAME.tier"
        )


def check_sharing(config: TrainConfig, plan: Plan | None, processes: Sequence[int], *, training: bool) -> None:
    """Refuses batches and processes that the devices that compute cannot share equally.

    Args:
      config: The run's configuration.
      plan: The run's plan; None where rows are dealt to devices that all compute.
      processes: (devices,), each device's process.
      training: False to predict only, in batches that may be padded.

    Raises:
      ConfigError: If a batch, or the processes, cannot be divided equally.
    """
    count, slices = len(processes) if plan is None else len(plan.compute_devices), config.data.micro_batches
    if training and config.data.batch_size % (count * slices):
        users = f"{count} devices (mesh.devices)"
        if plan is not None and plan.computes is not None:
            users = f"the {count} devices that compute by {config.plan} (of mesh.devices = {plan.devices})"
        sliced = f", in data.micro_batches = {slices} slices each," if slices > 1 else ""
        raise ConfigError(
            f"data.batch_size is {config.data.batch_size}, which {users}{sliced} cannot share equally; use a multiple"
            f" of {count * slices}"
        )
    if plan is None or plan.computes is None:
        return
    of_process = computing_of(plan, processes)
    if training and len(set(of_process)) > 1:
        raise ConfigError(
            f"plan: of the devices of the {len(of_process)} processes {', '.join(map(str, of_process))} compute, but"
            " each process reads an equal share of every batch; plan with --tables-on an equal number of devices of"
            " every process"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTrain:
    """A table that a plan puts into tensor-train cores of ``rank``; rows before ``first_row`` stay uncompressed."""

    rank: int
    first_row: int


def planned_trains(plan: Plan) -> dict[str, PlannedTrain]:
    """The tables that a plan puts into tensor-train cores.

    Raises:
      ConfigError: If a table's rows in cores are not all rows from some row on, or the plan lacks the cores' rank.
    """
    options = {o["table"]: o for o in dict(plan.info.get("options", {})).get("tt", ())}
    trains = {}
    for t, table in enumerate(plan.tables):
        cores = plan.tier[plan.first[t] : plan.first[t + 1]] == TT
        if not cores.any():
            continue
        begin = int(cores.argmax())
        first, option = int(plan.start[plan.first[t] + begin]), options.get(table.name)
        if option is None:
            raise ConfigError(f"the plan does not say the rank of table {table.name!r}; make it again with `jrec plan`")
        if not cores[begin:].all() or first != int(option["first_rank"]):
            raise ConfigError(
                f"the plan has rows of table {table.name!r} in tensor-train cores that are not all rows from"
                f" {int(option['first_rank']):,} on; make it again with `jrec plan`"
            )
        trains[table.name] = PlannedTrain(rank=int(option["rank"]), first_row=first)
    return trains


def _check_tables(plan: Plan, layout: EmbeddingLayout, config: TrainConfig, growing: frozenset[str]) -> None:
    for stack in layout.planned_stacks:
        for table in stack.tables:
            planned = plan.tables[plan.number(table.name)]
            if table.name in growing and planned.rows != table.rows:
                raise ConfigError(
                    f"plan: {config.plan} places {planned.rows:,} rows of table {table.name!r}, but the table grows and"
                    f" by tables.growth.capacity or its own has {table.rows:,}; plan again with `jrec plan DATA"
                    " --config` of this run"
                )
            for field, key, ours, theirs in (
                ("dim", "model.embedding_dim", table.dim, planned.dim),
                ("dtype", "model.table_dtype", table.dtype, planned.dtype),
            ):
                if ours != theirs:
                    raise ConfigError(
                        f"plan: {config.plan} places rows of {field} {theirs} of table {table.name!r}, but {key} is"
                        f" {ours}; plan again with `jrec plan DATA --config` of this run"
                    )
            number = plan.number(table.name)
            segments = slice(plan.first[number], plan.first[number + 1])
            if (plan.tier[segments][plan.start[segments] < table.rows] == TT).any():
                raise ConfigError(
                    f"plan: {config.plan} puts table {table.name!r} into tensor-train cores, but"
                    f" tables.overrides.{table.name}.tier says otherwise; leave that out, or plan again without --tt"
                )
