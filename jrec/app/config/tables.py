"""The ``[tables]`` section: which tables live where, and how tensor-train tables are shaped, started and cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, override

from jrec.app.config.typed_toml import Amount, Count, Formerly, Positive, Range, Section
from jrec.errors import ConfigError
from jrec.run.options import HostOptions

Rank = Annotated[int, Range(minimum=1, maximum=65536)]
DEVICE = Formerly("device", "sharded")
Bound = Annotated[float, Range(minimum=1e-6, maximum=1e4)]  # as of TableConfig
Cores = Annotated[int, Range(minimum=2, maximum=4)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTCacheSection(Section):
    """``[tables.tt.cache]``: the most frequent rows of tensor-train tables, kept uncompressed (TT-Rec, Section 4.2).

    A cache is for accuracy: on a CPU no step was faster with one, unless every lookup hit it (docs/tensor_train.md).

    Attributes:
      rows: The number of cached rows of every tensor-train table, all rows of a smaller one; 0 for no cache.
      fraction: The cached share of the table's rows, in place of ``rows``; TT-Rec found 0.0001 enough.
      warmup_steps: Steps during which lookups are only counted.
      refresh_every: Steps between later choices of the rows; 0 keeps the first choice.
      track_every: Steps between two steps whose lookups are counted; 1 counts all.
      on_evict: "discard": a row that leaves is forgotten. The one way, which files of earlier runs name.
    """

    rows: Count = 0
    fraction: Annotated[float, Range(minimum=0, maximum=1)] = 0.0
    warmup_steps: Positive = 1000
    refresh_every: Count = 1000
    track_every: Positive = 1
    on_evict: Literal["discard"] = "discard"

    @override
    def check(self) -> None:
        if self.rows and self.fraction:
            raise ConfigError(
                f"tables.tt.cache.rows is {self.rows} and tables.tt.cache.fraction {self.fraction}; set one of them"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTSection(Section):
    """``[tables.tt]``: which tables are tensor trains, and in which shape.

    A table is one if ``largest`` or ``min_rows`` selects it; ``tables.overrides`` adds and exempts single tables. A
    table whose cores would be no smaller than itself is not selected, and where ``rank`` is more than any table of the
    shape needs, the selected table takes what it needs; the report says both.

    Attributes:
      largest: How many of the largest tables are compressed.
      min_rows: The least number of rows of a table that is compressed; 0 compresses none by size.
      rank: The rank between neighbouring cores.
      cores: Cores per table; 2, 3 or 4.
      whole_rows: The number of first, and so most frequent, rows of every such table that stay uncompressed: ordinary
        rows of ``tables.tier``, or of a plan. A smaller table keeps all of its rows uncompressed.
      dtype: The cores' dtype; ``model.table_dtype`` unless given.
      contraction: How lookups are computed; chosen by the tables' shapes unless given. "sample" is EL-Rec's
        sample-level reuse, which is never chosen under a power law and goes without a cache, docs/tensor_train.md.
      initializer: The distribution of the initial cores, which gives the table's elements a plain table's variance.
      learning_rate: The cores' learning rate; as in ``optimizer.embedding`` unless given.
      weight_decay: The cores' weight decay; as in ``optimizer.embedding`` unless given.
      cache: The cache of uncompressed rows.
    """

    largest: Count = 0
    min_rows: Count = 0
    rank: Rank = 32
    cores: Cores = 3
    whole_rows: Count = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    contraction: Literal["unique", "dense", "sample"] | None = None
    initializer: Literal["sampled_gaussian", "gaussian", "uniform"] = "sampled_gaussian"
    learning_rate: Amount | None = None
    weight_decay: Amount | None = None
    cache: TTCacheSection = dataclasses.field(default_factory=TTCacheSection)

    @override
    def check(self) -> None:
        if self.contraction == "sample" and (self.cache.rows or self.cache.fraction):
            raise ConfigError(
                "tables.tt.contraction is 'sample', which cached rows do not take; set no tables.tt.cache"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSection(Section, HostOptions):
    """``[tables.host]``: tables in host memory, and the pipeline between them and the device (``HostOptions``)."""

    @override
    def check(self) -> None:
        if reason := self.few_cached("tables.host.cached_batches", "tables.host.queue"):
            raise ConfigError(reason)
        self.memory_bytes("tables.host.memory", "tables.host.folder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthSection(Section):
    """``[tables.growth]``: the tables of a dataset that grow (``jrec prepare --growing``), see docs/growing.md.

    Attributes:
      capacity: The number of rows of every such table, row 0 for values without one among them; 0 for one more than the
        training split of the run's first dataset has values.
      admit_after: How often a value must have occurred before it gets a row.
      evict: Which value loses its row to a new one when all rows are taken: the least frequently used ("lfu"), if it
        was used less often than the new one has occurred, or the least recently used ("lru").
    """

    capacity: Annotated[int, Range(minimum=0, maximum=2**31 - 1)] = 0
    admit_after: Annotated[int, Range(minimum=1, maximum=255)] = 1
    evict: Literal["lru", "lfu"] = "lfu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOverride(Section):
    """``[tables.overrides.NAME]``: one table's own settings.

    Attributes:
      tier: The table's tier, whatever the rules select; unless given, the rules decide.
      rank: The rank, in place of ``tables.tt.rank``. More than a table of the shape needs is an error.
      ranks: One rank per bond, in place of ``rank``.
      cores: The number of cores, in place of ``tables.tt.cores``.
      whole_rows: The number of uncompressed rows, in place of ``tables.tt.whole_rows``; shapes are of the other rows.
      initial_bound: The bound of the table's initial rows, in place of ``tables.initial_bound``.
      initial_rows: A file of pretrained vectors, each with a value that the table's features have in the log: Parquet,
        Arrow, JSON lines, or word2vec's text format. Values without a vector begin as ever; docs/pretrained_rows.md.
      row_factors, dim_factors: The factors of every core, for a shape that is not searched for; both or none.
      capacity, admit_after, evict: In place of the keys of ``tables.growth``.
    """

    tier: Annotated[Literal["sharded", "replicated", "host", "tt"], DEVICE] | None = None
    rank: Rank | None = None
    ranks: tuple[Rank, ...] | None = None
    cores: Cores | None = None
    whole_rows: Count | None = None
    initial_bound: Bound | None = None
    initial_rows: str = ""
    row_factors: tuple[Positive, ...] | None = None
    dim_factors: tuple[Positive, ...] | None = None
    capacity: Annotated[int, Range(minimum=2, maximum=2**31 - 1)] | None = None
    admit_after: Annotated[int, Range(minimum=1, maximum=255)] | None = None
    evict: Literal["lru", "lfu"] | None = None

    @property
    def grows(self) -> tuple[str, ...]:
        """The keys that are set and are of a table that grows."""
        return tuple(key for key in ("capacity", "admit_after", "evict") if getattr(self, key) is not None)

    @property
    def shaped(self) -> tuple[str, ...]:
        """The keys that are set and shape a tensor train."""
        keys = ("rank", "ranks", "cores", "row_factors", "dim_factors")
        return tuple(key for key in keys if getattr(self, key) is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesConfig(Section):
    """``[tables]``: where the rows live and which implementation of the embedding ops works on them.

    Attributes:
      tier: The tier of tables that neither a rule nor an override places elsewhere: "sharded" keeps every uncompressed
        row on one of the devices, by the run's plan or in turn; "replicated" keeps it on all of them; "host" keeps it
        in host memory and lends the devices the batch's rows.
      implementation: "auto" chooses by platform and shape; a named one never falls back to another.
      initial_bound: Rows begin uniform within plus and minus this (``TableConfig``); 1/sqrt(rows) unless given.
      tt: Tensor-train tables.
      host: Tables in host memory.
      growth: Tables that grow.
      overrides: Settings of single tables, by name.
    """

    tier: Annotated[Literal["sharded", "replicated", "host"], DEVICE] = "sharded"
    implementation: Literal["auto", "xla", "native", "pallas"] = "auto"
    initial_bound: Bound | None = None
    tt: TTSection = dataclasses.field(default_factory=TTSection)
    host: HostSection = dataclasses.field(default_factory=HostSection)
    growth: GrowthSection = dataclasses.field(default_factory=GrowthSection)
    overrides: Mapping[str, TableOverride] = dataclasses.field(default_factory=dict)

    @property
    def capacities(self) -> dict[str, int]:
        """The capacities of single growing tables, by name."""
        return {name: own.capacity for name, own in self.overrides.items() if own.capacity}

    def with_capacities(self, capacities: Mapping[str, int]) -> TablesConfig:
        """The section with these capacities where it leaves them open."""
        if self.growth.capacity:
            return self
        overrides = dict(self.overrides)
        for name, capacity in capacities.items():
            own = overrides.get(name, TableOverride())
            overrides[name] = dataclasses.replace(own, capacity=own.capacity or capacity)
        return dataclasses.replace(self, overrides=overrides)

    @override
    def check(self) -> None:
        for name, table in self.overrides.items():
            key = f"tables.overrides.{name}"
            if table.whole_rows is not None and table.tier not in (None, "tt"):
                raise ConfigError(
                    f"{key}.whole_rows = {table.whole_rows} keeps the first rows of a tensor-train table whole, but"
                    f" {key}.tier is {table.tier!r}; leave out one of them"
                )
            if table.shaped and table.tier not in (None, "tt"):
                raise ConfigError(
                    f"{key}.{table.shaped[0]} shapes a tensor-train table, but {key}.tier is {table.tier!r}"
                )
            for one, other in (("rank", "ranks"), ("cores", "row_factors"), ("cores", "dim_factors")):
                if one in table.shaped and other in table.shaped:
                    first, second = getattr(table, one), list(getattr(table, other))
                    raise ConfigError(f"{key}.{one} is {first} and {key}.{other} is {second}; set one")
            alone = {"row_factors", "dim_factors"} & set(table.shaped)
            if len(alone) == 1:
                raise ConfigError(
                    f"{key}.{alone.pop()} is set alone; a shape that is not searched for needs row_factors and"
                    " dim_factors"
                )
