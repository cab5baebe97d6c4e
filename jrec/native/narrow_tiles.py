"""Register tiles for slices of four columns, as a last core's are: their sums are shorter than ``small_gemm``'s loops.

Tiles have four rows of what lies below. All sums stay in registers, and every loop but one is unrolled.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from jrec.native.compile import inlined
from jrec.native.llvm_types import Builder, Intrinsic, Value
from jrec.native.memory import kernel_intrinsic
from jrec.native.small_gemm import WIDE_REGISTERS, load, offset, splat

SIDE = 4  # rows of a tile, and columns of its slice
WIDEST = 16 if WIDE_REGISTERS else 8  # of a tile's rank, backward; then 8
_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


@inlined
def fits(rows, rank, columns):
    """Whether products of these sizes are made of tiles."""
    return columns == SIDE and rows % SIDE == 0 and rank % 8 == 0


def _vector(size: int) -> ir.Type:
    return ir.VectorType(_FLOAT, size)


def _store(builder: Builder, address: Value, value: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def _shuffled(builder: Builder, one: Value, other: Value, lanes: list[int]) -> Value:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _repeated(builder: Builder, vector: Value, size: int, times: int) -> Value:
    """Each of the first ``size`` lanes ``times`` times."""
    lanes = [lane for lane in range(size) for _ in range(times)]
    return _shuffled(builder, vector, ir.Constant(vector.type, ir.Undefined), lanes)


def _sum(builder: Builder, total: Value, one: Value, other: Value) -> Value:
    return builder.fadd(total, builder.fmul(one, other, flags=("contract",)), flags=("contract",))


def _expand_by_four(builder: Builder, starts: list[Value], slice_: Value, rank: Value) -> list[Value]:
    """Emits the rows of the product, two halves to be added each.

    A register holds four lines of the slice, of which each is multiplied by its own element below.
    """
    # Stack slots that LLVM turns into registers: what a loop of its intermediate form carries would else be phi nodes.
    sums = [cgutils.alloca_once_value(builder, ir.Constant(_vector(16), [0.0] * 16)) for _ in starts]
    with cgutils.for_range_slice(builder, _I64(0), rank, _I64(4), intp=_I64) as (k, _):
        four = load(builder, offset(builder, slice_, builder.mul(k, _I64(SIDE))), _vector(16))
        for start, total in zip(starts, sums, strict=True):
            factors = _repeated(builder, load(builder, offset(builder, start, k), _vector(4)), 4, SIDE)
            builder.store(_sum(builder, builder.load(total), factors, four), total)
    totals = [builder.load(total) for total in sums]
    halves = [[_shuffled(builder, whole, whole, list(range(i, i + 8))) for i in (0, 8)] for whole in totals]
    return [builder.fadd(low, high) for low, high in halves]


def _expand_by_eight(builder: Builder, starts: list[Value], slice_: Value, rank: Value) -> list[Value]:
    """As ``_expand_by_four``; a register holds lines ``k`` and ``k + 4``, so that no factor crosses its halves.

    A shuffle across halves is two instructions where registers are this short.
    """
    sums = [cgutils.alloca_once_value(builder, ir.Constant(_vector(8), [0.0] * 8)) for _ in starts]
    with cgutils.for_range_slice(builder, _I64(0), rank, _I64(8), intp=_I64) as (k, _):
        rows = [load(builder, offset(builder, start, k), _vector(8)) for start in starts]
        lines = offset(builder, slice_, builder.mul(k, _I64(SIDE)))
        for i in range(4):
            low, high = (load(builder, offset(builder, lines, _I64(SIDE * j)), _vector(SIDE)) for j in (i, i + 4))
            two = _shuffled(builder, low, high, list(range(8)))
            for row, total in zip(rows, sums, strict=True):
                factors = _shuffled(builder, row, row, [i] * 4 + [i + 4] * 4)
                builder.store(_sum(builder, builder.load(total), factors, two), total)
    return [builder.load(total) for total in sums]


def _expand_tile(wide: bool) -> Intrinsic:
    @kernel_intrinsic
    def tile(typing_context, out, below, slice_, rank):
        def codegen(context, builder, signature, args):
            out, below, slice_, rank = args
            starts = [offset(builder, below, builder.mul(rank, _I64(i))) for i in range(SIDE)]
            totals = (_expand_by_four if wide else _expand_by_eight)(builder, starts, slice_, rank)
            for i in (0, 2):
                low, high = (
                    _shuffled(builder, totals[i], totals[i + 1], [*range(j, j + 4), *range(8 + j, 12 + j)])
                    for j in (0, 4)
                )
                _store(builder, offset(builder, out, _I64(SIDE * i)), builder.fadd(low, high))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return tile


expand_tile = _expand_tile(WIDE_REGISTERS)
"""``out[i, j] = sum_k below[i, k] * slice_[k, j]``: (4, 4), (4, rank) and (rank, 4) float32, each in one piece."""


@kernel_intrinsic
def turn_lines(typing_context, out, source, step):
    """Eight lines of four float32, in one piece, to four of eight, ``step`` floats apart."""

    def codegen(context, builder, signature, args):
        out, source, step = args
        whole = load(builder, source, _vector(8 * SIDE))
        for i in range(SIDE):
            line = _shuffled(builder, whole, whole, list(range(i, 8 * SIDE, SIDE)))
            _store(builder, offset(builder, out, builder.mul(step, _I64(i))), line)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel_intrinsic
def turn_lines_back(typing_context, out, source, step):
    """Four lines of eight float32, ``step`` floats apart, to eight of four, in one piece."""

    def codegen(context, builder, signature, args):
        out, source, step = args
        lines = [load(builder, offset(builder, source, builder.mul(step, _I64(i))), _vector(8)) for i in range(SIDE)]
        halves = [_shuffled(builder, lines[i], lines[i + 1], list(range(16))) for i in (0, 2)]
        lanes = [8 * i + j for j in range(8) for i in range(SIDE)]
        _store(builder, out, _shuffled(builder, halves[0], halves[1], lanes))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _transpose_tile(width: int) -> Intrinsic:
    @kernel_intrinsic
    def tile(typing_context, below, below_gradient, slopes, slope_step, digits, entries, totals, turned, rank):
        def codegen(context, builder, signature, args):
            below, below_gradient, slopes, slope_step, digits, entries, totals, turned, rank = args
            vector, lines = _vector(width), range(SIDE)
            steps = [builder.mul(rank, _I64(i)) for i in lines]
            # Read whole before the last store, which may go to the same place: ``below_gradient`` may be ``below``.
            lefts = [load(builder, offset(builder, below, step), vector) for step in steps]
            sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width)) for _ in lines]
            # One entry after another, each read from and added to memory whole: several entries may name one digit.
            with cgutils.for_range(builder, entries, intp=_I64) as loop:
                digit = builder.sext(load(builder, offset(builder, digits, loop.index), _I32), _I64)
                place = builder.mul(digit, builder.mul(rank, _I64(SIDE)))
                places = [builder.add(place, step) for step in steps]
                rights = [load(builder, offset(builder, turned, at), vector) for at in places]
                adding = [load(builder, offset(builder, totals, at), vector) for at in places]
                slope = offset(builder, slopes, builder.mul(loop.index, slope_step))
                for i in lines:
                    total = builder.load(sums[i])
                    for j in lines:
                        one = load(builder, offset(builder, slope, _I64(SIDE * i + j)), _FLOAT)
                        each = splat(builder, one, width)
                        total = _sum(builder, total, each, rights[j])
                        adding[j] = _sum(builder, adding[j], each, lefts[i])
                    builder.store(total, sums[i])
                for at, value in zip(places, adding, strict=True):
                    _store(builder, offset(builder, totals, at), value)
            for step, total in zip(steps, sums, strict=True):
                _store(builder, offset(builder, below_gradient, step), builder.load(total))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


transpose_tile, transpose_tile_8 = _transpose_tile(WIDEST), _transpose_tile(8)
"""For ``WIDEST`` or 8 columns of four lines below: their gradient, and what their entries add to their slices' sums.

    below_gradient[i] = sum_u sum_j slopes[u][i, j] * turned[digits[u]][j]
    totals[digits[u]][j] += sum_i slopes[u][i, j] * below[i]

Lines are ``rank`` floats apart; ``turned`` and ``totals`` have four to a digit. All begin at the tile's first column,
as do ``below`` and its gradient, which may be one. Slopes are (4, 4), ``slope_step`` floats apart.
"""
