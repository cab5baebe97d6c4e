"""The XLA custom calls: each reads its buffers from the call frame, fills a job and runs the kernels on XLA's threads.

The operands come in the order of the calls in ``jrec.native.xla``, which also allocates results and scratch.
"""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native import cast_kernels as cast
from jrec.native import segment_kernels as seg
from jrec.native.accumulate import BF16, F16, F32
from jrec.native.compile import address_of, inlined, kernel
from jrec.native.ffi import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    SERIAL_CHUNKS,
    answered_metadata,
    argument,
    bad_layout,
    call1,
    data,
    dim,
    dtype,
    error,
    free,
    integer_attribute,
    known_layout,
    message,
    new_job,
    no_memory,
    num_arguments,
    num_results,
    parallel,
    pool_size,
    pool_task,
    rank,
    result,
)
from jrec.native.memory import get_i32, get_i64, put_i64

_XLA_BF16, _XLA_F16 = 16, 10

_segment_chunks, _finish_segments = address_of(seg.segment_chunks.symbol), address_of(seg.finish_segments.symbol)
_cast_chunks, _cast_advance = address_of(cast.cast_chunks.symbol), address_of(cast.cast_advance.symbol)

_bad_offsets = message("jrec: a cast's offsets must ascend from 0 to at most its lookups; use tensor_cast's")


@inlined
def _dtype_code(buffer):
    kind = dtype(buffer)
    return BF16 if kind == _XLA_BF16 else (F16 if kind == _XLA_F16 else F32)


@inlined
def _run_segments(frame, job, threads):
    chunks = seg.count_chunks(job)
    # The number of threads changes no bit: chunks and pieces follow from the data.
    threads = min(threads, pool_size(frame)) if chunks >= SERIAL_CHUNKS else np.int64(1)
    parallel(frame, _segment_chunks(), job, chunks, threads)
    # Pieces of long segments lie in several chunks, so they are added only when all chunks are done, by one thread.
    call1(_finish_segments(), job)
    failure = get_i64(job, seg.ERROR)
    free(job)
    if failure == 1:
        return error(frame, _bad_offsets(), INVALID_ARGUMENT)
    if failure == 2:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    return np.int64(0)


@inlined
def _optional(buffer):
    """Address of an operand that is empty where there is none."""
    # XLA knows no absent operand, so that an empty array stands for None.
    return data(buffer) if dim(buffer, 0) > 0 else np.int64(0)


@inlined
def _set_segments(job, source, indices, offsets, weights):
    put_i64(job, seg.SOURCE, data(source))
    put_i64(job, seg.DTYPE, _dtype_code(source))
    put_i64(job, seg.SOURCE_ROWS, dim(source, 0))
    put_i64(job, seg.DIM, dim(source, 1))
    put_i64(job, seg.INDICES, data(indices))
    put_i64(job, seg.WEIGHTS, _optional(weights))
    if rank(indices) == 2:
        put_i64(job, seg.SEGMENTS, dim(indices, 0))
        put_i64(job, seg.LENGTH, dim(indices, 1))
        put_i64(job, seg.CAPACITY, dim(indices, 0) * dim(indices, 1))
    else:
        put_i64(job, seg.SEGMENTS, dim(offsets, 0) - 1)
        put_i64(job, seg.OFFSETS, data(offsets))
        put_i64(job, seg.CAPACITY, dim(indices, 0))


@kernel(types.int64(types.int64), requires=(pool_task, seg.segment_chunks, seg.finish_segments))
def gather_reduce_handler(frame):
    """(source, indices, offsets or empty, weights or empty) -> (out, partials, long)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(seg.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    _set_segments(job, argument(frame, 0), argument(frame, 1), argument(frame, 2), argument(frame, 3))
    put_i64(job, seg.SEGMENT_COST, seg.GATHER_COST)
    put_i64(job, seg.OUT, data(result(frame, 0)))
    put_i64(job, seg.PARTIALS, data(result(frame, 1)))
    put_i64(job, seg.LONG, _optional(result(frame, 2)))
    return _run_segments(frame, job, integer_attribute(frame, 0))


@inlined
def _set_table(job, frame, operands, scratch):
    """The table follows ``scratch`` results, its slots follow the table; as operands they follow ``operands`` others.

    The last operand may be the rows' numbers for rounding.
    """
    buffers = num_results(frame) - scratch
    # Not the operand: the result is aliased with it, and where XLA could not give it the operand's own memory, it has
    # copied the table there before this call.
    table = result(frame, scratch)
    put_i64(job, seg.TABLE, data(table))
    put_i64(job, seg.TABLE_DTYPE, _dtype_code(table))
    put_i64(job, seg.TABLE_ROWS, dim(table, 0))
    stride = np.int64(1)  # a core of a tensor train has rows of three axes
    for axis in range(1, rank(table)):
        stride *= dim(table, axis)
    put_i64(job, seg.STRIDE, stride)
    put_i64(job, seg.SEGMENT_COST, seg.UPDATE_COST)
    put_i64(job, seg.KIND, integer_attribute(frame, 0))
    put_i64(job, seg.HYPER, data(argument(frame, 0)))
    put_i64(job, seg.ROWS, data(argument(frame, 1)))
    if buffers > 1:
        put_i64(job, seg.SLOT0, data(result(frame, scratch + 1)))
    if buffers > 2:
        put_i64(job, seg.SLOT1, data(result(frame, scratch + 2)))
    if buffers > 3:
        put_i64(job, seg.SLOT2, data(result(frame, scratch + 3)))
    if num_arguments(frame) > operands + buffers:
        put_i64(job, seg.ROUNDING_ROWS, data(argument(frame, operands + buffers)))


@kernel(types.int64(types.int64), requires=(pool_task, seg.segment_chunks, seg.finish_segments))
def row_update_handler(frame):
    """(hyper, rows, gradients, table, slots..., numbers for rounding or nothing) -> (table, slots...), aliased."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(seg.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    _set_table(job, frame, 3, 0)
    put_i64(job, seg.SEGMENTS, dim(argument(frame, 1), 0))
    put_i64(job, seg.GRADIENTS, data(argument(frame, 2)))
    put_i64(job, seg.DIM, dim(argument(frame, 2), 1))
    return _run_segments(frame, job, integer_attribute(frame, 1))


@kernel(types.int64(types.int64), requires=(pool_task, seg.segment_chunks, seg.finish_segments))
def casted_update_handler(frame):
    """(hyper, rows, offsets, sources, positions, bag gradients, weights or empty, num_unique, table, slots..., numbers
    for rounding or nothing) -> (partials, long, table, slots...), the last ones aliased.
    """
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(seg.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    _set_segments(job, argument(frame, 5), argument(frame, 3), argument(frame, 2), argument(frame, 6))
    _set_table(job, frame, 8, 2)
    # A buffer of the program, not a static size, and possibly more than there is room for.
    unique = np.int64(get_i32(data(argument(frame, 7)), 0))
    put_i64(job, seg.SEGMENTS, min(max(unique, 0), dim(argument(frame, 1), 0)))
    put_i64(job, seg.POSITIONS, data(argument(frame, 4)))
    put_i64(job, seg.PARTIALS, data(result(frame, 0)))
    put_i64(job, seg.LONG, _optional(result(frame, 1)))
    return _run_segments(frame, job, integer_attribute(frame, 1))


@kernel(types.int64(types.int64), requires=(pool_task, cast.cast_chunks, cast.cast_advance))
def tensor_cast_handler(frame):
    """(ids, offsets or empty) -> (rows, offsets, sources, positions, num_unique, pairs, bag_of, counters)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(cast.JOB_WORDS + cast.TABLE_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    ids, offsets = argument(frame, 0), argument(frame, 1)
    num_rows, threads = integer_attribute(frame, 0), integer_attribute(frame, 1)
    put_i64(job, cast.IDS, data(ids))
    if rank(ids) == 2:
        capacity = dim(ids, 0) * dim(ids, 1)
        put_i64(job, cast.NUM_BAGS, dim(ids, 0))
        put_i64(job, cast.LENGTH, dim(ids, 1))
    else:
        capacity = dim(ids, 0)
        put_i64(job, cast.NUM_BAGS, dim(offsets, 0) - 1)
        put_i64(job, cast.OFFSETS, data(offsets))
    # As many chunks as the call has made room for counters.
    chunks = dim(result(frame, 7), 0) >> cast.MAX_DIGIT_BITS
    threads = min(threads, pool_size(frame)) if chunks > 1 else np.int64(1)
    table = job + 8 * cast.JOB_WORDS
    put_i64(job, cast.CAPACITY, capacity)
    put_i64(job, cast.NUM_ROWS, num_rows)
    put_i64(job, cast.UNIQUE_CAPACITY, dim(result(frame, 0), 0))
    put_i64(job, cast.TABLES, table)
    put_i64(job, cast.NUM_TABLES, 1)
    put_i64(job, cast.CHUNKS, chunks if threads > 1 else np.int64(1))
    put_i64(job, cast.ROWS_OUT, data(result(frame, 0)))
    put_i64(job, cast.OFFSETS_OUT, data(result(frame, 1)))
    put_i64(job, cast.SOURCES_OUT, data(result(frame, 2)))
    put_i64(job, cast.POSITIONS_OUT, data(result(frame, 3)))
    put_i64(job, cast.NUM_UNIQUE_OUT, data(result(frame, 4)))
    put_i64(job, cast.PAIRS, data(result(frame, 5)))
    put_i64(job, cast.BAG_OF, data(result(frame, 6)))
    put_i64(job, cast.COUNTERS, data(result(frame, 7)))
    put_i64(table, cast.T_END, capacity)
    put_i64(table, cast.T_ROWS, num_rows)
    # Serial work between phases, chunks of a phase in parallel: every ``parallel`` is a barrier for the next phase.
    count = call1(_cast_advance(), job)
    while count > 0:
        parallel(frame, _cast_chunks(), job, count, threads)
        count = call1(_cast_advance(), job)
    free(job)
    return np.int64(0)
