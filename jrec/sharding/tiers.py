"""What to do where the tables do not fit: the coldest rows to host memory, allowed tables to tensor-train cores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.errors import ConfigError
from jrec.sharding.cost import replicated_seconds, sharded_seconds
from jrec.sharding.errors import PlanError
from jrec.sharding.problem import ITEM_BYTES, PlanTable, Problem
from jrec.sharding.replicate import FrequencyRule, Runs, pays, runs_of

if TYPE_CHECKING:
    from jrec.ops.tt.shape import TTShape

_ALL_SUBSETS = 8  # options up to which every subset is tried
_GRID = 33


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTOption:
    """A table, or its rows from some row on, that may live as tensor-train cores on every device.

    Attributes:
      table: The table's name.
      memory_bytes: Bytes of the cores with their slots.
      seconds: Seconds of their products in a step of one device.
      rank: The cores' rank.
      first_rank: The rows before it, the most frequent ones, stay uncompressed; 0 compresses the whole table.
      required: Take it even where the tables fit without.
    """

    table: str
    memory_bytes: float
    seconds: float
    rank: int
    first_rank: int = 0
    required: bool = False


def tt_option(
    problem: Problem,
    name: str,
    rank: int,
    *,
    first_rank: int = 0,
    required: bool = False,
    shape: TTShape | None = None,
) -> TTOption:
    """The cores of a table at some rank: their memory, and by the cost model of ``jrec.ops.tt`` their time.

    Args:
      problem: The tables and their accesses.
      name: The table's name.
      rank: The rank of all bonds, or as much of it as the shape can use.
      first_rank: How many of the first rows stay uncompressed.
      required: Take it even where the tables fit without.
      shape: The cores' shape; None for the one that ``TTShape.search`` finds.

    Raises:
      ConfigError: On an unknown table, a rank below 1, or a dtype that cores cannot have.
    """
    from jrec.ops.tt.cost import explain
    from jrec.ops.tt.shape import TTShape

    number = table_number(problem, name)
    table: PlanTable = problem.tables[number]
    if table.dtype == "float16":
        raise ConfigError(f"table {name!r} is float16; cores are float32 or bfloat16")
    if rank < 1 or not 0 <= first_rank < table.rows:
        raise ConfigError(
            f"table {name!r} has {table.rows:,} rows, of which those from {first_rank:,} on cannot be in cores of rank"
            f" {rank}; give a rank of at least 1 and leave at least one row"
        )
    rows = table.rows - first_rank
    if shape is None:
        unranked = TTShape.search(rows, table.dim, ranks=1)
        shape = unranked.with_ranks([min(rank, bound) for bound in unranked.max_ranks])
    ranked = problem.by_row[number]
    lookups = float(ranked.mass[-1] - ranked.mass_before(np.array(first_rank)))
    choice = explain(shape, max(1, round(lookups)), platform="gpu")
    seconds = choice.forward_seconds[choice.forward]
    if problem.purpose == "training":
        seconds += choice.backward_seconds[choice.backward]
    return TTOption(
        table=name,
        memory_bytes=shape.num_parameters * ITEM_BYTES[table.dtype] * (1 + table.slot_bytes / table.row_bytes),
        seconds=seconds,
        rank=rank,
        first_rank=first_rank,
        required=required,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marginal:
    """What one more byte of memory would buy: seconds saved a step, and how."""

    seconds_per_byte: float
    effect: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tiers:
    """The tiers chosen.

    Attributes:
      kept: (tables,) int64, ranks whose rows live uncompressed on devices; those up to ``tt_from`` live in host memory.
      tt_from: (tables,) int64, ranks from which a table is tensor-train; its rows where it is not.
      tt: The options taken.
      extra: Bytes for further copies of rows, over all devices.
      marginal: What the next byte would buy.
      host_bytes: Bytes of rows in host memory.
      seconds: What the choice costs in a step.
    """

    kept: np.ndarray
    tt_from: np.ndarray
    tt: tuple[TTOption, ...]
    extra: float
    marginal: Marginal
    host_bytes: float
    seconds: float

    @property
    def core_bytes(self) -> float:
        """Bytes of all cores, on each device."""
        return sum(option.memory_bytes for option in self.tt)

    @property
    def core_seconds(self) -> float:
        """Seconds of all cores' products."""
        return sum(option.seconds for option in self.tt)


def cuts_of(taken: Sequence[TTOption]) -> dict[str, int]:
    """``Problem.cuts`` where these options are taken: cores hold rows, whichever are accessed most at present."""
    return {option.table: option.first_rank for option in taken if option.first_rank}


def table_number(problem: Problem, name: str) -> int:
    """The position of a table.

    Raises:
      ConfigError: If there is none of this name.
    """
    names = [t.name for t in problem.tables]
    if name not in names:
        raise ConfigError(f"there is no table {name!r}; the tables are {', '.join(names)}")
    return names.index(name)


def choose_tiers(
    problem: Problem,
    options: Sequence[TTOption] = (),
    *,
    host: bool = True,
    rule: FrequencyRule = "oper",
) -> Tiers:
    """The cheapest tiers that fit: nothing leaves the devices where the tables fit as they are.

    Every subset of the tensor-train options (of the cheapest ones by byte freed, where there are more than 8) is tried
    with the least host memory that then fits and, where memory is short, several amounts of copies.

    Args:
      problem: Tables and devices.
      options: Tables that may be tensor-train.
      host: Whether rows may go to host memory.
      rule: The rule of replication, see ``jrec.sharding.replicate.pays``.

    Raises:
      PlanError: If nothing that is allowed fits.
    """
    candidates = [t for taken in _subsets(problem, options) if (t := _with(problem, taken, host, rule)) is not None]
    if not candidates:
        capacity, needed = sum(problem.hardware.memory), problem.total_bytes
        allowed = "host memory" if host and problem.hardware.host else "no host memory"
        raise PlanError(
            f"the tables take {needed:,} bytes, but the {problem.devices} devices of {problem.hardware.name!r} offer"
            f" {capacity:,} together; allowed were {allowed} and {len(options)} tensor-train table(s). Give the devices"
            f" more memory, more devices, {'a host bandwidth, ' if host else ''}or tensor-train ranks"
        )
    return min(candidates, key=lambda tiers: tiers.seconds)


def _subsets(problem: Problem, options: Sequence[TTOption]) -> Iterator[tuple[TTOption, ...]]:
    required = tuple(o for o in options if o.required)
    free = [o for o in options if not o.required]
    # Where all rows fit uncompressed, no tensor train but those that were asked for.
    if problem.total_bytes <= _capacity(problem, 0.0):
        yield required
        return
    if len(free) <= _ALL_SUBSETS:
        for count in range(len(free) + 1):
            yield from (required + taken for taken in itertools.combinations(free, count))
        return

    def price(option: TTOption) -> float:
        table = problem.tables[table_number(problem, option.table)]
        freed = (table.rows - option.first_rank) * table.memory_bytes - problem.devices * option.memory_bytes
        return option.seconds / freed if freed > 0 else float("inf")

    free.sort(key=price)
    for count in range(len(free) + 1):
        yield required + tuple(free[:count])


def _with(problem: Problem, taken: tuple[TTOption, ...], host: bool, rule: FrequencyRule) -> Tiers | None:
    """The best tiers with exactly these options, None if they do not fit."""
    problem = problem.cut(cuts_of(taken))
    rows = np.array([t.rows for t in problem.tables], np.int64)
    tt_from = rows.copy()
    for option in taken:
        tt_from[table_number(problem, option.table)] = option.first_rank
    cores = sum(o.memory_bytes for o in taken)
    if cores > min(problem.hardware.memory):
        return None
    capacity = _capacity(problem, cores)
    runs = runs_of(problem, tt_from)
    dense = float(runs.memory.sum())
    wanted = problem.extra_memory * problem.total_bytes if problem.devices > 1 else 0.0
    tightest = max(0.0, min(problem.hardware.memory) - cores - float(problem.memory_bytes.max())) * (
        problem.devices - 1
    )
    core_seconds = sum(o.seconds for o in taken)
    if capacity >= dense:
        extra = min(wanted, capacity - dense, tightest)
        return Tiers(
            kept=tt_from.copy(), tt_from=tt_from, tt=taken, extra=extra, host_bytes=0.0, seconds=core_seconds,
            marginal=_next_copy(problem, runs, extra, wanted, rule),
        )  # fmt: skip
    if not host or not problem.hardware.host:
        return None
    amounts = np.linspace(0.0, min(wanted, tightest, capacity), _GRID)
    seconds = [_seconds(problem, runs, capacity, float(x), rule) for x in amounts]
    best = int(np.argmin(seconds))
    extra = float(amounts[best])
    kept_bytes = max(0.0, capacity - extra)
    kept = runs.prefix(problem, kept_bytes)
    return Tiers(
        kept=kept,
        tt_from=tt_from,
        tt=taken,
        extra=extra,
        host_bytes=float(((tt_from - kept) * problem.memory_bytes).sum()),
        seconds=core_seconds + seconds[best],
        marginal=_next_kept(problem, runs, kept_bytes),
    )


def _capacity(problem: Problem, cores: float) -> float:
    """Bytes that rows can surely fill: whole rows of each device or, where tables differ, all but a row of each."""
    room = np.maximum(np.array(problem.hardware.memory, np.float64) - cores, 0.0)
    row = float(problem.memory_bytes.max())
    if (problem.memory_bytes == row).all():
        return float((np.floor(room / row) * row).sum())
    # Pieces of unlike rows may leave less than a row of each device empty, whichever way they are dealt.
    return float(np.maximum(room - row, 0.0).sum())


def _seconds(problem: Problem, runs: Runs, capacity: float, extra: float, rule: FrequencyRule) -> float:
    """Seconds of one device's host accesses, fetches and all-reduces, with ``extra`` bytes of copies."""
    devices, hardware = problem.devices, problem.hardware
    passes = 2 if problem.purpose == "training" else 1
    memory, fetched = np.append(0, np.cumsum(runs.memory)), np.append(0, np.cumsum(runs.fetched))
    copied = extra / (devices - 1) if devices > 1 else 0.0
    if passes == 2 and copied:
        copied = min(copied, float(runs.memory[pays(problem, runs.access, rule)].sum()))
    near, kept = np.interp([copied, max(copied, capacity - extra)], memory, fetched)
    seconds = passes * (fetched[-1] - kept) / hardware.host
    if devices > 1:
        seconds += passes * (kept - near) * (devices - 1) / devices / hardware.p2p
        if passes == 2:
            seconds += replicated_seconds(problem, copied)
    return float(seconds)


def _next_kept(problem: Problem, runs: Runs, kept: float) -> Marginal:
    """What a byte more on the devices is worth where rows live in host memory."""
    passes = 2 if problem.purpose == "training" else 1
    run = min(int(np.searchsorted(np.cumsum(runs.memory), kept, side="right")), len(runs.table) - 1)
    per_byte = passes * float(runs.worth[run]) / problem.hardware.host
    if problem.devices > 1:
        per_byte -= passes * float(runs.worth[run]) * (1 - 1 / problem.devices) / problem.hardware.p2p
    name = problem.tables[runs.table[run]].name
    return Marginal(seconds_per_byte=max(per_byte, 0.0), effect=f"takes rows of table {name!r} back from host memory")


def _next_copy(problem: Problem, runs: Runs, extra: float, wanted: float, rule: FrequencyRule) -> Marginal:
    """What a byte more of copies is worth where all rows fit."""
    nothing = Marginal(seconds_per_byte=0.0, effect="buys nothing: every row whose copies pay is copied already")
    if problem.devices == 1:
        return Marginal(seconds_per_byte=0.0, effect="buys nothing: one device needs no copies")
    training = problem.purpose == "training"
    good = runs.take(pays(problem, runs.access, rule)) if training else runs
    run = int(np.searchsorted(np.cumsum(good.memory), extra / (problem.devices - 1), side="right"))
    if run >= len(good.table):
        return nothing
    number = int(good.table[run])
    size = float(problem.row_bytes[number])
    # Of a step in which all devices fetch at once: a row costs each of them an M-th of what Equation 4 says.
    saved = sharded_seconds(problem, float(good.access[run]) * size) / problem.devices
    saved = saved - replicated_seconds(problem, size) if training else saved / 2
    if saved <= 0:
        return Marginal(
            seconds_per_byte=0.0, effect="buys nothing: further copies cost more in all-reduce than they save"
        )
    per_byte = float(saved) / ((problem.devices - 1) * float(problem.memory_bytes[number]))
    limit = "extra_memory" if extra >= wanted else "the devices' memory"
    return Marginal(
        seconds_per_byte=per_byte,
        effect=f"copies further rows of table {problem.tables[number].name!r} to all devices; {limit} is the limit now",
    )
