"""The inner loop of lookups of quantized rows: a bag's rows, ``scale * value + bias`` each, summed in vector registers.

A row is ``HEADER`` bytes, its scale and its bias as float32, and its values behind them: a byte each (INT8), or four
bits each, the even element in the low ones (INT4). One row is one piece of memory, so that a lookup waits for it once.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jrec.native.accumulate import _AHEAD, _FLOAT, _I32, _I64, _fetch, _for_blocks, _splat
from jrec.native.llvm_types import Builder, Intrinsic, Value, Values

_I8 = ir.IntType(8)

HEADER = 8
"""Bytes of a row before its values."""


def _load_values(builder: Builder, bits: int, address: Value, width: int) -> Value:
    """``width`` consecutive values as a float32 vector."""
    bytes_ = max(1, width * bits // 8)
    vector = builder.load(builder.inttoptr(address, ir.VectorType(_I8, bytes_).as_pointer()))
    vector.align = 1
    if bits == 4:
        kind = vector.type
        low = builder.and_(vector, ir.Constant(kind, [15] * bytes_))
        high = builder.lshr(vector, ir.Constant(kind, [4] * bytes_))
        order = [place // 2 + bytes_ * (place % 2) for place in range(width)]
        vector = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, width), order))
    # Signed conversion of what is never negative: processors before AVX-512 have no other.
    return builder.sitofp(builder.zext(vector, ir.VectorType(_I32, width)), ir.VectorType(_FLOAT, width))


def _sum_block(builder: Builder, bits: int, width: int, at: Value, args: Values) -> None:
    """Emits the loop over a bag's rows for elements [at, at + width)."""
    out, source, _, stride, rows, indices, begin, end, limit, weights = args
    vector = ir.VectorType(_FLOAT, width)
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width))
    # Biases of a bag's rows add up to one number, which is added to all elements at the end: a row costs one product.
    biases = cgutils.alloca_once_value(builder, _FLOAT(0.0))
    index_array = builder.inttoptr(indices, _I32.as_pointer())
    last = builder.sub(limit, _I64(1))
    values_at = builder.add(builder.lshr(at, _I64(1)) if bits == 4 else at, _I64(HEADER))
    with cgutils.for_range_slice(builder, begin, end, _I64(1), intp=_I64) as (j, _):
        ahead = builder.add(j, _I64(_AHEAD))
        ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
        coming = builder.sext(builder.load(builder.gep(index_array, [ahead])), _I64)
        _fetch(builder, builder.add(source, builder.mul(coming, stride)), HEADER + max(1, width * bits // 8))
        index = builder.sext(builder.load(builder.gep(index_array, [j])), _I64)
        row = builder.add(source, builder.mul(index, stride))
        with builder.if_else(builder.icmp_unsigned("<", index, rows)) as (inside, outside):
            with inside:
                header = builder.inttoptr(row, _FLOAT.as_pointer())
                scale, bias = builder.load(header), builder.load(builder.gep(header, [_I64(1)]))
                scale.align = bias.align = 1
                weight = cgutils.alloca_once_value(builder, _FLOAT(1.0))
                with builder.if_then(builder.icmp_signed("!=", weights, _I64(0))):
                    own_weight = builder.load(builder.gep(builder.inttoptr(weights, _FLOAT.as_pointer()), [j]))
                    builder.store(own_weight, weight)
                weight = builder.load(weight)
                values = _load_values(builder, bits, builder.add(row, values_at), width)
                scaled = builder.fmul(values, _splat(builder, builder.fmul(scale, weight), width), flags=("contract",))
                builder.store(builder.fadd(builder.load(total), scaled, flags=("contract",)), total)
                builder.store(
                    builder.fadd(builder.load(biases), builder.fmul(bias, weight), flags=("contract",)), biases
                )
            with outside, builder.if_then(builder.icmp_signed(">=", index, _I64(0))):
                builder.store(_FLOAT(float("nan")), biases)
    summed = builder.fadd(builder.load(total), _splat(builder, builder.load(biases), width))
    address = builder.add(out, builder.mul(at, _I64(4)))
    builder.store(summed, builder.inttoptr(address, vector.as_pointer())).align = 4


def _sum_quantized(bits: int) -> Intrinsic:
    @intrinsic
    def sum_quantized(typing_context, out, source, dim, stride, rows, indices, begin, end, limit, weights):
        """Writes ``sum_j weights[j] * row(indices[j])`` over j in [begin, end) to the float32 array ``out``.

        Rows begin ``stride`` bytes after each other. Negative indices are skipped, indices of ``rows`` and more give
        NaN; indices are readable up to ``limit``. ``weights`` is 0 for none.
        """

        def codegen(context, builder, signature, args):
            _for_blocks(builder, args[2], lambda width, at: _sum_block(builder, bits, width, at, args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return sum_quantized


sum_int8, sum_int4 = _sum_quantized(8), _sum_quantized(4)
