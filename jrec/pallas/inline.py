"""The few operations on register tiles that Pallas cannot express on Mosaic GPU, written thread by thread.

``twins`` holds the same functions in plain JAX for interpret mode, which does not execute inline code.
Rows and positions are row scalars; negative ones mean that the row takes no part: nothing is read or written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm, scf, vector

from jrec.pallas.tile import THREADS, WARP, Tile

_FULL_WARP = 0xFFFFFFFF


def load_scalars(tile: Tile, ref: Any, positions: jax.Array, *, fill: float = 0, written: bool = False) -> jax.Array:
    """``ref[positions]`` as row scalars, ``fill`` where the position is negative. ref (n,).

    ``written`` tells the twin that the kernel also writes ``ref``.
    """
    del written
    dtype = ref.dtype

    @_inline(
        arg_types=(plgpu.RefType(), tile.scalar_layout),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, dtype, layout=tile.scalar_layout),
    )
    def load(ctx, source, positions):
        del ctx
        element = source.type.element_type
        otherwise = _constant(fill, element)
        registers = np.empty_like(positions.registers)
        for k, position in enumerate(_scalars(positions)):
            value = _guarded(
                _not_negative(position),
                element,
                lambda position=position: memref.load(source, [_index(position)]),
                otherwise,
            )
            registers[k] = vector.broadcast(ir.VectorType.get((1,), element), value)
        return _fragment(registers, positions.layout, dtype)

    return load(ref, positions)


def store_scalars(tile: Tile, ref: Any, positions: jax.Array, values: jax.Array) -> None:
    """Writes row scalars to ``ref[positions]``, once per row. ref (n,)."""

    @_inline(arg_types=(plgpu.RefType(), tile.scalar_layout, tile.scalar_layout))
    def store(ctx, target, positions, values):
        del ctx
        lane = _lane(tile)
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, _constant(0, lane.type))
        for position, value in zip(_scalars(positions), _scalars(values), strict=True):
            _when(
                arith.andi(first, _not_negative(position)),
                lambda position=position, value=value: memref.store(value, target, [_index(position)]),
            )

    store(ref, positions, values)


def load_rows(tile: Tile, ref: Any, rows: jax.Array, *, written: bool = False) -> jax.Array:
    """Float32 values of ``ref[rows]``, zero where the row is negative and in padding columns. ref (n, stride).

    ``written`` tells the twin that the kernel also writes ``ref``.
    """
    del written

    @_inline(
        arg_types=(plgpu.RefType(), tile.scalar_layout),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=tile.layout),
    )
    def load(ctx, source, rows):
        del ctx
        stored = ir.VectorType.get((tile.vector,), source.type.element_type)
        single = ir.VectorType.get((tile.vector,), ir.F32Type.get())
        zero = vector.broadcast(stored, _constant(0, stored.element_type))
        registers = np.empty(tile.blocks * tile.chunks, dtype=object)
        for register, row, column, inside in _accesses(tile, rows):
            value = _guarded(
                inside, stored, lambda row=row, column=column: vector.load(stored, source, [row, column]), zero
            )
            registers[register] = value if stored == single else arith.extf(single, value)
        return _fragment(registers, tile.layout.to_mgpu(), jnp.float32)

    return load(ref, rows)


def store_rows(tile: Tile, ref: Any, rows: jax.Array, values: jax.Array) -> None:
    """Writes float32 values to ``ref[rows]``, rounded to nearest even; padding columns stay out. ref (n, stride)."""

    @_inline(arg_types=(plgpu.RefType(), tile.scalar_layout, tile.layout))
    def store(ctx, target, rows, values):
        del ctx
        stored = ir.VectorType.get((tile.vector,), target.type.element_type)
        for register, row, column, inside in _accesses(tile, rows):
            value = values.registers.flat[register]
            if stored != value.type:
                value = arith.truncf(stored, value)
            _when(inside, lambda row=row, column=column, value=value: vector.store(value, target, [row, column]))

    store(ref, rows, values)


def spread(tile: Tile, scalars: jax.Array) -> jax.Array:
    """Values that equal their row's scalar."""
    dtype = scalars.dtype

    @_inline(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, layout=tile.layout),
    )
    def broadcast(ctx, scalars):
        del ctx
        wide = ir.VectorType.get((tile.vector,), scalars.mlir_dtype)
        of_chunk = [vector.broadcast(wide, scalar) for scalar in _scalars(scalars)]
        registers = np.empty(tile.blocks * tile.chunks, dtype=object)
        registers[:] = of_chunk * tile.blocks
        return _fragment(registers, tile.layout.to_mgpu(), dtype)

    return broadcast(scalars)


def row_sum(tile: Tile, values: jax.Array) -> jax.Array:
    """Sums along rows as row scalars, in a fixed order: within a thread, then by a butterfly over the lanes."""

    @_inline(
        arg_types=(tile.layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.scalar_shape, jnp.float32, layout=tile.scalar_layout),
    )
    def reduce(ctx, values):
        del ctx
        registers = np.empty(tile.chunks, dtype=object)
        for k in range(tile.chunks):
            vectors = [values.registers.flat[b * tile.chunks + k] for b in range(tile.blocks)]
            elements = [_element(v, i) for v in vectors for i in range(tile.vector)]
            total = elements[0]
            for element in elements[1:]:
                total = arith.addf(total, element)
            total = _butterfly(total, tile.lanes, arith.addf)
            registers[k] = vector.broadcast(ir.VectorType.get((1,), total.type), total)
        return _fragment(registers, tile.scalar_layout.to_mgpu(), jnp.float32)

    return reduce(values)


def most(tile: Tile, scalars: jax.Array) -> jax.Array:
    """The greatest of the int32 row scalars of the calling *warp*, (): how often its threads must loop.

    Warps of the warpgroup see different values, so only code without barriers may depend on it.
    """

    @_inline(
        arg_types=(tile.scalar_layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def reduce(ctx, scalars):
        del ctx
        greatest, *others = _scalars(scalars)
        for other in others:
            greatest = arith.maxsi(greatest, other)
        greatest = nvvm.redux_sync(greatest, nvvm.ReductionKind.MAX, _i32(_FULL_WARP))
        return mgpu.FragmentedArray.splat(greatest, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return reduce(scalars)


def _inline(*, arg_types: Any, return_type: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``plgpu.inline_mgpu``; the decorated function is called without the launch context that it is written with."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def _accesses(tile: Tile, rows: mgpu.FragmentedArray):
    """Per register of the values: its number, row and column as indices, and whether the access takes place."""
    lane = _lane(tile)
    column = arith.muli(lane, _constant(tile.vector, lane.type))
    for k, row in enumerate(_scalars(rows)):
        taken, row = _not_negative(row), _index(row)
        for block in range(tile.blocks):
            place = arith.addi(column, _constant(block * tile.width, lane.type))
            inside = taken
            if (block + 1) * tile.width > tile.dim:
                below = arith.cmpi(arith.CmpIPredicate.slt, place, _constant(tile.dim, lane.type))
                inside = arith.andi(taken, below)
            yield block * tile.chunks + k, row, _index(place), inside


def _lane(tile: Tile) -> ir.Value:
    """The thread's number among those that share its row, i32. The same for all its rows."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    return arith.andi(thread, _i32(tile.lanes - 1))


def _butterfly(value: ir.Value, lanes: int, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combines a value over ``lanes`` neighbouring threads; addition commutes, so all get the same bits."""
    distance = 1
    while distance < lanes:
        other = nvvm.shfl_sync(_i32(_FULL_WARP), value, _i32(distance), _i32(WARP - 1), nvvm.ShflKind.bfly)
        value = combine(value, other)
        distance *= 2
    return value


def _guarded(condition: ir.Value, kind: ir.Type, value: Callable[[], ir.Value], otherwise: ir.Value) -> ir.Value:
    branch: Any = scf.IfOp(condition, [kind], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([value()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([otherwise])
    return branch.results[0]


def _when(condition: ir.Value, action: Callable[[], Any]) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        action()
        scf.yield_([])


def _scalars(array: mgpu.FragmentedArray) -> list[ir.Value]:
    return [_element(register, 0) for register in array.registers.flat]


def _element(register: ir.Value, position: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([position]))


def _fragment(registers: np.ndarray, layout: Any, dtype: Any) -> mgpu.FragmentedArray:
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _not_negative(value: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.sge, value, _constant(0, value.type))


def _index(value: ir.Value) -> ir.Value:
    """As an index, which is 64 bits wide: row times stride cannot overflow."""
    return arith.index_cast(ir.IndexType.get(), value)


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value))


def _constant(value: float, kind: ir.Type) -> ir.Value:
    if isinstance(kind, ir.FloatType):
        return arith.constant(kind, ir.FloatAttr.get(kind, float(value)))
    return arith.constant(kind, ir.IntegerAttr.get(kind, int(value)))


assert THREADS == WARP * 4  # a warpgroup, as Mosaic GPU launches them
