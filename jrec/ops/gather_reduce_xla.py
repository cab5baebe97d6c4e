"""Gather-reduce as XLA runs it: loops and a scatter on CPUs, kernels of gathers in a fixed order on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.ops.offsets import nan_unless, well_formed
from jrec.ops.platforms import cpu_or_other
from jrec.ops.segment_sums import MAX_SUMMED, segment_sums
from jrec.ops.varying import varying_like


def segment_of_entries(offsets: jax.Array, capacity: int) -> jax.Array:
    """The segment of each of ``capacity`` entries, (capacity,) int32; entries past the last offset get num_segments."""
    # One at the end of every segment, so that the running sum counts the segments that have ended: an empty segment
    # ends where the one before does, and is passed over.
    starts = jnp.zeros(capacity + 1, jnp.int32).at[offsets[1:]].add(1, indices_are_sorted=True, mode="drop")
    return jnp.cumsum(starts[:capacity], dtype=jnp.int32)


def take_rows(source: jax.Array, indices: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Weighted float32 rows, (..., dim): zero for negative indices, NaN past the source."""
    if source.shape[0] == 0:  # JAX gathers nothing from an array without elements
        source = jnp.full((1, source.shape[1]), jnp.nan, source.dtype)
    inside = jnp.maximum(indices, 0)  # a gather at -1 would be a mistake to checkify's index_checks
    rows = source.at[inside].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(jnp.float32)
    if weights is not None:
        rows = rows * weights[..., None]
    # Behind the weights: an absent lookup may have a weight of NaN.
    return jnp.where((indices >= 0)[..., None], rows, jnp.float32(0))


def run_in_xla(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    """The sums of ``jrec.ops.gather_reduce``, in XLA; arguments and result are those."""
    return cpu_or_other((source, indices, offsets, weights), cpu=_xla_on_cpu, other=_xla_on_gpu)


def _xla_on_cpu(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    if offsets is not None:
        # A branch at run time: well-formed offsets, nearly all there are, do not pay for the slow way.
        good = well_formed(offsets, indices.shape[0])
        args = (source, indices, offsets, weights, good)
        return jax.lax.cond(jnp.all(good), _sums_of_segments, _sums_one_by_one, *args)
    num_segments, length = indices.shape
    if length == 0:
        return jnp.zeros((num_segments, source.shape[1]), jnp.float32)
    if length == 1:
        return take_rows(source, indices[:, 0], None if weights is None else weights[:, 0])

    # A loop over the bag's positions never holds the (num_segments, length, dim) gather: eight times faster on CPU.
    def add_position(position: jax.Array, total: jax.Array) -> jax.Array:
        index = jax.lax.dynamic_index_in_dim(indices, position, axis=1, keepdims=False)
        weight = None if weights is None else jax.lax.dynamic_index_in_dim(weights, position, axis=1, keepdims=False)
        return total + take_rows(source, index, weight)

    nothing = jnp.zeros((num_segments, source.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, length, add_position, varying_like(nothing, source, indices, weights))


def _sums_of_segments(
    source: jax.Array, indices: jax.Array, offsets: jax.Array, weights: jax.Array | None, _: jax.Array
) -> jax.Array:
    segments = segment_of_entries(offsets, indices.shape[0])
    rows = take_rows(source, indices, weights)
    # Entries past the last offset are of segment ``num_segments``, and dropped.
    return jax.ops.segment_sum(rows, segments, offsets.shape[0] - 1, indices_are_sorted=True, mode="drop")


def _sums_one_by_one(
    source: jax.Array, indices: jax.Array, offsets: jax.Array, weights: jax.Array | None, good: jax.Array
) -> jax.Array:
    """For malformed offsets, whose segments may overlap: slow, but each well-formed segment gets its own sum.

    As in a cast on CPUs, malformed offsets give no row a gradient; JAX could not transpose the loop either.
    """
    source, weights = jax.lax.stop_gradient((source, weights))

    def row(position: jax.Array) -> jax.Array:
        return take_rows(source, indices[position], None if weights is None else weights[position])

    def segment(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        nothing = jnp.zeros(source.shape[1], jnp.float32)
        if indices.shape[0] == 0:
            return nothing
        nothing = varying_like(nothing, bounds, source, indices, weights)
        return jax.lax.fori_loop(low, high, lambda i, total: total + row(i), nothing)

    low, high = jnp.where(good, offsets[:-1], 0), jnp.where(good, offsets[1:], 0)
    return nan_unless(good, jax.lax.map(segment, (low, high)))


def _xla_on_gpu(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    if offsets is None:
        return _sum_of_blocks(source, indices, weights)
    if indices.shape[0] == 0:
        return nan_unless(well_formed(offsets, 0), jnp.zeros((offsets.shape[0] - 1, source.shape[1]), jnp.float32))

    def rows_at(positions: jax.Array) -> jax.Array:
        def take(array: jax.Array) -> jax.Array:
            return array.at[positions].get(mode="clip", wrap_negative_indices=False)

        index = jnp.where(positions >= 0, take(indices), -1)
        return take_rows(source, index, None if weights is None else take(weights))

    return nan_unless(well_formed(offsets, indices.shape[0]), segment_sums(rows_at, indices.shape[0], offsets))


def _sum_of_blocks(source: jax.Array, indices: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Sums each segment's positions in blocks, of which each is one kernel of gathers and a small one of masks."""
    num_segments, length = indices.shape
    if length == 0:
        return jnp.zeros((num_segments, source.shape[1]), jnp.float32)
    # Blocks of nearly equal length, each below the length from which XLA writes what it gathers to memory first.
    blocks = -(-length // MAX_SUMMED)
    size = -(-length // blocks)

    def block(first: jax.Array | int, count: int) -> jax.Array:
        def columns(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, first, count, axis=1)

        return jnp.sum(take_rows(source, columns(indices), None if weights is None else columns(weights)), axis=1)

    total = block(0, size)
    if blocks <= 8:
        for first in range(size, length, size):
            # Without the barrier XLA would join the blocks, and make several arrays of their size instead.
            total = jax.lax.optimization_barrier(total) + block(first, min(size, length - first))
        return total
    total = jax.lax.fori_loop(1, length // size, lambda i, total: total + block(i * size, size), total)
    rest = length % size
    return jax.lax.optimization_barrier(total) + block(length - rest, rest) if rest else total
