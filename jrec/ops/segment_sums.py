"""Sums of sorted segments as XLA runs them well on GPUs: gathers alone, every sum in a fixed order, no atomics.

XLA's own segment sum is a scatter-add. On a GPU that fills an array with zeros and adds to it with float atomics, whose
order differs from run to run. Made deterministic (``--xla_gpu_deterministic_ops``) it becomes a scan over all lookups
with log(n) passes. Here the lookups are cut into aligned *runs* of eight, runs into runs of eight again, and so on:

    lookups     [start .... a)                                  [b .... end)      seven at most on each side
    level 1                 [a' .... c)                 [d .... b')               seven at most on each side
    level 2                         [c' ......... d')

The sum of a segment is its lookups left of its first full run, the sum of its full runs, and its lookups right of the
last one, so no output reads more than 15 rows. Sums of full runs are found by the segment's first one: on each level
at most as many segments are left as the level has runs. ``jrec.pallas.segments`` divides work the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Every output row reads 2 * (_RUN - 1) + 1 rows, needed or not: more lengthen the common short segments, fewer make
# pieces as large as the output.
_RUN = 8

Rows = Callable[[jax.Array], jax.Array]  # (n,) int32 positions, -1 for none -> (n, dim) float32 rows, zero for none


def segment_sums(rows_at: Rows, capacity: int, offsets: jax.Array) -> jax.Array:
    """Sums the rows of ``capacity`` positions per segment, without atomics.

    Args:
      rows_at: The rows at (n,) int32 positions, (n, dim) float32; zeros for position -1. Traced several times.
      capacity: How many positions there are.
      offsets: (num_segments + 1,) int32, ascending from 0 and at most ``capacity``.

    Returns:
      (num_segments, dim) float32.
    """
    starts, ends = offsets[:-1], offsets[1:]
    levels = _runs(rows_at, capacity)
    if not levels:
        return _edges(rows_at, starts, ends, None)
    # The segment that each lowest run begins in. Unrolled, the binary search is one kernel; as a loop it is twenty.
    first = jnp.arange(levels[0].shape[0], dtype=jnp.int32) * _RUN
    segments = jnp.searchsorted(offsets, first, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    above = None
    for level in reversed(range(len(levels))):
        nodes, size = levels[level], _RUN ** (level + 1)
        run = jnp.arange(nodes.shape[0], dtype=jnp.int32)
        segment = segments[:: size // _RUN][: nodes.shape[0]]
        low, high = _ceil(starts.at[segment].get(mode="clip"), size), ends.at[segment].get(mode="clip") // size
        found = (segment < starts.shape[0]) & (low == run) & (low < high)
        low, high = jnp.where(found, low, 0), jnp.where(found, high, 0)
        above = _edges(_rows_of(nodes), low, high, above)
    return _edges(rows_at, starts, ends, above)


def add_in_order(rows: list[jax.Array]) -> jax.Array:
    """``rows[0] + rows[1] + …``: on GPUs one kernel that reads what they are made of and writes the sum."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _runs(rows_at: Rows, capacity: int) -> list[jax.Array]:
    """Sums of the full runs of every level, lowest first, (runs, dim) float32 each."""
    levels: list[jax.Array] = []
    count, source = capacity // _RUN, rows_at
    while count:
        first = jnp.arange(count, dtype=jnp.int32) * _RUN
        levels.append(add_in_order([source(first + k) for k in range(_RUN)]))
        count, source = count // _RUN, _rows_of(levels[-1])
    return levels


def _edges(rows_at: Rows, low: jax.Array, high: jax.Array, above: jax.Array | None) -> jax.Array:
    """Sums of positions ``[low, high)``, whose full runs are summed in ``above`` at the first run of each segment."""
    run_low, run_high = _ceil(low, _RUN), high // _RUN
    left_end = jnp.minimum(run_low * _RUN, high)
    right = jnp.maximum(run_high * _RUN, left_end)

    def row(position: jax.Array, end: jax.Array) -> jax.Array:
        return rows_at(jnp.where(position < end, position, -1))

    terms = [row(low + k, left_end) for k in range(_RUN - 1)]
    if above is not None:
        terms.append(_rows_of(above)(jnp.where(run_low < run_high, run_low, -1)))
    return add_in_order(terms + [row(right + k, high) for k in range(_RUN - 1)])


def _rows_of(array: jax.Array) -> Rows:
    def rows(positions: jax.Array) -> jax.Array:
        taken = array.at[positions].get(mode="clip", wrap_negative_indices=False)
        return jnp.where((positions >= 0)[:, None], taken, jnp.float32(0))

    return rows


def _ceil(values: jax.Array, size: int) -> jax.Array:
    return (values + (size - 1)) // size
