"""Where each table of a dataset lives under a configuration, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jrec.app.config import TrainConfig
from jrec.app.config.tables import TableOverride, TTCacheSection
from jrec.data.growing import GrowingVocabulary, Growth
from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.json_values import JsonMapping, JsonObject
from jrec.nn import TTOptions
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig, Tier
from jrec.ops.tt import TTCacheConfig, TTShape

if TYPE_CHECKING:
    from jrec.app.run_plan import PlannedTrain
    from jrec.sharding import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedTables:
    """The tables that features read, each in its tier.

    Attributes:
      tables: The tables in the dataset's order; two parts for a table with uncompressed first rows and others in cores.
      notes: By table, decisions that the configuration does not state literally.
    """

    tables: tuple[TableConfig, ...]
    notes: dict[str, str]


def plan_tables(config: TrainConfig, schema: Schema, plan: Plan | None = None) -> PlacedTables:
    """Places the tables of a dataset.

    Args:
      config: The run's configuration.
      schema: The dataset.
      plan: What ``config.plan`` names (``RunData.plan``); None where it names none.

    Raises:
      RuntimeError: If the configuration names a plan, and none is given.
      ConfigError: On an override of an unknown table, a shape or rank that does not fit its table, or a plan that
        splits the table differently into uncompressed rows and cores.
    """
    read = {f.table for f in schema.categorical}
    # A growing table has as many rows as its capacity, whatever the dataset has counted.
    rules, growths = config.tables, growths_of(config, schema)
    tables = [
        dataclasses.replace(t, rows=growths[t.name].capacity) if t.name in growths else t
        for t in schema.tables
        if t.name in read
    ]
    names = [t.name for t in tables]
    if unknown := sorted(set(rules.overrides) - set(names)):
        raise ConfigError(
            f"tables.overrides.{unknown[0]}: the dataset has no table of that name, only {', '.join(names)}"
        )
    if unknown := sorted(set(config.optimizer.embedding.tables) - set(names)):
        raise ConfigError(
            f"optimizer.embedding.tables.{unknown[0]}: the dataset has no table of that name, only {', '.join(names)}"
        )
    planned = _planned_trains(config, plan)
    # Rules pass over growing tables: their rows change hands, which cores cannot follow.
    plain = [t for t in tables if not t.growing]
    largest = sorted(plain, key=lambda t: -t.rows)[: rules.tt.largest]
    selected = {t.name for t in largest} | {t.name for t in plain if rules.tt.min_rows and t.rows >= rules.tt.min_rows}
    placed, notes = [], {}
    for table in tables:
        override = rules.overrides.get(table.name, TableOverride())
        shape, note = None, None
        if table.growing and (override.tier == "tt" or override.shaped or override.whole_rows):
            raise ConfigError(
                f"tables.overrides.{table.name} makes a tensor train of it, but the table grows, so that its rows"
                " change hands; leave it whole, or prepare it without --growing"
            )
        if table.growing and table.name in planned:
            raise ConfigError(
                f"plan: {config.plan} has rows of table {table.name!r} in cores, but the table grows, so that its rows"
                " change hands; plan this dataset with `jrec plan DATA --config` of this run, without --tt for it"
            )
        # The first that applies: what the configuration says of this table, the rules over all tables, the plan.
        # Another tier by name leaves it uncompressed, whatever the rules say; a plan with cores of it is refused later.
        if override.tier == "tt":
            shape = _named_shape(config, table, override)
        elif override.tier is None and table.name in selected:
            shape, note = _selected_shape(config, table, override)
        elif override.tier is None and table.name in planned:
            shape = _planned_shape(config, table, planned[table.name])
        elif override.tier is None and (override.shaped or override.whole_rows):
            note = "stays whole: no rule selects it, so the shape in tables.overrides is not used"
        if shape is not None:
            # The plan counts bytes and places rows by its own cut, which must be the configuration's.
            _check_plan(config, table, table.rows - shape.rows, planned)
        placed.extend(_parts(config, table, shape, override.tier))
        if note is not None:
            notes[table.name] = note
    return PlacedTables(tables=tuple(placed), notes=notes)


def layout_of(
    config: TrainConfig, schema: Schema, plan: Plan | None, features: Sequence[FeatureConfig]
) -> EmbeddingLayout:
    """The placed tables with the features that read them.

    Raises:
      ConfigError: If they do not fit together, or as ``plan_tables``.
    """
    with value_errors_are_config_errors("the dataset's tables do not fit the model"):
        return EmbeddingLayout.build(plan_tables(config, schema, plan).tables, features, planned=config.planned)


def growths_of(config: TrainConfig, schema: Schema) -> dict[str, Growth]:
    """How each table grows that does, by name.

    Raises:
      ConfigError: If an override says how a table grows that does not.
    """
    rules, growths = config.tables.growth, {}
    for table in schema.tables:
        own = config.tables.overrides.get(table.name, TableOverride())
        if not table.growing:
            if own.grows:
                raise ConfigError(
                    f"tables.overrides.{table.name}.{own.grows[0]} is set, but the dataset's table does not grow;"
                    f" prepare the log with --growing {table.name}"
                )
            continue
        growths[table.name] = Growth(
            capacity=own.capacity or rules.capacity or table.rows_for_all,
            admit_after=own.admit_after or rules.admit_after,
            evict=own.evict or rules.evict,
        )
    return growths


def vocabularies_of(config: TrainConfig, schema: Schema) -> dict[str, GrowingVocabulary]:
    """Fresh vocabularies of the tables that grow, by name."""
    read = {f.table for f in schema.categorical}
    growths = growths_of(config, schema)
    return {
        name: GrowingVocabulary(growth, key_seed=schema.key_seed, canonical=schema.canonical)
        for name, growth in growths.items()
        if name in read
    }


def _planned_trains(config: TrainConfig, plan: Plan | None) -> dict[str, PlannedTrain]:
    """The tables that the run's plan puts into cores; a table that the plan has there must not be missed."""
    if (plan is None) != (not config.plan):
        raise RuntimeError(f"plan is {config.plan!r}, but {'no' if plan is None else 'a'} plan is given with it")
    if plan is None:
        return {}
    from jrec.app.run_plan import planned_trains

    return planned_trains(plan)


def _check_plan(config: TrainConfig, table: Table, whole_rows: int, planned: Mapping[str, PlannedTrain]) -> None:
    """Refuses a plan that keeps other rows of a tensor-train table uncompressed."""
    first = planned[table.name].first_row if table.name in planned else None
    if not config.plan or first == whole_rows or (first is None and not whole_rows):
        return
    says = f"rows {first:,} and on in cores" if first is not None else "no row in cores"
    raise ConfigError(
        f"plan: {config.plan} has of table {table.name!r} {says}, but by [tables] its first {whole_rows:,} rows are"
        " whole and all others in cores; plan again with `jrec plan DATA --config` of this run, or leave out what"
        f" [tables] says of it"
    )


def on_devices(config: TrainConfig, schema: Schema, devices: int, plan: Plan | None) -> TrainConfig:
    """The configuration with the same tables on other devices, whatever their number and kind, and without a plan.

    Args:
      config: A run's configuration.
      schema: The dataset.
      devices: The number of devices.
      plan: What ``config.plan`` names; None where it names none.
    """
    # Cores by the plan become overrides: without the plan, the tables must be the same.
    trains, overrides = _planned_trains(config, plan), config.tables.overrides
    tt = {t.name: t for t in plan_tables(config, schema, plan).tables if t.tier == "tt"} if trains else {}
    cores = {n: train_override(s, whole_rows=t.first_row) for n, t in tt.items() if n in trains and (s := t.tt_shape)}
    tables = dataclasses.replace(config.tables, overrides={**overrides, **cores})
    mesh = dataclasses.replace(config.mesh, devices=devices, exchange="auto")
    return dataclasses.replace(config, tables=tables, mesh=mesh, plan="")


def train_override(shape: TTShape, *, whole_rows: int = 0) -> TableOverride:
    """The entry of ``tables.overrides`` for cores of this shape after ``whole_rows`` uncompressed rows."""
    return TableOverride(
        tier="tt",
        ranks=shape.ranks,
        whole_rows=whole_rows,
        row_factors=shape.row_factors,
        dim_factors=shape.dim_factors,
    )


def tt_options(config: TrainConfig, layout: EmbeddingLayout) -> TTOptions:
    """How the tensor-train tables start and are looked up, and their caches."""
    rules = config.tables.tt
    caches = {
        table.name: cache
        for stack in layout.tt_stacks
        for table in stack.tables
        if (cache := _cache(rules.cache, table.rows)) is not None
    }
    return TTOptions(initializer=rules.initializer, caches=caches, contraction=rules.contraction)


def describe_tables(config: TrainConfig, schema: Schema, plan: Plan | None = None) -> dict[str, JsonObject]:
    """``described_tables`` of a run, for the report, with a ``note`` where the configuration does not decide."""
    placed = plan_tables(config, schema, plan)
    described = described_tables(placed.tables, config.tables.tt.cache)
    for name, note in placed.notes.items():
        described[name]["note"] = note
    return described


def described_tables(tables: Iterable[TableConfig], caches: TTCacheSection) -> dict[str, JsonObject]:
    """By table: tier, rows, dim, dtype, parameters, bytes, compression, the shape of a tensor train.

    ``compression`` is the uncompressed table's elements divided by the stored elements, which include a cache's rows.
    A table in parts has ``whole_rows`` uncompressed rows in ``whole_tier``.

    Args:
      tables: The tables; of one in parts the whole rows before the cores.
      caches: The caches of tensor-train tables.
    """
    described: dict[str, JsonObject] = {}
    for part in tables:
        size = jnp.dtype(part.dtype).itemsize
        entry: JsonObject = {"tier": part.tier, "rows": part.table_rows, "dim": part.dim, "dtype": part.dtype}
        parameters, stored = part.rows * part.dim, size * part.rows * part.dim
        if (shape := part.tt_shape) is not None:
            cache = _cache(caches, part.rows)
            cached = 0 if cache is None else cache.cache_rows * part.dim
            # Cached rows are float32, whatever the dtype of the cores.
            parameters, stored = shape.num_parameters + cached, size * shape.num_parameters + 4 * cached
            entry |= {key: list(getattr(shape, key)) for key in ("row_factors", "dim_factors", "ranks")}
            entry["cache_rows"] = 0 if cache is None else cache.cache_rows
        if part.first_row:
            # Whole rows come before the cores of a table, so that they are described already.
            head = described[part.name]
            entry |= {"whole_rows": part.first_row, "whole_tier": head["tier"]}
            parameters, stored = parameters + head["parameters"], stored + head["bytes"]
        entry |= {"parameters": parameters, "bytes": stored, "compression": part.table_rows * part.dim / parameters}
        described[part.name] = entry
    return described


def tables_total(described: Mapping[str, JsonMapping]) -> JsonObject:
    """Parameters and bytes of all tables, as stored and as they would be uncompressed."""
    tables = described.values()
    whole = {"parameters": sum(t["rows"] * t["dim"] for t in tables)}
    whole["bytes"] = sum(t["rows"] * t["dim"] * jnp.dtype(t["dtype"]).itemsize for t in tables)
    stored = {key: sum(t[key] for t in tables) for key in ("parameters", "bytes")}
    return {
        **stored,
        **{f"uncompressed_{k}": v for k, v in whole.items()},
        "compression": whole["parameters"] / stored["parameters"],
    }


def _parts(config: TrainConfig, table: Table, shape: TTShape | None, named: Tier | None) -> list[TableConfig]:
    """The table, or its uncompressed first rows and its other rows in cores of ``shape``."""
    own = config.tables.overrides.get(table.name, TableOverride()).initial_bound
    whole = TableConfig(
        name=table.name,
        rows=table.rows,
        dim=config.model.table_dim,
        dtype=config.model.table_dtype,
        tier=config.tables.tier if named in (None, "tt") else named,
        group=config.optimizer.embedding.group(table.name),
        initial_bound=config.tables.initial_bound if own is None else own,
    )
    if shape is None:
        return [whole]
    core_dtype = config.tables.tt.dtype or whole.dtype
    if core_dtype == "float16":
        raise ConfigError(
            "model.table_dtype is 'float16', but cores are float32 or bfloat16; set tables.tt.dtype to one of them"
        )
    return in_cores(whole, shape, core_dtype)


def in_cores(table: TableConfig, shape: TTShape, dtype: str) -> list[TableConfig]:
    """An uncompressed table with its last ``shape.rows`` rows in cores: one table, or two parts of one."""
    first, of_rows = table.rows - shape.rows, None if table.rows == shape.rows else table.rows
    parts = {"tt_shape": shape, "first_row": first, "of_rows": of_rows}
    cores = dataclasses.replace(table, rows=shape.rows, dtype=dtype, tier="tt", group="", **parts)
    return [dataclasses.replace(table, rows=first, of_rows=of_rows), cores] if first else [cores]


def _whole_rows(config: TrainConfig, table: Table, override: TableOverride) -> int:
    """How many rows of a tensor-train table stay uncompressed.

    Raises:
      ConfigError: If these are all rows of the table, and an override names cores or ``whole_rows``.
    """
    own = override.whole_rows
    rows = config.tables.tt.whole_rows if own is None else own
    if rows >= table.rows and (override.tier == "tt" or override.shaped or own is not None):
        key = "tables.tt" if own is None else f"tables.overrides.{table.name}"
        raise ConfigError(
            f"{key}.whole_rows is {rows}, but table {table.name!r} has {table.rows:,} rows, so that none are left for"
            f" cores; set tables.overrides.{table.name}.whole_rows to less, or its tier to 'sharded'"
        )
    return rows


def _factored(config: TrainConfig, rows: int, override: TableOverride) -> TTShape:
    """The shape of the rows in cores, with ranks of one."""
    dim, cores = config.model.table_dim, override.cores or config.tables.tt.cores
    if override.row_factors is None or override.dim_factors is None:
        return TTShape.search(rows, dim, num_cores=cores, ranks=1)
    ranks = (1,) * (len(override.row_factors) - 1)
    return TTShape(rows=rows, dim=dim, row_factors=override.row_factors, dim_factors=override.dim_factors, ranks=ranks)


def _ranks(config: TrainConfig, override: TableOverride, shape: TTShape) -> tuple[int, ...]:
    if override.ranks is not None:
        return override.ranks
    return (override.rank or config.tables.tt.rank,) * (shape.num_cores - 1)


def _named_shape(config: TrainConfig, table: Table, override: TableOverride) -> TTShape:
    """The shape of a table that the configuration names; raises ConfigError if it does not fit."""
    with value_errors_are_config_errors(f"tables.overrides.{table.name}"):
        shape = _factored(config, table.rows - _whole_rows(config, table, override), override)
        return shape.with_ranks(_ranks(config, override, shape))


def _planned_shape(config: TrainConfig, table: Table, planned: PlannedTrain) -> TTShape:
    """The shape that `jrec plan` assumed: ranks capped at the greatest useful ones."""
    shape = TTShape.search(table.rows - planned.first_row, config.model.table_dim, ranks=1)
    return shape.with_ranks(tuple(min(planned.rank, bound) for bound in shape.max_ranks))


def _selected_shape(config: TrainConfig, table: Table, override: TableOverride) -> tuple[TTShape | None, str | None]:
    """The shape of a table that a rule selected, None where it would not be smaller; and a note for the report."""
    if override.shaped:
        return _named_shape(config, table, override), None
    whole = _whole_rows(config, table, override)
    if whole >= table.rows:
        return None, f"stays whole: tables.tt.whole_rows is {whole:,}, and it has {table.rows:,} rows"
    # What a rule selects is made to fit, with a note in the report; what an override names is an error if it does not.
    shape = _factored(config, table.rows - whole, override)
    wanted = _ranks(config, override, shape)
    shape = shape.with_ranks(tuple(min(rank, bound) for rank, bound in zip(wanted, shape.max_ranks, strict=True)))
    if shape.num_parameters >= shape.rows * shape.dim:
        subject = f"its rows from {whole:,} on have" if whole else "the table has"
        return None, (
            f"stays whole: cores of ranks {list(shape.ranks)} would have {shape.num_parameters:,} elements, {subject}"
            f" {shape.rows * shape.dim:,}"
        )
    if shape.ranks != wanted:
        return shape, f"ranks {list(shape.ranks)} instead of {list(wanted)}; higher ranks add nothing"
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
    )
