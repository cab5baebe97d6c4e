"""Products of matrices too small for a GEMM library: register tiles of sums, as LLVM vectors.

Tensor-train slices are matrices of 2 to 64 rows and columns, and entries that share one lie scattered. So operands are
given by lists of addresses: the rows of ``product_rows`` lie anywhere, as do the terms that ``product_sum`` adds up. As
in ``accumulate``, the sums stay in vector registers because the loops are written as vectors: a tile has eight
registers of 8 floats, as many as two multiply-adds a cycle of latency four keep busy, which leaves half of AVX2's
sixteen to the operands.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from jrec.native.llvm_types import Builder, Value, Values
from jrec.native.memory import kernel_intrinsic, prefetch_line

LIST = 512  # addresses a list holds
_BLOCK = 8  # rows and columns of a block that is transposed in registers

_I64, _FLOAT = ir.IntType(64), ir.FloatType()
# Rows of a tile, by its columns: sixteen registers of AVX-512's thirty-two hold sums, or eight of AVX2's sixteen.
WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f", False))
_TALLEST = {32: 8 if WIDE_REGISTERS else 2, 16: 8 if WIDE_REGISTERS else 4, 8: 8, 4: 8, 2: 8, 1: 8}

# Emits the depth loop of a tile: calls the function it is given with the address of every line of the right operand
# and the addresses of the left operand's factors of the tile's rows.
_Depth = Callable[[Builder, int, Value, Callable[[Value, list[Value]], None]], None]


def offset(builder: Builder, base: Value, elements: Value) -> Value:
    """Emits the address of the 32-bit element that lies ``elements`` (an int64 value) after ``base``."""
    return builder.add(base, builder.mul(elements, _I64(4)))


def load(builder: Builder, address: Value, kind: ir.Type) -> Value:
    """Emits the value of type ``kind`` at an address, aligned as its elements are."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 8 if kind == _I64 else 4
    return value


def splat(builder: Builder, scalar: Value, width: int) -> Value:
    """Emits a vector whose ``width`` lanes are all ``scalar``."""
    vector = ir.VectorType(_FLOAT, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _tile(
    builder: Builder, width: int, places: list[Value], row: Value, column: Value, depth: _Depth, fresh: Value
) -> None:
    """Emits the sums of ``width`` columns from ``column`` on of the rows at ``places``, which begin at ``row``."""
    vector = ir.VectorType(_FLOAT, width)
    places = [offset(builder, place, column) for place in places]
    zero, sums = ir.Constant(vector, [0.0] * width), []
    for place in places:
        start = zero if fresh is None else builder.select(fresh, zero, load(builder, place, vector))
        sums.append(cgutils.alloca_once_value(builder, start))

    def add(line: Value, factors: list[Value]) -> None:
        right = load(builder, offset(builder, line, column), vector)
        # One line of the right operand meets all rows of the tile, so that a load serves as many multiply-adds.
        for total, factor in zip(sums, factors, strict=True):
            product = builder.fmul(right, splat(builder, load(builder, factor, _FLOAT), width), flags=("contract",))
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)

    depth(builder, len(places), row, add)
    for place, total in zip(places, sums, strict=True):
        store = builder.store(builder.load(total), builder.inttoptr(place, vector.as_pointer()))
        store.align = 4


def _product(
    builder: Builder,
    rows: Value,
    columns: Value,
    places: Callable[[Value, int], list[Value]],
    depth: _Depth,
    fresh: Value = None,
) -> None:
    """Emits a product, tile by tile: columns in blocks of 32 (where rows are few), 16, 8, .., and rows likewise."""

    def block(width: int, column: Value) -> None:
        tall, done = _TALLEST[width], _I64(0)
        # What the tallest tiles leave goes to tiles of half the rows, and so on: each has unrolled code of its own.
        while tall:
            end = builder.and_(rows, _I64(-tall))
            with cgutils.for_range_slice(builder, done, end, _I64(tall), intp=_I64) as (row, _):
                _tile(builder, width, places(row, tall), row, column, depth, fresh)
            tall, done = tall // 2, end

    few = builder.icmp_signed("<=", rows, _I64(_TALLEST[32]))
    pays = cgutils.true_bit if WIDE_REGISTERS else few
    wide = builder.select(pays, builder.and_(columns, _I64(-32)), _I64(0))
    with cgutils.for_range_slice(builder, _I64(0), wide, _I64(32), intp=_I64) as (column, _):
        block(32, column)
    done = wide
    for width in (16, 8, 4, 2, 1):
        end = builder.and_(columns, _I64(-width))
        with cgutils.for_range_slice(builder, done, end, _I64(width), intp=_I64) as (column, _):
            block(width, column)
        done = end


def _product_rows(builder: Builder, args: Values, each_step: Callable[[], None]) -> None:
    outs, lefts, rows, right, depth, columns = args

    def listed(addresses: Value, row: Value, tall: int) -> list[Value]:
        at = builder.add(addresses, builder.mul(row, _I64(8)))
        return [load(builder, builder.add(at, _I64(8 * i)), _I64) for i in range(tall)]

    def run(builder: Builder, tall: int, row: Value, add: Callable[[Value, list[Value]], None]) -> None:
        starts = listed(lefts, row, tall)
        with cgutils.for_range(builder, depth, intp=_I64) as loop:
            # Between the products, whose latency hides it.
            each_step()
            line = offset(builder, right, builder.mul(loop.index, columns))
            add(line, [offset(builder, start, loop.index) for start in starts])

    _product(builder, rows, columns, lambda row, tall: listed(outs, row, tall), run)


@kernel_intrinsic
def product_rows(typing_context, outs, lefts, rows, right, depth, columns):
    """``outs[i][j] = sum_k lefts[i][k] * right[k, j]``: int64 lists of ``rows`` addresses, of float32.

    ``right`` is (depth, columns), in one piece. No operand overlaps a result.
    """

    def codegen(context, builder, signature, args):
        _product_rows(builder, args, lambda: None)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@kernel_intrinsic
def product_rows_fetching(typing_context, outs, lefts, rows, right, depth, columns, one, other, size):
    """As ``product_rows``, which meanwhile asks for the lines of two arrays of ``size`` bytes, one line a step.

    So what comes next is on its way while the products keep the processor busy. Any addresses are allowed.
    """

    def codegen(context, builder, signature, args):
        one, other, size = args[6:]
        asked = cgutils.alloca_once_value(builder, _I64(0))

        def ask() -> None:
            place = builder.load(asked)
            for array in (one, other):
                prefetch_line(builder, builder.add(array, place), near=False)
            coming = builder.add(place, _I64(64))
            builder.store(builder.select(builder.icmp_signed("<", coming, size), coming, place), asked)

        _product_rows(builder, args[:6], ask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@kernel_intrinsic
def product_sum(typing_context, out, lefts, rights, terms, rows, columns, depth, row_step, depth_step, fresh):
    """``out[i, j] (+)= sum_t sum_k lefts[t][i * row_step + k * depth_step] * rights[t][k * columns + j]``.

    ``out`` is (rows, columns) float32 in one piece, and overwritten where ``fresh`` is not 0. ``lefts`` and ``rights``
    are int64 lists of ``terms`` addresses.
    """

    def codegen(context, builder, signature, args):
        out, lefts, rights, terms, rows, columns, depth, row_step, depth_step, fresh = args

        def places(row: Value, tall: int) -> list[Value]:
            return [offset(builder, out, builder.mul(builder.add(row, _I64(i)), columns)) for i in range(tall)]

        def run(builder: Builder, tall: int, row: Value, add: Callable[[Value, list[Value]], None]) -> None:
            steps = [builder.mul(builder.add(row, _I64(i)), row_step) for i in range(tall)]
            with cgutils.for_range(builder, terms, intp=_I64) as loop:
                at = builder.mul(loop.index, _I64(8))
                left, right = (load(builder, builder.add(base, at), _I64) for base in (lefts, rights))
                starts = [offset(builder, left, step) for step in steps]
                with cgutils.for_range(builder, depth, intp=_I64) as inner:
                    shift = builder.mul(inner.index, depth_step)
                    line = offset(builder, right, builder.mul(inner.index, columns))
                    add(line, [offset(builder, start, shift) for start in starts])

        _product(builder, rows, columns, places, run, builder.icmp_signed("!=", fresh, _I64(0)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


@kernel_intrinsic
def outer_sum(typing_context, out, lefts, rights, terms, rows, columns, fresh):
    """``out[i, j] (+)= sum_t lefts[t][i] * rights[t][j]``: ``product_sum`` of depth one and left rows in one piece."""

    def codegen(context, builder, signature, args):
        out, lefts, rights, terms, rows, columns, fresh = args

        def places(row: Value, tall: int) -> list[Value]:
            return [offset(builder, out, builder.mul(builder.add(row, _I64(i)), columns)) for i in range(tall)]

        def run(builder: Builder, tall: int, row: Value, add: Callable[[Value, list[Value]], None]) -> None:
            with cgutils.for_range(builder, terms, intp=_I64) as loop:
                at = builder.mul(loop.index, _I64(8))
                left, right = (load(builder, builder.add(base, at), _I64) for base in (lefts, rights))
                start = offset(builder, left, row)
                add(right, [builder.add(start, _I64(4 * i)) for i in range(tall)])

        _product(builder, rows, columns, places, run, builder.icmp_signed("!=", fresh, _I64(0)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@kernel_intrinsic
def transpose_block(typing_context, out, source, rows, columns):
    """Eight rows and columns of a (.., columns) float32 matrix from ``source`` on, into a (.., rows) one at ``out``."""

    def codegen(context, builder, signature, args):
        out, source, rows, columns = args
        vector, lanes = ir.VectorType(_FLOAT, _BLOCK), range(_BLOCK)
        lines = [load(builder, offset(builder, source, builder.mul(_I64(i), columns)), vector) for i in lanes]
        # Exchanges the off-diagonal halves of blocks of two, then of four, then of eight.
        for step in (1, 2, 4):
            upper = [_BLOCK + lane - step if lane & step else lane for lane in lanes]
            lower = [_BLOCK + lane if lane & step else lane + step for lane in lanes]
            for i in lanes:
                if not i & step:
                    pair = lines[i], lines[i + step]
                    lines[i], lines[i + step] = (
                        builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(ir.IntType(32), _BLOCK), mask))
                        for mask in (upper, lower)
                    )
        for i, line in enumerate(lines):
            place = offset(builder, out, builder.mul(_I64(i), rows))
            builder.store(line, builder.inttoptr(place, vector.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@kernel_intrinsic
def address_list(typing_context):
    """The address of a list on the stack, of ``LIST`` int64; every call of it in the source is a list of its own."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_I64, LIST)), _I64)

    return types.int64(), codegen
