"""Initial values of table elements in kernels: the bits of ``jrec.ops.row_init``, to the last one.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") in JAX's partitionable
layout: element ``i`` of an array draws from the 64-bit counter ``i``, and its 32 bits are the two output words' xor.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from jrec.native.llvm_types import Builder, Value
from jrec.native.memory import kernel_intrinsic

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _rotated(builder: Builder, word: Value, distance: int) -> Value:
    return builder.or_(builder.shl(word, _I32(distance)), builder.lshr(word, _I32(32 - distance)))


def _threefry(builder: Builder, key0: Value, key1: Value, high: Value, low: Value) -> tuple[Value, Value]:
    keys = (key0, key1, builder.xor(builder.xor(key0, key1), _I32(_PARITY)))
    x, y = builder.add(high, keys[0]), builder.add(low, keys[1])
    # Five groups of four rounds, with a key injected after each, are Threefry-2x32-20.
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = builder.add(x, y)
            y = builder.xor(_rotated(builder, y, distance), x)
        x = builder.add(x, keys[(group + 1) % 3])
        y = builder.add(y, builder.add(keys[(group + 2) % 3], _I32(group + 1)))
    return x, y


@kernel_intrinsic
def initial_value(typing_context, key0, key1, element, scale):
    """The first value, float32, of element number ``element`` (int64) of the table with this key (int32 words)."""

    def codegen(context, builder, signature, args):
        key0, key1, element, scale = args
        high = builder.trunc(builder.lshr(element, _I64(32)), _I32)
        x, y = _threefry(builder, key0, key1, high, builder.trunc(element, _I32))
        bits = builder.lshr(builder.xor(x, y), _I32(8))
        # An odd integer within +-2^24 is exact in float32, so that the product below is the only rounding.
        odd = builder.sub(builder.shl(bits, _I32(1)), _I32(2**24 - 1))
        return builder.fmul(builder.sitofp(odd, _F32), scale)

    return types.float32(types.int32, types.int32, types.int64, types.float32), codegen
