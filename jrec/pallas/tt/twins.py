"""Plain twins of ``jrec.pallas.tt.inline`` for interpret mode; arrays that a kernel only reads are read whole."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl

from jrec.pallas.tt.block import Block


def repeat(block: Block, scalars: jax.Array) -> jax.Array:
    """Item scalars as block scalars."""
    return jnp.tile(scalars, (block.down, 1))


def multiply(
    block: Block,
    left: Ref,
    right: Ref,
    left_rows: jax.Array,
    left_columns: jax.Array | None,
    right_rows: jax.Array,
    columns: jax.Array,
    taken: jax.Array,
    *,
    contraction: int,
) -> jax.Array:
    """Values ``sum_k l(k) * right[right_rows + k, column]``, added in ascending ``k``, in float32."""
    taken, right_rows = repeat(block, taken) >= 0, repeat(block, right_rows)
    terms = jnp.arange(contraction, dtype=jnp.int32)[None, None, :]
    if left_columns is None:
        factors = _take(left, left_rows[:, :, None], terms, taken)
    else:
        factors = _take(left, left_rows[:, :, None] + terms, left_columns[:, :, None], taken)
    elements = jnp.arange(block.vector, dtype=jnp.int32)[None, None, None, :]
    rows, places = right_rows[:, :, None, None] + terms[..., None], columns[:, :, None, None] + elements
    products = jnp.einsum("blk,blkv->blv", factors, _take(right, rows, places, taken), precision="highest")
    return products.reshape(block.values.shape)


def load_blocks(block: Block, ref: Ref, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Float32 values of ``ref[rows, columns..]``, zero where there is no such element."""
    inside = (rows >= 0) & (columns < block.width)
    elements = jnp.arange(block.vector, dtype=jnp.int32)[None, None, :]
    loaded = _take(ref, rows[:, :, None], columns[:, :, None] + elements, inside)
    return loaded.reshape(block.values.shape)


def store_blocks(block: Block, ref: Ref, rows: jax.Array, columns: jax.Array, values: jax.Array) -> None:
    """Writes values to ``ref[rows, columns..]`` where there is such an element."""
    wide = block.width if block.width <= block.columns else math.gcd(block.width, block.columns)
    threads = wide // block.vector
    in_row = -(-min(block.across, block.width // block.vector) // threads)
    down_lanes = block.lanes // block.across
    elements = values.reshape(block.values.rows, block.lanes, block.vector)

    def put(i: jax.Array, none: None) -> None:
        piece, rest = i % jnp.int32(in_row), i // jnp.int32(in_row)
        lane = rest % jnp.int32(down_lanes) * jnp.int32(block.across) + piece * jnp.int32(threads)
        number = rest // jnp.int32(down_lanes)
        row, column = rows[number, lane], columns[number, lane]

        def write() -> None:
            vector = jax.lax.dynamic_slice(elements, (number, lane, jnp.int32(0)), (1, threads, block.vector))
            ref[row, pl.ds(column, wide)] = vector.reshape(wide)

        jax.lax.cond((row >= 0) & (column < block.width), write, lambda: None)
        return none

    jax.lax.fori_loop(0, block.values.rows * down_lanes * in_row, put, None)


def _take(ref: Ref, rows: jax.Array, columns: jax.Array, taken: jax.Array) -> jax.Array:
    """Float32 ``ref[rows, columns]``, zero where ``taken`` is false; past either end too, which no kernel reads."""
    values = ref[...].at[rows, columns].get(mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.where(taken.reshape(taken.shape + (1,) * (values.ndim - taken.ndim)), values, jnp.float32(0))
