"""The few operations on register tiles that Pallas cannot express on Mosaic GPU, written thread by thread.

``twins`` holds the same functions in plain JAX for interpret mode, which does not execute inline code.
Rows and positions are row scalars; negative ones mean that the row takes no part: nothing is read or written for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, nvvm, vector

from jrec.pallas.threads import (
    FULL_WARP,
    butterfly,
    constant,
    element_of,
    fragment,
    guarded,
    i32,
    inline_op,
    lane_of,
    not_negative,
    scalars_of,
    to_index,
    when,
)
from jrec.pallas.tile import WARP, Tile


def load_scalars(tile: Tile, ref: Ref, positions: jax.Array, *, fill: float = 0, written: bool = False) -> jax.Array:
    """``ref[positions]`` as row scalars, ``fill`` where the position is negative. ref (n,).

    ``written`` tells the twin that the kernel also writes ``ref``.
    """
    del written
    dtype = ref.dtype

    @inline_op(
        arg_types=(plgpu.RefType(), tile.scalar_layout),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, dtype, layout=tile.scalar_layout),
    )
    def load(ctx, source, positions):
        del ctx
        element = source.type.element_type
        otherwise = constant(fill, element)
        registers = np.empty_like(positions.registers)
        for k, position in enumerate(scalars_of(positions)):
            value = guarded(
                not_negative(position),
                element,
                lambda position=position: memref.load(source, [to_index(position)]),
                otherwise,
            )
            registers[k] = vector.broadcast(ir.VectorType.get((1,), element), value)
        return fragment(registers, positions.layout, dtype)

    return load(ref, positions)


def store_scalars(tile: Tile, ref: Ref, positions: jax.Array, values: jax.Array) -> None:
    """Writes row scalars to ``ref[positions]``, once per row. ref (n,)."""

    @inline_op(arg_types=(plgpu.RefType(), tile.scalar_layout, tile.scalar_layout))
    def store(ctx, target, positions, values):
        del ctx
        lane = lane_of(tile)
        # All lanes of a row hold its scalar; one of them writes.
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0, lane.type))
        for position, value in zip(scalars_of(positions), scalars_of(values), strict=True):
            when(
                arith.andi(first, not_negative(position)),
                lambda position=position, value=value: memref.store(value, target, [to_index(position)]),
            )

    store(ref, positions, values)


def load_rows(tile: Tile, ref: Ref, rows: jax.Array, *, written: bool = False) -> jax.Array:
    """Float32 values of ``ref[rows]``, zero where the row is negative and in padding columns. ref (n, stride).

    ``written`` tells the twin that the kernel also writes ``ref``.
    """
    del written

    @inline_op(
        arg_types=(plgpu.RefType(), tile.scalar_layout),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=tile.layout),
    )
    def load(ctx, source, rows):
        del ctx
        stored = ir.VectorType.get((tile.vector,), source.type.element_type)
        single = ir.VectorType.get((tile.vector,), ir.F32Type.get())
        zero = vector.broadcast(stored, constant(0, stored.element_type))
        registers = np.empty(tile.blocks * tile.chunks, dtype=object)
        for register, row, column, inside in _accesses(tile, rows):
            value = guarded(
                inside, stored, lambda row=row, column=column: vector.load(stored, source, [row, column]), zero
            )
            registers[register] = value if stored == single else arith.extf(single, value)
        return fragment(registers, tile.layout.to_mgpu(), jnp.float32)

    return load(ref, rows)


def store_rows(tile: Tile, ref: Ref, rows: jax.Array, values: jax.Array) -> None:
    """Writes float32 values to ``ref[rows]``, rounded to nearest even; padding columns stay out. ref (n, stride)."""

    @inline_op(arg_types=(plgpu.RefType(), tile.scalar_layout, tile.layout))
    def store(ctx, target, rows, values):
        del ctx
        stored = ir.VectorType.get((tile.vector,), target.type.element_type)
        for register, row, column, inside in _accesses(tile, rows):
            value = values.registers.flat[register]
            if stored != value.type:
                value = arith.truncf(stored, value)
            when(inside, lambda row=row, column=column, value=value: vector.store(value, target, [row, column]))

    store(ref, rows, values)


def spread(tile: Tile, scalars: jax.Array) -> jax.Array:
    """Values that equal their row's scalar."""
    dtype = scalars.dtype

    @inline_op(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, layout=tile.layout),
    )
    def broadcast(ctx, scalars):
        del ctx
        wide = ir.VectorType.get((tile.vector,), scalars.mlir_dtype)
        of_chunk = [vector.broadcast(wide, scalar) for scalar in scalars_of(scalars)]
        registers = np.empty(tile.blocks * tile.chunks, dtype=object)
        # Register ``b * chunks + k`` is block ``b`` of row ``k`` (``Tile.layout``): the rows' scalars, once for each
        # block.
        registers[:] = of_chunk * tile.blocks
        return fragment(registers, tile.layout.to_mgpu(), dtype)

    return broadcast(scalars)


def from_lane(tile: Tile, scalars: jax.Array, lane: jax.Array | int) -> jax.Array:
    """Row scalars that equal what one lane of the row's threads holds: ``lane`` is a number or row scalars of it."""
    dtype = scalars.dtype
    if tile.lanes == 1:
        return scalars
    lane = jnp.asarray(lane, jnp.int32)

    @inline_op(
        arg_types=(tile.scalar_layout, tile.scalar_layout if lane.ndim else plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, dtype, layout=tile.scalar_layout),
    )
    def shuffle(ctx, scalars, lanes):
        del ctx
        # PTX's clamp operand: the upper byte masks a lane's group of ``lanes``, so the source is of the same row.
        group = i32((WARP - tile.lanes) << 8 | (WARP - 1))
        registers = np.empty_like(scalars.registers)
        sources = scalars_of(lanes) if lane.ndim else [lanes.registers.flat[0]] * registers.size
        for k, (value, source) in enumerate(zip(scalars_of(scalars), sources, strict=True)):
            value = nvvm.shfl_sync(i32(FULL_WARP), value, source, group, nvvm.ShflKind.idx)
            registers.flat[k] = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return fragment(registers, scalars.layout, dtype)

    return shuffle(scalars, lane)


def lane_sum(tile: Tile, scalars: jax.Array) -> jax.Array:
    """Row scalars that equal the sum over the row's threads of what each holds, int32."""

    @inline_op(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, jnp.int32, layout=tile.scalar_layout),
    )
    def reduce(ctx, scalars):
        del ctx
        registers = np.empty_like(scalars.registers)
        for k, value in enumerate(scalars_of(scalars)):
            total = butterfly(value, tile.lanes, arith.addi)
            registers.flat[k] = vector.broadcast(ir.VectorType.get((1,), total.type), total)
        return fragment(registers, scalars.layout, jnp.int32)

    return reduce(scalars)


def row_sum(tile: Tile, values: jax.Array) -> jax.Array:
    """Sums along rows as row scalars, in a fixed order: within a thread, then by a butterfly over the lanes."""

    @inline_op(
        arg_types=(tile.layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, jnp.float32, layout=tile.scalar_layout),
    )
    def reduce(ctx, values):
        del ctx
        registers = np.empty(tile.chunks, dtype=object)
        for k in range(tile.chunks):
            vectors = [values.registers.flat[b * tile.chunks + k] for b in range(tile.blocks)]
            elements = [element_of(v, i) for v in vectors for i in range(tile.vector)]
            # One after another, never as a tree of the compiler's choice: the order of additions is part of the result.
            total = elements[0]
            for element in elements[1:]:
                total = arith.addf(total, element)
            total = butterfly(total, tile.lanes, arith.addf)
            registers[k] = vector.broadcast(ir.VectorType.get((1,), total.type), total)
        return fragment(registers, tile.scalar_layout.to_mgpu(), jnp.float32)

    return reduce(values)


def most(tile: Tile, scalars: jax.Array) -> jax.Array:
    """The greatest of the int32 row scalars of the calling *warp*, (): how often its threads must loop.

    Warps of the warpgroup see different values, so only code without barriers may depend on it.
    """

    @inline_op(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def reduce(ctx, scalars):
        del ctx
        greatest, *rest = scalars_of(scalars)
        for other in rest:
            greatest = arith.maxsi(greatest, other)
        # One instruction of sm_80 and later, where a butterfly takes five shuffles. All lanes must reach it: rows that
        # take no part bring zeros, not a branch.
        greatest = nvvm.redux_sync(greatest, nvvm.ReductionKind.MAX, i32(FULL_WARP))
        return mgpu.FragmentedArray.splat(greatest, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return reduce(scalars)


def _accesses(tile: Tile, rows: mgpu.FragmentedArray):
    """Per register of the values: its number, row and column as indices, and whether the access takes place."""
    lane = lane_of(tile)
    column = arith.muli(lane, constant(tile.vector, lane.type))
    for k, row in enumerate(scalars_of(rows)):
        taken, row = not_negative(row), to_index(row)
        for block in range(tile.blocks):
            place = arith.addi(column, constant(block * tile.width, lane.type))
            inside = taken
            # Only the last block may reach past the row; the others need no comparison of columns.
            if (block + 1) * tile.width > tile.dim:
                below = arith.cmpi(arith.CmpIPredicate.slt, place, constant(tile.dim, lane.type))
                inside = arith.andi(taken, below)
            yield block * tile.chunks + k, row, to_index(place), inside


def warp_sum(tile: Tile, scalars: jax.Array) -> jax.Array:
    """The sum of the int32 row scalars of the calling *warp*, as row scalars. Only for one lane a row."""

    @inline_op(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, jnp.int32, layout=tile.scalar_layout),
    )
    def reduce(ctx, scalars):
        del ctx
        total, *rest = scalars_of(scalars)
        for other in rest:
            total = arith.addi(total, other)
        total = nvvm.redux_sync(total, nvvm.ReductionKind.ADD, i32(FULL_WARP))
        registers = np.empty_like(scalars.registers)
        for k in range(registers.size):
            registers.flat[k] = vector.broadcast(ir.VectorType.get((1,), total.type), total)
        return fragment(registers, tile.scalar_layout.to_mgpu(), jnp.int32)

    return reduce(scalars)


def warp_ranks(tile: Tile, flags: jax.Array) -> jax.Array:
    """How many flags of the calling *warp* are set before each row, as row scalars. Only for one lane a row.

    A warp's rows are ordered by chunk, and then by lane. flags: int32 row scalars, 0 or not.
    """

    @inline_op(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, jnp.int32, layout=tile.scalar_layout),
    )
    def rank(ctx, flags):
        del ctx
        lane = arith.andi(arith.index_cast(i32(0).type, gpu.thread_id(gpu.Dimension.x)), i32(WARP - 1))
        # The bits of the lanes before this one: set votes among them are its rank.
        below = arith.subi(arith.shli(i32(1), lane), i32(1))
        before = i32(0)
        registers = np.empty_like(flags.registers)
        for k, flag in enumerate(scalars_of(flags)):
            is_set = arith.cmpi(arith.CmpIPredicate.ne, flag, constant(0, flag.type))
            votes = nvvm.vote_sync(i32(FULL_WARP), is_set, nvvm.VoteSyncKind.ballot)
            here = arith.addi(before, llvm.intr_ctpop(arith.andi(votes, below)))
            registers.flat[k] = vector.broadcast(ir.VectorType.get((1,), here.type), here)
            before = arith.addi(before, llvm.intr_ctpop(votes))
        return fragment(registers, tile.scalar_layout.to_mgpu(), jnp.int32)

    return rank(flags)
