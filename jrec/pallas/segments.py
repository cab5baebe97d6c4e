"""How segments of any length are divided over thread blocks, without atomics and with sums in a fixed order.

The lookups are cut in aligned runs of ``split``. A run that lies within one segment is a *full run*: a kernel of its
own sums it to a *piece*, whichever thread block it falls to. Pieces are cut in runs of ``split`` again, and so on, as
in the nodes of a B-tree. The sum of a segment adds the nodes that cover it, from left to right:

    lookups     [start ........ a)                                        [b ........ end)
    pieces 1                    [a' .... c)                     [d .... b')
    pieces 2                                [c' .......... d')

so a segment of n lookups costs no thread more than about ``2 * split`` additions a level, and log(n) levels. Segments
without a full run (*short*, less than twice ``split``) need no pieces; the others (*long*) are found by their first
full run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas.tile import Operand, Tile, shift_right

_TOP = 256  # nodes that the highest level may hold: a segment's walk over them is not worth another launch


_NEVER = 2**31 - 1  # a position that no segment begins at


class Gather(NamedTuple):
    """What positions add up: arrays outside a kernel, refs inside.

    Attributes:
      rows: (n, stride) rows; an index of ``n`` or more makes the sum NaN.
      indices: (positions,) int32, negative ones are skipped; None for ``rows[position]``.
      weights: (positions,) float32, or None for ones. Only with indices.
    """

    rows: Any  # or the products of a tensor train's factors, which ``pallas.tt`` loads as rows
    indices: Any = None
    weights: Operand | None = None


class Lookups(NamedTuple):
    """Indices and weights of a few lookups of each row, loaded ahead of the rows that they name.

    Each array holds the lookups of ``lanes`` neighbouring positions, one a lane, so that one load and one register of
    every thread serve as many lookups; or, where only one is added at a time, the same one in every lane.
    """

    indices: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...] | None


def level_sizes(lookups: int, split: int, *, top: int = _TOP) -> tuple[int, ...]:
    """How many nodes each level of pieces holds, lowest first; () where no run can be full."""
    # The same arithmetic as in the kernels: a level's node covers ``split`` whole
    # nodes of the level below, so a node that is cut off at the end is no node.
    sizes = []
    nodes = lookups // split
    while nodes >= 1:
        sizes.append(nodes)
        if nodes <= top:
            break
        nodes //= split
    return tuple(sizes)


def segment_at(tile: Tile, ops: ModuleType, offsets: Ref, position: jax.Array) -> jax.Array:
    """The last segment that begins at or before each position, row scalars; any for a position below 0.

    ``offsets`` is an ascending int32 ref from 0. Each lane of a row looks at another place: at 16 lanes, a search among
    a million segments waits 5 times.
    """
    # Invariant: the answer lies in [low, low + size).
    low, size = tile.row_scalars(0, jnp.int32), offsets.shape[0]
    # A loop of Python, so unrolled: the number of steps depends only on the number of offsets.
    while size > 1:
        size = -(-size // (tile.lanes + 1))
        # The lanes cut the interval in ``lanes + 1`` pieces. Offsets ascend, so as
        # many begins as are not past the position lie before the answer's piece.
        place = low + (tile.lane_numbers() + 1) * size
        begins = ops.load_scalars(tile, offsets, jnp.where(place < offsets.shape[0], place, -1), fill=_NEVER)
        low = low + ops.lane_sum(tile, jnp.where(begins <= position, 1, 0)) * size
    return low


def run_at(
    tile: Tile, ops: ModuleType, offsets: Ref, runs: Ref, node: jax.Array, *, level: int, split: int
) -> jax.Array:
    """The segment that each node lies within, row scalars; -1 where it lies within none.

    Args:
      tile: The geometry.
      ops: ``inline`` or ``twins``.
      offsets: (segments + 1,) int32 ref.
      runs: (nodes of level 0,) int32 ref of what this found for them; None for level 0 itself.
      node: Row scalars int32, -1 for none.
      level: The nodes' level: one holds ``split ** (level + 1)`` lookups.
      split: See ``TuningConfig``.
    """
    # Only the lowest level searches. A node of a higher level begins where its first node of the lowest level begins,
    # whose segment was written down: one load in place of a search.
    if runs is None:
        segment = segment_at(tile, ops, offsets, jnp.where(node >= 0, node * split, -1))
    else:
        segment = ops.load_scalars(tile, runs, jnp.where(node >= 0, node * split**level, -1), fill=-1)
    real = (node >= 0) & (segment >= 0) & (segment < offsets.shape[0] - 1)
    # Within one segment: it begins at or before the node, by the search, and ends at or behind it.
    end = ops.load_scalars(tile, offsets, jnp.where(real, segment + 1, -1), fill=-1)
    return jnp.where(real & ((node + 1) * split ** (level + 1) <= end), segment, -1)


def load_lookups(
    tile: Tile, ops: ModuleType, source: Gather, low: jax.Array, high: jax.Array, *, unroll: int
) -> Lookups | None:
    """The first ``unroll`` lookups of ``[low, high)``, for ``add_range``; None where positions name rows themselves."""
    if source.indices is None:
        return None
    # One lookup a step: all lanes load the same one, and none has to be broadcast.
    if unroll == 1:
        positions = [jnp.where(low < high, low, -1)]
    else:
        lane = tile.lane_numbers()
        starts = range(0, unroll, tile.lanes)
        place = [low + (lane + start) for start in starts]
        positions = [
            jnp.where((at < high) & (lane < unroll - start), at, -1) for at, start in zip(place, starts, strict=True)
        ]
    # Weights come in the order of the positions (the cast's), so that they load with the indices.
    weights = None
    if source.weights is not None:
        weights = tuple(ops.load_scalars(tile, source.weights, p) for p in positions)
    return Lookups(tuple(ops.load_scalars(tile, source.indices, p, fill=-1) for p in positions), weights)


def add_range(
    tile: Tile,
    ops: ModuleType,
    source: Gather,
    low: jax.Array,
    high: jax.Array,
    total: jax.Array,
    *,
    unroll: int,
    lookups: Lookups | None = None,
) -> jax.Array:
    """Adds positions ``[low, high)`` of ``source`` to the values ``total``, row by row in ascending order.

    Args:
      tile: The geometry.
      ops: ``inline`` or ``twins``.
      source: What to add.
      low: Row scalars int32.
      high: Row scalars int32; where it is not above ``low``, nothing is added.
      total: values.
      unroll: Rows loaded before the first is added.
      lookups: ``load_lookups`` of the same range, where that was done ahead.
    """

    def rows_at(first: jax.Array, lookups: Lookups | None, total: jax.Array) -> jax.Array:
        if lookups is None:
            positions = [jnp.where(first + u < high, first + u, -1) for u in range(unroll)]
            for rows in [ops.load_rows(tile, source.rows, p) for p in positions]:
                total = total + rows
            return total
        # All rows are asked for before the first is added: the
        # loads are in flight together, and the sum keeps its order.
        indices = [_of_lane(tile, ops, lookups.indices, u, unroll) for u in range(unroll)]
        if lookups.weights is None:
            weights = [tile.row_scalars(1.0, jnp.float32)] * unroll
        else:
            weights = [_of_lane(tile, ops, lookups.weights, u, unroll) for u in range(unroll)]
        loaded = [ops.load_rows(tile, source.rows, jnp.where(x < source.rows.shape[0], x, -1)) for x in indices]
        for index, weight, rows in zip(indices, weights, loaded, strict=True):
            # Rows that were not loaded are zero, so the weight alone makes a skipped index 0 and one past the end NaN.
            weight = jnp.where(index < source.rows.shape[0], weight, jnp.float32(jnp.nan))
            weight = jnp.where(index < 0, jnp.float32(0), weight)
            total = total + ops.spread(tile, weight) * rows
        return total

    def step(i: jax.Array, carry: tuple[jax.Array, Lookups | None]) -> tuple[jax.Array, Lookups | None]:
        total, lookups = carry
        first = low + i * unroll
        # Asked for before this step's rows are waited for, so that the two latencies overlap.
        following = load_lookups(tile, ops, source, first + unroll, high, unroll=unroll)
        return rows_at(first, lookups, total), following

    # The whole warp loops as often as its longest row needs. Shorter
    # rows load nothing in the steps behind their end, and add zero.
    trips = ops.most(tile, jnp.maximum(high - low, 0))
    trips = shift_right(trips + (unroll - 1), unroll)
    if lookups is None:
        lookups = load_lookups(tile, ops, source, low, high, unroll=unroll)
    return jax.lax.fori_loop(0, trips, step, (total, lookups))[0]


def _of_lane(tile: Tile, ops: ModuleType, lookups: tuple[jax.Array, ...], number: int, unroll: int) -> jax.Array:
    """Row scalars of the lookup with this number among those loaded."""
    if unroll == 1:
        return lookups[0]
    return ops.from_lane(tile, lookups[number // tile.lanes], number % tile.lanes)


def add_nodes(
    tile: Tile,
    ops: ModuleType,
    levels: Sequence[Gather],
    low: jax.Array,
    high: jax.Array,
    *,
    split: int,
    unroll: int,
    zeros: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """Sums of the nodes that cover lookups ``[low, high)``: ``levels[0]`` are the lookups, then their pieces.

    ``zeros`` makes a sum of nothing, where that is not ``tile.zeros``.
    """
    source, *upper = levels
    nothing = (tile.zeros if zeros is None else zeros)()
    if not upper:
        return add_range(tile, ops, source, low, high, nothing, unroll=unroll)
    up_low, up_high = shift_right(low + (split - 1), split), shift_right(high, split)
    # Without a full run inside, ``[low, high)`` is summed by the first call, and the other two get empty ranges: every
    # row of a warp goes through the same code.
    inner = up_low < up_high
    total = add_range(tile, ops, source, low, jnp.where(inner, up_low * split, high), nothing, unroll=unroll)
    upper_total = add_nodes(
        tile, ops, upper, jnp.where(inner, up_low, 0), jnp.where(inner, up_high, 0), split=split, unroll=unroll,
        zeros=zeros,
    )  # fmt: skip
    total = total + upper_total
    return add_range(tile, ops, source, jnp.where(inner, up_high * split, high), high, total, unroll=unroll)


def bounds(tile: Tile, ops: ModuleType, offsets: Ref, segment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First lookup and end of each segment, row scalars; 0 and 0 where ``segment`` is negative."""
    low = ops.load_scalars(tile, offsets, segment)
    return low, ops.load_scalars(tile, offsets, jnp.where(segment >= 0, segment + 1, -1))


def malformed(segment: jax.Array, low: jax.Array, high: jax.Array, capacity: int) -> jax.Array:
    """Whether bounds descend, or lie outside of the lookups, or the first ones do not begin at 0."""
    return (low < 0) | (low > high) | (high > capacity) | ((segment == 0) & (low > 0))


def nan_where(tile: Tile, ops: ModuleType, bad: jax.Array) -> jax.Array:
    """Values of NaN for the rows that are bad, of zero for the others."""
    return ops.spread(tile, jnp.where(bad, jnp.float32(jnp.nan), jnp.float32(0)))


def is_short(low: jax.Array, high: jax.Array, split: int) -> jax.Array:
    """Whether lookups ``[low, high)`` contain no full run."""
    return shift_right(low + (split - 1), split) >= shift_right(high, split)


def long_segment(
    tile: Tile, ops: ModuleType, runs: Ref, offsets: Ref, run: jax.Array, *, split: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The segment whose first full run is ``run``, or -1, and its first lookup and end (0 and 0 without one)."""
    segment = ops.load_scalars(tile, runs, run, fill=-1)
    low, high = bounds(tile, ops, offsets, segment)
    # A long segment has many full runs; only the first one visits it, so that it is written once.
    begins = (segment >= 0) & (shift_right(low + (split - 1), split) == run)
    return jnp.where(begins, segment, -1), jnp.where(begins, low, 0), jnp.where(begins, high, 0)


def visit_long(
    tile: Tile,
    ops: ModuleType,
    runs: Ref,
    offsets: Ref,
    item: jax.Array,
    visit: Callable[[jax.Array, jax.Array, jax.Array], None],
    *,
    split: int,
    width: int,
) -> None:
    """Visits the long segments whose first full run is among the tile's ``width`` runs, dealt evenly to its rows.

    Most runs begin none. Every row looks through all of the tile's runs, its lanes at one each, and numbers the
    segments that it finds; as all rows find the same, each knows its own share without a word between warps.

    Args:
      tile: The geometry, of one row a thread.
      ops: ``inline`` or ``twins``.
      runs: (nodes,) int32 ref, see ``run_at``.
      offsets: (segments + 1,) int32 ref.
      item: Row scalars int32, the tile's number times its rows plus the row; none is -1.
      visit: Called with a segment of each row (-1 for none), its first lookup and its end.
      split: See ``TuningConfig``.
      width: A multiple of ``tile.lanes``.
    """
    row, lane = tile.row_numbers(), tile.lane_numbers()
    first = shift_right(item - row, tile.rows) * width
    visited, total = [], tile.row_scalars(0, jnp.int32)
    for start in range(0, width, tile.lanes):
        # Every row of the tile looks at the same runs, ``lanes`` of them at a time.
        run = first + (lane + start)
        segment, _, _ = long_segment(tile, ops, runs, offsets, jnp.where(run < runs.shape[0], run, -1), split=split)
        flags = jnp.where(segment >= 0, 1, 0)
        visited.append((segment, total + _ranks(tile, ops, flags)))
        total = total + ops.lane_sum(tile, flags)

    def visit_share(turn: jax.Array, none: None) -> None:
        number = turn * tile.rows + row
        # At most one lane of one part holds the segment of that number: the sum over all is that one, plus 1.
        share = functools.reduce(jnp.add, [jnp.where((s >= 0) & (rank == number), s + 1, 0) for s, rank in visited])
        segment = ops.lane_sum(tile, share) - 1
        visit(segment, *bounds(tile, ops, offsets, segment))
        return none

    # ``total`` is the same in all rows, so the warps agree on the number of turns without a barrier.
    turns = shift_right(ops.most(tile, total) + (tile.rows - 1), tile.rows)
    jax.lax.fori_loop(0, turns, visit_share, None)


def _ranks(tile: Tile, ops: ModuleType, flags: jax.Array) -> jax.Array:
    """For each lane, how many of the flags, 0 or 1, of the row's lanes before it are 1."""
    # A scan by doubling (Hillis and Steele), by shuffles among
    # the lanes of a row; the flag itself is taken off at the end.
    lane, total, distance = tile.lane_numbers(), flags, 1
    while distance < tile.lanes:
        before = ops.from_lane(tile, total, jnp.maximum(lane - distance, 0))
        total = total + jnp.where(lane >= distance, before, 0)
        distance *= 2
    return total - flags
