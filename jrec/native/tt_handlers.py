"""The XLA custom calls of the tensor-train kernels; see ``jrec.native.handlers`` and, for the operands, ``tt``."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native import tt_kernels as tt
from jrec.native import tt_piece_kernels as pieces
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
    num_arguments,
    num_results,
    parallel,
    pool_size,
    pool_task,
    result,
)
from jrec.native.memory import get_i64, put_i64
from jrec.native.tt_index_handlers import count_of

GRADIENT_RESULTS = 5  # of both transposes, before an optimizer's

_expand = address_of(tt.tt_expand_chunks.symbol)
_expand_digits = address_of(tt.tt_expand_digits.symbol)
_transpose_digits = address_of(tt.tt_transpose_digits.symbol)
_sum_shares = address_of(tt.tt_sum_shares_chunks.symbol)
_turn = address_of(pieces.tt_turn_chunks.symbol)
_transpose_pieces = address_of(pieces.tt_transpose_pieces.symbol)
_sum_pieces = address_of(pieces.tt_sum_pieces_chunks.symbol)


@inlined
def _set_level(job, below, core, parents, digits, count):
    put_i64(job, tt.BELOW, data(below))
    put_i64(job, tt.CORE, data(core))
    put_i64(job, tt.PARENTS, data(parents))
    put_i64(job, tt.DIGITS, data(digits))
    put_i64(job, tt.COUNT, count_of(count, dim(parents, 0)))
    put_i64(job, tt.ROWS, dim(below, 1))
    put_i64(job, tt.RANK, dim(below, 2))
    put_i64(job, tt.COLUMNS, dim(core, 2) * dim(core, 3))
    put_i64(job, tt.SLICES, dim(core, 0))


@inlined
def _set_gradients(job, frame):
    """From what both transposes take and give: the gradient, the below count; gradients of core and below, scratch."""
    put_i64(job, tt.OUT, data(argument(frame, 0)))
    put_i64(job, tt.BELOW_COUNT, count_of(argument(frame, 6), dim(argument(frame, 1), 0)))
    put_i64(job, tt.CORE_GRADIENT, data(result(frame, 0)))
    put_i64(job, tt.BELOW_GRADIENT, data(result(frame, 1)))
    put_i64(job, tt.TURNED, data(result(frame, 2)))


@inlined
def _set_step(job, frame, operands):
    """From what follows the other operands where there is an optimizer: hyperparameters and slots; the core is aliased.

    Results are then the core and its slots, after what both transposes give.
    """
    if num_arguments(frame) == operands:
        return
    put_i64(job, tt.HYPER, data(argument(frame, operands)))
    put_i64(job, tt.KIND, integer_attribute(frame, 1))
    # Counted from the results, so that one handler serves optimizers of any number of slots.
    core, slots = GRADIENT_RESULTS, num_results(frame) - GRADIENT_RESULTS - 1
    put_i64(job, tt.CORE, data(result(frame, core)))
    if slots > 0:
        put_i64(job, tt.SLOT0, data(result(frame, core + 1)))
    if slots > 1:
        put_i64(job, tt.SLOT1, data(result(frame, core + 2)))


@inlined
def _set_digit_order(job, offsets, entries):
    put_i64(job, tt.DIGIT_OFFSETS, data(offsets))
    put_i64(job, tt.DIGIT_ENTRIES, data(entries))


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


@kernel(types.int64(types.int64), requires=(pool_task, tt.tt_expand_chunks, tt.tt_expand_digits))
def tt_expand_handler(frame):
    """(below, core, parents, digits, count, order by digit or empty arrays) -> (out,)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job = new_job(tt.JOB_WORDS)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    core = argument(frame, 1)
    _set_level(job, argument(frame, 0), core, argument(frame, 2), argument(frame, 3), argument(frame, 4))
    put_i64(job, tt.OUT, data(result(frame, 0)))
    products, threads = _entry_products(job), _useful_threads(frame, job)
    if dim(argument(frame, 5), 0) == 0:
        _run(frame, _expand(), job, get_i64(job, tt.COUNT), products, threads)
    else:
        _set_digit_order(job, argument(frame, 5), argument(frame, 6))
        parallel(frame, _expand_digits(), job, dim(core, 0), threads)
    free(job)
    return np.int64(0)


@kernel(types.int64(types.int64), requires=(pool_task, tt.tt_transpose_digits, tt.tt_sum_shares_chunks))
def tt_transpose_digits_handler(frame):
    """(gradient, below, core, parents, digits, count, below count, order by digit; hyper, slots... or nothing) -> (core
    gradient, below gradient, core transposed, entries' shares, nothing; core, slots... or nothing). The below gradient
    may lie where ``below`` does; core and slots lie where they did.
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
    _set_gradients(job, frame)
    _set_digit_order(job, argument(frame, 7), argument(frame, 8))
    _set_step(job, frame, np.int64(9))
    put_i64(job, tt.SHARES, data(result(frame, 3)))
    put_i64(job, tt.CHUNK, tt.CHUNK_DIGITS)
    threads = _useful_threads(frame, job)
    parallel(frame, _transpose_digits(), job, dim(result(frame, 2), 0), threads)
    # A share is read at a quarter of the rate of a multiply-add in registers.
    parents, count = get_i64(job, tt.BELOW_COUNT), get_i64(job, tt.COUNT)
    width = get_i64(job, tt.ROWS) * get_i64(job, tt.RANK)
    _run(frame, _sum_shares(), job, parents, 4 * width * (1 + count // max(np.int64(1), parents)), threads)
    free(job)
    return np.int64(0)


@kernel(
    types.int64(types.int64),
    requires=(pool_task, pieces.tt_turn_chunks, pieces.tt_transpose_pieces, pieces.tt_sum_pieces_chunks),
)
def tt_transpose_pieces_handler(frame):
    """(gradient, below, core, parents, digits, count, below count; hyper, slots... or nothing) -> (core gradient, below
    gradient, core transposed, the core's gradients by piece, touched slices; core, slots... or nothing). As above.
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
    _set_gradients(job, frame)
    room, slices = dim(result(frame, 3), 0), get_i64(job, tt.SLICES)
    wanted = get_i64(job, tt.COUNT) // max(np.int64(1), pieces.PIECE_REPEATS * slices)
    wanted += wanted % 2  # so that two threads have as many each
    # As many as sizes and counts say, never the threads: sums over pieces keep one order.
    put_i64(job, tt.PIECES, min(max(np.int64(1), wanted), room))
    put_i64(job, tt.PIECE_GRADIENTS, data(result(frame, 3)))
    put_i64(job, tt.TOUCHED, data(result(frame, 4)))
    _set_step(job, frame, np.int64(7))
    threads, size = _useful_threads(frame, job), get_i64(job, tt.RANK) * get_i64(job, tt.COLUMNS)
    _run(frame, _turn(), job, slices, 16 * size, threads)  # to move a float takes as long as that many
    parallel(frame, _transpose_pieces(), job, get_i64(job, tt.PIECES), threads)
    _run(frame, _sum_pieces(), job, slices, 4 * size * get_i64(job, tt.PIECES), threads)
    free(job)
    return np.int64(0)
