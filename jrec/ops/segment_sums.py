"""Sums of sorted segments as XLA runs them well on GPUs: only gathers, every sum in a fixed order, no atomics.

XLA's own segment sum is a scatter-add. On a GPU that fills an array with zeros and adds to it with float atomics, whose
order differs from run to run. Made deterministic (``--xla_gpu_deterministic_ops``) it becomes a scan over all lookups
with log(n) passes. Here the lookups are cut into aligned *runs*, these into runs again, and so on:

    lookups     [start .... a)                                  [b .... end)      fewer than a run on each side
    level 1                 [a' .... c)                 [d .... b')               fewer than a run on each side
    level 2                         [c' ......... d')

The sum of a segment is its lookups left of its first full run, the sum of its full runs, and its lookups right of the
last one. Sums of full runs are found by the segment's first one, so a level has as many sums as it has runs.
``jrec.pallas.segments`` divides work the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrec.ops.sizes import is_static, surely_at_most

# XLA reduces a middle axis of fewer than 32 elements within the kernel that gathers them. For a longer one it first
# writes all that is gathered to memory, transposed.
MAX_SUMMED = 31

# Every sum adds 2 * (run - 1) + 1 rows, needed or not. Longer runs of lookups would lengthen the common short segments,
# shorter ones make pieces as large as the output. Above, rows are few, and longer runs save launches.
_LOOKUPS, _NODES = 8, 16
_TOP = MAX_SUMMED  # nodes of the highest level, which are walked from first to last

Rows = Callable[[jax.Array], jax.Array]  # int32 positions, -1 for none -> (*positions, dim) float32 rows, zero for none
Span = tuple[jax.Array, jax.Array]  # first and end of each sum's positions, (n,) int32


def segment_sums(rows_at: Rows, capacity: int, offsets: jax.Array) -> jax.Array:
    """Sums the rows of ``capacity`` positions per segment, without atomics.

    Args:
      rows_at: The rows at int32 positions of any shape, (*shape, dim) float32; zeros for position -1. Traced twice.
      capacity: How many positions there are.
      offsets: (num_segments + 1,) int32, ascending from 0 and at most ``capacity``.

    Returns:
      (num_segments, dim) float32.
    """
    counts = level_sizes(capacity)
    sources = [rows_at]
    for level, count in enumerate(counts):
        positions = jnp.arange(count * _run(level), dtype=jnp.int32).reshape(count, _run(level))
        sources.append(_rows_of(jnp.sum(sources[-1](positions), axis=1)))
    spans = [(offsets[:-1], offsets[1:]), *_spans(offsets, counts)]
    total = above = None
    # From the top: a level's spans need the sums of the level above, found by a span's first full run.
    for level in reversed(range(len(spans))):
        source, span = sources[level], spans[level]
        # The highest level has few nodes, which are all looked at; below it only a span's two edges are added.
        total = (
            _walk(source, span, (capacity, *counts)[-1]) if above is None else _edges(source, span, above, _run(level))
        )
        above = _rows_of(total)
    assert total is not None
    return total


MOST = 2**31 - 1  # lookups, whose positions are int32


def level_sizes(capacity: int) -> list[int]:
    """How many runs each level above the lookups has, lowest first; a symbolic capacity as many levels as any needs."""
    sizes: list[int] = []
    spare = 0 if is_static(capacity) else 1  # so that no level of a symbolic capacity is empty; nothing reads the last
    most = MOST
    while most > _TOP and not surely_at_most(capacity, _TOP):
        capacity, most = capacity // _run(len(sizes)) + spare, most // _run(len(sizes)) + spare
        sizes.append(capacity)
    return sizes


def _run(level: int) -> int:
    """How many positions of a level a run has."""
    return _NODES if level else _LOOKUPS


def _spans(offsets: jax.Array, counts: list[int]) -> list[Span]:
    """Per level and run the runs of the segment whose first full one it is; an empty span where it is none's."""
    if not counts:
        return []
    places, ends, base, size = [], [], 0, 1
    for level, count in enumerate(counts):
        size *= _run(level)
        # Of each segment the runs that lie within it as a whole, on this level.
        low, high = (offsets[:-1] + (size - 1)) // size, offsets[1:] // size
        places.append(jnp.where(low < high, base + low, -1))
        ends.append(high)
        base += count
    # One scatter for all levels. What is dropped gets places of its own past the end: so all places are distinct.
    place = jnp.concatenate(places)
    place = jnp.where(place >= 0, place, base + jnp.arange(place.shape[0], dtype=jnp.int32))
    end_at = jnp.zeros(base, jnp.int32).at[place].set(jnp.concatenate(ends), mode="drop", unique_indices=True)
    spans, base = [], 0
    for count in counts:
        spans.append((jnp.arange(count, dtype=jnp.int32), end_at[base : base + count]))
        base += count
    return spans


def _walk(rows_at: Rows, span: Span, width: int) -> jax.Array:
    """Sums of spans among ``width`` positions, one by one."""
    return jnp.sum(rows_at(_positions(span[0], span[1], width)), axis=1)


def _edges(rows_at: Rows, span: Span, above: Rows, run: int) -> jax.Array:
    """Sums of spans whose full runs are summed in ``above``, at the first run of each span."""
    low, high = span
    run_low, run_high = (low + (run - 1)) // run, high // run
    left_end = jnp.minimum(run_low * run, high)
    # Without a full run the left side takes all positions, and the right side begins where it ends: nothing twice.
    right = jnp.maximum(run_high * run, left_end)
    left_sum, right_sum = (
        jnp.sum(rows_at(_positions(*at, run - 1)), axis=1) for at in ((low, left_end), (right, high))
    )
    return left_sum + above(jnp.where(run_low < run_high, run_low, -1)) + right_sum


def _positions(low: jax.Array, high: jax.Array, count: int) -> jax.Array:
    """The first ``count`` positions of spans, (n, count) int32, -1 past their ends."""
    at = low[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.where(at < high[:, None], at, -1)


def _rows_of(array: jax.Array) -> Rows:
    def rows(positions: jax.Array) -> jax.Array:
        taken = array.at[positions].get(mode="clip", wrap_negative_indices=False)
        return jnp.where((positions >= 0)[..., None], taken, jnp.float32(0))

    return rows
