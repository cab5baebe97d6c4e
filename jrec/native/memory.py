"""Loads, stores and atomics at raw addresses, for kernels that run on buffers of NumPy and of XLA alike.

``get_f32(address, i)`` reads element ``i`` of the float32 array at ``address``; all indices are 64 bits wide. There are
no bounds checks and no wrap-around of negative indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from jrec.native.llvm_types import Builder, Intrinsic, Value, Values

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def kernel_intrinsic(function: Callable[..., Any]) -> Intrinsic:
    """As numba's, for type checkers: what kernels call has not the signature of what is written here."""
    return intrinsic(function)


def _element(builder: Builder, args: Values, kind: ir.Type) -> Value:
    base = builder.inttoptr(args[0], kind.as_pointer())
    return builder.gep(base, [args[1]], inbounds=True)


def _get(numba_type: types.Type, kind: ir.Type) -> Intrinsic:
    @intrinsic
    def get(typing_context, address, index):
        def codegen(context, builder, signature, args):
            value = builder.load(_element(builder, args, kind))
            # The alignment of one element is all that holds: addresses point anywhere into rows of any dim.
            value.align = kind.get_abi_size(context.target_data)
            return value

        return numba_type(types.int64, types.int64), codegen

    return get


def _put(numba_type: types.Type, kind: ir.Type) -> Intrinsic:
    @intrinsic
    def put(typing_context, address, index, value):
        def codegen(context, builder, signature, args):
            store = builder.store(args[2], _element(builder, args, kind))
            store.align = kind.get_abi_size(context.target_data)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return put


get_i16, put_i16 = _get(types.int16, _I16), _put(types.int16, _I16)
get_i32, put_i32 = _get(types.int32, _I32), _put(types.int32, _I32)
get_i64, put_i64 = _get(types.int64, _I64), _put(types.int64, _I64)
get_u64, put_u64 = _get(types.uint64, _I64), _put(types.uint64, _I64)
get_f32, put_f32 = _get(types.float32, _F32), _put(types.float32, _F32)


def prefetch_line(builder: Builder, address: Value, *, near: bool) -> None:
    """Emits a request for the cache line at an address: into the first cache, or only into the second, which is larger
    and to which more lines may be on their way.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", (), kind)
    # To be read (0), from the data cache (1). Locality 3 is every cache level, 2 the second level and what is behind
    # it.
    builder.call(function, [builder.inttoptr(address, byte), _I32(0), _I32(3 if near else 2), _I32(1)])


@kernel_intrinsic
def prefetch(typing_context, address):
    """Asks for the cache line at ``address``; any address is allowed."""

    def codegen(context, builder, signature, args):
        prefetch_line(builder, args[0], near=True)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@kernel_intrinsic
def fetch_add(typing_context, address, value):
    """Atomically adds to the int64 at ``address`` and returns what was there before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        # Sequentially consistent, so release and acquire as well: who reads the sum sees what was written before each
        # addition.
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@kernel_intrinsic
def fetch_or(typing_context, address, value):
    """Atomically sets the bits of ``value`` in the int64 at ``address`` and returns what was there before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("or", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@kernel_intrinsic
def load_acquire(typing_context, address):
    """Atomically reads the int64 at ``address``."""

    def codegen(context, builder, signature, args):
        # Pairs with ``fetch_add``: what other threads wrote before their additions is visible from here on.
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@kernel_intrinsic
def get_f16(typing_context, address, index):
    """Reads a float16 as float32."""

    def codegen(context, builder, signature, args):
        value = builder.load(_element(builder, args, ir.HalfType()))
        value.align = 2
        return builder.fpext(value, _F32)

    return types.float32(types.int64, types.int64), codegen


@kernel_intrinsic
def put_f16(typing_context, address, index, value):
    """Writes a float32 as float16, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        store = builder.store(builder.fptrunc(args[2], ir.HalfType()), _element(builder, args, ir.HalfType()))
        store.align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@kernel_intrinsic
def get_bf16(typing_context, address, index):
    """Reads a bfloat16 as float32."""

    def codegen(context, builder, signature, args):
        value = builder.load(_element(builder, args, _I16))
        value.align = 2
        # A bfloat16 is the upper half of a float32, so widening is a shift, and exact.
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)

    return types.float32(types.int64, types.int64), codegen


@kernel_intrinsic
def put_bf16(typing_context, address, index, value):
    """Writes a float32 as bfloat16, rounded to nearest even; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[2], _I32)
        # Half to even: 0x7FFF and the lowest kept bit carry where the dropped half is above one half, or is one half
        # and the kept part odd.
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
        # A NaN whose payload lies in the dropped half only would round to infinity: the quiet bit keeps it a NaN.
        quiet = builder.or_(builder.lshr(bits, _I32(16)), _I32(0x40))
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
        store = builder.store(
            builder.trunc(builder.select(is_nan, quiet, rounded), _I16), _element(builder, args, _I16)
        )
        store.align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen
