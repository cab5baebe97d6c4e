"""Where each table of a dataset lives under a configuration, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.nn import TTOptions
from jrec.ops.layout import EmbeddingLayout, TableConfig, Tier
from jrec.ops.tt import TTCacheConfig, TTShape
from jrec.train.config import TrainConfig
from jrec.train.config_tables import TableOverride, TTCacheSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """The tables that features read, each in its tier.

    Attributes:
      tables: in the dataset's order.
      notes: by table, what became of it that the configuration does not say literally.
    """

    tables: tuple[TableConfig, ...]
    notes: dict[str, str]


def plan_tables(config: TrainConfig, schema: Schema) -> TablePlan:
    """Places the tables of a dataset.

    Raises:
      ConfigError: on an override of an unknown table, or a shape or rank that does not fit its table.
    """
    read = {f.table for f in schema.categorical}
    tables = [t for t in schema.tables if t.name in read]
    rules = config.tables
    names = [t.name for t in tables]
    if unknown := sorted(set(rules.overrides) - set(names)):
        raise ConfigError(
            f"tables.overrides.{unknown[0]}: the dataset has no table of that name, only {', '.join(names)}"
        )
    planned = plan_ranks(config)
    largest = sorted(tables, key=lambda t: -t.rows)[: rules.tt.largest]
    selected = {t.name for t in largest} | {t.name for t in tables if rules.tt.min_rows and t.rows >= rules.tt.min_rows}
    placed, notes = [], {}
    for table in tables:
        override = rules.overrides.get(table.name, TableOverride())
        shape, note = None, None
        if override.tier == "tt":
            shape = _named_shape(config, table, override)
        elif override.tier is None and table.name in selected:
            shape, note = _selected_shape(config, table, override)
        elif override.tier is None and table.name in planned:
            shape = _planned_shape(config, table, planned[table.name])
        elif override.tier is None and override.shaped:
            note = "stays whole: no rule selects it, so the shape in tables.overrides is not used"
        placed.append(_table(config, table, shape, override.tier))
        if note is not None:
            notes[table.name] = note
    return TablePlan(tables=tuple(placed), notes=notes)


def plan_ranks(config: TrainConfig) -> dict[str, int]:
    """The tensor-train tables of the run's plan, with their ranks; see ``jrec.sharding``."""
    if not config.plan:
        return {}
    from jrec.sharding import load_plan
    from jrec.train.mesh_plan import tt_ranks

    return tt_ranks(load_plan(config.plan))


def on_devices(config: TrainConfig, schema: Schema, devices: int) -> TrainConfig:
    """The configuration with the same tables on other devices, whatever their number and kind, and without a plan."""
    ranks = plan_ranks(config)
    shapes = {t.name: _planned_shape(config, t, ranks[t.name]) for t in schema.tables if t.name in ranks}
    given = config.tables.overrides
    cores = {n: TableOverride(tier="tt", ranks=s.ranks) for n, s in shapes.items() if n not in given}
    tables = dataclasses.replace(config.tables, overrides={**given, **cores})
    mesh = dataclasses.replace(config.mesh, devices=devices, exchange="auto")
    return dataclasses.replace(config, tables=tables, mesh=mesh, plan="")


def tt_options(config: TrainConfig, layout: EmbeddingLayout) -> TTOptions:
    """Initializer and caches of the tensor-train tables."""
    rules = config.tables.tt
    caches = {
        table.name: cache
        for stack in layout.members
        if stack.tier == "tt"
        for table in stack.tables
        if (cache := _cache(rules.cache, table.rows)) is not None
    }
    return TTOptions(initializer=rules.initializer, caches=caches)


def describe_tables(config: TrainConfig, schema: Schema) -> dict[str, dict[str, Any]]:
    """By table: tier, rows, dim, dtype, parameters, bytes, compression, the shape of a tensor train; for the report.

    ``compression`` is the whole table's elements by those that are stored, a cache's rows among them.
    """
    plan = plan_tables(config, schema)
    described = {}
    for table in plan.tables:
        size, whole = jnp.dtype(table.dtype).itemsize, table.rows * table.dim
        entry: dict[str, Any] = {"tier": table.tier, "rows": table.rows, "dim": table.dim, "dtype": table.dtype}
        parameters, stored = whole, size * whole
        if (shape := table.tt_shape) is not None:
            cache = _cache(config.tables.tt.cache, table.rows)
            cached = 0 if cache is None else cache.cache_rows * table.dim
            parameters, stored = shape.num_parameters + cached, size * shape.num_parameters + 4 * cached
            entry |= {key: list(getattr(shape, key)) for key in ("row_factors", "dim_factors", "ranks")}
            entry["cache_rows"] = 0 if cache is None else cache.cache_rows
        entry |= {"parameters": parameters, "bytes": stored, "compression": whole / parameters}
        described[table.name] = entry | ({"note": plan.notes[table.name]} if table.name in plan.notes else {})
    return described


def tables_total(described: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Parameters and bytes of all tables, beside those they would have whole."""
    tables = described.values()
    whole = {"parameters": sum(t["rows"] * t["dim"] for t in tables)}
    whole["bytes"] = sum(t["rows"] * t["dim"] * jnp.dtype(t["dtype"]).itemsize for t in tables)
    stored = {key: sum(t[key] for t in tables) for key in ("parameters", "bytes")}
    return {
        **stored,
        **{f"uncompressed_{k}": v for k, v in whole.items()},
        "compression": whole["parameters"] / stored["parameters"],
    }


def _table(config: TrainConfig, table: Table, shape: TTShape | None, named: Tier | None) -> TableConfig:
    dim, dtype = config.model.embedding_dim, config.model.table_dtype
    if shape is None:
        tier = config.tables.tier if named is None else named
        tier = "planned" if tier == "device" and config.mesh.on else tier
        return TableConfig(name=table.name, rows=table.rows, dim=dim, dtype=dtype, tier=tier)
    core_dtype = config.tables.tt.dtype or dtype
    if core_dtype == "float16":
        raise ConfigError(
            "model.table_dtype is 'float16', but cores are float32 or bfloat16; set tables.tt.dtype to one of them"
        )
    return TableConfig(name=table.name, rows=table.rows, dim=dim, dtype=core_dtype, tier="tt", tt_shape=shape)


def _factored(config: TrainConfig, table: Table, override: TableOverride) -> TTShape:
    """The table's shape with ranks of one."""
    dim, cores = config.model.embedding_dim, override.cores or config.tables.tt.cores
    if override.row_factors is None or override.dim_factors is None:
        return TTShape.search(table.rows, dim, num_cores=cores, ranks=1)
    ranks = (1,) * (len(override.row_factors) - 1)
    return TTShape(
        rows=table.rows, dim=dim, row_factors=override.row_factors, dim_factors=override.dim_factors, ranks=ranks
    )


def _ranks(config: TrainConfig, override: TableOverride, shape: TTShape) -> tuple[int, ...]:
    if override.ranks is not None:
        return override.ranks
    return (override.rank or config.tables.tt.rank,) * (shape.num_cores - 1)


def _named_shape(config: TrainConfig, table: Table, override: TableOverride) -> TTShape:
    """The shape of a table that the configuration names: what does not fit is an error."""
    with value_errors_are_config_errors(f"tables.overrides.{table.name}"):
        shape = _factored(config, table, override)
        return shape.with_ranks(_ranks(config, override, shape))


def _planned_shape(config: TrainConfig, table: Table, rank: int) -> TTShape:
    """The shape that `jrec plan` reckoned with: as much of the rank as it can use."""
    shape = TTShape.search(table.rows, config.model.embedding_dim, ranks=1)
    return shape.with_ranks(tuple(min(rank, bound) for bound in shape.max_ranks))


def _selected_shape(config: TrainConfig, table: Table, override: TableOverride) -> tuple[TTShape | None, str | None]:
    """The shape of a table that a rule selected, None where it would not be smaller; and what to say about it."""
    if override.shaped:
        return _named_shape(config, table, override), None
    shape = _factored(config, table, override)
    wanted = _ranks(config, override, shape)
    shape = shape.with_ranks(tuple(min(rank, bound) for rank, bound in zip(wanted, shape.max_ranks, strict=True)))
    if shape.num_parameters >= table.rows * shape.dim:
        return None, (
            f"stays whole: cores of ranks {list(shape.ranks)} would have {shape.num_parameters:,} elements, the table"
            f" has {table.rows * shape.dim:,}"
        )
    if shape.ranks != wanted:
        return shape, f"ranks {list(shape.ranks)} instead of {list(wanted)}: more represent no further table of it"
    return shape, None


def _cache(section: TTCacheSection, rows: int) -> TTCacheConfig | None:
    cache_rows = min(section.rows or round(section.fraction * rows), rows)
    if not cache_rows:
        return None
    return TTCacheConfig(
        cache_rows=cache_rows,
        warmup_steps=section.warmup_steps,
        refresh_every=section.refresh_every or None,
        track_every=section.track_every,
        on_evict=section.on_evict,
    )
