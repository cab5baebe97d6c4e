"""Tensor-train products of sorted unique entries, and their transposes, as small GEMMs over whoever shares an operand.

A middle core's slices are large: entries of one digit share a slice, forward as the rows of one product, and the
slice's gradient is the sum over them. Where an optimizer is given, it steps a slice while its gradient is in the
caches, so that no gradient of the whole core is ever written. The last core's slices are small and what lies below
them is not: entries are taken in order, so that parents stream by and the core stays in the caches. Each sum has one
writer and a fixed order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native import narrow_tiles
from jrec.native.accumulate import F32, sum_lines
from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_f32, get_i32, get_i64, prefetch, put_f32, put_i64
from jrec.native.optimizer_steps import update_row
from jrec.native.small_gemm import (
    LIST,
    address_list,
    outer_sum,
    product_rows,
    product_rows_fetching,
    product_sum,
    transpose_block,
)

CHUNK_PRODUCTS = 1 << 18  # multiply-adds of a chunk: ten microseconds
CHUNK_DIGITS = 4  # of a chunk, backward by digit
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
    CORE_GRADIENT = 11  # (m, R, N); by digit with an optimizer (chunks, R, N), room for a slice's of each chunk
    CHUNK = 12  # entries, parents or digits of a chunk
    DIGIT_OFFSETS = 13  # (m + 1,) int32, where every digit's entries begin in DIGIT_ENTRIES
    DIGIT_ENTRIES = 14  # int32, entries by digit
    TURNED = (
        15  # slices transposed: by digit (chunks, N, R), room for one of a chunk, which stays in L1; else (m, N, R)
    )
    SHARES = 16  # (capacity, A, R), what entries add to their parents' gradients
    SLICES = 17  # m
    PIECES = 18  # of the entries, where they are taken in order
    PIECE_GRADIENTS = 19  # (PIECES, m, N, R), every piece's gradient of the core, transposed
    TOUCHED = 20  # (m,) int32, 1 for the digits that entries have; only where they are taken in order
    HYPER = 21  # what the optimizer is to do; 0 to leave the core as it is, and write its gradient
    KIND = 22  # the optimizer
    SLOT0 = 23
    SLOT1 = 24


JOB_WORDS = len(Job)
(
    BELOW, CORE, PARENTS, DIGITS, COUNT, ROWS, RANK, COLUMNS, OUT, BELOW_GRADIENT, BELOW_COUNT, CORE_GRADIENT, CHUNK,
    DIGIT_OFFSETS, DIGIT_ENTRIES, TURNED, SHARES, SLICES, PIECES, PIECE_GRADIENTS,
    TOUCHED, HYPER, KIND, SLOT0, SLOT1,
) = (int(word) for word in Job)  # fmt: skip


@inlined
def clear(address, size):
    """Sets ``size`` floats to zero."""
    for i in range(size):
        put_f32(address, i, np.float32(0))


@inlined
def fetch(address, size):
    """Asks for the cache lines of ``size`` floats, which are not where a hardware prefetcher would look."""
    for i in range(0, size, 16):
        prefetch(address + 4 * i)


@inlined
def transpose(out, source, rows, columns):
    """(rows, columns) float32 to (columns, rows)."""
    high, wide = rows - rows % 8, columns - columns % 8
    if columns == narrow_tiles.SIDE:
        for i in range(0, high, 8):
            narrow_tiles.turn_lines(out + 4 * i, source + 4 * columns * i, rows)
        wide = columns
    elif rows == narrow_tiles.SIDE:
        for j in range(0, wide, 8):
            narrow_tiles.turn_lines_back(out + 4 * rows * j, source + 4 * j, columns)
        high = rows
    else:
        for i in range(0, high, 8):
            for j in range(0, wide, 8):
                transpose_block(out + 4 * (j * rows + i), source + 4 * (i * columns + j), rows, columns)
    for i in range(rows):
        for j in range(wide if i < high else np.int64(0), columns):
            put_f32(out, j * rows + i, get_f32(source, i * columns + j))


@inlined
def lower_bound(array, size, value):
    """The first index of an ascending int32 array that holds ``value`` or more."""
    # Invariant: everything before ``low`` is less than the value, everything from ``high`` on is not.
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
    """Entries of the chunks [begin, end), one by one."""
    below, core, out = get_i64(job, BELOW), get_i64(job, CORE), get_i64(job, OUT)
    parents, digits = get_i64(job, PARENTS), get_i64(job, DIGITS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    size = get_i64(job, CHUNK)
    narrow = narrow_tiles.fits(rows, rank, columns)
    lefts, rights = address_list(), address_list()
    for u in range(begin * size, min(end * size, get_i64(job, COUNT))):
        left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
        slice_ = core + 4 * rank * columns * np.int64(get_i32(digits, u))
        target = out + 4 * rows * columns * u
        if narrow:
            for a in range(0, rows, narrow_tiles.SIDE):
                narrow_tiles.expand_tile(target + 4 * columns * a, left + 4 * rank * a, slice_, rank)
            continue
        put_i64(lefts, 0, left)
        put_i64(rights, 0, slice_)
        product_sum(target, lefts, rights, np.int64(1), rows, columns, rank, rank, np.int64(1), np.int64(1))


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_expand_digits(job, begin, end):
    """Entries of the digits [begin, end): a digit's entries are the rows of one product with its slice."""
    below, core, out = get_i64(job, BELOW), get_i64(job, CORE), get_i64(job, OUT)
    parents, entries, offsets = get_i64(job, PARENTS), get_i64(job, DIGIT_ENTRIES), get_i64(job, DIGIT_OFFSETS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    lefts, outs = address_list(), address_list()
    for digit in range(begin, end):
        slice_ = core + 4 * rank * columns * digit
        listed = np.int64(0)
        for j in range(get_i32(offsets, digit), get_i32(offsets, digit + 1)):
            u = np.int64(get_i32(entries, j))
            left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
            # An entry has one digit, so that every line of the result has one writer, though entries of a digit lie
            # anywhere.
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
def tt_transpose_digits(job, begin, end):
    """Backward by digit: gradients of the slices of the chunks [begin, end), and their entries' shares of parents'.

    A slice's gradient is its entries' parents transposed by their gradients, shares are those gradients by the slice
    transposed, and then the optimizer steps it: all while slice and gradients are in the caches.
    """
    core, offsets, steps = get_i64(job, CORE), get_i64(job, DIGIT_OFFSETS), get_i64(job, HYPER) != 0
    rank, columns = get_i64(job, RANK), get_i64(job, COLUMNS)
    size, slices = get_i64(job, CHUNK), get_i64(job, SLICES)
    lefts, rights = address_list(), address_list()
    for chunk in range(begin, end):
        # Scratch of the chunk, not of a thread: whichever thread takes it, no two write to one place.
        turned = get_i64(job, TURNED) + 4 * rank * columns * chunk
        for digit in range(chunk * size, min((chunk + 1) * size, slices)):
            place = 4 * rank * columns * digit
            out = get_i64(job, CORE_GRADIENT) + (4 * rank * columns * chunk if steps else place)
            first, last = np.int64(get_i32(offsets, digit)), np.int64(get_i32(offsets, digit + 1))
            # A slice that no entry chose has no gradient: it is not stepped, as a row without lookups is not.
            if first == last:
                if not steps:
                    clear(out, rank * columns)
                continue
            # The slice's memory is ``rank`` short lines; its transpose has few long ones, which fill vector registers.
            if columns < NARROW and columns < rank:
                _add_outers(job, turned, first, last, lefts, rights, np.int64(1))
                transpose(out, turned, columns, rank)
            else:
                _add_outers(job, out, first, last, lefts, rights, np.int64(0))
            # Shares need the slice as it was in the forward pass: the optimizer steps it only after them.
            transpose(turned, core + place, rank, columns)
            _write_shares(job, turned, first, last, lefts, rights, place + 4 * rank * columns)
            if steps:
                step_slice(job, digit, out)


@inlined
def step_slice(job, digit, gradient):
    """The optimizer's step of one slice."""
    size, none = get_i64(job, RANK) * get_i64(job, COLUMNS), np.int64(0)
    kind, core, hyper = get_i64(job, KIND), get_i64(job, CORE), get_i64(job, HYPER)
    slots = get_i64(job, SLOT0), get_i64(job, SLOT1)
    update_row(kind, core, np.int64(F32), digit, digit, size, size, gradient, slots[0], slots[1], none, hyper, none)


@inlined
def _add_outers(job, total, first, last, lefts, slopes, narrow):
    """The gradient of the slice whose entries are [first, last) by digit, into ``total``; transposed if ``narrow``."""
    below, gradient = get_i64(job, BELOW), get_i64(job, OUT)
    parents, entries = get_i64(job, PARENTS), get_i64(job, DIGIT_ENTRIES)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    listed, fresh = np.int64(0), np.int64(1)
    for j in range(first, last):
        u = np.int64(get_i32(entries, j))
        left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
        slope = gradient + 4 * rows * columns * u
        fetch(left, rows * rank)
        fetch(slope, rows * columns)
        for a in range(rows):
            if listed == LIST:
                _add_outer(total, lefts, slopes, listed, rank, columns, narrow, fresh)
                listed, fresh = np.int64(0), np.int64(0)
            put_i64(lefts, listed, left + 4 * rank * a)
            put_i64(slopes, listed, slope + 4 * columns * a)
            listed += 1
    _add_outer(total, lefts, slopes, listed, rank, columns, narrow, fresh)


@inlined
def _add_outer(total, lefts, slopes, terms, rank, columns, narrow, fresh):
    if narrow:
        outer_sum(total, slopes, lefts, terms, columns, rank, fresh)
    else:
        outer_sum(total, lefts, slopes, terms, rank, columns, fresh)


@inlined
def _write_shares(job, turned, first, last, outs, slopes, coming):
    """Gradients of the entries [first, last) by digit, by their slice transposed.

    Meanwhile the next slice is asked for, which begins ``coming`` bytes after the first, and its slots.
    """
    gradient, shares, entries = get_i64(job, OUT), get_i64(job, SHARES), get_i64(job, DIGIT_ENTRIES)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    core, slots, size = get_i64(job, CORE) + coming, get_i64(job, SLOT0) + coming, 4 * rank * columns
    listed = np.int64(0)
    for j in range(first, last):
        u = np.int64(get_i32(entries, j))
        for a in range(rows):
            if listed == LIST:
                product_rows_fetching(outs, slopes, listed, turned, columns, rank, core, slots, size)
                listed = np.int64(0)
            put_i64(slopes, listed, gradient + 4 * columns * (rows * u + a))
            put_i64(outs, listed, shares + 4 * rank * (rows * u + a))
            listed += 1
    product_rows_fetching(outs, slopes, listed, turned, columns, rank, core, slots, size)


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_sum_shares_chunks(job, begin, end):
    """Gradients of the parents of the chunks [begin, end): the sums of their entries' shares, in order."""
    shares, out, parents = get_i64(job, SHARES), get_i64(job, BELOW_GRADIENT), get_i64(job, PARENTS)
    count, size = get_i64(job, COUNT), get_i64(job, CHUNK)
    width = get_i64(job, ROWS) * get_i64(job, RANK)
    first, last = begin * size, min(end * size, get_i64(job, BELOW_COUNT))
    # Parents ascend, so the entries of a chunk's parents are one run; where it begins is the only search.
    u = lower_bound(parents, count, first)
    for parent in range(first, last):
        own = u
        while u < count and get_i32(parents, u) == parent:
            u += 1
        sum_lines(out + 4 * width * parent, shares + 4 * width * own, width, u - own, width)
