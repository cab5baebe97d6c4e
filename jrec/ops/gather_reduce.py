"""The primitive of embedding training: rows of a source, summed per segment (Tensor Casting, Figures 2 and 7).

Forward it sums table rows into bags; backward, with a cast's arguments, bag gradients into unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Call, Implementation, dispatch_together
from jrec.ops.platforms import cpu_or_other
from jrec.ops.segment_sums import segment_sums
from jrec.ops.verdicts import KernelClass


def gather_reduce(
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None = None,
    *,
    weights: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums (weighted) rows of ``source`` per segment: ``out[s] = sum_j weights[j] * source[indices[j]]``.

    Args:
      source: (rows, dim), float32, bfloat16 or float16.
      indices: int32, (num_segments, length) or, with ``offsets``, (capacity,). Negative entries are skipped; an entry
        past the source makes its segment NaN, never another row's sum. Entries past ``offsets[-1]`` are not read.
      offsets: (num_segments + 1,) int32, ascending from 0 and at most ``capacity``; None for the padded form.
      weights: float32 of the shape of ``indices``, or None for ones.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest.

    Returns:
      (num_segments, dim) float32, accumulated in float32; empty segments are zero.

    Raises:
      ValueError: on shapes or dtypes that do not fit together.
    """
    call = gather_reduce_call(source, indices, offsets, weights=weights)
    return call.dispatch("gather_reduce", implementation, _together)


def gather_reduce_call(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None = None, *, weights: jax.Array | None = None
) -> Call:
    """One of several for ``gather_reduce_together``; see ``gather_reduce`` for arguments and errors."""
    check_segments(indices, offsets, weights, name="indices")
    if source.ndim != 2 or not jnp.issubdtype(source.dtype, jnp.floating):
        raise ValueError(f"source must be a (rows, dim) float array, but is {source.dtype}{list(source.shape)}")
    return Call(
        args=(source, indices, offsets, weights),
        xla=_xla,
        native=_native if source.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) else None,
        request=_request,
        kernel=KernelClass(kernel="gather_reduce", dtype=source.dtype.name, dim=source.shape[1]),
    )


def gather_reduce_together(calls: Sequence[Call], implementation: Implementation | None) -> list[jax.Array]:
    """What ``gather_reduce`` returns for each call; on a GPU, kernels of all of them share launches."""
    return dispatch_together("gather_reduce", implementation, calls, _together)


def check_segments(
    indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, *, name: str = "ids"
) -> None:
    """Raises ValueError where indices, offsets and weights are not the padded or the ragged form of segments."""
    form = "(num_bags, length)" if offsets is None else "(capacity,) beside offsets"
    if indices.ndim != (2 if offsets is None else 1):
        raise ValueError(f"{name} must have shape {form}, but have shape {indices.shape}")
    if indices.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, but are {indices.dtype}; cast them after checking their range")
    if offsets is not None and (offsets.ndim != 1 or offsets.shape[0] < 1 or offsets.dtype != jnp.int32):
        raise ValueError(f"offsets must be (num_bags + 1,) int32, but are {offsets.dtype}{list(offsets.shape)}")
    if weights is not None and (weights.shape != indices.shape or weights.dtype != jnp.float32):
        raise ValueError(
            f"weights must be float32 of the {name}' shape {indices.shape},"
            f" but are {weights.dtype}{list(weights.shape)}"
        )


def segment_of_entries(offsets: jax.Array, capacity: int) -> jax.Array:
    """The segment of each of ``capacity`` entries, (capacity,) int32; entries past the last offset get num_segments."""
    starts = jnp.zeros(capacity + 1, jnp.int32).at[offsets[1:]].add(1, indices_are_sorted=True, mode="drop")
    return jnp.cumsum(starts[:capacity], dtype=jnp.int32)


def take_rows(source: jax.Array, indices: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Weighted float32 rows, (..., dim): zero for negative indices, NaN past the source."""
    rows = source.at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(jnp.float32)
    if weights is not None:
        rows = rows * weights[..., None]
    return jnp.where((indices >= 0)[..., None], rows, jnp.float32(0))


def _xla(source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> jax.Array:
    return cpu_or_other((source, indices, offsets, weights), cpu=_xla_on_cpu, other=_xla_on_gpu)


def _xla_on_cpu(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    if offsets is not None:
        segments = segment_of_entries(offsets, indices.shape[0])
        rows = take_rows(source, indices, weights)
        return jax.ops.segment_sum(rows, segments, offsets.shape[0] - 1, indices_are_sorted=True, mode="drop")
    # A loop over the bag's positions never holds the (num_segments, length, dim) gather: eight times faster on CPU.
    return _sum_of_positions(source, indices, weights, block=1)


def _xla_on_gpu(
    source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    if offsets is None:
        # A block is one kernel, which reads its rows and indices once and writes its sums once. Of more than about
        # fifty gathers XLA would make several kernels, with arrays of the output's size between them.
        return _sum_of_positions(source, indices, weights, block=32)
    if indices.shape[0] == 0:
        return jnp.zeros((offsets.shape[0] - 1, source.shape[1]), jnp.float32)

    def rows_at(positions: jax.Array) -> jax.Array:
        def take(array: jax.Array) -> jax.Array:
            return array.at[positions].get(mode="clip", wrap_negative_indices=False)

        index = jnp.where(positions >= 0, take(indices), -1)
        return take_rows(source, index, None if weights is None else take(weights))

    return segment_sums(rows_at, indices.shape[0], offsets)


def _sum_of_positions(source: jax.Array, indices: jax.Array, weights: jax.Array | None, *, block: int) -> jax.Array:
    """Sums each segment's positions in ascending order, ``block`` of them at a time."""
    num_segments, length = indices.shape

    def add_positions(total: jax.Array | None, first: jax.Array | int, count: int) -> jax.Array:
        for position in range(count):

            def column(array: jax.Array, position: int = position) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(array, first + position, axis=1, keepdims=False)

            rows = take_rows(source, column(indices), None if weights is None else column(weights))
            total = rows if total is None else total + rows
        return jnp.zeros((num_segments, source.shape[1]), jnp.float32) if total is None else total

    if length <= block:
        return add_positions(None, 0, length)
    blocks, rest = divmod(length, block)
    if blocks <= 8 and block > 1:
        total = add_positions(None, 0, block)
        for first in range(block, length, block):
            # Without the barrier XLA would join the blocks, and split them elsewhere.
            total = add_positions(jax.lax.optimization_barrier(total), first, min(block, length - first))
        return total
    total = jnp.zeros((num_segments, source.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, blocks, lambda i, total: add_positions(total, i * block, block), total)
    return add_positions(total, blocks * block, rest)


def _native(source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> jax.Array:
    from jrec.native import xla as native

    return native.gather_reduce(source, indices, offsets, weights)


def _request(source: jax.Array, indices: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> Any:
    from jrec.pallas.gather_reduce import Request

    return Request(source=source, indices=indices, offsets=offsets, weights=weights)


def _together(requests: Sequence[Any]) -> list[jax.Array]:
    from jrec.pallas.gather_reduce import gather_reduce_many

    return gather_reduce_many(requests)
