"""What is to be planned: tables, how their rows are accessed, devices, and the kind of use.

OPER's symbols: a row is an embedding ``e_k``, ``S_k`` its bytes, ``A_k`` its average accesses by one device in one
step, ``M`` the number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from jrec.access.profile import AccessProfile
from jrec.errors import ConfigError
from jrec.sharding.hardware import Hardware

Purpose = Literal["training", "inference"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_EXTRA = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTable:
    """A table to be placed.

    Attributes:
      name, rows, dim, dtype, group: As in ``jrec.ops.layout.TableConfig``.
      slot_bytes: Bytes of the optimizer's slots of one row, which lie where the row lies.
      stack_number: Which of the stacks of its dim and dtype it is in, counted from 1: a layout has several where int32
        addresses do not reach all rows of one (``EmbeddingLayout.build``).
    """

    name: str
    rows: int
    dim: int
    dtype: str = "float32"
    slot_bytes: int = 0
    stack_number: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.rows <= 2**32 and 1 <= self.dim < 2**31 and 0 <= self.slot_bytes < 2**40):
            raise ConfigError(f"table {self.name!r}: {self.rows} rows of dim {self.dim}, {self.slot_bytes} slot bytes")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"table {self.name!r} has dtype {self.dtype!r}; choose one of {', '.join(ITEM_BYTES)}")

    @property
    def row_bytes(self) -> int:
        """What is fetched: a row without its slots."""
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """What a row takes where it lives."""
        return self.row_bytes + self.slot_bytes

    @property
    def stack(self) -> str:
        """Tables of equal dim, dtype and group share an array on each device, or several where a layout has several."""
        kind = f"d{self.dim}_{self.dtype}" + (f"@{self.group}" if self.group else "")
        return kind if self.stack_number == 1 else f"{kind}_{self.stack_number}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """A table's rows from most to least accessed. Rank and row are equal where the profile descends.

    Attributes:
      starts: (runs + 1,) int64, ranks where runs of equally accessed rows start.
      access: (runs,) float64, A of each row of a run; descending, before a cut and behind it.
      first_row: (runs,) int64, the row of a run's first rank; the run's rows follow each other.
      mass: (runs + 1,) float64, accesses of all ranks before a run.
    """

    starts: np.ndarray
    access: np.ndarray
    first_row: np.ndarray
    mass: np.ndarray

    @staticmethod
    def of(starts: np.ndarray, access: np.ndarray, cut: int = 0) -> Ranked:
        """From runs in row order; the ranks before ``cut`` are of the rows before it."""
        if cut not in starts:
            run = int(np.searchsorted(starts, cut)) - 1
            starts, access = np.insert(starts, run + 1, cut), np.insert(access, run, access[run])
        first = int(np.searchsorted(starts, cut))
        before, behind = np.argsort(-access[:first], kind="stable"), np.argsort(-access[first:], kind="stable")
        # Stable sorts: of rows accessed alike the first in the table are first, and ranges of ranks stay ranges of
        # rows.
        order = np.concatenate([before, first + behind])
        lengths = np.diff(starts)[order]
        return Ranked(
            starts=np.append(0, np.cumsum(lengths)),
            access=access[order],
            first_row=starts[:-1][order],
            mass=np.append(0.0, np.cumsum(access[order] * lengths)),
        )

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return int(self.starts[-1])

    def mass_before(self, ranks: np.ndarray) -> np.ndarray:
        """Accesses of all ranks before each of these."""
        run = np.minimum(np.searchsorted(self.starts, ranks, side="right") - 1, len(self.access) - 1)
        return self.mass[run] + (ranks - self.starts[run]) * self.access[run]

    def access_at(self, ranks: np.ndarray) -> np.ndarray:
        """A of the row of each rank."""
        return self.access[np.searchsorted(self.starts, ranks, side="right") - 1]

    def rank_of(self, rows: np.ndarray) -> np.ndarray:
        """The ranks of rows."""
        order = np.argsort(self.first_row)
        run = order[np.searchsorted(self.first_row[order], rows, side="right") - 1]
        return self.starts[run] + rows - self.first_row[run]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Tables, their accesses, the devices, and the purpose.

    Attributes:
      tables: The tables to be placed; the profile has each of them.
      profile: The access profile.
      hardware: The devices; where it has ``tables_on``, the others share the batch and keep no rows.
      batch_size: Examples of one step over all devices together.
      purpose: "training" sends gradients back and sums replicas' gradients; "inference" only fetches.
      extra_memory: How much of the tables' size may be spent on further copies of rows.
      dedup: Count a row that a device accesses several times in a step as one fetch, which is what a lookup of unique
        ids does. OPER's equations do not.
      cuts: A row of each table that ranks do not pass: rows before it rank before all rows from it on, however often
        these are accessed, since the latter are stored in another way.

    Raises:
      ConfigError: On values out of range or a profile of other sizes.
    """

    tables: tuple[PlanTable, ...]
    profile: AccessProfile
    hardware: Hardware
    batch_size: int
    purpose: Purpose = "training"
    extra_memory: float = DEFAULT_EXTRA
    dedup: bool = False
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", tuple(self.tables))
        if not self.tables:
            raise ConfigError("there are no tables to plan")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; a step has at least one example")
        if not 0 <= self.extra_memory <= 100:
            raise ConfigError(f"extra_memory is {self.extra_memory}; it is a share of the tables' size, such as 0.05")
        if self.purpose not in ("training", "inference"):
            raise ConfigError(f"purpose is {self.purpose!r}; choose training or inference")
        if self.dedup and self.computes is not None:
            raise ConfigError(
                "dedup counts the rows that a device fetches, but devices that only keep tables (tables_on) get every"
                " lookup and send sums back; leave --dedup out"
            )
        for table in self.tables:
            if (rows := self.profile.table(table.name).rows) != table.rows:
                raise ConfigError(f"table {table.name!r} has {table.rows:,} rows, but {rows:,} in the access profile")

    @property
    def devices(self) -> int:
        """OPER's M."""
        return self.hardware.devices

    @property
    def computes(self) -> tuple[bool, ...] | None:
        """(devices,) which devices have examples; None where all have, and keep tables too."""
        return self.hardware.computes

    @property
    def num_compute_devices(self) -> int:
        """How many devices share the batch."""
        return self.devices - len(self.hardware.tables_on)

    def on_devices(self, hardware: Hardware, compute_devices: int, **changes: object) -> Problem:
        """The problem on other devices, each accessing as much as one of ``compute_devices`` does."""
        # A Problem divides a batch among its own devices.
        profile = dataclasses.replace(self.profile, examples=self.profile.examples * compute_devices / hardware.devices)
        return dataclasses.replace(self, hardware=hardware, profile=profile, **changes)

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes of all rows with their slots, one copy each."""
        return sum(t.rows * t.memory_bytes for t in self.tables)

    @functools.cached_property
    def ranked(self) -> tuple[Ranked, ...]:
        """The rows of every table, ranked by A."""
        return tuple(self._ranked(table) for table in self.tables)

    @functools.cached_property
    def by_row(self) -> tuple[Ranked, ...]:
        """The rows of every table in their own order: ranks are rows, and accesses need not descend."""
        return tuple(
            Ranked(
                starts=starts,
                access=access,
                first_row=starts[:-1],
                mass=np.append(0.0, np.cumsum(access * np.diff(starts))),
            )
            for starts, access in map(self._accesses, self.tables)
        )

    def _ranked(self, table: PlanTable) -> Ranked:
        return Ranked.of(*self._accesses(table), self.cuts.get(table.name, 0))

    def cut(self, rows: Mapping[str, int]) -> Problem:
        """The problem with these cuts; those that rows in order of access keep by themselves are left out."""
        needed = {}
        for table in self.tables:
            starts, access = self._accesses(table)
            row = rows.get(table.name, 0)
            before, behind = access[starts[:-1] < row], access[starts[1:] > row]
            if before.size and behind.size and before.min() < behind.max():
                needed[table.name] = row
        return self if self.cuts == needed else dataclasses.replace(self, cuts=needed)

    def _accesses(self, table: PlanTable) -> tuple[np.ndarray, np.ndarray]:
        profile = self.profile.table(table.name)
        access = profile.counts * (self.batch_size / self.num_compute_devices / self.profile.examples)
        # Of Poisson many accesses, the probability of at least one; expm1 keeps the rare rows' digits.
        return profile.starts, -np.expm1(-access) if self.dedup else access

    @functools.cached_property
    def row_bytes(self) -> np.ndarray:
        """(tables,) int64."""
        return np.array([t.row_bytes for t in self.tables], np.int64)

    @functools.cached_property
    def memory_bytes(self) -> np.ndarray:
        """(tables,) int64, slots included."""
        return np.array([t.memory_bytes for t in self.tables], np.int64)


def tables_of(rows: Iterable[tuple[str, int]], dim: int, *, dtype: str = "float32", slot_bytes: int = 0):
    """Tables of one dim, from (name, rows) pairs."""
    return tuple(PlanTable(name=n, rows=r, dim=dim, dtype=dtype, slot_bytes=slot_bytes) for n, r in rows)
