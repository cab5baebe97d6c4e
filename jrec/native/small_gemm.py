"""Products of matrices too small for a GEMM library: a register tile of sums, as LLVM vectors.

Tensor-train slices are matrices of 2 to 64 rows and columns. As in ``accumulate``, the sums stay in vector registers
because the loop is written as vectors: columns in blocks of 32, 16, .., 1, and as many rows at once as leave half of
AVX2's sixteen registers to the sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _FLOAT = ir.IntType(64), ir.FloatType()
_ROWS = {32: 2, 16: 4, 8: 4, 4: 4, 2: 4, 1: 4}  # of a tile, by its columns


def _splat(builder: Any, scalar: Any, width: int) -> Any:
    vector = ir.VectorType(_FLOAT, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _vector(builder: Any, base: Any, index: Any, width: int) -> Any:
    """Pointer to the vector at element ``index`` of the float32 array at ``base``."""
    address = builder.add(base, builder.mul(index, _I64(4)))
    return builder.inttoptr(address, ir.VectorType(_FLOAT, width).as_pointer())


def _tile(builder: Any, rows: int, width: int, row: Any, column: Any, args: Any, accumulate: bool) -> None:
    """Emits the sums of ``rows`` by ``width`` elements of the product from (row, column) on."""
    out, left, right, depth, columns, row_step, depth_step = args
    vector = ir.VectorType(_FLOAT, width)
    places = [_vector(builder, out, builder.add(builder.mul(builder.add(row, _I64(i)), columns), column), width)
              for i in range(rows)]  # fmt: skip
    sums = []
    for place in places:
        start = ir.Constant(vector, [0.0] * width)
        if accumulate:
            start = builder.load(place)
            start.align = 4
        sums.append(cgutils.alloca_once_value(builder, start))
    with cgutils.for_range(builder, depth, intp=_I64) as loop:
        line = builder.load(_vector(builder, right, builder.add(builder.mul(loop.index, columns), column), width))
        line.align = 4
        for i, total in enumerate(sums):
            at = builder.add(builder.mul(builder.add(row, _I64(i)), row_step), builder.mul(loop.index, depth_step))
            factor = builder.load(builder.gep(builder.inttoptr(left, _FLOAT.as_pointer()), [at]))
            product = builder.fmul(line, _splat(builder, factor, width), flags=("contract",))
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for place, total in zip(places, sums, strict=True):
        store = builder.store(builder.load(total), place)
        store.align = 4


def _columns_block(builder: Any, width: int, column: Any, count: Any, args: Any, accumulate: bool) -> None:
    """Emits all rows of the columns [column, column + width)."""
    tall = _ROWS[width]
    full = builder.and_(count, _I64(-tall))
    with cgutils.for_range_slice(builder, _I64(0), full, _I64(tall), intp=_I64) as (row, _):
        _tile(builder, tall, width, row, column, args, accumulate)
    with cgutils.for_range_slice(builder, full, count, _I64(1), intp=_I64) as (row, _):
        _tile(builder, 1, width, row, column, args, accumulate)


def _multiply(accumulate: bool) -> Any:
    @intrinsic
    def multiply(typing_context, out, left, right, rows, depth, columns, row_step, depth_step):
        """``out[i, j] (+)= sum_k left[i * row_step + k * depth_step] * right[k, j]``.

        ``out`` is (rows, columns) and ``right`` (depth, columns), both float32 in one piece; they do not overlap.
        """

        def codegen(context, builder, signature, args):
            out, left, right, rows, depth, columns, row_step, depth_step = args
            rest = (out, left, right, depth, columns, row_step, depth_step)
            widest = max(_ROWS)
            with cgutils.for_range(builder, builder.sdiv(columns, _I64(widest)), intp=_I64) as loop:
                _columns_block(builder, widest, builder.mul(loop.index, _I64(widest)), rows, rest, accumulate)
            for width in sorted(_ROWS, reverse=True)[1:]:
                with builder.if_then(builder.icmp_signed("!=", builder.and_(columns, _I64(width)), _I64(0))):
                    column = builder.and_(columns, _I64(-2 * width))
                    _columns_block(builder, width, column, rows, rest, accumulate)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return multiply


multiply, multiply_add = _multiply(accumulate=False), _multiply(accumulate=True)
