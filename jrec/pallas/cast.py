"""The cast after its sort: unique rows, segment bounds and gather sources of sorted lookups, in two launches.

The sorted keys are cut in one *run* for each warp, 32 lanes by ``unroll`` chunks by ``trips``. The first kernel counts
how many segments start within every run. In the second each warp adds up the counts before its run, finds its starts
again, and numbers them by votes of the warp. So no thread block waits for another, and there are no atomics.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, launch, ops_for
from jrec.pallas.tile import THREADS, WARP, Tile, shift_right

_WARPS = THREADS // WARP
_MAX_RUNS = 2048  # every warp of the second kernel reads all counts: 8 KB, which stay in L2
_SMALL = 65_536  # up to here more warps are worth more than more loads in flight in each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """How sorted lookups are cut.

    Attributes:
      blocks: Thread blocks, of four runs each.
      trips: How often a warp loads ``unroll`` chunks of 32 keys.
      unroll: Chunks that are loaded before the first is used, a power of two.
    """

    blocks: int
    trips: int
    unroll: int

    def __post_init__(self) -> None:
        if self.unroll < 1 or self.unroll & (self.unroll - 1):
            raise ValueError(f"{self.unroll=} must be a power of two")
        if self.blocks < 1 or self.trips < 1:
            raise ValueError(f"{self.blocks=} and {self.trips=} must be at least 1")

    @property
    def count(self) -> int:
        """How many runs there are."""
        return self.blocks * _WARPS

    @property
    def tile(self) -> Tile:
        """One lane a row: row ``r`` is lane ``r % 32`` of warp ``r // 32 % 4`` in chunk ``r // 128``."""
        return Tile(dim=1, vector=1, lanes=1, blocks=1, rows=self.unroll * THREADS)

    @staticmethod
    def of(places: int, *, unroll: int | None = None, most: int = _MAX_RUNS) -> Runs:
        """Runs that cover ``places`` places, at most ``most`` of them (rounded up to whole thread blocks)."""
        if unroll is None:
            unroll = 4 if places <= _SMALL else 8
        # Trips grow where runs would be more than the second kernel can add up in each warp.
        trips = -(-places // (WARP * unroll * most))
        return Runs(blocks=-(-places // (THREADS * unroll * trips)), trips=trips, unroll=unroll)


def ragged_keys(
    ids: jax.Array, offsets: jax.Array, *, num_rows: int, key_type: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The keys to sort and the bags of ragged lookups, in one launch.

    Args:
      ids: (capacity,) int32.
      offsets: (num_bags + 1,) int32, ascending from 0.
      num_rows: Rows of the table.
      key_type: Type of the keys, which holds ``num_rows``: int32, uint16 or uint8.

    Returns:
      (capacity,) keys, ``num_rows`` for padding and for lookups of no bag; and (capacity,) int32 bags, ``num_bags``
      past the last offset.

    Raises:
      NotImplementedError: Inside a ``shard_map`` with ``check_vma=True``.
    """
    if ids.shape[0] == 0:
        return jnp.zeros(0, key_type), jnp.zeros(0, jnp.int32)
    return _ragged_keys(ids, offsets, num_rows=num_rows, key_type=jnp.dtype(key_type), interpret=interpret_params())


@functools.partial(jax.jit, static_argnames=("num_rows", "key_type", "interpret"))
def _ragged_keys(
    ids: jax.Array, offsets: jax.Array, *, num_rows: int, key_type: jnp.dtype, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    capacity, num_bags = ids.shape[0], offsets.shape[0] - 1
    runs = Runs.of(capacity)
    ops, tile = ops_for(interpret), runs.tile

    def cast_keys(place: jax.Array, ids: Ref, offsets: Ref, keys: Ref, bags: Ref) -> None:
        row = ops.load_scalars(tile, ids, place, fill=-1)

        # Neighbouring lookups mostly read the same offsets, so a step of the search is one or two sectors a warp.
        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = shift_right(low + high, 2)
            open_ = low < high
            ends = ops.load_scalars(tile, offsets, jnp.where(open_, middle + 1, -1))
            return jnp.where(open_ & (ends <= place), middle + 1, low), jnp.where(open_ & (ends > place), middle, high)

        # Invariant of the search: the lookup's bag lies in [low, high], and ``num_bags`` stands for none.
        bounds = tile.row_scalars(0, jnp.int32), tile.row_scalars(num_bags, jnp.int32)
        bag, _ = jax.lax.fori_loop(0, num_bags.bit_length(), halve, bounds)
        # The search leaves only lookups before the first bag, where that does not begin at 0, with a bag not theirs.
        first = ops.load_scalars(tile, offsets, tile.row_scalars(0, jnp.int32))
        real = (row >= 0) & (row < num_rows) & (bag < num_bags) & ((bag > 0) | (first == 0))
        ops.store_scalars(tile, keys, place, jnp.where(real, row, num_rows).astype(key_type))
        ops.store_scalars(tile, bags, place, bag)

    job = Job(
        body=cast_keys,
        tile=tile,
        count=capacity,
        operands=(ids, offsets),
        out_types=(jax.ShapeDtypeStruct((capacity,), key_type), jax.ShapeDtypeStruct((capacity,), jnp.int32)),
        blocks=-(-capacity // tile.rows),
    )
    keys, bags = launch([job], interpret=interpret)[0]
    return keys, bags


def cast_sorted(
    keys: jax.Array,
    positions: jax.Array,
    bags: jax.Array | int,
    *,
    num_bags: int,
    num_rows: int,
    unique_capacity: int,
    runs: Runs | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What ``jrec.ops.tensor_cast`` returns beside the positions, from sorted lookups.

    Args:
      keys: (capacity,) int32, uint16 or uint8, ascending rows; ``num_rows`` for padding.
      positions: (capacity,) int32, the flat position of every key.
      bags: (capacity,) int32, the bag of every flat position; or the length of all bags.
      num_bags: How many bags there are.
      num_rows: Rows of the table.
      unique_capacity: How many unique rows fit.
      runs: How the keys are cut, or None for ``Runs.of``.

    Returns:
      ``rows``, ``offsets``, ``sources`` and ``num_unique``, as in ``Cast``.

    Raises:
      NotImplementedError: Inside a ``shard_map`` with ``check_vma=True``.
    """
    capacity = keys.shape[0]
    if capacity == 0:
        none = jnp.zeros(0, jnp.int32)
        rows = jnp.full(unique_capacity, num_rows, jnp.int32)
        return rows, jnp.zeros(unique_capacity + 1, jnp.int32), none, jnp.int32(0)
    if runs is None:
        runs = Runs.of(max(capacity, unique_capacity) + 1)
    of_place, length = (None, bags) if isinstance(bags, int) else (bags, None)
    bounds = _Bounds(length, num_bags, num_rows, unique_capacity)
    return _cast_sorted(keys, positions, of_place, bounds=bounds, runs=runs, interpret=interpret_params())


class _Bounds(NamedTuple):
    length: int | None  # of every bag, where bags have one length
    num_bags: int
    num_rows: int
    unique_capacity: int


@functools.partial(jax.jit, static_argnames=("bounds", "runs", "interpret"))
def _cast_sorted(
    keys: jax.Array, positions: jax.Array, bags: jax.Array | None, *, bounds: _Bounds, runs: Runs, interpret: Interpret
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    # Two launches, since a number depends on all counts before
    # it, and only the end of a launch says that they are there.
    counts, total = _count(keys, bounds.num_rows, runs, interpret)
    return _write(keys, positions, bags, counts, total, bounds, runs, interpret)


def _count(keys: jax.Array, num_rows: int, runs: Runs, interpret: Interpret) -> tuple[jax.Array, jax.Array]:
    """(runs,) int32, how many segments start in each run; and (1,) int32, how many keys are not padding."""
    ops, tile = ops_for(interpret), runs.tile

    def cast_count(item: jax.Array, keys: Ref, counts: Ref, total: Ref) -> None:
        def add(i: jax.Array, count: jax.Array) -> jax.Array:
            place = _place(runs, item, i)
            # Padding begins at exactly one place, also where it is only the end of the
            # keys: its place is the number of real ones, which that thread writes.
            first, padding = _starts(tile, ops, keys, place, num_rows)[1:]
            ops.store_scalars(tile, total, jnp.where(padding, 0, -1), place)  # of all places, exactly one
            return count + jnp.where(first, 1, 0)

        # Lanes count for themselves, and are added once a run, not once a trip.
        starts = jax.lax.fori_loop(0, runs.trips, add, tile.row_scalars(0, jnp.int32))
        run, chunk, lane = _run(runs, item)
        ops.store_scalars(tile, counts, jnp.where((chunk == 0) & (lane == 0), run, -1), ops.warp_sum(tile, starts))

    job = Job(
        body=cast_count,
        tile=tile,
        count=runs.blocks * tile.rows,
        operands=(keys,),
        out_types=(jax.ShapeDtypeStruct((runs.count,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)),
        blocks=runs.blocks,
    )
    counts, total = launch([job], interpret=interpret)[0]
    return counts, total


def _write(
    keys: jax.Array,
    positions: jax.Array,
    bags: jax.Array | None,
    counts: jax.Array,
    total: jax.Array,
    bounds: _Bounds,
    runs: Runs,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    ops, tile = ops_for(interpret), runs.tile
    length, num_bags, num_rows, unique_capacity = bounds
    capacity = keys.shape[0]

    def cast_write(
        item: jax.Array, read: tuple[PyTree, ...], rows: Ref, offsets: Ref, sources: Ref, num_unique: Ref
    ) -> None:
        keys, positions, bags, counts, total = read
        run, chunk, lane = _run(runs, item)
        # Every warp adds up the counts for itself: they are a few KB in L2, and no block waits for another's prefix.
        before, unique = _before(runs, ops, counts, run, chunk, lane)
        ops.store_scalars(tile, num_unique, jnp.where((run == 0) & (chunk == 0) & (lane == 0), 0, -1), unique)
        real = ops.load_scalars(tile, total, tile.row_scalars(0, jnp.int32))

        def write(i: jax.Array, before: jax.Array) -> jax.Array:
            place = _place(runs, item, i)
            position = ops.load_scalars(tile, positions, jnp.where(place < capacity, place, -1))
            key, first, _ = _starts(tile, ops, keys, place, num_rows)
            flags = jnp.where(first, 1, 0)
            # Votes of the warp: no shared memory, and no barrier among warps whose runs differ.
            segment = before + ops.warp_ranks(tile, flags)
            ops.store_scalars(tile, rows, jnp.where(first & (segment < unique_capacity), segment, -1), key)
            ops.store_scalars(tile, offsets, jnp.where(first & (segment <= unique_capacity), segment, -1), place)
            # The entries that no segment has are written by the threads of their number.
            left = place >= unique
            fill = tile.row_scalars(num_rows, jnp.int32)
            ops.store_scalars(tile, rows, jnp.where(left & (place < unique_capacity), place, -1), fill)
            ops.store_scalars(tile, offsets, jnp.where(left & (place <= unique_capacity), place, -1), real)
            # Ragged: the bag of each flat position was written down; padded bags divide the position by their length.
            if length is None:
                source = ops.load_scalars(tile, bags, jnp.where(place < real, position, -1))
            else:
                source = jax.lax.div(position, tile.row_scalars(max(1, length), jnp.int32))
            source = jnp.where(place < real, source, num_bags)
            ops.store_scalars(tile, sources, jnp.where(place < capacity, place, -1), source)
            return before + ops.warp_sum(tile, flags)

        jax.lax.fori_loop(0, runs.trips, write, before)

    # Mosaic has no arrays without elements, so there is always room for a row.
    sizes = max(1, unique_capacity), unique_capacity + 1, capacity, 1
    job = Job(
        body=cast_write,
        tile=tile,
        count=runs.blocks * tile.rows,
        operands=((keys, positions, bags, counts, total),),
        out_types=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes),
        blocks=runs.blocks,
    )
    rows, offsets, sources, num_unique = launch([job], interpret=interpret)[0]
    return rows[:unique_capacity], offsets, sources, num_unique[0]


def _run(runs: Runs, item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The run that a thread works on, and its chunk and lane within one trip, row scalars."""
    row = item & (runs.tile.rows - 1)
    block = shift_right(item, runs.tile.rows)
    warp = shift_right(row, WARP) & (_WARPS - 1)
    return block * _WARPS + warp, shift_right(row, THREADS), row & (WARP - 1)


def _place(runs: Runs, item: jax.Array, trip: jax.Array) -> jax.Array:
    """The sorted lookup that each row stands for in a trip, row scalars; a run's lookups are neighbours."""
    run, chunk, lane = _run(runs, item)
    return (run * runs.trips + trip) * (WARP * runs.unroll) + chunk * WARP + lane


def _starts(
    tile: Tile, ops: ModuleType, keys: Ref, place: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The key at each place, whether a segment starts there, and whether the padding does, row scalars.

    Past the keys is padding, too.
    """
    capacity = keys.shape[0]
    key = ops.load_scalars(tile, keys, jnp.where(place < capacity, place, -1), fill=num_rows).astype(jnp.int32)
    # Also by loads, which hit the first level's cache but for one key a warp.
    previous = ops.load_scalars(tile, keys, jnp.where(place <= capacity, place - 1, -1), fill=num_rows)
    previous = jnp.where(place == 0, -1, previous.astype(jnp.int32))
    real = key < num_rows
    return key, real & (key != previous), (key >= num_rows) & (previous < num_rows)


def _before(
    runs: Runs, ops: ModuleType, counts: Ref, run: jax.Array, chunk: jax.Array, lane: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum of the counts before a warp's run, and of all of them, row scalars."""
    tile, width = runs.tile, WARP * runs.unroll
    nothing = tile.row_scalars(0, jnp.int32)

    def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = i * width + chunk * WARP + lane
        count = ops.load_scalars(tile, counts, jnp.where(at < runs.count, at, -1))
        return sums[0] + jnp.where(at < run, count, 0), sums[1] + count

    before, all_runs = jax.lax.fori_loop(0, -(-runs.count // width), add, (nothing, nothing))
    return ops.warp_sum(tile, before), ops.warp_sum(tile, all_runs)
