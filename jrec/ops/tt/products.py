"""One level of the product: entries of the level below by slices of a core, and the transpose of that.

``expand`` is forward, ``expand_transpose`` backward. Both know three ways: "grouped" multiplies entry by entry (native
kernels on CPU; elsewhere batched GEMMs over pieces of the entries, as many pieces as the batch's entries need),
"dense" is one GEMM of everything below with the whole core, of which the entries are then taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.segment_sums import segment_sums
from jrec.ops.sizes import is_static, larger, search_sorted, smaller
from jrec.ops.tt.index import Level, digit_cast
from jrec.ops.varying import varying_like
from jrec.ops.verdicts import KernelClass

if TYPE_CHECKING:
    from jrec.native import tt as native_tt

Method = Literal["grouped", "dense"]

_REPEATS = 2  # room for that many entries of every digit makes native forward work by digits worth a sort
_TILE = 32  # entries of a digit whose share of a slice's gradient is one product of a batched GEMM
_PIECE_FLOATS = 1 << 21  # of the slices gathered at once: 8 MiB, which also bounds the gradients held a piece


def expand(
    below: jax.Array, core: jax.Array, level: Level, *, method: Method, implementation: Implementation | None = None
) -> jax.Array:
    """Products of a level.

    Args:
      below: (P, A, R) float32, the level below.
      core: (m, R, n, R') float32.
      level: The level's entries.
      method: "grouped" or "dense".
      implementation: The implementation of "grouped".

    Returns:
      (capacity, A * n, R') float32. What padding holds is undefined and never to be read.
    """
    if method == "dense":
        return _dense(below, core, level)
    args = (below, core, level)
    kernel = _kernel(below, core)
    return dispatch("tt_expand", implementation, args, xla=_grouped, native=_native, pallas=_pallas, kernel=kernel)


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
    """Gradients of ``below`` and ``core``, from the gradient of ``expand``'s output.

    Args:
      gradient: (capacity, A * n, R') float32; what padding holds is ignored.
      below: (P, A, R) float32.
      core: (m, R, n, R') float32.
      level: The level's entries.
      below_count: () int32, how many entries of ``below`` are real; the gradient of the others is undefined.
      method: "grouped" or "dense".
      implementation: The implementation of "grouped".

    Returns:
      (P, A, R) and (m, R, n, R') float32.
    """
    if method == "dense":
        return _dense_transpose(gradient, below, core, level)
    args = (gradient, below, core, level, below_count)
    return dispatch(
        "tt_expand",
        implementation,
        args,
        xla=_grouped_transpose,
        native=_native_transpose,
        pallas=_pallas_transpose,
        kernel=_kernel(below, core),
    )


def _kernel(below: jax.Array, core: jax.Array) -> KernelClass:
    _, rank, columns, right_rank = core.shape
    return KernelClass(kernel="tt_products", dtype=core.dtype.name, dim=(below.shape[1], rank, columns, right_rank))


def _pallas(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    from jrec.pallas import tt

    order = digit_cast(level, core.shape[0], "pallas").sources
    return tt.expand(below, core, level.parents, level.digits, order)


def _pallas_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level, below_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from jrec.pallas import tt

    del below_count
    order = digit_cast(level, core.shape[0], "pallas").sources
    return tt.expand_transpose(gradient, below, core, level.parents, level.digits, order)


def _native(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    from jrec.native import tt

    # A sort by digit pays only where several entries share a slice.
    m, repeats = core.shape[0], level.capacity >= _REPEATS * core.shape[0]
    by_digit = tt.digit_order(level.digits, level.count, m) if repeats and not _streams(core) else None
    return tt.expand(below, core, level.parents, level.digits, level.count, by_digit)


def _native_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level, below_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from jrec.native import tt

    return tt.expand_transpose(gradient, below, core, native_level(core, level, below_count))


def native_level(core: jax.Array, level: Level, below_count: jax.Array) -> native_tt.Level:
    """What the native kernels of a level's transposes take of it."""
    from jrec.native import tt

    by_digit = None if _streams(core) else tt.digit_order(level.digits, level.count, core.shape[0])
    return tt.Level(level.parents, level.digits, level.count, below_count, by_digit)


def _streams(core: jax.Array) -> bool:
    """Whether native kernels take the entries in order: a last core's slices are small, what is below them large."""
    return core.shape[3] == 1


def _pieces(level: Level, floats: int) -> tuple[int, jax.Array]:
    """Entries a piece has, and how many pieces hold the real ones."""
    # Pieces bound the memory of gathered slices, and only as many are
    # run as the batch's real entries need: capacity costs nothing.
    size = larger(1, smaller(level.capacity, _PIECE_FLOATS // larger(1, floats)))
    return size, (level.count + jnp.int32(size - 1)) // jnp.int32(size)


def _take(source: jax.Array, indices: jax.Array) -> jax.Array:
    return source.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _window(array: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, begin, size)


def _flat(core: jax.Array) -> jax.Array:
    """(m, R, n, R') as (m, R, n * R')."""
    return core.reshape(*core.shape[:2], -1)


def _grouped(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    shape = level.capacity, below.shape[1] * core.shape[2], core.shape[3]
    core = _flat(core)
    size, pieces = _pieces(level, core.shape[1] * core.shape[2])

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last window may begin before its piece, where the capacity ends: those entries are made again.
        begin = jnp.minimum(i * jnp.int32(size), jnp.int32(level.capacity - size))
        left = _take(below, _window(level.parents, begin, size))
        right = _take(core, _window(level.digits, begin, size))
        product = jnp.matmul(left, right, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product, begin, axis=0)

    out = jnp.zeros((level.capacity, below.shape[1], core.shape[2]), jnp.float32)
    if level.capacity > 0:
        out = jax.lax.fori_loop(jnp.int32(0), pieces, piece, varying_like(out, below, core, level))
    return out.reshape(shape)


def _grouped_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level, below_count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del below_count
    if level.capacity == 0:
        return jnp.zeros(below.shape, jnp.float32), jnp.zeros(core.shape, jnp.float32)
    slope, slices = gradient.reshape(level.capacity, below.shape[1], -1), _flat(core)
    # A CPU adds in order where indices repeat; a GPU does not, and sums there are made by segments instead.
    args = (slope, below, slices, level)
    of_below, of_core = jax.lax.platform_dependent(*args, cpu=_scattered_transpose, default=_segmented_transpose)
    return of_below, of_core.reshape(core.shape)


def _scattered_transpose(
    slope: jax.Array, below: jax.Array, core: jax.Array, level: Level
) -> tuple[jax.Array, jax.Array]:
    size, pieces = _pieces(level, core.shape[1] * core.shape[2])

    def piece(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Entries that the window before has summed already point past both ends here, and are dropped.
        begin = jnp.minimum(i * jnp.int32(size), jnp.int32(level.capacity - size))
        fresh = begin + jnp.arange(size, dtype=jnp.int32) >= i * jnp.int32(size)
        parents = jnp.where(fresh, _window(level.parents, begin, size), jnp.int32(below.shape[0]))
        digits = jnp.where(fresh, _window(level.digits, begin, size), jnp.int32(core.shape[0]))
        slopes = _window(slope, begin, size)
        of_below = jnp.einsum("uan,urn->uar", slopes, _take(core, digits), preferred_element_type=jnp.float32)
        of_core = jnp.einsum("uar,uan->urn", _take(below, parents), slopes, preferred_element_type=jnp.float32)
        return sums[0].at[parents].add(of_below, mode="drop"), sums[1].at[digits].add(of_core, mode="drop")

    zeros = jnp.zeros(below.shape, jnp.float32), jnp.zeros(core.shape, jnp.float32)
    return jax.lax.fori_loop(jnp.int32(0), pieces, piece, varying_like(zeros, slope, below, core, level))


def _segmented_transpose(
    slope: jax.Array, below: jax.Array, core: jax.Array, level: Level
) -> tuple[jax.Array, jax.Array]:
    """In an order of its own, whatever the device: batched GEMMs of entries, whose sums are made by a scan."""
    own = Level(parents=jnp.arange(level.capacity, dtype=jnp.int32), digits=level.digits, count=level.count)
    # The transpose of a product by slices is a product by the
    # slices transposed: the same loop, each entry its own parent.
    of_entries = _grouped(slope, core.swapaxes(1, 2)[..., None], own).reshape(level.capacity, -1)
    of_below = _segment_sums(of_entries, level.parents, below.shape[0]).reshape(below.shape)

    m, places = core.shape[0], level.capacity // _TILE + core.shape[0]
    cast = digit_cast(level, m, "xla")
    # Each digit's entries are cut in tiles, of which the last may be short: at most one more a digit than the capacity
    # fills, so ``places`` is enough for any batch.
    sizes = cast.offsets[1:] - cast.offsets[:-1]
    ends = jnp.cumsum((sizes + jnp.int32(_TILE - 1)) // jnp.int32(_TILE), dtype=jnp.int32)
    tile = jnp.arange(places, dtype=jnp.int32)
    segment = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)  # of each tile; m past the last
    first = jnp.where(segment > 0, _take(ends, segment - 1), 0)
    start = _take(cast.offsets, segment) + (tile - first) * jnp.int32(_TILE)
    position = start[:, None] + jnp.arange(_TILE, dtype=jnp.int32)[None, :]
    real = (segment < m)[:, None] & (position < _take(cast.offsets, segment + 1)[:, None])
    entry = jnp.where(real, _take(cast.positions, position), jnp.int32(level.capacity))
    parents = level.parents.at[entry].get(mode="fill", fill_value=below.shape[0])
    left = _take(below, parents).reshape(places, -1, core.shape[1])
    right = _take(slope, entry).reshape(places, -1, core.shape[2])
    of_tiles = jnp.einsum("tkr,tkn->trn", left, right, preferred_element_type=jnp.float32)
    digits = cast.rows.at[segment].get(mode="fill", fill_value=m)
    return of_below, _segment_sums(of_tiles.reshape(places, -1), digits, m).reshape(core.shape)


def _segment_sums(values: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Sums of rows of ascending segments, (count, width); rows of segment ``count`` are left out."""
    if not is_static(values.shape[0]):  # JAX's scan is made of as many passes as the number of rows takes
        bounds = search_sorted(segments, jnp.arange(count + 1, dtype=jnp.int32), "left")
        return segment_sums(lambda positions: _take(values, positions), values.shape[0], bounds)

    def join(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Associative, since segments ascend: a sum is carried on within a segment, and begins anew where the number
        # changes.
        same = one[0] == two[0]
        return two[0], jnp.where(same[:, None], one[1] + two[1], two[1])

    _, sums = jax.lax.associative_scan(join, (segments, values))
    numbers = jnp.arange(count, dtype=jnp.int32)
    last = jnp.searchsorted(segments, numbers, side="right").astype(jnp.int32) - 1
    present = (last >= 0) & (segments[jnp.maximum(last, 0)] == numbers)
    return jnp.where(present[:, None], sums[jnp.maximum(last, 0)], jnp.float32(0))


def _dense_places(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    """Where entries lie in the (P * A * m, N) dense product, (capacity, A) int32; padding points past its end."""
    parents, rows, m = below.shape[0], below.shape[1], core.shape[0]
    if parents * rows * m >= 2**31:
        raise ValueError(
            f"the dense product of {parents} prefixes and {m} slices has {parents * rows * m:,} rows, which no int32"
            " holds; use contraction 'unique'"
        )
    # The dense product has (parent, row, digit) in this order; ``dense_fits`` has made sure that int32 numbers them.
    first = level.parents * jnp.int32(rows * m) + level.digits
    places = first[:, None] + (jnp.arange(rows, dtype=jnp.int32) * jnp.int32(m))[None, :]
    return jnp.where((level.parents < parents)[:, None], places, jnp.int32(parents * rows * m))


def _dense(below: jax.Array, core: jax.Array, level: Level) -> jax.Array:
    shape = level.capacity, below.shape[1] * core.shape[2], core.shape[3]
    core = _flat(core)
    parents, rows, rank = below.shape
    m, _, columns = core.shape
    table = below.reshape(parents * rows, rank) @ core.swapaxes(0, 1).reshape(rank, m * columns)
    taken = _take(table.reshape(parents * rows * m, columns), _dense_places(below, core, level))
    return taken.reshape(shape)


def _dense_transpose(
    gradient: jax.Array, below: jax.Array, core: jax.Array, level: Level
) -> tuple[jax.Array, jax.Array]:
    shape, core = core.shape, _flat(core)
    parents, rows, rank = below.shape
    m, _, columns = core.shape
    gradient = gradient.reshape(level.capacity, rows, columns)
    places = _dense_places(below, core, level)
    # ``set`` is enough: entries are unique (prefix, digit) pairs, so that no place is written twice.
    table = jnp.zeros((parents * rows * m, columns), jnp.float32).at[places].set(gradient, mode="drop")
    table = table.reshape(parents * rows, m * columns)
    flat_below, flat_core = below.reshape(parents * rows, rank), core.swapaxes(0, 1).reshape(rank, m * columns)
    of_below = (table @ flat_core.T).reshape(below.shape)
    of_core = (flat_below.T @ table).reshape(rank, m, columns).swapaxes(0, 1)
    return of_below, of_core.reshape(shape)
