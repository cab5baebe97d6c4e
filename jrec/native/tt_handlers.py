"""The XLA custom calls of the tensor-train kernels; see ``jrec.native.handlers`` and, for the operands, ``tt``."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native import tt_kernels as tt
from jrec.native.compile import address_of, inlined, kernel
from jrec.native.ffi import (
    FAILED_PRECONDITION,
    RESOURCE_EXHAUSTED,
    SERIAL_CHUNKS,
    answered_metadata,
    argument,
    bad_layout,
    data,
    dim,
    error,
    free,
    integer_attribute,
    known_layout,
    new_job,
    no_memory,
    parallel,
    pool_size,
    pool_task,
    result,
)
from jrec.native.memory import get_i32, get_i64, put_i64

_expand = address_of(tt.tt_expand_chunks.symbol)
_expand_segments = address_of(tt.tt_expand_segments.symbol)
_below_gradient = address_of(tt.tt_below_gradient_chunks.symbol)
_core_gradient = address_of(tt.tt_core_gradient_segments.symbol)


@inlined
def _count(buffer, capacity):
    """A () int32 operand, at least 0 and at most ``capacity``."""
    return min(max(np.int64(get_i32(data(buffer), 0)), 0), capacity)


@inlined
def _set_level(job, below, core, parents, digits, count):
    put_i64(job, tt.BELOW, data(below))
    put_i64(job, tt.CORE, data(core))
    put_i64(job, tt.PARENTS, data(parents))
    put_i64(job, tt.DIGITS, data(digits))
    put_i64(job, tt.COUNT, _count(count, dim(parents, 0)))
    put_i64(job, tt.ROWS, dim(below, 1))
    put_i64(job, tt.RANK, dim(below, 2))


@inlined
def _useful_threads(frame, job):
    """One where the whole job is not worth waking another."""
    if get_i64(job, tt.COUNT) * _entry_products(job) < SERIAL_CHUNKS * tt.CHUNK_PRODUCTS:
        return np.int64(1)
    return min(integer_attribute(frame, 0), pool_size(frame))


@inlined
def _entry_products(job):
    return get_i64(job, tt.ROWS) * get_i64(job, tt.RANK) * get_i64(job, tt.COLUMNS)


@inlined
def _run(frame, function, job, items, products, threads):
    """Runs a kernel over ``items``, in chunks of CHUNK_PRODUCTS multiply-adds at ``products`` each."""
    size = max(np.int64(1), tt.CHUNK_PRODUCTS // max(np.int64(1), products))
    put_i64(job, tt.CHUNK, size)
    parallel(frame, function, job, (items + size - 1) // size, threads)


@inlined
def _set_segments(job, frame, first):
    """From the operands of a cast by digit: rows, offsets, positions and num_unique."""
    rows = argument(frame, first)
    put_i64(job, tt.SEGMENT_DIGITS, data(rows))
    put_i64(job, tt.SEGMENT_OFFSETS, data(argument(frame, first + 1)))
    put_i64(job, tt.SEGMENT_ENTRIES, data(argument(frame, first + 2)))
    put_i64(job, tt.SEGMENTS, _count(argument(frame, first + 3), dim(rows, 0)))


@kernel(types.int64(types.int64), requires=(pool_task, tt.tt_expand_chunks, tt.tt_expand_segments))
def tt_expand_handler(frame):
    """(below, core, parents, digits, count, a cast by digit or empty arrays) -> (out,)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(tt.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    core = argument(frame, 1)
    _set_level(job, argument(frame, 0), core, argument(frame, 2), argument(frame, 3), argument(frame, 4))
    put_i64(job, tt.COLUMNS, dim(core, 2) * dim(core, 3))
    put_i64(job, tt.OUT, data(result(frame, 0)))
    products, threads = _entry_products(job), _useful_threads(frame, job)
    if dim(argument(frame, 5), 0) == 0:
        _run(frame, _expand(), job, get_i64(job, tt.COUNT), products, threads)
    else:
        _set_segments(job, frame, 5)
        parallel(frame, _expand_segments(), job, get_i64(job, tt.SEGMENTS), threads)
    free(job)
    return np.int64(0)


@kernel(types.int64(types.int64), requires=(pool_task, tt.tt_below_gradient_chunks, tt.tt_core_gradient_segments))
def tt_expand_transpose_handler(frame):
    """(gradient, below, core, parents, digits, count, below count, a cast by digit) -> (core gradient, below gradient,
    scratch of the core's size). The below gradient may lie where ``below`` does.
    """
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(tt.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    below, core = argument(frame, 1), argument(frame, 2)
    _set_level(job, below, core, argument(frame, 3), argument(frame, 4), argument(frame, 5))
    put_i64(job, tt.COLUMNS, dim(core, 2) * dim(core, 3))
    put_i64(job, tt.OUT, data(argument(frame, 0)))
    put_i64(job, tt.BELOW_COUNT, _count(argument(frame, 6), dim(below, 0)))
    _set_segments(job, frame, 7)
    put_i64(job, tt.CORE_GRADIENT, data(result(frame, 0)))
    put_i64(job, tt.BELOW_GRADIENT, data(result(frame, 1)))
    put_i64(job, tt.TURNED, data(result(frame, 2)))
    products, threads = _entry_products(job), _useful_threads(frame, job)
    parallel(frame, _core_gradient(), job, dim(core, 0), threads)
    parents = get_i64(job, tt.BELOW_COUNT)
    children = max(np.int64(1), get_i64(job, tt.COUNT) // max(np.int64(1), parents))
    _run(frame, _below_gradient(), job, parents, products * children, threads)
    free(job)
    return np.int64(0)
