"""A tensor-train level on a GPU: its products, their gradients, and the last level fused with pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.pallas.gather_reduce import gather_reduce
from jrec.pallas.launch import MAX_DIM
from jrec.pallas.tt.product import grouped_products
from jrec.pallas.tt.reduce import Products, reduce_products
from jrec.pallas.tt.runs import bounds_of
from jrec.pallas.tt.tuning import WIDE, tune_single


def expand(below: jax.Array, core: jax.Array, parents: jax.Array, digits: jax.Array, order: jax.Array) -> jax.Array:
    """Products of a level.

    Wide slices are multiplied slice by slice, with the entries that chose one below one another; narrow ones, the
    last core's, entry by entry, since neighbours share their parent there and a slice is a few lines of the cache.

    Args:
      below: (P, A, R) float32 or bfloat16.
      core: (m, R, n, R') float32 or bfloat16.
      parents: (capacity,) int32, P or more for padding.
      digits: (capacity,) int32, m or more for padding.
      order: (capacity,) int32, entries by digit; not read for narrow slices.

    Returns:
      (capacity, A * n, R') float32. What padding holds is undefined.
    """
    m, rank, n, right_rank = core.shape
    capacity, height, width = parents.shape[0], below.shape[1], n * right_rank
    right = core.reshape(m, rank, width)
    # Narrow: each entry is a segment of one, of the kernel that also sums.
    if width < WIDE:
        offsets = jnp.arange(capacity + 1, dtype=jnp.int32)
        products = Products(below, right, parents, digits)
        out = reduce_products(products, None, offsets, config=tune_single(height=height, width=width))
    else:
        out = grouped_products(below, right, parents, order, _bounds(order, digits, m))
    return out.reshape(capacity, height * n, right_rank)


def expand_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, parents: jax.Array, digits: jax.Array, order: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of ``below`` and ``core``, from the gradient of ``expand``'s output. Deterministic: no atomics.

    Args:
      gradient: (capacity, A * n, R') float32; what padding holds is ignored.
      below: (P, A, R) float32 or bfloat16.
      core: (m, R, n, R') float32 or bfloat16.
      parents: (capacity,) int32 ascending, P or more for padding: entries of one parent are neighbours.
      digits: (capacity,) int32, m or more for padding.
      order: (capacity,) int32, entries by digit.

    Returns:
      (P, A, R) and (m, R, n, R') float32.
    """
    m, rank, n, right_rank = core.shape
    capacity, height, width = parents.shape[0], below.shape[1], n * right_rank
    gradient = gradient.reshape(capacity, height, width)
    by_digit, by_parent = _bounds(order, digits, m), bounds_of(parents, below.shape[0])
    # A copy of the core, transposed in memory: its columns become rows, which threads load as vectors.
    turned = core.reshape(m, rank, width).swapaxes(1, 2)
    # Products by runs are written and then summed by gather-reduce, which holds rows of up to ``MAX_DIM`` elements.
    if width < WIDE or height * rank > MAX_DIM:
        of_below = reduce_products(Products(gradient, turned, None, digits), None, by_parent)
    else:
        of_entries = grouped_products(gradient, turned, None, order, by_digit)
        flat = of_entries.reshape(capacity, height * rank)
        of_below = gather_reduce(flat, jnp.arange(capacity, dtype=jnp.int32), by_parent).reshape(below.shape)
    # By digit: parents transposed times gradients, each segment one slice. No two segments write the same slice.
    of_core = reduce_products(Products(below, gradient, parents, None), order, by_digit, transposed=True)
    return of_below, of_core.reshape(core.shape)


def bags(
    below: jax.Array,
    last_core: jax.Array,
    parents: jax.Array,
    digits: jax.Array,
    sources: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """The last level fused with pooling: each lookup's product is added to its bag and never written.

    Args:
      below: (P, A, R) float32 or bfloat16.
      last_core: (m, R, n, 1) float32 or bfloat16.
      parents: (capacity,) int32.
      digits: (capacity,) int32.
      sources: int32, the unique row of every lookup, (num_bags, length) or, with offsets, (lookups,); negative ones are
        skipped, one past the entries makes its bag NaN.
      offsets: (num_bags + 1,) int32, or None.
      weights: float32 of the shape of ``sources``, or None.

    Returns:
      (num_bags, A * n) float32.
    """
    m, rank, n, _ = last_core.shape
    bounds = offsets
    if bounds is None:
        num_bags, length = sources.shape
        bounds = jnp.arange(num_bags + 1, dtype=jnp.int32) * jnp.int32(length)
    out = reduce_products(
        Products(below, last_core.reshape(m, rank, n), parents, digits),
        sources.reshape(-1),
        bounds,
        None if weights is None else weights.reshape(-1),
    )
    return out.reshape(out.shape[0], below.shape[1] * n)


def _bounds(order: jax.Array, digits: jax.Array, slices: int) -> jax.Array:
    """Where each digit's entries begin in ``order``."""
    return bounds_of(digits.at[order].get(mode="fill", fill_value=slices), slices)
