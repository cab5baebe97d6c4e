"""The inner loop of every gather-reduce: weighted rows of one segment, summed in vector registers.

LLVM will not keep a sum in registers across rows by itself, since it cannot know that sum and source do not overlap;
so the loop is written as LLVM vectors. A row is cut into blocks of 64, 32, ..., 1 elements: 64 floats are eight of the
sixteen vector registers of AVX2, and long enough that reading the indices once more per block costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jrec.native.llvm_types import Builder, Intrinsic, Value, Values
from jrec.native.memory import kernel_intrinsic, prefetch_line

F32, BF16, F16 = 0, 1, 2
"""Codes of the sources' dtypes in the kernels."""

_AHEAD = 32  # rows; of the distances 8 to 64 the fastest on rows of 64 floats that caches hold in part
_I16, _I32, _I64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_MINUS_ZERO, _NAN = 0x80000000, 0x7FC00000
_LINE = 64  # bytes of a cache line
_WIDTHS = (64, 32, 16, 8, 4, 2, 1)


def _load_widened(builder: Builder, address: Value, dtype: int, width: int) -> Value:
    """``width`` consecutive elements as a float32 vector."""
    element = {F32: _FLOAT, BF16: _I16, F16: ir.HalfType()}[dtype]
    vector = builder.load(builder.inttoptr(address, ir.VectorType(element, width).as_pointer()))
    # Rows begin at multiples of an element, not of a vector: an aligned load would fault.
    vector.align = 4 if dtype == F32 else 2
    floats = ir.VectorType(_FLOAT, width)
    # An instruction where the processor has F16C; LLVM calls a library function an element elsewhere, so that
    # ``xla.unavailable`` refuses x86 processors without it.
    if dtype == F16:
        return builder.fpext(vector, floats)
    if dtype == BF16:
        words = ir.VectorType(_I32, width)
        return builder.bitcast(builder.shl(builder.zext(vector, words), ir.Constant(words, [16] * width)), floats)
    return vector


def _splat(builder: Builder, scalar: Value, width: int) -> Value:
    vector = ir.VectorType(scalar.type, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, width), [0] * width)
    )


def _fetch(builder: Builder, address: Value, size: int) -> None:
    for byte in range(0, size, _LINE):
        prefetch_line(builder, builder.add(address, _I64(byte)), near=False)


def _row_of_block(builder: Builder, dtype: int, width: int, at: Value, args: Values, j: Value) -> Value:
    """Asks for the row ``_AHEAD`` of index ``j``; the index itself, and the address of its row's block."""
    _, source, dim, _, indices, _, _, limit = args[:8]
    size = 4 if dtype == F32 else 2
    index_array = builder.inttoptr(indices, _I32.as_pointer())
    last = builder.sub(limit, _I64(1))
    block = builder.add(source, builder.mul(at, _I64(size)))
    stride = builder.mul(dim, _I64(size))
    ahead = builder.add(j, _I64(_AHEAD))
    # Ahead may be in the next segments: their rows come next. Past the end of all indices the last one stands in; the
    # address that an index gives may be any, since asking for a line never faults.
    ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
    coming = builder.sext(builder.load(builder.gep(index_array, [ahead])), _I64)
    _fetch(builder, builder.add(block, builder.mul(coming, stride)), width * size)
    index = builder.sext(builder.load(builder.gep(index_array, [j])), _I64)
    return index, builder.add(block, builder.mul(index, stride))


def _add_row(builder: Builder, dtype: int, width: int, at: Value, args: Values, j: Value, total: Value) -> None:
    """Emits the sum of ``total`` and what index ``j`` adds to its elements [at, at + width)."""
    rows, weights, positions = args[3], args[8], args[9]
    vector = ir.VectorType(_FLOAT, width)

    def add(value: Value) -> None:
        builder.store(builder.fadd(builder.load(total), value, flags=("contract",)), total)

    def weight_of(j: Value) -> Value:
        place = cgutils.alloca_once_value(builder, j)
        with builder.if_then(builder.icmp_signed("!=", positions, _I64(0))):
            moved = builder.load(builder.gep(builder.inttoptr(positions, _I32.as_pointer()), [j]))
            builder.store(builder.sext(moved, _I64), place)
        return builder.load(builder.gep(builder.inttoptr(weights, _FLOAT.as_pointer()), [builder.load(place)]))

    index, address = _row_of_block(builder, dtype, width, at, args, j)
    # Unsigned: one comparison tells negative indices and those past the end from the rest.
    with builder.if_else(builder.icmp_unsigned("<", index, rows)) as (inside, outside):
        with inside:
            row = _load_widened(builder, address, dtype, width)
            with builder.if_else(builder.icmp_signed("!=", weights, _I64(0))) as (weighted, plain):
                with weighted:
                    add(builder.fmul(row, _splat(builder, weight_of(j), width), flags=("contract",)))
                with plain:
                    add(row)
        with outside, builder.if_then(builder.icmp_signed(">=", index, _I64(0))):
            # NaN, since a kernel inside jit cannot raise: a sum without the row would train on without a word.
            add(ir.Constant(vector, [float("nan")] * width))


def _sum_block(builder: Builder, dtype: int, width: int, at: Value, args: Values) -> None:
    """Emits the loop over a segment's rows for elements [at, at + width)."""
    out, begin, end = args[0], args[5], args[6]
    vector = ir.VectorType(_FLOAT, width)
    # A stack slot in LLVM's code, a register in the processor's: its address goes nowhere, so LLVM promotes it.
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width))
    with cgutils.for_range_slice(builder, begin, end, _I64(1), intp=_I64) as (j, _):
        _add_row(builder, dtype, width, at, args, j, total)
    address = builder.add(out, builder.mul(at, _I64(4)))
    store = builder.store(builder.load(total), builder.inttoptr(address, vector.as_pointer()))
    store.align = 4


def _sum_blocks(builder: Builder, dtype: int, width: int, at: Value, args: Values) -> None:
    """Emits the loop over the rows of many segments for elements [at, at + width), without a branch at their ends."""
    out, dim, begin, end, places, ends = args[0], args[2], args[5], args[6], args[10], args[11]
    vector, bits = ir.VectorType(_FLOAT, width), ir.VectorType(_I32, width)
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width))
    segment = cgutils.alloca_once_value(builder, _I64(0))

    def element(array: Value) -> Value:
        return builder.load(builder.gep(builder.inttoptr(array, _I32.as_pointer()), [builder.load(segment)]))

    with cgutils.for_range_slice(builder, begin, end, _I64(1), intp=_I64) as (j, _):
        _add_row(builder, dtype, width, at, args, j, total)
        so_far = builder.load(total)
        place = builder.add(builder.mul(builder.sext(element(places), _I64), dim), at)
        address = builder.add(out, builder.mul(place, _I64(4)))
        builder.store(so_far, builder.inttoptr(address, vector.as_pointer())).align = 4
        last = builder.icmp_signed("==", builder.trunc(builder.add(j, _I64(1)), _I32), element(ends))
        # After a segment's last row the sum is cleared by a mask, all ones or all zeros, and the running sum is stored
        # at every row: the last store to a segment's place is its sum.
        kept = _splat(builder, builder.sext(builder.not_(last), _I32), width)
        builder.store(builder.bitcast(builder.and_(builder.bitcast(so_far, bits), kept), vector), total)
        builder.store(builder.add(builder.load(segment), builder.zext(last, _I64)), segment)


def _sum_lines_block(builder: Builder, width: int, at: Value, args: Values) -> None:
    """Emits the loop over lines for elements [at, at + width)."""
    out, source, _, lines, step = args
    vector = ir.VectorType(_FLOAT, width)
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width))
    with cgutils.for_range(builder, lines, intp=_I64) as loop:
        place = builder.add(at, builder.mul(loop.index, step))
        line = _load_widened(builder, builder.add(source, builder.mul(place, _I64(4))), F32, width)
        # No product to contract with, and one addition a line in their order: the bits are the same on every processor.
        builder.store(builder.fadd(builder.load(total), line), total)
    address = builder.add(out, builder.mul(at, _I64(4)))
    builder.store(builder.load(total), builder.inttoptr(address, vector.as_pointer())).align = 4


def _copy_block(builder: Builder, dtype: int, width: int, at: Value, args: Values) -> None:
    """Emits the loop over rows for elements [at, at + width) of segments of one index each."""
    out, _, dim, rows, _, begin, end, _ = args
    vector = ir.VectorType(_I32, width)  # bits: under the kernels' floating-point rules, -0 would stay what it is

    def bits(constant: int) -> Value:
        return ir.Constant(vector, [constant] * width)

    # The sum of one row from +0 turns -0 into +0, so a copy must, too: lookups have the same bits on either way.
    value = cgutils.alloca_once(builder, vector)
    block = builder.add(out, builder.mul(at, _I64(4)))
    stride = builder.mul(dim, _I64(4))
    with cgutils.for_range_slice(builder, begin, end, _I64(1), intp=_I64) as (j, _):
        index, address = _row_of_block(builder, dtype, width, at, args, j)
        with builder.if_else(builder.icmp_unsigned("<", index, rows)) as (inside, outside):
            with inside:  # the sum of one row, which is +0 where the row is -0
                row = builder.bitcast(_load_widened(builder, address, dtype, width), vector)
                builder.store(builder.select(builder.icmp_unsigned("==", row, bits(_MINUS_ZERO)), bits(0), row), value)
            with outside:
                past = builder.icmp_signed(">=", index, _I64(0))
                builder.store(builder.select(past, bits(_NAN), bits(0)), value)
        here = builder.inttoptr(builder.add(block, builder.mul(j, stride)), vector.as_pointer())
        builder.store(builder.load(value), here).align = 4


def _for_blocks(builder: Builder, dim: Value, emit: Callable[[int, Value], None]) -> None:
    """Emits the code of ``emit(width, at)`` for blocks that together are a row."""
    # The bits of ``dim`` below 64 name the narrower blocks, each at most once, the widest first.
    widest = _WIDTHS[0]
    with cgutils.for_range(builder, builder.sdiv(dim, _I64(widest)), intp=_I64) as loop:
        emit(widest, builder.mul(loop.index, _I64(widest)))
    for width in _WIDTHS[1:]:
        with builder.if_then(builder.icmp_signed("!=", builder.and_(dim, _I64(width)), _I64(0))):
            emit(width, builder.and_(dim, _I64(-2 * width)))


def _copy_rows(dtype: int) -> Intrinsic:
    @intrinsic
    def copy_rows(typing_context, out, source, dim, rows, indices, begin, end, limit):
        """Writes ``source[indices[j]]`` to row ``j`` of the float32 array ``out`` for j in [begin, end).

        The sums of segments of one index each: see ``sum_rows`` for what indices outside of the source give.
        """

        def codegen(context, builder, signature, args):
            _for_blocks(builder, args[2], lambda width, at: _copy_block(builder, dtype, width, at, args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return copy_rows


def _sum_rows(dtype: int) -> Intrinsic:
    @intrinsic
    def sum_rows(typing_context, out, source, dim, rows, indices, begin, end, limit, weights, positions):
        """Writes ``sum_j weight(j) * source[indices[j]]`` over j in [begin, end) to the float32 array ``out``.

        Negative indices are skipped, indices of ``rows`` and more give NaN. Indices are readable up to ``limit``.
        ``weights`` is 0 for none; ``positions`` is 0, or the address of where in ``weights`` each index has its own.
        """

        def codegen(context, builder, signature, args):
            _for_blocks(builder, args[2], lambda width, at: _sum_block(builder, dtype, width, at, args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return sum_rows


def _sum_segments(dtype: int) -> Intrinsic:
    @intrinsic
    def sum_segments(
        typing_context, out, source, dim, rows, indices, begin, end, limit, weights, positions, places, ends
    ):
        """The sums of consecutive segments, none of them empty, that together are [begin, end); see ``sum_rows``.

        Segment ``k`` ends before ``ends[k]`` and its sum is row ``places[k]`` of the array ``out``, both int32. For
        short segments, whose lengths no processor predicts.
        """

        def codegen(context, builder, signature, args):
            _for_blocks(builder, args[2], lambda width, at: _sum_blocks(builder, dtype, width, at, args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), codegen

    return sum_segments


@kernel_intrinsic
def sum_lines(typing_context, out, source, dim, lines, step):
    """Writes the sum of ``lines`` rows of ``dim`` float32, ``step`` elements apart; ``out`` may be the first."""

    def codegen(context, builder, signature, args):
        _for_blocks(builder, args[2], lambda width, at: _sum_lines_block(builder, width, at, args))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


sum_f32, sum_bf16, sum_f16 = (_sum_rows(dtype) for dtype in (F32, BF16, F16))
copy_f32, copy_bf16, copy_f16 = (_copy_rows(dtype) for dtype in (F32, BF16, F16))
segments_f32, segments_bf16, segments_f16 = (_sum_segments(dtype) for dtype in (F32, BF16, F16))
