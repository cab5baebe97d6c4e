"""How tables are stacked: one array per (place, dim, dtype, group), so that alike tables go through one kernel launch.

Tables of equal dim, dtype and group that live in one place lie one below the other in a stack; table ``t`` starts at
row ``base`` of it, and the *address* of its row ``i`` is ``base + i``. A tensor-train table has cores of its own and is
a stack of its own.
The bags of a stack are *feature-major*: all bags of the first feature, then all of the second. Features follow the
order of their tables, so the address ranges of successive tables ascend and the cast of a stack is the concatenation
of its tables' casts.

A table may come in two *parts*, its frequent rows whole and the others as tensor-train cores: two tables of one name in
two stacks. Every feature of it then has its bags in both, each with the ids of that part's rows, and is their sum.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import numpy as np

from jrec.ops.tt.shape import MAX_ROWS, TTShape
from jrec.shown import Shown, counted, human_bytes

Tier = Literal["sharded", "replicated", "host", "tt"]
TIERS: tuple[str, ...] = get_args(Tier)
Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
DTYPES = ("float32", "bfloat16", "float16")
MAX_TABLE_ROWS = 2**32 - 1
"""Row numbers fit uint32, and one value past the last stands for padding."""
BOUNDS = (1e-6, 1e4)
"""Least and greatest bound of initial rows: their least element is a normal float32, their greatest a float16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table: ``rows`` vectors of ``dim`` elements of ``dtype``.

    Its ``tier`` says where the rows live, in the words of plans: each on one of the devices ("sharded"), each on every
    device ("replicated"; with one device there is no difference), in memory of the "host", or as tensor-train cores of
    ``tt_shape`` ("tt"). A plan may place single rows of an uncompressed table elsewhere.

    Rows begin uniform in ±``initial_bound``, 1/sqrt(rows) unless given, as in the reference DLRM; cores of a tensor
    train begin with the variance of such rows. A greater bound lets products of rows tell from the first step whether
    two ids are the same, also in a large table.

    A stack has one row optimizer. Tables that are trained by another one than the rest, or not at all, have a ``group``
    of their own, any text, and so are in another stack (``jrec.nn.SparseOptimizer``).

    Of a table in parts each one says which it is: ``rows`` from ``first_row`` on, of ``of_rows`` in all. The first part
    is whole, the second of tier "tt":

      >>> head = TableConfig(name="user", rows=100, dim=16, of_rows=1000)
      >>> shape = TTShape.search(900, 16, ranks=8)
      >>> tail = TableConfig(name="user", rows=900, dim=16, tier="tt", tt_shape=shape, first_row=100, of_rows=1000)
    """

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    tier: Tier = "sharded"
    tt_shape: TTShape | None = None
    group: str = ""
    first_row: int = 0
    of_rows: int | None = None
    initial_bound: float | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"table {self.name!r} has {self.rows} rows; a table needs at least one")
        if max(self.rows, self.table_rows) > MAX_TABLE_ROWS:
            raise ValueError(
                f"table {self.name!r} has {max(self.rows, self.table_rows):,} rows; a table has at most"
                f" {MAX_TABLE_ROWS:,}: hash its ids to fewer"
            )
        if not 1 <= self.dim <= 4096:
            raise ValueError(f"table {self.name!r} has dim {self.dim}; dims from 1 to 4096 are supported")
        if self.dtype not in DTYPES:
            raise ValueError(f"table {self.name!r} has dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.initial_bound is not None and not BOUNDS[0] <= self.initial_bound <= BOUNDS[1]:
            raise ValueError(
                f"table {self.name!r} has initial_bound {self.initial_bound}; choose one from {BOUNDS[0]:g} to"
                f" {BOUNDS[1]:g}, or None for 1/sqrt(rows)"
            )
        if self.tier not in TIERS:
            raise ValueError(f"table {self.name!r} has tier {self.tier!r}; choose one of {', '.join(TIERS)}")
        if (self.tier == "tt") != (self.tt_shape is not None):
            raise ValueError(
                f"table {self.name!r} of tier {self.tier!r} has tt_shape {self.tt_shape}; tensor-train tables, and no"
                " others, have one (TTShape.search)"
            )
        if self.tt_shape is not None:
            if (self.tt_shape.rows, self.tt_shape.dim) != (self.rows, self.dim):
                raise ValueError(
                    f"table {self.name!r} is {self.rows:,} x {self.dim}, but its tt_shape is of {self.tt_shape.rows:,}"
                    f" x {self.tt_shape.dim}"
                )
            if self.dtype == "float16":
                raise ValueError(f"table {self.name!r} is float16; cores are float32 or bfloat16")
        self._check_part()

    def _check_part(self) -> None:
        if not self.is_part:
            if self.first_row:
                raise ValueError(
                    f"table {self.name!r} begins at row {self.first_row:,}; say of how many rows it is a part (of_rows)"
                )
            return
        stop = self.first_row + self.rows
        whole, cores = self.first_row == 0 and stop < self.table_rows, self.first_row > 0 and stop == self.table_rows
        if not (cores if self.tier == "tt" else whole):
            raise ValueError(
                f"table {self.name!r} has a part of tier {self.tier!r} with rows {self.first_row:,} to {stop:,} of"
                f" {self.table_rows:,}; of a table in parts the first rows are whole and all others of tier 'tt'"
            )

    @property
    def bytes(self) -> int:
        """What its rows, or its cores, take without slots."""
        elements = self.rows * self.dim if self.tt_shape is None else self.tt_shape.num_parameters
        return elements * (4 if self.dtype == "float32" else 2)

    @property
    def is_part(self) -> bool:
        """Whether the table has further rows in another part."""
        return self.of_rows is not None

    @property
    def table_rows(self) -> int:
        """Rows of the table with all its parts."""
        return self.rows if self.of_rows is None else self.of_rows

    @property
    def bound(self) -> float:
        """The rows' elements begin uniform within plus and minus this."""
        return self.table_rows**-0.5 if self.initial_bound is None else self.initial_bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """One categorical feature: which table it reads, how many ids an example has at most, how they are pooled.

    ``pooling`` "none" keeps the ids apart, a (batch, max_length, dim) sequence; the others give (batch, dim).
    ``fixed_length`` promises that every example has exactly ``max_length`` ids, which saves the offsets.
    """

    name: str
    table: str
    max_length: int = 1
    pooling: Pooling = "sum"
    weighted: bool = False
    fixed_length: bool = False

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"feature {self.name!r} has max_length {self.max_length}; it must be at least 1")
        if self.pooling not in POOLINGS:
            raise ValueError(f"feature {self.name!r} has pooling {self.pooling!r}; choose one of {', '.join(POOLINGS)}")

    @property
    def unpooled(self) -> bool:
        """Whether every id has a bag of its own: sequences, and max pooling, which reduces afterwards."""
        return self.pooling in ("none", "max")

    @property
    def vectors(self) -> int:
        """How many vectors of an example a model gets: one where ids are pooled, else one a position."""
        return self.max_length if self.pooling == "none" else 1

    @property
    def bags_per_example(self) -> int:
        """How many bags of the stack one example of this feature owns."""
        return self.max_length if self.unpooled else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedFeature:
    """A feature's place in a stack: the address of its table, and its first bag for a batch of one example.

    Attributes:
      config: The feature.
      base: Address of the first of the table's rows that are in this stack.
      rows: How many of the table's rows are in this stack.
      first_bag: The feature's first bag, for a batch of one example.
      first_row: Which row of the table is at ``base``; not 0 only where the table comes in parts.
      table_rows: How many rows the table has with all its parts; ids must be below.
    """

    config: FeatureConfig
    base: int
    rows: int
    first_bag: int
    first_row: int = 0
    table_rows: int

    @property
    def is_part(self) -> bool:
        """Whether ids of this feature are looked up in another stack, too."""
        return self.rows != self.table_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Tables of one (place, dim, dtype, group), and the features that read them, feature-major.

    On a device a stack is one array of (rows, dim); a stack of tensor-train cores is one table.
    """

    name: str
    dim: int
    dtype: str
    rows: int
    tables: tuple[TableConfig, ...]
    bases: tuple[int, ...]
    features: tuple[StackedFeature, ...]

    @property
    def tt_shape(self) -> TTShape | None:
        """The shape of a tensor-train table, None of uncompressed ones."""
        return self.tables[0].tt_shape

    @property
    def compressed(self) -> bool:
        """Whether the stack is a tensor-train table."""
        return self.tt_shape is not None

    @property
    def wide(self) -> bool:
        """Whether the stack is one table of 2^31 - 1 rows or more; devices have its addresses modulo 2^32, in int32."""
        return self.rows >= MAX_ROWS

    @property
    def address_dtype(self) -> np.dtype:
        """Type of addresses on the host: int32, or int64 of a ``wide`` stack."""
        return np.dtype(np.int64 if self.wide else np.int32)

    def addresses_from_device(self, words: np.ndarray) -> np.ndarray:
        """Addresses, modulo 2^32 in int32 as devices have them, in ``address_dtype``."""
        # A table has below 2^32 rows, so that nothing is lost modulo 2^32 and the sign is only a bit.
        return words.view(np.uint32).astype(np.int64) if self.wide else words

    @functools.cached_property
    def bags_per_example(self) -> int:
        """Bags of the whole stack that one example owns."""
        return sum(f.config.bags_per_example for f in self.features)

    @functools.cached_property
    def weighted(self) -> bool:
        """Whether lookups carry weights: the feature's own, or a mean's."""
        return any(f.config.weighted or f.config.pooling in ("mean", "sqrtn") for f in self.features)

    @functools.cached_property
    def padded_length(self) -> int | None:
        """Ids per bag where every bag has the same static number of them, so that offsets are not needed."""
        lengths = {1 if f.config.unpooled else f.config.max_length for f in self.features}
        # Where bags vary in length padding would travel, and be read, like ids: these are ragged.
        regular = all(f.config.max_length == 1 or f.config.fixed_length for f in self.features)
        return lengths.pop() if regular and len(lengths) == 1 else None

    def num_bags(self, batch_size: int) -> int:
        """Bags in a batch."""
        return batch_size * self.bags_per_example

    def capacity(self, batch_size: int) -> int:
        """The most lookups a batch can hold: every example at its feature's ``max_length``."""
        return batch_size * sum(f.config.max_length for f in self.features)

    def unique_capacity(self, batch_size: int) -> int:
        """The most unique rows a batch can touch: no table gives more than its rows, nor than its lookups."""
        lookups = {table.name: 0 for table in self.tables}
        for feature in self.features:
            lookups[feature.config.table] += batch_size * feature.config.max_length
        # By table: a stack of small tables and one long one has far fewer unique rows than lookups.
        return sum(min(table.rows, lookups[table.name]) for table in self.tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingLayout:
    """The stacks of a model. Hashable, so that modules and jitted functions can hold it as static data.

    Attributes:
      members: The stacks.
      order: The features' names in the order of their tables, whatever stacks these are in: what a model computes from
        features in this order does not depend on the tiers.
      planned: Whether a plan places every uncompressed row, over devices and host memory; a table's tier then holds for
        the rows that the plan does not have.

    Example:
      >>> configs = [TableConfig(name="user", rows=1000, dim=8), TableConfig(name="item", rows=500, dim=8)]
      >>> EmbeddingLayout.build(configs, [FeatureConfig(name=table.name, table=table.name) for table in configs])
      EmbeddingLayout: 2 tables of 1,500 rows, 48 kB
        user  1,000 x 8  float32  sharded  32 kB  read by user
        item  500 x 8    float32  sharded  16 kB  read by item
    """

    members: tuple[Stack, ...]
    order: tuple[str, ...]
    planned: bool = False

    def __repr__(self) -> str:
        return layout_shown(self).text()

    def _repr_html_(self) -> str:
        return layout_shown(self).html()

    @functools.cached_property
    def stacks(self) -> Mapping[str, Stack]:
        """The stacks by name."""
        return types.MappingProxyType({stack.name: stack for stack in self.members})

    @functools.cached_property
    def tt_stacks(self) -> tuple[Stack, ...]:
        """The tensor-train tables; every device has their cores."""
        return tuple(stack for stack in self.members if stack.compressed)

    @functools.cached_property
    def planned_stacks(self) -> tuple[Stack, ...]:
        """The stacks whose rows a plan places."""
        return tuple(stack for stack in self.members if self.planned and not stack.compressed)

    @functools.cached_property
    def host_stacks(self) -> tuple[Stack, ...]:
        """The stacks that lie in host memory as a whole, without a plan."""
        return tuple(s for s in self.members if not self.planned and s.tables[0].tier == "host")

    @functools.cached_property
    def device_stacks(self) -> tuple[Stack, ...]:
        """The stacks that lie on the device as a whole, without a plan: a model holds their rows."""
        elsewhere = {stack.name for stack in (*self.tt_stacks, *self.planned_stacks, *self.host_stacks)}
        return tuple(stack for stack in self.members if stack.name not in elsewhere)

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[tuple[Stack, int], ...]]:
        """The stacks that each feature is looked up in, with its number among their features; features in order.

        Several stacks where the feature's table comes in parts.
        """
        places: dict[str, tuple[tuple[Stack, int], ...]] = dict.fromkeys(self.order, ())
        for stack in self.members:
            for number, feature in enumerate(stack.features):
                places[feature.config.name] += ((stack, number),)
        return types.MappingProxyType(places)

    @functools.cached_property
    def features(self) -> tuple[tuple[FeatureConfig, int], ...]:
        """The features in order, each once, with their dims."""
        return tuple((placed[0][0].features[placed[0][1]].config, placed[0][0].dim) for placed in self.places.values())

    @functools.cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        """The tables, or parts of them, in the order that ``build`` was given."""
        order = list(dict.fromkeys(config.table for config, _ in self.features))
        tables = [table for stack in self.members for table in stack.tables]
        return tuple(sorted(tables, key=lambda table: (order.index(table.name), table.first_row)))

    def with_plan(self) -> EmbeddingLayout:
        """The same tables and features where a plan places every uncompressed row."""
        if self.planned:
            return self
        return EmbeddingLayout.build(self.tables, [config for config, _ in self.features], planned=True)

    @staticmethod
    def build(
        tables: Iterable[TableConfig], features: Iterable[FeatureConfig], *, planned: bool = False
    ) -> EmbeddingLayout:
        """Stacks tables of one (place, dim, dtype, group) in their given order; places each feature behind its table.

        Where int32 addresses do not reach all rows, tables are in several stacks, the second called "d16_float32_2".
        Tables of group "slow" form the stack "d16_float32@slow", tables in host memory the stack
        "host_d16_float32".

        Args:
          tables: The tables.
          features: The features that read them.
          planned: Whether a plan places the rows, so that tables of any tier share a stack.

        Raises:
          ValueError: On duplicate names, parts that do not make a table, a feature of an unknown table, a table that no
            feature reads, or a table of 2^31 - 1 rows or more that lies uncompressed, or in cores, on a device.
        """
        tables, features = tuple(tables), tuple(features)
        firsts = [t for t in tables if not t.first_row]
        _check_parts(tables)
        for kind, names in (("table", [t.name for t in firsts]), ("feature", [f.name for f in features])):
            if repeated := sorted(name for name, times in collections.Counter(names).items() if times > 1):
                raise ValueError(f"{kind} names must be unique, but {', '.join(repeated)} occur more than once")
        readers: dict[str, list[FeatureConfig]] = {t.name: [] for t in tables}
        for feature in features:
            if feature.table not in readers:
                raise ValueError(
                    f"feature {feature.name!r} reads table {feature.table!r}, but the tables are {', '.join(readers)}"
                )
            readers[feature.table].append(feature)
        if unread := [name for name, who in readers.items() if not who]:
            raise ValueError(f"no feature reads table(s) {', '.join(unread)}; remove them or add a feature")
        groups = _groups(tables, planned=planned)
        return EmbeddingLayout(
            members=tuple(_stack(name, group, readers) for name, group in groups.items()),
            # By tables as they were given, whatever stacks they are in: moving a table to another tier moves no input
            # of a model.
            order=tuple(feature.name for table in firsts for feature in readers[table.name]),
            planned=planned,
        )


def layout_shown(layout: EmbeddingLayout) -> Shown:
    """What a layout shows of itself, and a run below its own line: tables, rows, bytes, places and readers."""
    readers: dict[str, list[str]] = {}
    for feature, _ in layout.features:
        more = f" ({feature.pooling} of up to {feature.max_length})" if feature.max_length > 1 else ""
        readers.setdefault(feature.table, []).append(f"{feature.name}{more}")
    rows = [
        (table.name, f"{table.rows:,} x {table.dim}", table.dtype, _place(table, layout.planned),
         human_bytes(table.bytes), f"read by {', '.join(readers[table.name])}"[:80])
        for table in layout.tables
    ]  # fmt: skip
    total, size = sum(table.rows for table in layout.tables), sum(table.bytes for table in layout.tables)
    count = f"{counted(len(layout.tables), 'table')} of {counted(total, 'row')}"
    return Shown((f"EmbeddingLayout: {count}, {human_bytes(size)}",), rows)


def _place(table: TableConfig, planned: bool) -> str:
    """Where a table is, in a word or two."""
    if table.tier == "tt":
        return "tensor train"
    return "by plan" if planned else table.tier


def _check_parts(tables: tuple[TableConfig, ...]) -> None:
    """Raises ValueError where parts of tables are missing, too many, or of unequal dims."""
    by_name: dict[str, list[TableConfig]] = {}
    for table in tables:
        by_name.setdefault(table.name, []).append(table)
    for table in tables:
        other_parts = [t for t in by_name[table.name] if t is not table] if table.is_part else []
        if table.is_part and (len(other_parts) != 1 or other_parts[0].table_rows != table.table_rows):
            raise ValueError(
                f"table {table.name!r} of {table.table_rows:,} rows comes in parts, of which rows {table.first_row:,}"
                f" to {table.first_row + table.rows:,} are one; give exactly one other, with the rest"
            )
        for other in other_parts:
            if other.rows + table.rows != table.table_rows or other.dim != table.dim or other.tier == table.tier:
                raise ValueError(
                    f"the parts of table {table.name!r}, {table.rows:,} x {table.dim} of tier {table.tier!r} and"
                    f" {other.rows:,} x {other.dim} of tier {other.tier!r}, do not make its {table.table_rows:,} rows;"
                    " give the first rows whole and all others, of the same dim, of tier 'tt'"
                )


def _groups(tables: Iterable[TableConfig], *, planned: bool) -> dict[str, list[TableConfig]]:
    """The tables of each stack, by name."""
    groups: dict[str, list[TableConfig]] = {}
    current: dict[str, tuple[str, int, int]] = {}  # by kind, the stack in the making: its name, number and rows
    for table in tables:
        kind = _stack_name(table, planned=planned)
        if table.rows >= MAX_ROWS and (table.tier == "tt" or not (planned or table.tier == "host")):
            raise ValueError(
                f"table {table.name!r} of tier {table.tier!r} has {table.rows:,} rows, but int32 addresses reach"
                f" {MAX_ROWS - 1:,}; hash its ids to fewer rows, keep it in host memory (tier 'host'), or spread its"
                " rows over several devices (mesh.devices; planned=True in code)"
            )
        name, number, rows = current.get(kind, (kind, 1, 0))
        # A table is never cut: the next one begins another stack, whose addresses start at 0 again.
        if rows and rows + table.rows >= MAX_ROWS:
            number, rows = number + 1, 0
            name = f"{kind}_{number}"
        current[kind] = name, number, rows + table.rows
        groups.setdefault(name, []).append(table)
    return groups


def _stack_name(table: TableConfig, *, planned: bool) -> str:
    if table.tier == "tt":
        return f"tt_{table.name}"
    kind = f"d{table.dim}_{table.dtype}" + (f"@{table.group}" if table.group else "")
    return f"host_{kind}" if table.tier == "host" and not planned else kind


def _stack(name: str, tables: list[TableConfig], readers: Mapping[str, list[FeatureConfig]]) -> Stack:
    bases, features, rows, bag = [], [], 0, 0
    for table in tables:
        bases.append(rows)
        for config in readers[table.name]:
            features.append(
                StackedFeature(
                    config=config,
                    base=rows,
                    rows=table.rows,
                    first_bag=bag,
                    first_row=table.first_row,
                    table_rows=table.table_rows,
                )
            )
            bag += config.bags_per_example
        rows += table.rows
    return Stack(
        name=name,
        dim=tables[0].dim,
        dtype=tables[0].dtype,
        rows=rows,
        tables=tuple(tables),
        bases=tuple(bases),
        features=tuple(features),
    )
