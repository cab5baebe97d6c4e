"""Plain twins of ``inline`` for interpret mode: the same functions on the same arrays.

Arrays that a kernel writes are read and written a row at a time, exactly the rows that the inline code touches, so that
the interpreter's race detector sees true accesses. Those that it only reads are read whole, which is much faster; a
position past their end becomes NaN or the least integer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas.tile import THREADS, WARP, Tile


def load_scalars(tile: Tile, ref: Ref, positions: jax.Array, *, fill: float = 0, written: bool = False) -> jax.Array:
    """``ref[positions]`` as row scalars, ``fill`` where the position is negative."""
    if not written:
        values = ref[...].at[jnp.maximum(positions, 0)].get(mode="fill")
        return jnp.where(positions >= 0, values, jnp.asarray(fill, ref.dtype))

    def add(row: jax.Array, values: jax.Array) -> jax.Array:
        position = positions[row, 0]
        value = jax.lax.cond(position >= 0, lambda: ref[position], lambda: jnp.asarray(fill, ref.dtype))
        return jax.lax.dynamic_update_slice_in_dim(values, jnp.full((1, tile.lanes), value), row, axis=0)

    return jax.lax.fori_loop(0, tile.rows, add, jnp.full(tile.scalar_shape, fill, ref.dtype))


def store_scalars(tile: Tile, ref: Ref, positions: jax.Array, values: jax.Array) -> None:
    """Writes row scalars to ``ref[positions]``."""

    def put(row: jax.Array, none: None) -> None:
        position = positions[row, 0]

        def write() -> None:
            ref[position] = values[row, 0]

        jax.lax.cond(position >= 0, write, lambda: None)
        return none

    jax.lax.fori_loop(0, tile.rows, put, None)


def load_rows(tile: Tile, ref: Ref, rows: jax.Array, *, written: bool = False) -> jax.Array:
    """Float32 values of ``ref[rows]``, zero where the row is negative and in padding columns."""
    numbers = rows[:, 0]
    if not written:
        read = ref[...][:, : tile.dim].at[jnp.maximum(numbers, 0)].get(mode="fill").astype(jnp.float32)
        read = jnp.where((numbers >= 0)[:, None], read, jnp.float32(0))
    else:

        def add(row: jax.Array, values: jax.Array) -> jax.Array:
            one = jax.lax.cond(
                numbers[row] >= 0,
                lambda: ref[numbers[row], : tile.dim].astype(jnp.float32),
                lambda: jnp.zeros(tile.dim, jnp.float32),
            )
            return jax.lax.dynamic_update_slice_in_dim(values, one[None], row, axis=0)

        read = jax.lax.fori_loop(0, tile.rows, add, jnp.zeros((tile.rows, tile.dim), jnp.float32))
    covered = tile.blocks * tile.width
    read = jnp.pad(read, ((0, 0), (0, covered - tile.dim)))
    return read.reshape(tile.rows, tile.blocks, tile.width).swapaxes(0, 1).reshape(tile.shape)


def store_rows(tile: Tile, ref: Ref, rows: jax.Array, values: jax.Array) -> None:
    """Writes float32 values to ``ref[rows]``, rounded to nearest even."""
    by_row = values.reshape(tile.blocks, tile.rows, tile.width).swapaxes(0, 1).reshape(tile.rows, -1)[:, : tile.dim]

    def put(row: jax.Array, none: None) -> None:
        number = rows[row, 0]

        def write() -> None:
            ref[number, : tile.dim] = by_row[row].astype(ref.dtype)

        jax.lax.cond(number >= 0, write, lambda: None)
        return none

    jax.lax.fori_loop(0, tile.rows, put, None)


def spread(tile: Tile, scalars: jax.Array) -> jax.Array:
    """Values that equal their row's scalar."""
    wide = jnp.broadcast_to(scalars[None, :, :1], (tile.blocks, tile.rows, tile.width))
    return wide.reshape(tile.shape)


def from_lane(tile: Tile, scalars: jax.Array, lane: jax.Array | int) -> jax.Array:
    """Row scalars that equal what one lane of the row's threads holds."""
    if jnp.ndim(lane):
        return jnp.take_along_axis(scalars, jnp.clip(jnp.asarray(lane), 0, tile.lanes - 1), axis=1)
    return jnp.broadcast_to(jax.lax.dynamic_slice_in_dim(scalars, lane, 1, axis=1), tile.scalar_shape)


def lane_sum(tile: Tile, scalars: jax.Array) -> jax.Array:
    """Row scalars that equal the sum over the row's threads."""
    return jnp.broadcast_to(jnp.sum(scalars, axis=1, keepdims=True, dtype=jnp.int32), tile.scalar_shape)


def row_sum(tile: Tile, values: jax.Array) -> jax.Array:
    """See ``inline``; the order of addition differs."""
    total = jnp.sum(values.reshape(tile.blocks, tile.rows, tile.width), axis=(0, 2))
    return jnp.broadcast_to(total[:, None], tile.scalar_shape)


def most(tile: Tile, scalars: jax.Array) -> jax.Array:
    """See ``inline``; over the whole tile, which every warp may follow."""
    del tile
    return jnp.max(scalars)


def warp_sum(tile: Tile, scalars: jax.Array) -> jax.Array:
    """The sum of the row scalars of each warp, as row scalars."""
    total = jnp.sum(_by_warp(tile, scalars), axis=(1, 2), keepdims=True, dtype=scalars.dtype)
    return _by_row(tile, jnp.broadcast_to(total, (THREADS // WARP, tile.chunks, WARP)))


def warp_ranks(tile: Tile, flags: jax.Array) -> jax.Array:
    """How many flags of the row's warp are set before it, as row scalars."""
    flags = (_by_warp(tile, flags) != 0).astype(jnp.int32).reshape(THREADS // WARP, -1)
    ranks = jnp.cumsum(flags, axis=1, dtype=jnp.int32) - flags
    return _by_row(tile, ranks.reshape(THREADS // WARP, tile.chunks, WARP))


def _by_warp(tile: Tile, scalars: jax.Array) -> jax.Array:
    """(warps, chunks, 32): the row scalars of a tile of one lane a row, as its warps hold them."""
    return scalars.reshape(tile.chunks, THREADS // WARP, WARP).swapaxes(0, 1)


def _by_row(tile: Tile, values: jax.Array) -> jax.Array:
    """The row scalars that ``_by_warp`` takes apart."""
    return values.swapaxes(0, 1).reshape(tile.scalar_shape)
