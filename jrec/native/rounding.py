"""Stochastic rounding in kernels: the bits of ``jrec.ops.rounding``, to the last one.

All of it is integer arithmetic but one sum of a float16's subnormal grid, which has a single order of its terms: so
the kernels' fast-math flags cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from jrec.native.llvm_types import Builder, Intrinsic, Value

_I32, _F32 = ir.IntType(32), ir.FloatType()
_EXPONENT, _MAGNITUDE, _SIGN = 0x7F800000, 0x7FFFFFFF, 0x80000000
_HALF_NORMAL = 0x38800000  # the bits of 2**-14, the smallest normal float16


def _hash(builder: Builder, key0: Value, key1: Value, row: Value, column: Value) -> Value:
    def mix(value: Value, shift: int) -> Value:
        return builder.xor(value, builder.lshr(value, _I32(shift)))

    # The constants and the order of ``jrec.ops.rounding.random_bits``; both wrap modulo 2^32.
    value = builder.add(builder.mul(row, _I32(0x9E3779B1)), key0)
    value = builder.mul(mix(value, 16), _I32(0x85EBCA6B))
    value = builder.mul(mix(value, 13), _I32(0xC2B2AE35))
    value = builder.add(builder.add(mix(value, 16), builder.mul(column, _I32(0x27D4EB2F))), key1)
    value = builder.mul(mix(value, 16), _I32(0x7FEB352D))
    value = builder.mul(mix(value, 15), _I32(0x846CA68B))
    return mix(value, 16)


def _cut(builder: Builder, raw: Value, random: Value, dropped: int) -> Value:
    """Adds random bits below the last kept one and cuts them off; NaN and infinities stay as they are."""
    carried = builder.add(raw, builder.lshr(random, _I32(32 - dropped)))
    rounded = builder.and_(carried, _I32(2**32 - 2**dropped))
    special = builder.icmp_unsigned("==", builder.and_(raw, _I32(_EXPONENT)), _I32(_EXPONENT))
    return builder.select(special, raw, rounded)


def _subnormal_half(builder: Builder, raw: Value, random: Value) -> Value:
    """Bits of the multiple of 2**-24 that ``|raw|``, below 2**-14, becomes, with the sign of ``raw``."""
    magnitude = builder.bitcast(builder.and_(raw, _I32(_MAGNITUDE)), _F32)
    # The draw less a half: an odd integer of 14 bits over 2**14, exact like the product before it.
    odd = builder.sub(builder.shl(builder.lshr(random, _I32(19)), _I32(1)), _I32(2**13 - 1))
    draw = builder.fmul(builder.sitofp(odd, _F32), ir.Constant(_F32, 2.0**-14))
    quanta = builder.fadd(builder.fmul(magnitude, ir.Constant(_F32, 2.0**24)), draw)
    rint = builder.module.declare_intrinsic("llvm.rint", (_F32,))
    whole = builder.fptosi(builder.call(rint, [quanta]), _I32)  # through an integer, so that there is no -0
    small = builder.fmul(builder.sitofp(whole, _F32), ir.Constant(_F32, 2.0**-24))
    return builder.or_(builder.bitcast(small, _I32), builder.and_(raw, _I32(_SIGN)))


def _rounding(to_grid: Callable[[Builder, Value, Value], Value]) -> Intrinsic:
    """An intrinsic (value, key0, key1, row, column) -> the float32 on a 16-bit grid that value becomes."""

    @intrinsic
    def rounded(typing_context, value, key0, key1, row, column):
        def codegen(context, builder, signature, args):
            value, key0, key1, row, column = args
            random = _hash(builder, key0, key1, builder.trunc(row, _I32), builder.trunc(column, _I32))
            return builder.bitcast(to_grid(builder, builder.bitcast(value, _I32), random), _F32)

        arguments = types.float32, types.int32, types.int32, types.int64, types.int64
        return types.float32(*arguments), codegen

    return rounded


def _to_bf16(builder: Builder, raw: Value, random: Value) -> Value:
    return _cut(builder, raw, random, 16)


def _to_f16(builder: Builder, raw: Value, random: Value) -> Value:
    is_small = builder.icmp_unsigned("<", builder.and_(raw, _I32(_MAGNITUDE)), _I32(_HALF_NORMAL))
    # Clamped, so that no large value meets the conversion to an integer.
    clamped = builder.select(is_small, raw, _I32(0))
    return builder.select(is_small, _subnormal_half(builder, clamped, random), _cut(builder, raw, random, 13))


round_bf16, round_f16 = _rounding(_to_bf16), _rounding(_to_f16)
