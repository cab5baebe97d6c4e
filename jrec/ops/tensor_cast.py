"""Tensor Casting, Algorithm 2: sort the lookups by row, so that the backward pass is a gather-reduce."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.gather_reduce import check_segments, segment_of_entries
from jrec.ops.types import Cast
from jrec.ops.verdicts import CAST


def tensor_cast(
    ids: jax.Array,
    offsets: jax.Array | None = None,
    *,
    num_rows: int,
    unique_capacity: int | None = None,
    implementation: Implementation | None = None,
) -> Cast:
    """Sorts lookups by row and finds the segments of equal rows. Depends on ids alone, so it can run ahead of time.

    Args:
      ids: int32, (num_bags, length), or (capacity,) with ``offsets``. Negative ids and ids of ``num_rows`` or more are
        padding here: they join no segment.
      offsets: (num_bags + 1,) int32 or None.
      num_rows: rows of the table.
      unique_capacity: how many unique rows fit. The default, the smaller of the lookups and the rows, always
        suffices; with a smaller one, ``num_unique > unique_capacity`` tells that rows were left out, and the caller
        must check it.
      implementation: "xla", "native" (CPU), or None for the platform's fastest. All give identical casts.

    Returns:
      A ``Cast``.
    """
    check_segments(ids, offsets, None)
    if unique_capacity is None:
        unique_capacity = min(ids.size, num_rows)

    def xla(ids: jax.Array, offsets: jax.Array | None) -> Cast:
        return _xla(ids, offsets, num_rows, unique_capacity)

    def native(ids: jax.Array, offsets: jax.Array | None) -> Cast:
        from jrec.native import xla as kernels

        return kernels.tensor_cast(ids, offsets, num_rows=num_rows, unique_capacity=unique_capacity)

    return dispatch("tensor_cast", implementation, (ids, offsets), xla=xla, native=native, kernel=CAST)


def _xla(ids: jax.Array, offsets: jax.Array | None, num_rows: int, unique_capacity: int) -> Cast:
    capacity = ids.size
    positions = jnp.arange(capacity, dtype=jnp.int32)
    if offsets is None:
        num_bags = ids.shape[0]
        bags = positions // jnp.int32(max(1, ids.shape[1]))
    else:
        num_bags = offsets.shape[0] - 1
        bags = segment_of_entries(offsets, capacity)
    flat = ids.reshape(-1)
    real = (flat >= 0) & (flat < num_rows) & (bags < num_bags)
    keys, positions = jax.lax.sort((jnp.where(real, flat, num_rows), positions), num_keys=1, is_stable=True)
    real = keys < num_rows
    total = jnp.sum(real, dtype=jnp.int32)
    first = jnp.concatenate([jnp.ones(min(1, capacity), bool), keys[1:] != keys[:-1]])
    segment = jnp.cumsum(first, dtype=jnp.int32) - 1
    starts = jnp.where(first & real, segment, unique_capacity)
    iota = jnp.arange(capacity, dtype=jnp.int32)
    return Cast(
        rows=jnp.full(unique_capacity, num_rows, jnp.int32).at[starts].set(keys, mode="drop"),
        offsets=jnp.full(unique_capacity + 1, total, jnp.int32)
        .at[jnp.where(first & real, segment, unique_capacity + 1)]
        .set(iota, mode="drop"),
        sources=jnp.where(real, bags[positions], num_bags),
        positions=positions,
        num_unique=jnp.sum(first & real, dtype=jnp.int32),
    )
