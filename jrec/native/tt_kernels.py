"""Tensor-train products of sorted unique entries, and their transposes, one small product an entry.

Forward an entry is its parent by the slice of its digit. Backward the entries of one parent lie side by side, so each
thread owns the sums of some parents; and the entries of one digit are listed by a cast, so each thread owns the
gradient of some slices. No sum has two writers, so results do not depend on the number of threads.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_i32, get_i64, put_f32
from jrec.native.small_gemm import multiply, multiply_add

CHUNK_PRODUCTS = 1 << 18  # multiply-adds of a chunk: ten to twenty microseconds


class Job(enum.IntEnum):
    """Words of the int64 job array. Names of arrays hold addresses."""

    BELOW = 0  # (.., A, R) float32
    CORE = 1  # forward (m, R, N) float32, backward (m, N, R)
    PARENTS = 2  # int32
    DIGITS = 3  # int32
    COUNT = 4  # of entries
    ROWS = 5  # A
    RANK = 6  # R
    COLUMNS = 7  # N
    OUT = 8  # forward (.., A, N); backward the gradient of that, read
    BELOW_GRADIENT = 9
    BELOW_COUNT = 10
    CORE_GRADIENT = 11  # (m, R, N)
    CHUNK = 12  # entries, parents
    SEGMENT_DIGITS = 13  # int32, ascending: the digits that occur
    SEGMENT_OFFSETS = 14  # int32
    SEGMENT_ENTRIES = 15  # int32, entries by digit
    SEGMENTS = 16


JOB_WORDS = len(Job)
(
    BELOW, CORE, PARENTS, DIGITS, COUNT, ROWS, RANK, COLUMNS, OUT, BELOW_GRADIENT, BELOW_COUNT, CORE_GRADIENT, CHUNK,
    SEGMENT_DIGITS, SEGMENT_OFFSETS, SEGMENT_ENTRIES, SEGMENTS,
) = (int(word) for word in Job)  # fmt: skip


@inlined
def _clear(address, size):
    for i in range(size):
        put_f32(address, i, np.float32(0))


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
    """Entries of the chunks [begin, end)."""
    below, core, out = get_i64(job, BELOW), get_i64(job, CORE), get_i64(job, OUT)
    parents, digits = get_i64(job, PARENTS), get_i64(job, DIGITS)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    size = get_i64(job, CHUNK)
    for u in range(begin * size, min(end * size, get_i64(job, COUNT))):
        left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
        slice_ = core + 4 * rank * columns * np.int64(get_i32(digits, u))
        multiply(out + 4 * rows * columns * u, left, slice_, rows, rank, columns, rank, np.int64(1))


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_below_gradient_chunks(job, begin, end):
    """Gradients of the parents of the chunks [begin, end): entries' gradients by their slices transposed."""
    core, gradient, out = get_i64(job, CORE), get_i64(job, OUT), get_i64(job, BELOW_GRADIENT)
    parents, digits, count = get_i64(job, PARENTS), get_i64(job, DIGITS), get_i64(job, COUNT)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    size = get_i64(job, CHUNK)
    first, last = begin * size, min(end * size, get_i64(job, BELOW_COUNT))
    _clear(out + 4 * rows * rank * first, (last - first) * rows * rank)
    u = _lower_bound(parents, count, first)
    while u < count:
        parent = np.int64(get_i32(parents, u))
        if parent >= last:
            break
        slice_ = core + 4 * rank * columns * np.int64(get_i32(digits, u))
        slope = gradient + 4 * rows * columns * u
        multiply_add(out + 4 * rows * rank * parent, slope, slice_, rows, columns, rank, columns, np.int64(1))
        u += 1


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_core_gradient_chunks(job, begin, end):
    """Gradients of the slices [begin, end): parents transposed by entries' gradients, over the slice's entries."""
    below, gradient, out = get_i64(job, BELOW), get_i64(job, OUT), get_i64(job, CORE_GRADIENT)
    parents, entries = get_i64(job, PARENTS), get_i64(job, SEGMENT_ENTRIES)
    rows, rank, columns = get_i64(job, ROWS), get_i64(job, RANK), get_i64(job, COLUMNS)
    present, segments = get_i64(job, SEGMENT_DIGITS), get_i64(job, SEGMENTS)
    offsets = get_i64(job, SEGMENT_OFFSETS)
    for digit in range(begin, end):
        total = out + 4 * rank * columns * digit
        _clear(total, rank * columns)
        s = _lower_bound(present, segments, digit)
        if s < segments and get_i32(present, s) == digit:
            for j in range(get_i32(offsets, s), get_i32(offsets, s + 1)):
                u = np.int64(get_i32(entries, j))
                left = below + 4 * rows * rank * np.int64(get_i32(parents, u))
                slope = gradient + 4 * rows * columns * u
                multiply_add(total, left, slope, rank, rows, columns, np.int64(1), rank)
