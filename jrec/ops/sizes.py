"""Sizes of arrays: ints, or, where ``jax.export`` traces with symbolic shapes, expressions of unknown numbers.

A symbolic dimension is at least 1, and comparisons that depend on its value raise. So structure, such as how many
levels a sum has, follows from the largest number that there can be.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.core
import jax.numpy as jnp

from jrec.ops.varying import varying_like


def smaller(one: int, two: int) -> int:
    """The lesser of two sizes."""
    return jax.core.min_dim(one, two)


def larger(one: int, two: int) -> int:
    """The greater of two sizes."""
    return jax.core.max_dim(one, two)


def is_static(size: object) -> bool:
    """Whether a size is a number, not a symbolic dimension."""
    return isinstance(size, int)


def static(size: object) -> int | None:
    """A size that is a number; None for a symbolic one."""
    return size if isinstance(size, int) else None


def all_static(*trees: object) -> bool:
    """Whether all arrays of some pytrees have static shapes."""
    return all(is_static(size) for leaf in jax.tree.leaves(trees) for size in leaf.shape)


def surely_at_most(size: int, most: int) -> bool:
    """Whether a size is at most ``most``, whatever number a symbolic one may stand for."""
    try:
        return bool(size <= most)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def search_sorted(ascending: jax.Array, queries: jax.Array, side: Literal["left", "right"]) -> jax.Array:
    """``jnp.searchsorted`` in int32, which also searches an array of symbolic length, of at least one element."""
    size = ascending.shape[0]
    if is_static(size):
        return jnp.searchsorted(ascending, queries, side=side).astype(jnp.int32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        value = ascending.at[middle].get(mode="clip", wrap_negative_indices=False)
        right = (low < high) & ((value < queries) if side == "left" else (value <= queries))
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    bounds = jnp.zeros(queries.shape, jnp.int32), jnp.full(queries.shape, size, jnp.int32)
    # 32 steps, whatever the length is: it is below 2^31.
    return jax.lax.fori_loop(0, 32, halve, varying_like(bounds, ascending, queries))[0]
