"""How many threads the native kernels use, and the pool on which they run outside jit."""

from __future__ import annotations

import functools
import itertools
import os
from concurrent import futures

from jrec import environment
from jrec.native.compile import Kernel

_GROUPS = 16  # per thread: enough to share the work evenly, few enough that Python's part in it is small


def num_threads() -> int:
    """From ``JREC_NUM_THREADS``, else ``OMP_NUM_THREADS``, else all CPUs that this process may use; never more.

    Raises:
      ValueError: If a variable is not a positive integer.
    """
    available = environment.cores()
    for variable in ("JREC_NUM_THREADS", "OMP_NUM_THREADS"):
        if text := os.environ.get(variable, "").strip():
            first = text.split(",")[0]  # OpenMP allows one number per nesting level
            if not first.isdigit() or int(first) < 1:
                raise ValueError(f"{variable}={text!r} must be a positive number of threads")
            return min(int(first), available)
    return available


def run(kernel: Kernel, job: int, chunks: int, threads: int) -> None:
    """Runs ``kernel(job, begin, end)`` over [0, chunks); threads take some chunks, then some more."""
    call = kernel.call
    if threads == 1 or chunks <= 1:
        call(job, 0, chunks)
        return
    group = max(1, chunks // (_GROUPS * threads))
    counter = itertools.count(0, group)  # next() is atomic

    def work() -> None:
        while (begin := next(counter)) < chunks:
            call(job, begin, min(begin + group, chunks))

    # One helper fewer than threads: the caller works, too.
    helpers = [_pool(os.getpid(), threads - 1).submit(work) for _ in range(min(threads, chunks) - 1)]
    try:
        work()
    finally:  # an interrupted caller frees what the helpers still read and write
        for helper in helpers:
            # A helper that has not started never will. One that has is inside a kernel, which reads and writes the
            # caller's arrays by address: these must live until it ends. Helpers of several callers share the pool, so
            # one may well be queued behind another's.
            if not helper.cancel():
                helper.result()


@functools.cache
def _pool(process: int, helpers: int) -> futures.ThreadPoolExecutor:
    del process  # threads do not survive a fork: a child makes its own
    return futures.ThreadPoolExecutor(helpers, thread_name_prefix="jrec-native")
