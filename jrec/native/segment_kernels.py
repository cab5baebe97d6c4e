"""Gather-reduce, and gather-reduce fused with an optimizer's step: forward and backward are one loop over segments.

Work is cut by lookups, not by segments, since one row may own a third of all lookups: chunk ``c`` takes the segments
whose *cost position*, ``offsets[s] + s * segment_cost``, lies in its range of ``CHUNK``. Segments longer than
``PIECE`` are summed in pieces of that length, each in the chunk where it begins, and the pieces are added in order
afterwards. Chunks and pieces depend only on the data, so results do not depend on the number of threads.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native.accumulate import (
    BF16,
    F32,
    copy_bf16,
    copy_f16,
    copy_f32,
    segments_bf16,
    segments_f16,
    segments_f32,
    sum_bf16,
    sum_f16,
    sum_f32,
)
from jrec.native.compile import c_function, inlined, kernel
from jrec.native.memory import get_f32, get_i32, get_i64, prefetch, put_f32, put_i32, put_i64
from jrec.native.optimizer_steps import (
    ADAM,
    EXACT_ADAM,
    EXACT_ADAMW,
    EXACT_MOMENTUM,
    EXACT_RMSPROP,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAM,
    ROWWISE_RMSPROP,
    SGD,
    update_row,
)

CHUNK = 2048  # cost of a chunk: ten microseconds of rows in cache, far above the price of handing it out
PIECE = 4096  # lookups; at least CHUNK, so that at most one long segment begins, and one goes on, in any chunk
SHORT = 8  # lookups of a segment, on average, up to which its end is taken without a branch
GATHER_COST, UPDATE_COST = 1, 4  # of a segment beside its lookups: writing a sum; reading and writing a row and slots


class Job(enum.IntEnum):
    """Words of the int64 job array. Names of arrays hold addresses."""

    SOURCE = 0
    DTYPE = 1  # of the source
    DIM = 2
    SOURCE_ROWS = 3
    INDICES = 4  # int32
    CAPACITY = 5  # of the indices
    OFFSETS = 6  # int32, 0 for segments of LENGTH
    LENGTH = 7
    SEGMENTS = 8
    WEIGHTS = 9  # float32 or 0
    POSITIONS = 10  # int32 or 0: where an index's weight is
    OUT = 11  # float32; 0 updates rows instead
    SEGMENT_COST = 12
    PARTIALS = (
        13  # scratch, (2 * chunks, dim) float32: the pieces beginning in each chunk; a segment's first one second
    )
    LONG = 14  # scratch, (chunks,) int32: the long segment that begins in each chunk, or -1
    ERROR = 15  # 1: malformed offsets; 2: out of memory
    ROWS = 16  # int32, or uint32, the row of each segment
    TABLE = 17
    TABLE_DTYPE = 18
    TABLE_ROWS = 19
    KIND = 20
    SLOT0 = 21
    SLOT1 = 22
    HYPER = 23  # int32, see optimizer_steps
    GRADIENTS = 24  # float32, one row a segment in place of a sum, or 0
    STRIDE = 25  # elements from row to row of the table and of its slots; at least DIM
    UNSIGNED = 26  # 1 where ROWS are uint32, of a table of up to 2^32 - 1 rows
    ROUNDING_ROWS = 27  # int32, what stochastic rounding hashes in place of ROWS, or 0
    SLOT2 = 28


JOB_WORDS = len(Job)
(
    SOURCE, DTYPE, DIM, SOURCE_ROWS, INDICES, CAPACITY, OFFSETS, LENGTH, SEGMENTS, WEIGHTS, POSITIONS, OUT,
    SEGMENT_COST, PARTIALS, LONG, ERROR, ROWS, TABLE, TABLE_DTYPE, TABLE_ROWS, KIND, SLOT0, SLOT1, HYPER, GRADIENTS,
    STRIDE, UNSIGNED, ROUNDING_ROWS, SLOT2,
) = (int(word) for word in Job)  # fmt: skip

malloc = c_function("malloc", types.int64, types.int64)
free = c_function("free", types.void, types.int64)


def max_chunks(capacity: int, segments: int, segment_cost: int) -> int:
    """How many chunks a job of this static size has at most."""
    return -(-(capacity + segments * segment_cost) // CHUNK)


def max_pieces(longest: int, chunks: int) -> int:
    """Rows of PARTIALS that a job needs whose segments have at most ``longest`` lookups."""
    return 2 * chunks if longest > PIECE else 0


@inlined
def _start(job, s):
    """First lookup of segment s, clamped into the indices whatever the offsets say."""
    offsets = get_i64(job, OFFSETS)
    if offsets == 0:
        return s * get_i64(job, LENGTH)
    # Chunks are cut before anybody has checked the offsets:
    # malformed ones may cut badly, but lead nowhere out of bounds.
    return min(max(np.int64(get_i32(offsets, s)), 0), get_i64(job, CAPACITY))


@inlined
def _position(job, s):
    # Well-formed ones strictly ascend, since every segment costs at least 1: a binary search finds one first segment
    # for each chunk, also among empty segments, and a chunk has at most CHUNK of them.
    return _start(job, s) + s * get_i64(job, SEGMENT_COST)


@inlined
def count_chunks(job):
    """How many chunks the job has."""
    return (_position(job, get_i64(job, SEGMENTS)) + CHUNK - 1) // CHUNK


@inlined
def _first_segment(job, chunk, chunks):
    """The first segment whose cost position is not below the chunk's."""
    low, high = np.int64(0), get_i64(job, SEGMENTS)
    if chunk == 0:
        return low
    # Callers cut by capacities (``max_chunks``), which offsets need not fill: chunks behind the last one get no
    # segments.
    if chunk >= chunks:
        return high
    while low < high:
        middle = (low + high) // 2
        if _position(job, middle) < chunk * CHUNK:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _sum(job, out, begin, end):
    source, dim, rows = get_i64(job, SOURCE), get_i64(job, DIM), get_i64(job, SOURCE_ROWS)
    indices, limit, dtype = get_i64(job, INDICES), get_i64(job, CAPACITY), get_i64(job, DTYPE)
    # A branch a segment, not a function pointer: each dtype's loop is inlined where it is called.
    weights, positions = get_i64(job, WEIGHTS), get_i64(job, POSITIONS)
    if dtype == F32:
        sum_f32(out, source, dim, rows, indices, begin, end, limit, weights, positions)
    elif dtype == BF16:
        sum_bf16(out, source, dim, rows, indices, begin, end, limit, weights, positions)
    else:
        sum_f16(out, source, dim, rows, indices, begin, end, limit, weights, positions)


@inlined
def _copied(job):
    """Whether every segment is one index without a weight, so that its sum is a copy."""
    plain = (get_i64(job, WEIGHTS) == 0) & (get_i64(job, OFFSETS) == 0) & (get_i64(job, LENGTH) == 1)
    return plain & (get_i64(job, OUT) != 0)


@inlined
def _copy(job, first, last):
    """Does segments [first, last) of a job whose segments are copied."""
    out, source, dim, rows = get_i64(job, OUT), get_i64(job, SOURCE), get_i64(job, DIM), get_i64(job, SOURCE_ROWS)
    indices, limit, dtype = get_i64(job, INDICES), get_i64(job, CAPACITY), get_i64(job, DTYPE)
    if dtype == F32:
        copy_f32(out, source, dim, rows, indices, first, last, limit)
    elif dtype == BF16:
        copy_bf16(out, source, dim, rows, indices, first, last, limit)
    else:
        copy_f16(out, source, dim, rows, indices, first, last, limit)


@inlined
def _row(job, s):
    """The row of segment s."""
    row = np.int64(get_i32(get_i64(job, ROWS), s))
    # Undoes the sign extension of uint32 rows that were read as int32.
    return row & np.int64(0xFFFFFFFF) if get_i64(job, UNSIGNED) != 0 else row


@inlined
def _update(job, s, gradient, scratch):
    row = _row(job, s)
    # A cast's padding names the row behind the last one: nothing of it is read or written.
    if (row >= 0) & (row < get_i64(job, TABLE_ROWS)):
        numbers = get_i64(job, ROUNDING_ROWS)
        number = row if numbers == 0 else np.int64(get_i32(numbers, s))
        update_row(
            get_i64(job, KIND), get_i64(job, TABLE), get_i64(job, TABLE_DTYPE), row, number, get_i64(job, DIM),
            get_i64(job, STRIDE), gradient, get_i64(job, SLOT0), get_i64(job, SLOT1), get_i64(job, SLOT2),
            get_i64(job, HYPER), scratch,
        )  # fmt: skip


@inlined
def _prefetch_lines(address, size):
    for byte in range(0, size, 64):
        prefetch(address + byte)


@inlined
def _prefetch_row(job, s):
    """Asks for the row and the slots of segment s, if there is one."""
    if s < get_i64(job, SEGMENTS):
        row, dim, kind = _row(job, s), get_i64(job, DIM), get_i64(job, KIND)
        # Asking for a line never faults, so a row of padding needs no check. Slots lie as ``update_row`` finds them.
        size = 4 if get_i64(job, TABLE_DTYPE) == F32 else 2
        at = row * get_i64(job, STRIDE)
        _prefetch_lines(get_i64(job, TABLE) + size * at, size * dim)
        if kind in (ROWWISE_ADAGRAD, ROWWISE_RMSPROP):
            prefetch(get_i64(job, SLOT0) + 4 * row)
        elif kind != SGD:
            _prefetch_lines(get_i64(job, SLOT0) + 4 * at, 4 * dim)
        if kind in (ADAM, EXACT_ADAM, EXACT_ADAMW):
            _prefetch_lines(get_i64(job, SLOT1) + 4 * at, 4 * dim)
        elif kind in (ROWWISE_ADAM, EXACT_MOMENTUM, EXACT_RMSPROP):
            prefetch(get_i64(job, SLOT1) + 4 * row)
        if kind in (EXACT_ADAM, EXACT_ADAMW):
            prefetch(get_i64(job, SLOT2) + 4 * row)


@inlined
def _piece(job, chunk, s, k, begin, end):
    # Two places a chunk are enough, since no piece is shorter than a chunk: piece 0 of the segment that begins here,
    # and one piece of the segment that goes on from an earlier chunk.
    out = get_i64(job, PARTIALS) + 4 * get_i64(job, DIM) * (2 * chunk + (1 if k == 0 else 0))
    _sum(job, out, begin + k * PIECE, min(end, begin + (k + 1) * PIECE))


@inlined
def _carried_piece(job, chunk, first):
    """The piece, if any, that begins in the chunk and belongs to the long segment before its first one."""
    s = first - 1
    begin, end, low = _start(job, s), _start(job, first), chunk * CHUNK
    # The first piece of segment ``s`` that begins at or after the chunk's begin. Pieces are no shorter than chunks, so
    # there is at most one, and piece 0 belongs to the chunk where the segment itself begins.
    k = (low - _position(job, s) + PIECE - 1) // PIECE
    exists = (end - begin > PIECE) & (k > 0) & (k * PIECE < end - begin)
    if exists & (_position(job, s) + k * PIECE < low + CHUNK):
        _piece(job, chunk, s, k, begin, end)


@inlined
def _well_formed(s, begin, end, capacity):
    return (begin <= end) & (begin >= 0) & (end <= capacity) & ((s > 0) | (begin == 0))


def _segments(sum_rows):
    @inlined
    def segments(job, chunk, first, last, scratch):
        """Does the segments [first, last) of a chunk, of a long one the first piece; says which is long, else -1."""
        source, dim, rows = get_i64(job, SOURCE), get_i64(job, DIM), get_i64(job, SOURCE_ROWS)
        indices, limit, out = get_i64(job, INDICES), get_i64(job, CAPACITY), get_i64(job, OUT)
        weights, positions, split = get_i64(job, WEIGHTS), get_i64(job, POSITIONS), get_i64(job, LONG) != 0
        gradients, offsets, length = get_i64(job, GRADIENTS), get_i64(job, OFFSETS), get_i64(job, LENGTH)
        long = np.int32(-1)
        # A chunk owns its segments, and rows of a cast are unique: no other thread reads or writes their sums, rows or
        # slots, so there are neither locks nor atomics.
        for s in range(first, last):
            begin, end = s * length, (s + 1) * length
            if offsets != 0:
                begin, end = np.int64(get_i32(offsets, s)), np.int64(get_i32(offsets, s + 1))
                if not _well_formed(s, begin, end, limit):
                    # Threads may write this word at once, all the same value; it is read when all are done.
                    put_i64(job, ERROR, 1)
                    continue
            if split & (end - begin > PIECE):
                long = np.int32(s)
                _piece(job, chunk, s, 0, begin, end)
                continue
            if out == 0:
                # Rows of a cast ascend, but lie far apart: no hardware prefetcher sees the next one coming.
                _prefetch_row(job, s + 8)
            # An update's gradient never leaves the thread's scratch, behind which ``update_row`` has room of its own.
            total = scratch if out == 0 else out + 4 * dim * s
            # A copy, since ``update_row`` scales, clips and decays the gradient in place, and the operand is not ours
            # to change.
            if gradients != 0:
                for d in range(dim):
                    put_f32(total, d, get_f32(gradients + 4 * dim * s, d))
            # An update goes on with a gradient of zero: momentum and weight decay move the row all the same.
            elif begin == end:
                for d in range(dim):
                    put_f32(total, d, np.float32(0))
            else:
                sum_rows(total, source, dim, rows, indices, begin, end, limit, weights, positions)
            if out == 0:
                _update(job, s, total, scratch + 4 * dim)
        return long

    return segments


_segments_f32, _segments_bf16, _segments_f16 = (_segments(sum_rows) for sum_rows in (sum_f32, sum_bf16, sum_f16))


@inlined
def _list_short(job, first, last, places, ends):
    """Lists the segments [first, last) that are not empty; how many, or -1 where they are not short or malformed."""
    offsets, lookups = get_i64(job, OFFSETS), _start(job, last) - _start(job, first)
    if (offsets == 0) | (get_i64(job, GRADIENTS) != 0) | (last - first > CHUNK) | (lookups > SHORT * (last - first)):
        return np.int64(-1)
    # The test above has ruled out more segments than the lists have room for, which only malformed offsets bring.
    listed, end, longest = np.int64(0), get_i32(offsets, first), np.int32(0)
    ascending = _well_formed(first, np.int64(end), np.int64(get_i32(offsets, last)), get_i64(job, CAPACITY))
    for s in range(first, last):
        begin, end = end, get_i32(offsets, s + 1)
        # Written always, and kept only where the segment is not empty: no branch on a length that nobody predicts.
        put_i32(places, listed, np.int32(s))
        put_i32(ends, listed, end)
        listed += np.int64(end > begin)
        longest, ascending = max(longest, end - begin), ascending & (begin <= end)
    return listed if ascending & (longest <= PIECE) else np.int64(-1)


@inlined
def _sum_short(job, first, last, places, ends, listed):
    """The sums of segments [first, last), of which these are not empty."""
    out, source, dim, rows = get_i64(job, OUT), get_i64(job, SOURCE), get_i64(job, DIM), get_i64(job, SOURCE_ROWS)
    indices, limit, dtype = get_i64(job, INDICES), get_i64(job, CAPACITY), get_i64(job, DTYPE)
    weights, positions = get_i64(job, WEIGHTS), get_i64(job, POSITIONS)
    # Empty segments are in no list, so that their sums are zeroed here; the others are overwritten.
    if listed < last - first:  # as the places of padding, which come last
        for i in range(dim * first, dim * last):
            put_f32(out, i, np.float32(0))
    begin, end = _start(job, first), _start(job, last)
    if dtype == F32:
        segments_f32(out, source, dim, rows, indices, begin, end, limit, weights, positions, places, ends)
    elif dtype == BF16:
        segments_bf16(out, source, dim, rows, indices, begin, end, limit, weights, positions, places, ends)
    else:
        segments_f16(out, source, dim, rows, indices, begin, end, limit, weights, positions, places, ends)


@kernel(types.void(types.int64, types.int64, types.int64))
def segment_chunks(job, begin, end):
    """Runs chunks [begin, end)."""
    # Without room for pieces (``max_pieces``) no segment can be long, and nothing is split.
    chunks, split = count_chunks(job), get_i64(job, LONG) != 0
    copied, dtype, update = _copied(job), get_i64(job, DTYPE), get_i64(job, OUT) == 0
    scratch = malloc(8 * get_i64(job, DIM) + 8 if update else np.int64(8 * (CHUNK + 1)))
    if scratch == 0:
        put_i64(job, ERROR, 2)
        return
    # Update: a row's gradient, and behind it a row widened from 16 bits. Else two lists of CHUNK + 1 int32.
    for chunk in range(begin, end):
        first, last = _first_segment(job, chunk, chunks), _first_segment(job, chunk + 1, chunks)
        if copied:
            _copy(job, first, last)
            continue
        # Also where no segment begins in this chunk: it may lie wholly within a long one.
        if split & (first > 0):
            _carried_piece(job, chunk, first)
        if not update:
            ends = scratch + 4 * (CHUNK + 1)
            listed = _list_short(job, first, last, scratch, ends)
            if listed >= 0:
                _sum_short(job, first, last, scratch, ends, listed)
                if split:
                    put_i32(get_i64(job, LONG), chunk, np.int32(-1))
                continue
        if dtype == F32:
            long = _segments_f32(job, chunk, first, last, scratch)
        elif dtype == BF16:
            long = _segments_bf16(job, chunk, first, last, scratch)
        else:
            long = _segments_f16(job, chunk, first, last, scratch)
        if split:
            put_i32(get_i64(job, LONG), chunk, long)
    free(scratch)


@inlined
def _sum_one_by_one(job):
    """All sums anew where offsets are malformed: chunks may have missed segments. Malformed ones become NaN."""
    out, offsets, dim = get_i64(job, OUT), get_i64(job, OFFSETS), get_i64(job, DIM)
    for s in range(get_i64(job, SEGMENTS)):
        begin, end = np.int64(get_i32(offsets, s)), np.int64(get_i32(offsets, s + 1))
        if _well_formed(s, begin, end, get_i64(job, CAPACITY)):
            _sum(job, out + 4 * dim * s, begin, end)
        else:
            for d in range(dim):
                put_f32(out + 4 * dim * s, d, np.float32(np.nan))


@kernel(types.void(types.int64))
def finish_segments(job):
    """Adds up the pieces of the long segments, once all chunks are done; of malformed sums makes NaN."""
    # Sums are made anew. Rows cannot be, some of which are stepped by now: an update fails (``_run_segments``).
    if (get_i64(job, ERROR) == 1) & (get_i64(job, OUT) != 0):
        _sum_one_by_one(job)
        put_i64(job, ERROR, 0)
        return
    if (get_i64(job, LONG) == 0) | (get_i64(job, ERROR) != 0):
        return
    dim, partials = get_i64(job, DIM), get_i64(job, PARTIALS)
    scratch = malloc(4 * dim + 8)
    if scratch == 0:
        put_i64(job, ERROR, 2)
        return
    # By chunk, so by segment, and each piece in order: the sums do not depend on which thread made which piece.
    for chunk in range(count_chunks(job)):
        s = np.int64(get_i32(get_i64(job, LONG), chunk))
        if s < 0:
            continue
        length, position = _start(job, s + 1) - _start(job, s), _position(job, s)
        total = partials + 4 * dim * (2 * chunk + 1)
        for k in range(1, (length + PIECE - 1) // PIECE):
            # Piece ``k`` lies with the chunk where it begins, in the
            # first of its two places; a segment's piece 0 has the second.
            piece = partials + 4 * dim * (2 * ((position + k * PIECE) // CHUNK))
            for d in range(dim):
                put_f32(total, d, get_f32(total, d) + get_f32(piece, d))
        if get_i64(job, OUT) != 0:
            for d in range(dim):
                put_f32(get_i64(job, OUT) + 4 * dim * s, d, get_f32(total, d))
        else:
            _update(job, s, total, scratch)
    free(scratch)
