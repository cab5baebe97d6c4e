"""Products and blocks of them on register tiles, written thread by thread; ``twins`` holds plain twins.

Rows, columns and positions are block scalars unless said otherwise (see ``block``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from jrec.pallas.threads import (
    constant,
    element_of,
    fragment,
    guarded,
    i32,
    inline_op,
    not_negative,
    scalars_of,
    to_index,
)
from jrec.pallas.threads import when as when_true
from jrec.pallas.tt.block import Block

_STEPS = 4  # of the contraction whose operands are loaded before the first is used


def repeat(block: Block, scalars: jax.Array) -> jax.Array:
    """Item scalars as block scalars."""
    dtype = scalars.dtype

    @inline_op(
        arg_types=(block.items.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(block.values.scalar_shape, dtype, layout=block.values.scalar_layout),
    )
    def copy(ctx, scalars):
        del ctx
        registers = np.empty(block.down, dtype=object)
        registers[:] = list(scalars.registers.flat) * block.down
        return fragment(registers, block.values.scalar_layout.to_mgpu(), dtype)

    return copy(scalars)


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
    """Values ``sum_k l(k) * right[right_rows + k, column]`` for ``k`` in ``range(contraction)``, ascending, in float32.

    Args:
      block: The geometry.
      left: (rows, columns) ref.
      right: (rows, width) ref.
      left_rows: Where the left factor's row begins; with ``left_columns``, the first of its rows.
      left_columns: None for ``l(k) = left[left_rows, k]``, else ``l(k) = left[left_rows + k, left_columns]``.
      right_rows: Item scalars, the first of the right factor's rows.
      columns: First column of each thread.
      taken: Item scalars int32; where it is negative nothing is loaded, and the values are zero.
      contraction: How many terms.
    """
    # No remainder: the loop has one body, whose loads are all within the contraction.
    steps = _STEPS
    while contraction % steps:
        steps //= 2
    by_row = left_columns is None
    of_block, of_item = block.values.scalar_layout, block.items.scalar_layout

    @inline_op(
        arg_types=(plgpu.RefType(), plgpu.RefType(), of_block, of_block, of_item, of_block, of_item),
        return_type=plgpu.ShapeDtypeStruct(block.values.shape, jnp.float32, layout=block.values.layout),
    )
    def product(ctx, left, right, left_rows, left_columns, right_rows, columns, taken):
        del ctx
        left_row = [to_index(row) for row in scalars_of(left_rows)]
        left_column = [to_index(column) for column in scalars_of(left_columns)]
        right_row, column = to_index(scalars_of(right_rows)[0]), to_index(scalars_of(columns)[0])
        kind = ir.VectorType.get((block.vector,), ir.F32Type.get())
        zero = vector.broadcast(kind, constant(0, ir.F32Type.get()))
        # A product that is not taken is a loop of no steps: nothing is loaded, and the sum is zero.
        terms = arith.select(not_negative(scalars_of(taken)[0]), i32(contraction), i32(0))
        # The sums are the loop's own values, in registers from the first term to the last.
        loop: Any = scf.ForOp(i32(0), terms, i32(steps), [zero] * block.down)
        with ir.InsertionPoint(loop.body):
            k = to_index(loop.induction_variable)
            places = [arith.addi(k, constant(step, k.type)) for step in range(steps)]
            rights = [_load(right, [arith.addi(right_row, place), column], block.vector) for place in places]
            totals = []
            for row, of_row, total in zip(left_row, left_column, loop.inner_iter_args, strict=True):
                if by_row:
                    loaded = _load(left, [row, k], steps)
                    lefts = [element_of(loaded, step) for step in range(steps)]
                else:
                    lefts = [element_of(_load(left, [arith.addi(row, p), of_row], 1), 0) for p in places]
                # Ascending, by fused multiply-adds: the same order, and the same bits, whatever the geometry.
                for one, many in zip(lefts, rights, strict=True):
                    total = vector.fma(vector.broadcast(kind, one), many, total)
                totals.append(total)
            scf.yield_(totals)
        registers = np.empty(block.down, dtype=object)
        registers[:] = list(loop.results)
        return fragment(registers, block.values.layout.to_mgpu(), jnp.float32)

    return product(left, right, left_rows, left_rows if by_row else left_columns, right_rows, columns, taken)


def load_blocks(block: Block, ref: Ref, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Float32 values of ``ref[rows, columns..]``, zero where the row is negative or the column past the width."""

    @inline_op(
        arg_types=(plgpu.RefType(), block.values.scalar_layout, block.values.scalar_layout),
        return_type=plgpu.ShapeDtypeStruct(block.values.shape, jnp.float32, layout=block.values.layout),
    )
    def load(ctx, source, rows, columns):
        del ctx
        kind = ir.VectorType.get((block.vector,), ir.F32Type.get())
        zero = vector.broadcast(kind, constant(0, kind.element_type))
        registers = np.empty(block.down, dtype=object)
        for k, (inside, row, column) in enumerate(_places(block, rows, columns)):
            place = [row, column]
            registers[k] = guarded(inside, kind, lambda place=place: _load(source, place, block.vector), zero)
        return fragment(registers, block.values.layout.to_mgpu(), jnp.float32)

    return load(ref, rows, columns)


def store_blocks(block: Block, ref: Ref, rows: jax.Array, columns: jax.Array, values: jax.Array) -> None:
    """Writes values to ``ref[rows, columns..]``, float32; nothing where ``load_blocks`` would give zero."""

    @inline_op(arg_types=(plgpu.RefType(), block.values.scalar_layout, block.values.scalar_layout, block.values.layout))
    def store(ctx, target, rows, columns, values):
        del ctx
        for k, (inside, row, column) in enumerate(_places(block, rows, columns)):
            value, place = values.registers.flat[k], [row, column]
            when_true(inside, lambda value=value, place=place: vector.store(value, target, place))

    store(ref, rows, columns, values)


def _places(block: Block, rows: mgpu.FragmentedArray, columns: mgpu.FragmentedArray):
    """Per register: whether the access takes place, its row and its column."""
    for row, column in zip(scalars_of(rows), scalars_of(columns), strict=True):
        below = arith.cmpi(arith.CmpIPredicate.slt, column, constant(block.width, column.type))
        yield arith.andi(not_negative(row), below), to_index(row), to_index(column)


def _load(source: ir.Value, place: list[ir.Value], length: int) -> ir.Value:
    """``length`` neighbouring elements as float32."""
    element = source.type.element_type
    if length == 1:
        loaded = vector.broadcast(ir.VectorType.get((1,), element), memref.load(source, place))
    else:
        loaded = vector.load(ir.VectorType.get((length,), element), source, place)
    single = ir.VectorType.get((length,), ir.F32Type.get())
    return loaded if loaded.type == single else arith.extf(single, loaded)
