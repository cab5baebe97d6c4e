"""One level of the product: entries of the level below by slices of a core, and the transpose of that.

``expand`` is forward, ``expand_transpose`` backward. Both know three ways: "grouped" multiplies entry by entry (native
kernels on CPU; elsewhere batched GEMMs over pieces of the entries, as many pieces as the batch's entries need),
"dense" is one GEMM of everything below with the whole core, of which the entries are then taken.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.tt.plan import Level, digit_cast

Method = Literal["grouped", "dense"]

_PIECE_FLOATS = 1 << 21  # of the slices gathered at once: 8 MiB, which also bounds the gradients held a piece


def expand(
    below: jax.Array, core: jax.Array, level: Level, *, method: Method, implementation: Implementation | None = None
) -> jax.Array:
    """Products of a level.

    Args:
      below: (P, A, R) float32, the level below.
      core: (m, R, n, R') float32.
      level: its entries.
      method: "grouped" or "dense".
      implementation: of "grouped".

    Returns:
      (capacity, A * n, R') float32. What padding holds is undefined and never to be read.
    """
    _, rank, n, right = core.shape
    flat = core.reshape(core.shape[0], rank, n * right)
    if method == "dense":
        out = _dense(below, flat, level)
    else:
        args = (below, flat, level)
        out = dispatch("tt_expand", _without_pallas(implementation), args, xla=_grouped, native=_native)
    return out.reshape(level.capacity, below.shape[1] * n, right)


def expand_transpose(
    gradient: jax.Array,
    below: jax.Array,
    core: jax.Array,
    level: Level,
    *,
    below_count: jax.Array,
    method: Method,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of ``below`` and ``core``, from that of ``expand``'s output.

    Args:
      gradient: (capacity, A * n, R') float32; what padding holds is ignored.
      below: (P, A, R) float32.
      core: (m, R, n, R') float32.
      level: its entries.
      below_count: () int32, how many entries of ``below`` are real; the gradient of the others is undefined.
      method: "grouped" or "dense".
      implementation: of "grouped".

    Returns:
      (P, A, R) and (m, R, n, R') float32.
    """
    m, rank, n, right = core.shape
    flat = core.reshape(m, rank, n * right)
    gradient = gradient.reshape(level.capacity, below.shape[1], n * right)
    if method == "dense":
        below_gradient, core_gradient = _dense_transpose(gradient, below, flat, level)
    else:
        args = (gradient, below, flat, level, below_count)
        below_gradient, core_gradient = dispatch(
            "tt_expand", _without_pallas(implementation), args, xla=_grouped_transpose, native=_native_transpose
        )
    return below_gradient, core_gradient.reshape(core.shape)


def _without_pallas(implementation: Implementation | None) -> Implementation | None:
    return "xla" if implementation == "pallas" else implementation


def _native(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    from jrec.native import tt

    return tt.expand(below, core, level.parents, level.digits, level.count)


def _native_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level, below_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from jrec.native import tt

    by_digit = digit_cast(level, core.shape[0])
    return tt.expand_transpose(gradient, below, core, level.parents, level.digits, level.count, below_count, by_digit)


def _pieces(level: Level, floats: int) -> tuple[int, jax.Array]:
    """Entries a piece has, and how many pieces hold the real ones."""
    size = max(1, min(level.capacity, _PIECE_FLOATS // max(1, floats)))
    return size, (level.count + jnp.int32(size - 1)) // jnp.int32(size)


def _take(source: jax.Array, indices: jax.Array) -> jax.Array:
    return source.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _window(array: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, begin, size)


def _grouped(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    size, pieces = _pieces(level, core.shape[1] * core.shape[2])

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last window may begin before its piece, where the capacity ends: those entries are made again.
        begin = jnp.minimum(i * jnp.int32(size), jnp.int32(level.capacity - size))
        left = _take(below, _window(level.parents, begin, size))
        right = _take(core, _window(level.digits, begin, size))
        product = jnp.matmul(left, right, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product, begin, axis=0)

    empty = jnp.zeros((level.capacity, below.shape[1], core.shape[2]), jnp.float32)
    if level.capacity == 0:
        return empty
    return jax.lax.fori_loop(jnp.int32(0), pieces, piece, empty)


def _grouped_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level, below_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del below_count
    below_gradient, core_gradient = jnp.zeros(below.shape, jnp.float32), jnp.zeros(core.shape, jnp.float32)
    if level.capacity == 0:
        return below_gradient, core_gradient
    size, pieces = _pieces(level, core.shape[1] * core.shape[2])

    def piece(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Entries that the window before has summed already point past both ends here, and are dropped.
        begin = jnp.minimum(i * jnp.int32(size), jnp.int32(level.capacity - size))
        fresh = begin + jnp.arange(size, dtype=jnp.int32) >= i * jnp.int32(size)
        parents = jnp.where(fresh, _window(level.parents, begin, size), jnp.int32(below.shape[0]))
        digits = jnp.where(fresh, _window(level.digits, begin, size), jnp.int32(core.shape[0]))
        slope = _window(gradient, begin, size)
        of_below = jnp.einsum("uan,urn->uar", slope, _take(core, digits), preferred_element_type=jnp.float32)
        of_core = jnp.einsum("uar,uan->urn", _take(below, parents), slope, preferred_element_type=jnp.float32)
        return sums[0].at[parents].add(of_below, mode="drop"), sums[1].at[digits].add(of_core, mode="drop")

    return jax.lax.fori_loop(jnp.int32(0), pieces, piece, (below_gradient, core_gradient))


def _dense_places(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    """Where entries lie in the (P * A * m, N) dense product, (capacity, A) int32; padding points past its end."""
    parents, rows, m = below.shape[0], below.shape[1], core.shape[0]
    if parents * rows * m >= 2**31:
        raise ValueError(
            f"the dense product of {parents} prefixes and {m} slices has {parents * rows * m:,} rows, which no int32"
            " holds; use contraction 'unique'"
        )
    first = level.parents * jnp.int32(rows * m) + level.digits
    places = first[:, None] + (jnp.arange(rows, dtype=jnp.int32) * jnp.int32(m))[None, :]
    return jnp.where((level.parents < parents)[:, None], places, jnp.int32(parents * rows * m))


def _dense(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    parents, rows, rank = below.shape
    m, _, columns = core.shape
    table = below.reshape(parents * rows, rank) @ core.swapaxes(0, 1).reshape(rank, m * columns)
    return _take(table.reshape(parents * rows * m, columns), _dense_places(below, core, level))


def _dense_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level
) -> tuple[jax.Array, jax.Array]:
    parents, rows, rank = below.shape
    m, _, columns = core.shape
    places = _dense_places(below, core, level)
    table = jnp.zeros((parents * rows * m, columns), jnp.float32).at[places].set(gradient, mode="drop")
    table = table.reshape(parents * rows, m * columns)
    flat_below, flat_core = below.reshape(parents * rows, rank), core.swapaxes(0, 1).reshape(rank, m * columns)
    of_below = (table @ flat_core.T).reshape(below.shape)
    of_core = (flat_below.T @ table).reshape(rank, m, columns).swapaxes(0, 1)
    return of_below, of_core
