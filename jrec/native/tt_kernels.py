"""Tensor-train products of sorted unique entries, and their transposes, as small GEMMs over whoever shares an operand.

Entries of one digit share a slice of the core: forward they are the rows of one product, and the slice's gradient is
the sum over them. Entries of one parent lie side by side, and the parent's gradient is the sum over those. Each sum has
one writer and a fixed order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_f32, get_i32, get_i64, put_f32, put_i64
from jrec.native.small_gemm import LIST, address_list, outer_sum, product_rows, product_sum, transpose_block

CHUNK_PRODUCTS = 1 << 18  # multiply-adds of a chunk: ten microseconds
NARROW = 16  # columns below which a slice's gradient is summed transposed, so that its rank fills the vectors


class Job(enum.IntEnum):
    """Words of the int64 job array. Names of arrays hold addresses."""

    BELOW = 0  # (.., A, R) float32
    CORE = 1  # (m, R, N) float32
    PARENTS = 2  # int32
    DIGITS = 3  # int32
    COUNT = 4  # of entries
    ROWS = 5  # A
    RANK = 6  # R
    COLUMNS = 7  # N
    OUT = 8  # forward (.., A, N); backward the gradient of that, read
    BELOW_GRADIENT = 9  # may be BELOW itself
    BELOW_COUNT = 10
    CORE_GRADIENT = 11  # (m, R, N)
    CHUNK = 12  # entries, parents
    SEGMENT_DIGITS = 13  # int32, ascending: the digits that occur
    SEGMENT_OFFSETS = 14  # int32
    SEGMENT_ENTRIES = 15  # int32, entries by digit
    SEGMENTS = 16
    TURNED = 17  # (m, N, R): slices transposed; before that, gradients


JOB_WORDS = len(Job)
(
    BELOW, CORE, PARENTS, DIGITS, COUNT, ROWS, RANK, COLUMNS, OUT, BELOW_GRADIENT, BELOW_COUNT, CORE_GRADIENT, CHUNK,
    SEGMENT_DIGITS, SEGMENT_OFFSETS, SEGMENT_ENTRIES, SEGMENTS, TURNED,
) = (int(word) for word in Job)  # fmt: skip


@inlined
def _clear(address, size):
    for i in range(size):
        put_f32(address, i, np.float32(0))


@inlined
def _transpose(out, source, rows, columns):
    """(rows, columns) float32 to (columns, rows)."""
    high, wide = rows - rows % 8, columns - columns % 8
    for i in range(0, high, 8):
        for j in range(0, wide, 8):
            transpose_block(out + 4 * (j * rows + i), source + 4 * (i * columns + j), rows, columns)
    for i in range(rows):
        for j in range(wide if i < high else np.int64(0), columns):
            put_f32(out, j * rows + i, get_f32(source, i * columns + j))


@inlined
def _lower_bound(array, size, value):
    """The first index of an ascending int32 array that holds ``value`` or more."""
    low, high = np.int64(0), size
    while low < high:
        middle = (low + high) // 2
        if get_i32(array, middle) < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_expand_chunks(job, begin, end):
    """Entries of the chunks [begin, end), one by one: for batches in which digits hardly repeat."""
    below, core, out = get_i64(job, BELOW), get_i64(job, CORE), get_i64(job, OUT)
    parents, digits = get_i64(job, PARENTS), get_i64(job, DIGITS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    size = get_i64(job, CHUNK)
    lefts, rights = address_list(), address_list()
    for u in range(begin * size, min(end * size, get_i64(job, COUNT))):
        put_i64(lefts, 0, below + 4 * rows * rank * np.int64(get_i32(parents, u)))
        put_i64(rights, 0, core + 4 * rank * columns * np.int64(get_i32(digits, u)))
        target = out + 4 * rows * columns * u
        product_sum(target, lefts, rights, np.int64(1), rows, columns, rank, rank, np.int64(1), np.int64(1))


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_expand_segments(job, begin, end):
    """Entries of the segments [begin, end): a digit's entries are the rows of a product with its slice."""
    below, core, out = get_i64(job, BELOW), get_i64(job, CORE), get_i64(job, OUT)
    parents, entries = get_i64(job, PARENTS), get_i64(job, SEGMENT_ENTRIES)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    present, offsets = get_i64(job, SEGMENT_DIGITS), get_i64(job, SEGMENT_OFFSETS)
    lefts, outs = address_list(), address_list()
    for s in range(begin, end):
        slice_ = core + 4 * rank * columns * np.int64(get_i32(present, s))
        listed = np.int64(0)
        for j in range(get_i32(offsets, s), get_i32(offsets, s + 1)):
            u = np.int64(get_i32(entries, j))
            left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
            target = out + 4 * rows * columns * u
            for a in range(rows):
                if listed == LIST:
                    product_rows(outs, lefts, listed, slice_, rank, columns)
                    listed = np.int64(0)
                put_i64(lefts, listed, left + 4 * rank * a)
                put_i64(outs, listed, target + 4 * columns * a)
                listed += 1
        product_rows(outs, lefts, listed, slice_, rank, columns)


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_core_gradient_segments(job, begin, end):
    """Gradients of the slices [begin, end): parents transposed by entries' gradients, over the slice's entries.

    Leaves the slices themselves transposed, for the gradient of the level below.
    """
    below, gradient, out = get_i64(job, BELOW), get_i64(job, OUT), get_i64(job, CORE_GRADIENT)
    core, turned = get_i64(job, CORE), get_i64(job, TURNED)
    parents, entries = get_i64(job, PARENTS), get_i64(job, SEGMENT_ENTRIES)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    present, segments = get_i64(job, SEGMENT_DIGITS), get_i64(job, SEGMENTS)
    offsets = get_i64(job, SEGMENT_OFFSETS)
    lefts, slopes = address_list(), address_list()
    for digit in range(begin, end):
        place = 4 * rank * columns * digit
        s = _lower_bound(present, segments, digit)
        if s >= segments or get_i32(present, s) != digit:
            _clear(out + place, rank * columns)
            continue
        narrow = columns < NARROW and columns < rank
        total = turned + place if narrow else out + place
        listed, fresh = np.int64(0), np.int64(1)
        for j in range(get_i32(offsets, s), get_i32(offsets, s + 1)):
            u = np.int64(get_i32(entries, j))
            left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
            slope = gradient + 4 * rows * columns * u
            for a in range(rows):
                if listed == LIST:
                    _add_outer(total, lefts, slopes, listed, rank, columns, narrow, fresh)
                    listed, fresh = np.int64(0), np.int64(0)
                put_i64(lefts, listed, left + 4 * rank * a)
                put_i64(slopes, listed, slope + 4 * columns * a)
                listed += 1
        _add_outer(total, lefts, slopes, listed, rank, columns, narrow, fresh)
        if narrow:
            _transpose(out + place, total, columns, rank)
        _transpose(turned + place, core + place, rank, columns)


@inlined
def _add_outer(total, lefts, slopes, terms, rank, columns, narrow, fresh):
    if narrow:
        outer_sum(total, slopes, lefts, terms, columns, rank, fresh)
    else:
        outer_sum(total, lefts, slopes, terms, rank, columns, fresh)


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_below_gradient_chunks(job, begin, end):
    """Gradients of the parents of the chunks [begin, end): their entries' gradients by slices transposed."""
    turned, gradient, out = get_i64(job, TURNED), get_i64(job, OUT), get_i64(job, BELOW_GRADIENT)
    parents, digits, count = get_i64(job, PARENTS), get_i64(job, DIGITS), get_i64(job, COUNT)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    size = get_i64(job, CHUNK)
    first, last = begin * size, min(end * size, get_i64(job, BELOW_COUNT))
    slopes, slices = address_list(), address_list()
    u = _lower_bound(parents, count, first)
    for parent in range(first, last):
        total = out + 4 * rows * rank * parent
        listed, fresh = np.int64(0), np.int64(1)
        while u < count and get_i32(parents, u) == parent:
            if listed == LIST:
                product_sum(total, slopes, slices, listed, rows, rank, columns, columns, np.int64(1), fresh)
                listed, fresh = np.int64(0), np.int64(0)
            put_i64(slopes, listed, gradient + 4 * rows * columns * u)
            put_i64(slices, listed, turned + 4 * rank * columns * np.int64(get_i32(digits, u)))
            listed += 1
            u += 1
        product_sum(total, slopes, slices, listed, rows, rank, columns, columns, np.int64(1), fresh)
