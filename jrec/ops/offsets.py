"""Offsets of ragged bags that do not ascend from 0 to at most the number of ids: refused outside jit, NaN inside.

Bag ``b`` is *well formed* where ``0 <= offsets[b] <= offsets[b + 1] <= capacity``, and the first one begins at 0. As
ids past the table do, malformed offsets make their own bags NaN and leave the others what they are; a cast leaves the
ids of malformed bags out, so that no row is updated by a bag that does not hold it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_concrete_offsets(offsets: jax.Array, capacity: int, *, name: str = "ids") -> None:
    """Raises ValueError on malformed offsets where their values are at hand, that is outside jit.

    Args:
      offsets: (num_bags + 1,) int32.
      capacity: The number of ids.
      name: What the ids are called in messages.
    """
    if isinstance(offsets, Tracer):
        return
    values = np.asarray(offsets)  # NumPy, since jnp would trace even concrete offsets inside another function's jit
    rule = f"offsets must ascend from 0 to at most the number of {name}, {capacity}"
    if values[0] != 0:
        raise ValueError(f"offsets[0] is {values[0]}, but {rule}; begin them with 0")
    descents = np.flatnonzero(values[1:] < values[:-1])
    if descents.size:
        b = int(descents[0])
        raise ValueError(
            f"offsets[{b}:{b + 2}] are {values[b]} and {values[b + 1]}, but {rule}; make them from the bags' lengths:"
            " numpy.concatenate([[0], numpy.cumsum(lengths)])"
        )
    if values[-1] > capacity:
        b = int(np.argmax(values > capacity))
        raise ValueError(f"offsets[{b}] is {values[b]}, but {rule}; pass all {name}, or cut the bags")


def well_formed(offsets: jax.Array, capacity: int) -> jax.Array:
    """Which bags are well formed, (num_bags,) bool."""
    low, high = offsets[:-1], offsets[1:]
    from_zero = (low == 0) | (jnp.arange(low.shape[0], dtype=jnp.int32) > 0)
    return (low >= 0) & (low <= high) & (high <= capacity) & from_zero


def whole_bags(offsets: jax.Array, segments: jax.Array) -> jax.Array:
    """Which bags are well formed and have all of their ids to themselves, (num_bags,) bool.

    Args:
      offsets: (num_bags + 1,) int32.
      segments: (capacity,) int32 ascending, from ``segment_of_entries``.
    """
    if segments.shape[0] == 0:  # JAX gathers nothing from an array without elements
        return well_formed(offsets, 0)
    low, high, bag = offsets[:-1], offsets[1:], jnp.arange(offsets.shape[0] - 1, dtype=jnp.int32)

    def owns(position: jax.Array) -> jax.Array:
        return segments.at[position].get(mode="fill", fill_value=-1, wrap_negative_indices=False) == bag

    return well_formed(offsets, segments.shape[0]) & ((low == high) | (owns(low) & owns(high - 1)))


def within_bags(offsets: jax.Array, segments: jax.Array) -> jax.Array:
    """Which entries lie in the bag that ``segments`` (see ``whole_bags``) says, a well-formed one, (capacity,) bool."""

    def at(values: jax.Array, bags: jax.Array) -> jax.Array:
        return jnp.asarray(values).at[bags].get(mode="clip", wrap_negative_indices=False)

    num_bags, position = offsets.shape[0] - 1, jnp.arange(segments.shape[0], dtype=jnp.int32)
    low, high = at(offsets, segments), at(offsets, segments + 1)
    # Only the first bag could begin late, and leave lookups before it that are in no bag.
    from_zero = (segments > 0) | (low == 0)
    return (segments < num_bags) & (low <= position) & (position < high) & (high <= segments.shape[0]) & from_zero


def nan_unless(good: jax.Array, sums: jax.Array) -> jax.Array:
    """(num_bags, dim) ``sums``, NaN where (num_bags,) ``good`` is False."""
    return jnp.where(good[:, None], sums, jnp.float32(jnp.nan))
