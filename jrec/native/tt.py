"""The tensor-train kernels inside jit on CPU; ``jrec.ops.tt.products`` and ``index`` call them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrec.native.calls import custom_call, threads_attribute
from jrec.ops.types import Cast


class DigitOrder(NamedTuple):
    """A level's entries by digit: digit ``d`` has ``entries[offsets[d] : offsets[d + 1]]``, ascending.

    Attributes:
      offsets: (m + 1,) int32.
      entries: (capacity,) int32, undefined from the level's count on.
    """

    offsets: jax.Array
    entries: jax.Array


def level(
    entries: jax.Array, count: jax.Array, factor: int, *, room: int, padding: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The digits of sorted entries, the sorted unique prefixes before them, and which prefix every entry has.

    Args:
      entries: (capacity,) int32 ascending.
      count: () int32, how many are real.
      factor: How many digits there are; padding's digit.
      room: How many prefixes fit; 0 gives prefixes themselves as parents.
      padding: The parent of padding.

    Returns:
      Parents and digits, (capacity,) int32, prefixes, (room,) int32, and how many of these are real, () int32.
    """
    results = [_i32(*entries.shape), _i32(*entries.shape), _i32(room), _i32()]
    call = custom_call("tt_index_handlers", "tt_level", results)
    return tuple(call(entries, count, factor=np.int64(factor), padding=np.int64(padding)))


def digit_order(digits: jax.Array, count: jax.Array, factor: int) -> DigitOrder:
    """The first ``count`` of (capacity,) int32 ``digits`` below ``factor``, sorted."""
    results = [_i32(factor + 1), _i32(*digits.shape)]
    return DigitOrder(*custom_call("tt_index_handlers", "tt_digit_order", results)(digits, count))


def touched(chosen: jax.Array, count: jax.Array, slices: int) -> jax.Array:
    """Which of ``slices`` the first ``count`` of (capacity,) int32 ``chosen`` name, (slices,) bool."""
    return custom_call("tt_index_handlers", "tt_touched", [_i32(slices)])(chosen, count)[0] != 0


def sources(positions: jax.Array, offsets: jax.Array, ids: jax.Array) -> jax.Array:
    """The unique row of every lookup, of the ids' shape, from their cast; -1 for padding."""
    call = custom_call("tt_index_handlers", "tt_sources", [_i32(ids.size)])
    return call(positions, offsets, ids.reshape(-1))[0].reshape(ids.shape)


def split(
    cast: Cast, cached: jax.Array, ids: jax.Array, *, rows: int, num_bags: int
) -> tuple[Cast, Cast, jax.Array, jax.Array]:
    """The casts of the lookups that hit a cache and of the others, and so on; see ``CacheSplit`` for what and order."""
    size, lookups = cast.rows.shape[0], ids.size
    one = [_i32(size), _i32(size + 1), _i32(lookups), _i32(lookups), _i32()]
    results = [*one, *one, _i32(lookups), _i32(lookups)]
    operands = cast.rows, cast.offsets, cast.sources, cast.positions, cast.num_unique, cached, ids.reshape(-1)
    arrays = custom_call("tt_index_handlers", "tt_split", results)(
        *operands, num_bags=np.int64(num_bags), rows=np.int64(rows)
    )
    names = "rows", "offsets", "sources", "positions", "num_unique"
    hits, misses = (Cast(**dict(zip(names, part, strict=True))) for part in (arrays[:5], arrays[5:10]))
    return hits, misses, arrays[10].reshape(ids.shape), arrays[11].reshape(ids.shape)


def expand(
    below: jax.Array,
    core: jax.Array,
    parents: jax.Array,
    digits: jax.Array,
    count: jax.Array,
    by_digit: DigitOrder | None,
) -> jax.Array:
    """(P, A, R) by slices of (m, R, n, R'): (capacity, A * n, R') float32, undefined from ``count`` on.

    With the entries by digit, all entries of a digit are multiplied together.
    """
    # Of this shape at once: XLA copies what is given away in place after a reshape.
    result = jax.ShapeDtypeStruct((parents.shape[0], below.shape[1] * core.shape[2], core.shape[3]), jnp.float32)
    empty = jnp.zeros(0, jnp.int32)
    order = DigitOrder(empty, empty) if by_digit is None else by_digit
    return custom_call("tt_handlers", "tt_expand", [result])(
        below, core, parents, digits, count, *order, threads=threads_attribute()
    )[0]


def expand_transpose(
    gradient: jax.Array,
    below: jax.Array,
    core: jax.Array,
    parents: jax.Array,
    digits: jax.Array,
    count: jax.Array,
    below_count: jax.Array,
    by_digit: DigitOrder | None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients (P, A, R), undefined from ``below_count`` on, and (m, R, n, R'), from ``expand``'s output's gradient.

    The first takes the place of ``below`` where nothing else needs that any more. With the entries by digit, slices'
    gradients are sums over those; else they are sums over pieces of the entries in order.
    """
    operands = gradient, below, core, parents, digits, count, below_count
    m, capacity = core.shape[0], parents.shape[0]
    if by_digit is None:
        from jrec.native.tt_piece_kernels import MOST_PIECES, PIECE_REPEATS

        pieces = min(MOST_PIECES, max(1, capacity // max(1, PIECE_REPEATS * m)))
        name, turned, partial = "tt_transpose_pieces", m, (pieces, *core.shape)
    else:
        from jrec.native.tt_kernels import CHUNK_DIGITS

        operands = *operands, *by_digit
        name, turned, partial = "tt_transpose_digits", -(-m // CHUNK_DIGITS), (capacity, *below.shape[1:])
    shapes = core.shape, below.shape, (turned, *core.shape[1:]), partial
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    of_core, of_below, *_ = custom_call("tt_handlers", name, results, {1: 1})(*operands, threads=threads_attribute())
    return of_below, of_core


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
