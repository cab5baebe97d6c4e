"""What inline kernel code is written with: one thread's view of register tiles, branches and constants, as MLIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm, scf, vector

from jrec.pallas.tile import THREADS, WARP, Tile

FULL_WARP = 0xFFFFFFFF


def inline_op(
    *, arg_types: Sequence[object], return_type: object = None
) -> Callable[[Callable[..., object]], Callable[..., Any]]:
    """``plgpu.inline_mgpu``; the decorated function is called without the launch context that it is written with."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def lane_of(tile: Tile) -> ir.Value:
    """The thread's number among those that share its row, i32. The same for all its rows."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    return arith.andi(thread, i32(tile.lanes - 1))


def butterfly(value: ir.Value, lanes: int, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combines a value over ``lanes`` neighbouring threads; addition commutes, so all get the same bits."""
    distance = 1
    while distance < lanes:
        # Rows have a power of two of neighbouring lanes, so that the exchange never leaves a row.
        other = nvvm.shfl_sync(i32(FULL_WARP), value, i32(distance), i32(WARP - 1), nvvm.ShflKind.bfly)
        value = combine(value, other)
        distance *= 2
    return value


def guarded(condition: ir.Value, kind: ir.Type, value: Callable[[], ir.Value], otherwise: ir.Value) -> ir.Value:
    """``value()`` of type ``kind`` where the condition holds; elsewhere ``otherwise``, and it is not computed."""
    branch: Any = scf.IfOp(condition, [kind], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([value()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([otherwise])
    return branch.results[0]


def when(condition: ir.Value, action: Callable[[], object]) -> None:
    """Does something where the condition holds."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        action()
        scf.yield_([])


def scalars_of(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """The thread's registers of an array whose registers hold one element each."""
    return [element_of(register, 0) for register in array.registers.flat]


def element_of(register: ir.Value, position: int) -> ir.Value:
    """An element of a vector."""
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([position]))


def fragment(registers: np.ndarray, layout: Any, dtype: DTypeLike) -> mgpu.FragmentedArray:
    """The array that these registers of the threads make up."""
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def not_negative(value: ir.Value) -> ir.Value:
    """Whether a signed integer is 0 or more."""
    return arith.cmpi(arith.CmpIPredicate.sge, value, constant(0, value.type))


def to_index(value: ir.Value) -> ir.Value:
    """As an index, which is 64 bits wide: row times stride cannot overflow."""
    return arith.index_cast(ir.IndexType.get(), value)


def i32(value: int) -> ir.Value:
    """A constant of 32 bits."""
    return arith.constant(ir.IntegerType.get_signless(32), ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value))


def constant(value: float, kind: ir.Type) -> ir.Value:
    """A constant of an integer, index or float type."""
    if isinstance(kind, ir.FloatType):
        return arith.constant(kind, ir.FloatAttr.get(kind, float(value)))
    return arith.constant(kind, ir.IntegerAttr.get(kind, int(value)))


assert THREADS == WARP * 4  # a warpgroup, as Mosaic GPU launches them
