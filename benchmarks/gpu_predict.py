"""The predicted time of jrec's GPU kernels on a batch, from compiled code and real segments. Nothing here was measured.

A launch takes the longest of four times, to which the gaps between launches are added apart:

    HBM       bytes that must come from or go to device memory, at a copy's bandwidth
    L2        bytes that L1 does not have, at L2's bandwidth
    issue     instructions of all warps, one a cycle on each of four schedulers
    latency   thread blocks dealt to multiprocessors in order, as many as fit; a warp waits for one load after another.
              This is Little's law at the real distribution of segments, with waves, tails and the longest warp in it.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

from benchmarks import gpu_trips
from benchmarks.gpu_caches import misses, misses_of_each
from benchmarks.gpu_chip import Chip, resident_blocks
from benchmarks.gpu_facts import Facts, Kernel
from benchmarks.gpu_model_cases import Case
from benchmarks.gpu_trips import Segments
from jrec.pallas import segments
from jrec.pallas.cast import Runs
from jrec.pallas.tile import ACCESS_BYTES, WARP, Tile
from jrec.pallas.tuning import TuningConfig

SECTOR = 32  # bytes that the memory moves at least
_TRIP_CYCLES, _ROW_CYCLES = 60, 6  # from the last load's arrival to the next loads: a step's fixed part, and a row's
_VISIT_CYCLES = 300  # an optimizer step: a sum along the row by shuffles, a root, stores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One job of a launch.

    Attributes:
      name: The job's body.
      blocks: (blocks,) seconds that each thread block takes when it waits for nothing but its own loads.
      steps: (warps,) steps of each warp that makes any.
      hbm_bytes: Bytes from and to device memory.
      l2_bytes: Bytes between L1 and L2, with those.
      row_loads: Loads of rows that warps issue, of up to 512 bytes each.
      visits: Tiles that warps visit.
    """

    name: str
    blocks: np.ndarray
    steps: np.ndarray
    hbm_bytes: float
    l2_bytes: float
    row_loads: float
    visits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A launch's predicted time, seconds, and what it comes from.

    Attributes:
      name: The kernel.
      registers: Registers of a thread.
      warps: Warps that a multiprocessor holds.
      blocks: Thread blocks.
      waves: Blocks by those that the GPU holds at once.
      in_flight: Bytes of rows that a multiprocessor's warps can ask for at once, where all lanes load.
      mean_steps: Steps of a warp that makes any.
      most_steps: Steps of the warp that makes most.
      hbm: Seconds.
      l2: Seconds.
      issue: Seconds.
      latency: Seconds.
    """

    name: str
    registers: int
    warps: int
    blocks: int
    waves: float
    in_flight: int
    mean_steps: float
    most_steps: int
    hbm: float
    l2: float
    issue: float
    latency: float

    @property
    def seconds(self) -> float:
        """The longest of the four."""
        return max(self.hbm, self.l2, self.issue, self.latency)

    @property
    def bound(self) -> str:
        """Which of the four it is."""
        return max(("hbm", "l2", "issue", "latency"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """Times that no kernel beats, seconds.

    Attributes:
      distinct: Each distinct byte once, at the bandwidth of device memory; as in ``benchmarks.gpu``.
      levels: The same, or at L2's bandwidth what L1s cannot have, whichever takes longer: each multiprocessor fetches a
        row once if it is to add it up at all, be its L1 as large as can be. Goals are judged against this.
    """

    distinct: float
    levels: float


def makespan(blocks: np.ndarray, slots: int) -> float:
    """When the last block ends, where each is dealt to the first slot that is free."""
    if blocks.size <= slots:
        return float(blocks.max(initial=0))
    free = list(blocks[:slots])
    heapq.heapify(free)
    for block in blocks[slots:]:
        heapq.heapreplace(free, free[0] + block)
    return float(max(free))


def predict(works: Sequence[Work], kernel: Kernel, chip: Chip, *, loads_a_step: int) -> Prediction:
    """The time of a launch of ``works``, which were compiled to ``kernel``."""
    resident = resident_blocks(registers=kernel.registers, shared_bytes=kernel.shared_bytes)
    slots = resident * chip.multiprocessors
    blocks = np.concatenate([work.blocks for work in works])
    steps = np.concatenate([work.steps for work in works])
    per_load, per_visit = _instructions(kernel, len(works))
    issued = sum(work.row_loads * per_load + work.visits * per_visit for work in works)
    warps = resident * gpu_trips.WARPS
    return Prediction(
        name=kernel.name,
        registers=kernel.registers,
        warps=warps,
        blocks=blocks.size,
        waves=blocks.size / slots,
        in_flight=warps * WARP * ACCESS_BYTES * loads_a_step,
        mean_steps=float(steps.mean()) if steps.size else 0.0,
        most_steps=int(steps.max(initial=0)),
        hbm=sum(work.hbm_bytes for work in works) / chip.hbm,
        l2=sum(work.l2_bytes for work in works) / chip.l2,
        issue=issued / (4 * chip.multiprocessors * chip.clock),
        latency=makespan(blocks, slots),
    )


def _instructions(kernel: Kernel, jobs: int) -> tuple[float, float]:
    """Machine instructions of a warp for each load of a row in a loop, and for the rest of a visit."""
    scale = kernel.instructions / kernel.ptx_instructions
    loops = [loop for loop in kernel.loops if loop.row_loads]
    if not loops:
        return 0.0, kernel.instructions / jobs
    per_load = max(loop.instructions / loop.row_loads for loop in loops)
    rest = kernel.ptx_instructions - sum(loop.instructions for loop in loops)
    return scale * per_load, scale * rest / jobs


def _step(chip: Chip, latency: float, unroll: int) -> float:
    return latency + (_TRIP_CYCLES + _ROW_CYCLES * unroll) / chip.clock


def _row_bytes(dim: int) -> int:
    return -(-dim * 4 // SECTOR) * SECTOR


def forward(case: Case, cast_segments: Segments, facts: Facts, config: TuningConfig, chip: Chip) -> list[Prediction]:
    """Predicts the gather-reduce of a batch whose bags all have the same length."""
    (kernel,) = facts.kernels
    tile = Tile.of(case.dim, 4, chunks=config.chunks)
    steps = -(-case.length // config.unroll)
    tiles = -(-case.bags // tile.rows)
    # A warp's rows rarely are all in L2, and it waits for the slowest.
    once = chip.block_start + chip.hbm_latency + steps * _step(chip, chip.hbm_latency, config.unroll * config.chunks)
    row = _row_bytes(case.dim)
    fetched = sum(misses(c, capacity=chip.l2_bytes / row) for c in cast_segments.counts_by_table) * row
    streams = case.lookups * 4 + case.bags * case.dim * 4
    works = Work(
        name="gather_reduce_padded",
        blocks=np.full(tiles, once),
        steps=np.full(tiles * gpu_trips.WARPS, steps),
        hbm_bytes=fetched + streams,
        l2_bytes=_l1_misses(cast_segments, row, chip) * row + streams,
        row_loads=tiles * gpu_trips.WARPS * case.length * tile.blocks * tile.chunks,
        visits=tiles * gpu_trips.WARPS,
    )
    return [predict([works], kernel, chip, loads_a_step=min(case.length, config.unroll) * tile.blocks * tile.chunks)]


def _l1_misses(cast_segments: Segments, row: int, chip: Chip) -> float:
    return sum(
        misses_of_each(c, caches=chip.multiprocessors, capacity=chip.l1_bytes / row)
        for c in cast_segments.counts_by_table
    )


def update(case: Case, cast_segments: Segments, facts: Facts, config: TuningConfig, chip: Chip) -> list[Prediction]:
    """Predicts a casted update with row-wise Adagrad: short segments beside pieces, pieces of these, long segments."""
    nodes = gpu_trips.full_nodes(cast_segments, config)
    first, *rest = facts.kernels
    loads = config.unroll * Tile.of(case.dim, 4).blocks
    short = _short(case, cast_segments, config, chip)
    if not nodes:
        return [predict([short], first, chip, loads_a_step=loads * config.chunks)]
    launches = [[_pieces(case, cast_segments, nodes, 0, config, chip), short]]
    launches += [[_pieces(case, cast_segments, nodes, level, config, chip)] for level in range(1, len(nodes))]
    launches.append([_long(case, cast_segments, config, chip)])
    kernels = [first, *rest]
    if len(kernels) != len(launches):
        raise ValueError(
            f"{case.name}: {len(launches)} launches are modelled, but {len(kernels)} kernels were compiled"
        )
    return [predict(works, kernel, chip, loads_a_step=loads) for works, kernel in zip(launches, kernels, strict=True)]


def _touched_bytes(rows: int, dim: int) -> int:
    """Rows and their sums of squares, in and out, in whole sectors; and the cast's row numbers and offsets."""
    return rows * (2 * (_row_bytes(dim) + SECTOR) + 8)


def _short(case: Case, cast_segments: Segments, config: TuningConfig, chip: Chip) -> Work:
    tile = Tile.of(case.dim, 4, chunks=config.chunks)
    trips = gpu_trips.short_trips(
        cast_segments, tile, config
    )  # of the tiles that the cast's rows fill: a walk ends there
    grid = min(-(-case.lookups // tile.rows), config.blocks)
    step = _step(chip, chip.l2_latency, config.unroll * config.chunks)
    # Table row and slot are asked for before the first gradient; both must be there for the optimizer's step.
    visit = np.maximum(chip.hbm_latency, trips * step) if config.prefetch else chip.hbm_latency + trips * step
    visit += _VISIT_CYCLES / chip.clock
    blocks = np.zeros((grid, gpu_trips.WARPS))
    np.add.at(blocks, np.arange(visit.shape[0]) % grid, visit)
    start = chip.block_start + 3 * chip.l2_latency  # how many rows, their bounds, their lookups
    short = cast_segments.short(config.split)
    lookups, rows = int(cast_segments.lengths[short].sum()), int(short.sum())
    gradients = case.bags * case.dim * 4
    l2_lookups = _gradient_l2_bytes(case, lookups, chip)
    touched = _touched_bytes(rows, case.dim)
    return Work(
        name="casted_update_short",
        blocks=start + blocks.max(axis=1),
        steps=trips[trips > 0].reshape(-1),
        hbm_bytes=touched + lookups * 4 + gradients * lookups / cast_segments.lookups,
        l2_bytes=touched + lookups * 4 + l2_lookups,
        row_loads=float(trips.sum()) * config.unroll * tile.blocks * tile.chunks,
        visits=visit.size,
    )


def _gradient_l2_bytes(case: Case, lookups: int, chip: Chip) -> float:
    """Bytes that ``lookups`` random bag gradients take from L2, after each multiprocessor's L1."""
    tables = case.workload.num_tables
    counts = np.full(case.workload.batch, max(1e-9, lookups / tables / case.workload.batch))
    row = _row_bytes(case.dim)
    return (
        min(lookups, tables * misses_of_each(counts, caches=chip.multiprocessors, capacity=chip.l1_bytes / row)) * row
    )


def _pieces(
    case: Case, cast_segments: Segments, nodes: list[np.ndarray], level: int, config: TuningConfig, chip: Chip
) -> Work:
    tile = Tile.of(case.dim, 4)
    full = nodes[level] >= 0
    trips = gpu_trips.by_warp(full, tile) * -(-config.split // config.unroll)
    searches = _searches(case.lookups + 1, tile.lanes) if level == 0 else 1
    # A node that lies within a segment: its number's search, the segment's end, its indices; then the rows.
    waits = (searches + 1) * chip.l2_latency
    warps = (
        chip.block_start
        + waits
        + np.where(trips > 0, chip.l2_latency * (level == 0) + trips * _step(chip, chip.l2_latency, config.unroll), 0)
    )
    lookups = int(full.sum()) * config.split
    written = int(full.sum()) * case.dim * 4 + full.size * 4 * (level == 0)
    if level == 0:
        gradients = case.bags * case.dim * 4 * lookups / cast_segments.lookups
        read, l2_read = lookups * 4 + gradients, lookups * 4 + _gradient_l2_bytes(case, lookups, chip)
    else:
        read, l2_read = 0, lookups * case.dim * 4  # pieces were written just before: they are in L2
    return Work(
        name="pieces",
        blocks=warps.max(axis=1),
        steps=trips[trips > 0].reshape(-1),
        hbm_bytes=read + written,
        l2_bytes=l2_read + written + full.size * searches * tile.lanes * 4,
        row_loads=float(trips.sum()) * config.unroll * tile.blocks,
        visits=trips.size,
    )


def _searches(segments: int, lanes: int) -> int:
    """Dependent loads of ``segment_at``."""
    waits = 0
    while segments > 1:
        segments = -(-segments // (lanes + 1))
        waits += 1
    return waits


def _long(case: Case, cast_segments: Segments, config: TuningConfig, chip: Chip) -> Work:
    tile = Tile.of(case.dim, 4)
    steps, visits, _ = gpu_trips.long_walk(cast_segments, tile, config)
    step = _step(chip, chip.l2_latency, config.long_unroll)
    # A visit that finds a segment waits for its row's number and then for the row; every step for its indices first.
    warps = (
        chip.block_start
        + 3 * chip.l2_latency
        + visits * (chip.l2_latency + chip.hbm_latency + _VISIT_CYCLES / chip.clock)
        + steps * (step + chip.l2_latency)
    )
    rows = int((~cast_segments.short(config.split)).sum())
    nodes = gpu_trips.full_nodes(cast_segments, config)
    levels = segments.level_sizes(cast_segments.lookups, config.split, top=config.top)
    lengths = cast_segments.lengths[~cast_segments.short(config.split)]
    loose = lengths.sum() - int((nodes[0] >= 0).sum()) * config.split  # lookups beside the full runs
    pieces = int((nodes[0] >= 0).sum()) * case.dim * 4
    touched = _touched_bytes(rows, case.dim)
    return Work(
        name="casted_update_long",
        blocks=warps.max(axis=1),
        steps=steps[steps > 0].reshape(-1),
        hbm_bytes=touched + loose * 4,
        l2_bytes=touched + loose * (4 + _row_bytes(case.dim)) + pieces + levels[0] * 12,
        row_loads=float(steps.sum()) * config.long_unroll * tile.blocks,
        visits=int(visits.sum()),
    )


def cast(case: Case, cast_segments: Segments, facts: Facts, config: None, chip: Chip) -> list[Prediction]:
    """Predicts the cast's two kernels after its sort."""
    del config, cast_segments
    count, write = facts.kernels
    room = min(case.lookups, case.rows)  # for unique rows, where the caller names no bound
    runs = Runs.of(max(case.lookups, room) + 1)
    # A block's warps do the same; what a trip loads does not depend on what the one before did, but for its order.
    trip = chip.l2_latency + (_TRIP_CYCLES + 4 * _ROW_CYCLES * runs.unroll) / chip.clock
    counted = chip.block_start + runs.trips * trip
    # All counts before a run's own, how many lookups are real, and then the lookups.
    written = chip.block_start + -(-runs.count // (WARP * runs.unroll)) * trip + chip.l2_latency + runs.trips * trip
    in_trips = runs.blocks * gpu_trips.WARPS * runs.trips
    keys, results = case.lookups * 4, case.lookups * 4 + room * 8
    launches = []
    for name, kernel, seconds, moved in (
        ("cast_count", count, counted, keys),
        ("cast_write", write, written, 2 * keys + results),
    ):
        work = Work(
            name=name,
            blocks=np.full(runs.blocks, seconds),
            steps=np.full(runs.blocks * gpu_trips.WARPS, runs.trips),
            hbm_bytes=moved,
            l2_bytes=moved,
            row_loads=0,
            visits=in_trips,  # a trip issues no more than the whole kernel has
        )
        launches.append(predict([work], kernel, chip, loads_a_step=runs.unroll))
    return launches


def floors(case: Case, cast_segments: Segments, chip: Chip) -> dict[str, Floors]:
    """Of "forward", "cast" (without its sort) and "update" (with row-wise Adagrad)."""
    rows, row = cast_segments.lengths.size, case.dim * 4
    sums = case.bags * row
    once = {
        "forward": case.lookups * 4 + rows * row + sums,
        "cast": case.lookups * 12 + min(case.lookups, case.rows) * 8,  # keys and positions; sources, rows and offsets
        "update": case.lookups * 4 + rows * 8 + sums + 2 * rows * (row + 4),
    }
    spread = functools.partial(misses_of_each, caches=chip.multiprocessors, capacity=math.inf)
    gradients = case.workload.num_tables * spread(np.full(case.workload.batch, case.length))
    again = {
        "forward": case.lookups * 4 + sum(spread(c) for c in cast_segments.counts_by_table) * row + sums,
        "cast": once["cast"],
        "update": case.lookups * 4 + rows * 8 + gradients * row + 2 * rows * (row + 4),
    }
    return {
        direction: Floors(
            distinct=once[direction] / chip.hbm, levels=max(once[direction] / chip.hbm, again[direction] / chip.l2)
        )
        for direction in once
    }
