"""The tensor-train kernels inside jit on CPU; ``jrec.ops.tt.products`` calls them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.native.calls import custom_call, threads_attribute
from jrec.ops.types import Cast


def expand(
    below: jax.Array, core: jax.Array, parents: jax.Array, digits: jax.Array, count: jax.Array, by_digit: Cast | None
) -> jax.Array:
    """(P, A, R) by slices of (m, R, n, R'): (capacity, A * n, R') float32, undefined from ``count`` on.

    With the entries' cast by digit, all entries of a digit are multiplied together.
    """
    # Of this shape at once: XLA copies what is given away in place after a reshape.
    result = jax.ShapeDtypeStruct((parents.shape[0], below.shape[1] * core.shape[2], core.shape[3]), jnp.float32)
    empty = jnp.zeros(0, jnp.int32)
    cast = (empty, empty, empty, jnp.int32(0)) if by_digit is None else _lists(by_digit)
    return custom_call("tt_handlers", "tt_expand", [result])(
        below, core, parents, digits, count, *cast, threads=threads_attribute()
    )[0]


def expand_transpose(
    gradient: jax.Array,
    below: jax.Array,
    core: jax.Array,
    parents: jax.Array,
    digits: jax.Array,
    count: jax.Array,
    below_count: jax.Array,
    by_digit: Cast,
) -> tuple[jax.Array, jax.Array]:
    """Gradients (P, A, R), undefined from ``below_count`` on, and (m, R, n, R'), from ``expand``'s output's gradient.

    The first takes the place of ``below`` where nothing else needs that any more.
    """
    results = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (core, below, core)]
    operands = gradient, below, core, parents, digits, count, below_count, *_lists(by_digit)
    of_core, of_below, _ = custom_call("tt_handlers", "tt_expand_transpose", results, {1: 1})(
        *operands, threads=threads_attribute()
    )
    return of_below, of_core


def _lists(cast: Cast) -> tuple[jax.Array, ...]:
    return cast.rows, cast.offsets, cast.positions, cast.num_unique
