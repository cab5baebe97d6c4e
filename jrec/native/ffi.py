"""XLA's foreign function interface as seen from a numba kernel: call frames, errors, and XLA's own thread pool.

Offsets follow ``xla/ffi/api/c_api.h`` at API version 0.4 on a 64-bit machine. Minor versions only add fields at the
end; of another major version ``jrec.native.xla.unavailable`` lets no handler be registered. Every handler checks the
sizes of the structures it is given before it reads them, and tests/test_native_ffi.py compares all offsets with the
header that the installed jaxlib ships.

Kernels inside jit run on XLA's intra-op threads, so that several handlers at once, as under ``shard_map``, share one
pool and never oversubscribe the machine. Chunks are dealt in contiguous shares. A thread first takes the share of the
core it is on, and then what others left: so most of what one kernel wrote is read by the next on the same core,
rather than from another's cache, which may be on another chiplet. The caller works too and then waits only for chunks
that a thread is running already, so it finishes even if no pool thread ever is free; a task that starts late finds the
shares spent and touches nothing but the small reference-counted state.
"""

from __future__ import annotations

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jrec.native.compile import address_of, c_function, inlined, kernel
from jrec.native.llvm_types import Intrinsic
from jrec.native.memory import fetch_add, get_i32, get_i64, load_acquire, put_i32, put_i64

API_MAJOR, API_MINOR = 0, 4

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGS, _RESULTS, _ATTRS = 8, 16, 24, 40, 80, 120
_FRAME_SIZE, _LIST_SIZE = 168, 40
# XLA_FFI_Api
_ERROR_CREATE, _ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 48, 64, 136, 144
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 8, 9
SERIAL_CHUNKS = 4  # of a job; fewer are not worth waking a thread: some tens of microseconds of work

_METADATA_EXTENSION = 1

malloc = c_function("malloc", types.int64, types.int64)
free = c_function("free", types.void, types.int64)
sched_yield = c_function("sched_yield", types.int32)


def _caller(result: types.Type, count: int) -> Intrinsic:
    """An intrinsic that calls the C function at an address with ``count`` int64 arguments."""

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType() if result == types.void else word, [word] * count)
        value = builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value() if result == types.void else value

    if count == 1:

        @intrinsic
        def call1(typing_context, address, argument):
            return result(types.int64, types.int64), codegen

        return call1

    @intrinsic
    def call3(typing_context, address, first, second, third):
        return result(*[types.int64] * 4), codegen

    return call3


_call_api = _caller(types.int64, 1)
call1 = _caller(types.int64, 1)
_call_chunks = _caller(types.void, 3)


def message(text: str) -> Intrinsic:
    """An intrinsic that gives the address of a constant C string."""

    @intrinsic
    def address(typing_context):
        def codegen(context, builder, signature, args):
            return builder.ptrtoint(context.insert_const_string(builder.module, text), ir.IntType(64))

        return types.int64(), codegen

    return address


bad_layout = message("jrec: this jaxlib's FFI call frames have an unknown layout; use implementation='xla'")
no_memory = message("jrec: out of memory in a native kernel")


def _on_stack(words: int) -> Intrinsic:
    """An intrinsic that gives the address of some 64-bit words, which last until the kernel returns."""

    @intrinsic
    def address(typing_context):
        def codegen(context, builder, signature, args):
            return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), words)), ir.IntType(64))

        return types.int64(), codegen

    return address


_error_words = _on_stack(4)


@inlined
def error(frame, text, code):
    """Creates an XLA error, to be returned by the handler."""
    # XLA_FFI_Error_Create_Args: its size, no extension, the message, the code. On the stack, since the error may be
    # that there is no memory: a handler that had none for these words, too, would say that all went well.
    words = _error_words()
    put_i64(words, 0, 32)
    put_i64(words, 1, 0)
    put_i64(words, 2, text)
    put_i64(words, 3, code)
    return _call_api(get_i64(get_i64(frame + _API, 0) + _ERROR_CREATE, 0), words)


@inlined
def answered_metadata(frame):
    """Whether XLA only asked which API version the handler speaks; if so, says it."""
    # XLA calls a handler like this once, when it is registered; the frame has no buffers then.
    extension = get_i64(frame + _EXTENSION, 0)
    if extension == 0:
        return False
    if get_i32(extension + 8, 0) != _METADATA_EXTENSION:
        return False
    version = get_i64(extension + 24, 0) + 8
    put_i32(version + 16, 0, np.int32(API_MAJOR))
    put_i32(version + 20, 0, np.int32(API_MINOR))
    return True


@inlined
def known_layout(frame):
    """Whether the call frame has the layout that this module reads."""
    # A frame of a newer minor version may be longer; lists, of which elements are read, must have the known size.
    fits = (get_i64(frame, 0) >= _FRAME_SIZE - 8) & (get_i64(frame + _ARGS, 0) == _LIST_SIZE)
    return fits & (get_i64(frame + _RESULTS, 0) == _LIST_SIZE)


@inlined
def argument(frame, i):
    """Buffer ``i`` of the arguments."""
    return get_i64(get_i64(frame + _ARGS + 32, 0), i)


@inlined
def num_arguments(frame):
    """How many buffers the arguments are."""
    return get_i64(frame + _ARGS + 16, 0)


@inlined
def num_results(frame):
    """How many buffers the results are."""
    return get_i64(frame + _RESULTS + 16, 0)


@inlined
def result(frame, i):
    """Buffer ``i`` of the results."""
    return get_i64(get_i64(frame + _RESULTS + 32, 0), i)


@inlined
def data(buffer):
    """Address of a buffer's elements."""
    return get_i64(buffer + 24, 0)


@inlined
def dtype(buffer):
    """XLA's code of a buffer's element type."""
    return np.int64(get_i32(buffer + 16, 0))


@inlined
def rank(buffer):
    """A buffer's number of dimensions."""
    return get_i64(buffer + 32, 0)


@inlined
def dim(buffer, i):
    """A buffer's size along dimension ``i``."""
    return get_i64(get_i64(buffer + 40, 0), i)


@inlined
def integer_attribute(frame, i):
    """The int64 attribute number ``i`` by name."""
    # Sorted by name, whatever the order of the call: of ``kind`` and ``threads`` the first is ``kind``.
    scalar = get_i64(get_i64(frame + _ATTRS + 40, 0), i)
    return get_i64(get_i64(scalar + 8, 0), 0)


# State of one parallel run: int64 words. XLA may start a task after the run is over, so the last to leave frees it.
# Words that threads write while others work are lines apart: between chiplets a line takes 0.2 us, at every chunk.
_APART = 16  # words: two lines, since cores fetch them in pairs
_FUNCTION, _JOB, _SHARES, _CALL = range(4)
_REFERENCES, _FINISHED = 2 * _APART, 2 * _APART + 1
_FIRST_SHARE = 3 * _APART
_NEXT, _END = range(2)  # of a share's words


if hasattr(ctypes.CDLL(None), "sched_getcpu"):
    _core = c_function("sched_getcpu", types.int32)
else:  # as on macOS: all threads begin with the first share

    @inlined
    def _core():
        return np.int32(0)


@inlined
def _share(state, i):
    return state + 8 * (_FIRST_SHARE + i * _APART)


@inlined
def _work(state):
    """Takes the chunks of this core's share, then what is left of the others'; counts them as finished at the end."""
    shares, finished = get_i64(state, _SHARES), 0
    # Only a hint, which may be out of date by the next line: any share is right, the own one is quicker.
    own = np.int64(_core()) % shares
    for i in range(own, own + shares):
        share = _share(state, i if i < shares else i - shares)
        end = get_i64(share, _END)
        # A look before the increment: a spent share is not written
        # by everybody who passes, and its counter cannot run away.
        while load_acquire(share + 8 * _NEXT) < end:
            chunk = fetch_add(share + 8 * _NEXT, 1)
            if chunk >= end:
                break
            _call_chunks(get_i64(state, _FUNCTION), get_i64(state, _JOB), chunk, chunk + 1)
            finished += 1
    # Once, not by chunk: the line of the counter moves between cores as often as threads finish. The atomic addition
    # also publishes what the chunks wrote, which the caller sees when it reads the counter.
    if finished > 0:
        fetch_add(state + 8 * _FINISHED, finished)


@inlined
def _leave(state):
    # The last one frees: a pool thread may begin its task when the caller has long returned.
    if fetch_add(state + 8 * _REFERENCES, -1) == 1:
        free(state)


@kernel(types.void(types.int64))
def pool_task(state):
    """What XLA's pool threads run."""
    _work(state)
    _leave(state)


_pool_task = address_of(pool_task.symbol)


@inlined
def _ignore(api, failure):
    """Destroys an error of the API; says whether there was one."""
    if failure == 0:
        return False
    words = malloc(24)
    if words != 0:
        put_i64(words, 0, 24)
        put_i64(words, 1, 0)
        put_i64(words, 2, failure)
        _call_api(get_i64(api + _ERROR_DESTROY, 0), words)
        free(words)
    return True


@inlined
def pool_size(frame):
    """Threads of XLA's intra-op pool; 1 where there is none."""
    api = get_i64(frame + _API, 0)
    words = malloc(40)
    if words == 0:
        return np.int64(1)
    put_i64(words, 0, 32)
    put_i64(words, 1, 0)
    put_i64(words, 2, get_i64(frame + _CONTEXT, 0))
    put_i64(words, 3, words + 32)
    put_i64(words, 4, 1)
    failed = _ignore(api, _call_api(get_i64(api + _NUM_THREADS, 0), words))
    size = np.int64(1) if failed else get_i64(words, 4)
    free(words)
    return size


@inlined
def parallel(frame, function, job, chunks, threads):
    """Runs ``function(job, begin, end)`` over [0, chunks) on up to ``threads`` threads, this one included."""
    # Shares and threads are equally many: the calling thread takes one, too.
    shares = min(threads, chunks)
    state = malloc(8 * (_FIRST_SHARE + shares * _APART)) if shares > 1 else np.int64(0)
    # One thread, or no memory for the state: the work is done here, in the same chunks, with the same results.
    if state == 0:
        _call_chunks(function, job, 0, chunks)
        return
    api, call = get_i64(frame + _API, 0), state + 8 * _CALL
    # Plain stores: nobody else knows the state before a task is scheduled, which publishes them. The first reference is
    # the caller's own.
    put_i64(state, _REFERENCES, 1)
    put_i64(state, _FINISHED, 0)
    put_i64(state, _FUNCTION, function)
    put_i64(state, _JOB, job)
    put_i64(state, _SHARES, shares)
    for i in range(shares):
        put_i64(_share(state, i), _NEXT, chunks * i // shares)
        put_i64(_share(state, i), _END, chunks * (i + 1) // shares)
    # XLA_FFI_ThreadPool_Schedule_Args. XLA reads it during the call, so one serves all tasks.
    put_i64(call, 0, 40)
    put_i64(call, 1, 0)
    put_i64(call, 2, get_i64(frame + _CONTEXT, 0))
    put_i64(call, 3, _pool_task())
    put_i64(call, 4, state)
    for _ in range(shares - 1):
        # Before the task can run and leave. Where XLA refuses it, nobody else will take the reference back.
        fetch_add(state + 8 * _REFERENCES, 1)
        if _ignore(api, _call_api(get_i64(api + _SCHEDULE, 0), call)):
            fetch_add(state + 8 * _REFERENCES, -1)
            break
    _work(state)
    # The job and XLA's buffers belong to the caller, so it must not return before every chunk is finished. No shares
    # are left by now: what is waited for is running on another core.
    while load_acquire(state + 8 * _FINISHED) < chunks:
        # Not a spin: where threads outnumber cores, the one that is waited for may need this core.
        sched_yield()
    _leave(state)


@inlined
def new_job(words):
    """A job of zeros, or 0 where there is no memory."""
    job = malloc(8 * words)
    if job != 0:
        for i in range(words):
            put_i64(job, i, 0)
    return job
