"""The ``[tables]`` section: which tables live where, and how tensor-train tables are shaped, started and cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, override

from jrec.errors import ConfigError
from jrec.train.config.typed_toml import Range, Section

Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Amount = Annotated[float, Range(minimum=0)]
Rank = Annotated[int, Range(minimum=1, maximum=65536)]
Ahead = Annotated[int, Range(minimum=0, maximum=1024)]  # threads, or batches under way
Cores = Annotated[int, Range(minimum=2, maximum=4)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTCacheSection(Section):
    """``[tables.tt.cache]``: rows that tensor-train tables keep in full, those looked up most (TT-Rec, Section 4.2).

    Attributes:
      rows: of every tensor-train table; 0 for no cache. Of a smaller table all rows.
      fraction: of the table's rows, instead; TT-Rec found 0.0001 enough.
      warmup_steps: steps during which lookups are only counted.
      refresh_every: steps between later choices of the rows; 0 keeps those chosen first.
      track_every: count the lookups of one step in so many.
      on_evict: what a row that leaves has learned is forgotten ("discard"), or the cores are moved towards it ("fold").
    """

    rows: Count = 0
    fraction: Annotated[float, Range(minimum=0, maximum=1)] = 0.0
    warmup_steps: Positive = 1000
    refresh_every: Count = 1000
    track_every: Positive = 1
    on_evict: Literal["discard", "fold"] = "discard"

    @override
    def check(self) -> None:
        if self.rows and self.fraction:
            raise ConfigError(
                f"tables.tt.cache.rows is {self.rows} and tables.tt.cache.fraction {self.fraction}; set one of them"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTSection(Section):
    """``[tables.tt]``: which tables are tensor trains, and of what shape.

    A table is one if ``largest`` or ``min_rows`` selects it; ``tables.overrides`` adds and exempts single tables. A
    table whose cores would be no smaller than itself is not selected, and where ``rank`` is more than any table of the
    shape needs, the selected table takes what it needs; the report says both.

    Attributes:
      largest: compress the so many largest tables.
      min_rows: compress tables of so many rows or more; 0 for none.
      rank: between neighbouring cores.
      cores: of a table; 2, 3 or 4.
      whole_rows: so many rows of every such table, its first and so its most frequent, stay whole: ordinary rows of
        ``tables.tier``, or of a plan. Of a smaller table all rows.
      dtype: of the cores; ``model.table_dtype`` unless given.
      initializer: what the cores are drawn from, so that the table's elements have the variance of a plain table's.
      learning_rate: of the cores; that of ``optimizer.embedding`` unless given.
      weight_decay: of the cores; that of ``optimizer.embedding`` unless given.
      cache: of full rows.
    """

    largest: Count = 0
    min_rows: Count = 0
    rank: Rank = 32
    cores: Cores = 3
    whole_rows: Count = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    initializer: Literal["sampled_gaussian", "gaussian", "uniform"] = "sampled_gaussian"
    learning_rate: Amount | None = None
    weight_decay: Amount | None = None
    cache: TTCacheSection = dataclasses.field(default_factory=TTCacheSection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSection(Section):
    """``[tables.host]``: tables in host memory and the pipeline between them and the device. No key changes a result.

    Attributes:
      queue: batches that may be under way between reading rows from the host and writing them back; 1 is sequential.
      cached_batches: how many batches' updated rows the device keeps, so that they need not travel again; at least
        ``queue - 1``. 0 for as many as ``queue``.
      folder: where memory-mapped files hold rows and slots, for tables larger than memory; empty for memory itself.
      threads: that read and write rows; 0 for all CPUs.
    """

    queue: Annotated[int, Range(minimum=1, maximum=1024)] = 3
    cached_batches: Ahead = 0
    folder: str = ""
    threads: Ahead = 0

    @override
    def check(self) -> None:
        if self.cached_batches and self.cached_batches < self.queue - 1:
            raise ConfigError(
                f"tables.host.cached_batches is {self.cached_batches}, but with tables.host.queue = {self.queue} the"
                f" rows of up to {self.queue - 1} batches are only on the device; set it to at least that, or to 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOverride(Section):
    """``[tables.overrides.NAME]``: what is different with one table.

    Attributes:
      tier: where it lives, whatever the rules select; unless given, the rules decide.
      rank: of a tensor-train table, instead of ``tables.tt.rank``. More than a table of the shape needs is an error.
      ranks: one a bond, instead of ``rank``.
      cores: instead of ``tables.tt.cores``.
      whole_rows: instead of ``tables.tt.whole_rows``; shapes are of the rows behind them.
      row_factors, dim_factors: of every core, for a shape that is not searched for; both or none.
    """

    tier: Literal["device", "tt", "host"] | None = None
    rank: Rank | None = None
    ranks: tuple[Rank, ...] | None = None
    cores: Cores | None = None
    whole_rows: Count | None = None
    row_factors: tuple[Positive, ...] | None = None
    dim_factors: tuple[Positive, ...] | None = None

    @property
    def shaped(self) -> tuple[str, ...]:
        """The keys that are set of those that shape a tensor train."""
        keys = ("rank", "ranks", "cores", "row_factors", "dim_factors")
        return tuple(key for key in keys if getattr(self, key) is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesConfig(Section):
    """``[tables]``: where the rows live and which implementation of the embedding ops works on them.

    Attributes:
      tier: of the tables that neither a rule nor an override places elsewhere: "device" keeps every full row there,
        "host" in host memory, and lends the device those of the batch.
      implementation: "auto" chooses by platform and shape; a named one never falls back to another.
      tt: tensor-train tables.
      host: tables in host memory.
      overrides: by name of the table.
    """

    tier: Literal["device", "host"] = "device"
    implementation: Literal["auto", "xla", "native", "pallas"] = "auto"
    tt: TTSection = dataclasses.field(default_factory=TTSection)
    host: HostSection = dataclasses.field(default_factory=HostSection)
    overrides: Mapping[str, TableOverride] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        for name, of in self.overrides.items():
            key = f"tables.overrides.{name}"
            if of.whole_rows is not None and of.tier not in (None, "tt"):
                raise ConfigError(
                    f"{key}.whole_rows = {of.whole_rows} keeps the first rows of a tensor-train table whole, but"
                    f" {key}.tier is {of.tier!r}; leave out one of them"
                )
            if of.shaped and of.tier not in (None, "tt"):
                raise ConfigError(f"{key}.{of.shaped[0]} shapes a tensor-train table, but {key}.tier is {of.tier!r}")
            for one, other in (("rank", "ranks"), ("cores", "row_factors"), ("cores", "dim_factors")):
                if one in of.shaped and other in of.shaped:
                    raise ConfigError(
                        f"{key}.{one} is {getattr(of, one)} and {key}.{other} is {list(getattr(of, other))}; set one"
                    )
            alone = {"row_factors", "dim_factors"} & set(of.shaped)
            if len(alone) == 1:
                raise ConfigError(
                    f"{key}.{alone.pop()} is set alone; a shape that is not searched for needs row_factors and"
                    " dim_factors"
                )
