"""The tensor-train kernels inside jit on CPU; ``jrec.ops.tt.products`` and ``index`` call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrec.native.calls import custom_call, threads_attribute
from jrec.native.hyper import hyperparameters, kind_of
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.types import Cast


class DigitOrder(NamedTuple):
    """A level's entries by digit: digit ``d`` has ``entries[offsets[d] : offsets[d + 1]]``, ascending.

    Attributes:
      offsets: (m + 1,) int32.
      entries: (capacity,) int32, undefined from the level's count on.
    """

    offsets: jax.Array
    entries: jax.Array


def index(
    cast: Cast, count: jax.Array, ids: jax.Array, factors: Sequence[int], rooms: Sequence[int]
) -> tuple[list[tuple[jax.Array, jax.Array, jax.Array]], jax.Array]:
    """The levels of a lookup's sorted unique rows, and which row every lookup has.

    Args:
      cast: The lookups' cast.
      count: () int32, how many of its rows are real.
      ids: int32.
      factors: How many slices each core has, from the last to the second.
      rooms: How many entries fit into the level below each of them; for the second core, the first core's slices.

    Returns:
      Of every core, in the order of ``factors``, its level's parents and digits, (capacity,) int32, and count, ()
      int32; then the places of the lookups' rows among the cast's, of the ids' shape: negative for padding, and one
      past all rows for what has none. Parents are places in the level below, or, of the second core, digits.
    """
    results = []
    for size, room in zip([cast.rows.shape[0], *rooms[:-1]], [*rooms[:-1], 0], strict=True):
        results += [_i32(size), _i32(size), _i32(room), _i32()]
    operands = cast.rows, count, cast.positions, cast.offsets, ids.reshape(-1)
    constants = (jnp.asarray(np.array(each, np.int32)) for each in (factors, rooms))
    call = custom_call("tt_index_handlers", "tt_index", [*results, _i32(ids.size)])
    *made, places = call(*operands, *constants, threads=threads_attribute())
    counts = [count, *made[3:-1:4]]
    return list(zip(made[::4], made[1::4], counts, strict=True)), places.reshape(ids.shape)


def digit_order(digits: jax.Array, count: jax.Array, factor: int) -> DigitOrder:
    """The first ``count`` of (capacity,) int32 ``digits`` below ``factor``, sorted."""
    results = [_i32(factor + 1), _i32(*digits.shape)]
    return DigitOrder(*custom_call("tt_index_handlers", "tt_digit_order", results)(digits, count))


def touched(chosen: jax.Array, count: jax.Array, slices: int) -> jax.Array:
    """Which of ``slices`` the first ``count`` of (capacity,) int32 ``chosen`` name, (slices,) bool."""
    return custom_call("tt_index_handlers", "tt_touched", [_i32(slices)])(chosen, count)[0] != 0


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


class Level(NamedTuple):
    """A level's entries as the kernels of its transposes take them.

    Attributes:
      parents: (capacity,) int32 ascending.
      digits: (capacity,) int32.
      count: () int32, how many entries are real.
      below_count: () int32, how many entries of the level below are.
      by_digit: The entries by digit, whose slices' gradients are sums over those; or None, where they are sums over
        pieces of the entries in order.
    """

    parents: jax.Array
    digits: jax.Array
    count: jax.Array
    below_count: jax.Array
    by_digit: DigitOrder | None


def expand_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level
) -> tuple[jax.Array, jax.Array]:
    """Gradients (P, A, R), undefined from ``below_count`` on, and (m, R, n, R'), from ``expand``'s output's gradient.

    The first takes the place of ``below`` where nothing else needs that any more.
    """
    of_core, of_below, *_ = _transpose(gradient, below, core, level)
    return of_below, of_core


def expand_transpose_step(
    gradient: jax.Array,
    below: jax.Array,
    level: Level,
    optimizer: RowOptimizer,
    core: jax.Array,
    slots: Slots,
    step: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, Slots]]:
    """The gradient of ``below``, as ``expand_transpose`` has it, and the core and its slots after the optimizer's step.

    Core and slots are stepped in place where nothing else needs them any more. Slices without an entry keep their bits.
    """
    state = core, *(slots[slot] for slot in optimizer.slots)
    hyper = hyperparameters(optimizer, step, scale)
    _, of_below, _, _, _, core, *new = _transpose(gradient, below, core, level, kind_of(optimizer), (hyper, *state[1:]))
    return of_below, (core, dict(zip(optimizer.slots, new, strict=True)))


def _transpose(
    gradient: jax.Array,
    below: jax.Array,
    core: jax.Array,
    level: Level,
    kind: int = -1,
    step: tuple[jax.Array, ...] = (),
) -> Sequence[jax.Array]:
    """What the handlers give; ``step`` holds an optimizer's hyperparameters and slots, or nothing."""
    operands = gradient, below, core, level.parents, level.digits, level.count, level.below_count
    m, capacity = core.shape[0], level.parents.shape[0]
    if level.by_digit is None:
        from jrec.native.tt_piece_kernels import MOST_PIECES, PIECE_REPEATS

        # Room for as many pieces as the capacity could ask for; the handler takes fewer where a batch has fewer
        # entries.
        pieces = min(MOST_PIECES, max(1, capacity // max(1, PIECE_REPEATS * m)))
        name, of_core, turned, partial, touched = "tt_transpose_pieces", m, m, (pieces, *core.shape), m
    else:
        from jrec.native.tt_kernels import CHUNK_DIGITS

        operands = *operands, *level.by_digit
        turned, partial, touched = -(-m // CHUNK_DIGITS), (capacity, *below.shape[1:]), 0
        name, of_core = "tt_transpose_digits", turned if step else m
    shapes = (of_core, *core.shape[1:]), below.shape, (turned, *core.shape[1:]), partial
    results = [*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), _i32(touched)]
    # The below gradient in the place of ``below``, of which XLA makes a copy where something still reads it.
    aliases = {1: 1}
    if step:
        places = 2, *range(len(operands) + 1, len(operands) + len(step))
        state = core, *step[1:]
        aliases |= {place: len(results) + i for i, place in enumerate(places)}
        results += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
    # Handlers number attributes by name.
    return custom_call("tt_handlers", name, results, aliases)(
        *operands, *step, threads=threads_attribute(), update=np.int64(kind)
    )


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
