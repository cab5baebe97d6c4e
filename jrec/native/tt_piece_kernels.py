"""The transposes of a level's products in order of its entries, for cores that stay in the caches; see ``tt_kernels``.

Entries are cut into pieces, as many whatever the number of threads. Each has a gradient of the core of its own, so that
slices have one writer at a time; then these are added up in order. They are kept transposed: so the rank, not a last
core's few columns, fills the vectors.
"""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native.accumulate import sum_lines
from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_i32, get_i64, put_i32, put_i64
from jrec.native.narrow_tiles import SIDE, WIDEST, fits, transpose_tile, transpose_tile_8
from jrec.native.small_gemm import LIST, address_list, product_sum
from jrec.native.tt_kernels import (
    BELOW,
    BELOW_COUNT,
    BELOW_GRADIENT,
    CHUNK,
    COLUMNS,
    CORE,
    CORE_GRADIENT,
    COUNT,
    DIGITS,
    HYPER,
    OUT,
    PARENTS,
    PIECE_GRADIENTS,
    PIECES,
    RANK,
    ROWS,
    SLICES,
    TOUCHED,
    TURNED,
    clear,
    fetch,
    step_slice,
    transpose,
)

MOST_PIECES = 16
PIECE_REPEATS = 8  # entries of a piece for every slice, so that its gradient of the core costs little beside them


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_turn_chunks(job, begin, end):
    """Slices of the chunks [begin, end), transposed; none of them is touched yet."""
    core, turned, touched = get_i64(job, CORE), get_i64(job, TURNED), get_i64(job, TOUCHED)
    rank, columns, size = get_i64(job, RANK), get_i64(job, COLUMNS), get_i64(job, CHUNK)
    for digit in range(begin * size, min(end * size, get_i64(job, SLICES))):
        place = 4 * rank * columns * digit
        transpose(turned + place, core + place, rank, columns)
        put_i32(touched, digit, np.int32(0))


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_transpose_pieces(job, begin, end):
    """Gradients of the parents of the pieces [begin, end), and of the core by these pieces.

    A piece has the parents whose first entries it has, with all of their entries, and the parents without any that
    come before them.
    """
    parents, count, pieces = get_i64(job, PARENTS), get_i64(job, COUNT), get_i64(job, PIECES)
    width = get_i64(job, ROWS) * get_i64(job, RANK)
    core_size = get_i64(job, SLICES) * get_i64(job, RANK) * get_i64(job, COLUMNS)
    below_gradient = get_i64(job, BELOW_GRADIENT)
    rank, columns = get_i64(job, RANK), get_i64(job, COLUMNS)
    digits, turned, touched = get_i64(job, DIGITS), get_i64(job, TURNED), get_i64(job, TOUCHED)
    narrow = fits(get_i64(job, ROWS), rank, columns)
    slopes, rights = address_list(), address_list()
    for piece in range(begin, end):
        # A gradient of the whole core for each piece: no two threads add to one slice, and a last core is small.
        total = get_i64(job, PIECE_GRADIENTS) + 4 * core_size * piece
        clear(total, core_size)
        u, last = _piece_begin(parents, count, piece, pieces), _piece_begin(parents, count, piece + 1, pieces)
        # The piece before ends with this parent. Those without entries behind it are cleared here, so that every line
        # has one writer.
        done = np.int64(get_i32(parents, u - 1)) + 1 if u > 0 else np.int64(0)
        while u < last:
            parent = np.int64(get_i32(parents, u))
            # Parents without entries: no entry will write their gradient, and their memory holds what was there before.
            clear(below_gradient + 4 * width * done, width * (parent - done))
            first = u
            while u < last and get_i32(parents, u) == parent:
                digit = np.int64(get_i32(digits, u))
                if get_i32(touched, digit) == 0:  # written once: else its line goes from core to core at every entry
                    put_i32(touched, digit, np.int32(1))
                slice_ = 4 * rank * columns * digit
                fetch(total + slice_, rank * columns)
                fetch(turned + slice_, rank * columns)
                u += 1
            if narrow:
                _transpose_tiles(job, total, parent, first, u)
            else:
                # Before the parent's gradient, which may take the parent's place.
                _add_to_slices(job, total, parent, first, u, slopes, rights)
                _write_parent_gradient(job, parent, first, u, slopes, rights)
            done = parent + 1
        if piece == pieces - 1:
            clear(below_gradient + 4 * width * done, width * (get_i64(job, BELOW_COUNT) - done))


@inlined
def _piece_begin(parents, count, piece, pieces):
    """The first entry of the first parent that begins in a piece."""
    u = count * piece // pieces
    while 0 < u < count and get_i32(parents, u) == get_i32(parents, u - 1):
        u += 1
    return u


@inlined
def _transpose_tiles(job, total, parent, first, last):
    """Both of what follows, of slices of four columns."""
    below, below_gradient = get_i64(job, BELOW), get_i64(job, BELOW_GRADIENT)
    slopes, turned, digits = get_i64(job, OUT), get_i64(job, TURNED), get_i64(job, DIGITS) + 4 * first
    rows, rank, step = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, ROWS) * SIDE
    for a in range(0, rows, SIDE):
        line, slope, r = 4 * rank * (rows * parent + a), slopes + 4 * (step * first + SIDE * a), np.int64(0)
        while r < rank:
            shift = 4 * r
            left, out, into, right = below + line + shift, below_gradient + line + shift, total + shift, turned + shift
            if rank - r >= WIDEST:
                transpose_tile(left, out, slope, step, digits, last - first, into, right, rank)
                r += WIDEST
            else:
                transpose_tile_8(left, out, slope, step, digits, last - first, into, right, rank)
                r += 8


@inlined
def _add_to_slices(job, total, parent, first, last, slopes, lefts):
    """Adds the gradients of a parent's entries [first, last) to their slices'."""
    gradient, digits = get_i64(job, OUT), get_i64(job, DIGITS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    one = np.int64(1)
    put_i64(lefts, 0, get_i64(job, BELOW) + 4 * rows * rank * parent)
    for u in range(first, last):
        put_i64(slopes, 0, gradient + 4 * rows * columns * u)
        place = total + 4 * rank * columns * np.int64(get_i32(digits, u))
        product_sum(place, slopes, lefts, one, columns, rank, rows, one, columns, np.int64(0))


@inlined
def _write_parent_gradient(job, parent, first, last, slopes, slices):
    """The gradient of a parent: the sum over its entries [first, last) of their gradients by slices transposed."""
    gradient, turned, digits = get_i64(job, OUT), get_i64(job, TURNED), get_i64(job, DIGITS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    total = get_i64(job, BELOW_GRADIENT) + 4 * rows * rank * parent
    listed, fresh = np.int64(0), np.int64(1)
    for u in range(first, last):
        if listed == LIST:
            product_sum(total, slopes, slices, listed, rows, rank, columns, columns, np.int64(1), fresh)
            listed, fresh = np.int64(0), np.int64(0)
        put_i64(slopes, listed, gradient + 4 * rows * columns * u)
        put_i64(slices, listed, turned + 4 * rank * columns * np.int64(get_i32(digits, u)))
        listed += 1
    product_sum(total, slopes, slices, listed, rows, rank, columns, columns, np.int64(1), fresh)


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_sum_pieces_chunks(job, begin, end):
    """Gradients of the slices of the chunks [begin, end), the sums over pieces in order, and the optimizer's steps."""
    totals, out, slices = get_i64(job, PIECE_GRADIENTS), get_i64(job, CORE_GRADIENT), get_i64(job, SLICES)
    rank, columns, size = get_i64(job, RANK), get_i64(job, COLUMNS), get_i64(job, CHUNK)
    touched, steps = get_i64(job, TOUCHED), get_i64(job, HYPER) != 0
    for digit in range(begin * size, min(end * size, slices)):
        place = 4 * rank * columns * digit
        sum_lines(totals + place, totals + place, rank * columns, get_i64(job, PIECES), rank * columns * slices)
        transpose(out + place, totals + place, columns, rank)
        if steps and get_i32(touched, digit) != 0:
            step_slice(job, digit, out + place)
