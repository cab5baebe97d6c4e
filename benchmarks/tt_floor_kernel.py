"""Peak rates of all cores: multiply-adds in the tensor-train kernels' own register tile, and bytes of a copy."""

from __future__ import annotations

import functools
import time

import numpy as np
from numba import types

from benchmarks import harness
from jrec.native import threads
from jrec.native.compile import Kernel, kernel, pointer
from jrec.native.memory import get_f32, get_i64, put_f32, put_i64
from jrec.native.small_gemm import address_list, product_rows

ROWS, DEPTH, COLUMNS = 48, 32, 64  # a middle core's slice at rank 32, by the rows of about as many entries
CHUNKS = 4  # a core
TIMES = 500  # that a chunk repeats the product: a millisecond
COPIED = 1 << 27  # bytes that a copy reads and writes, over and over if arrays are smaller: milliseconds


@kernel(types.void(types.int64, types.int64, types.int64))
def repeated_products(job, begin, end):
    """The products of chunks [begin, end), each over and over; ``job`` has the addresses of each chunk's operands."""
    lefts, outs = address_list(), address_list()
    for chunk in range(begin, end):
        base = get_i64(job, chunk)
        right, out = base + 4 * ROWS * DEPTH, base + 4 * (ROWS * DEPTH + DEPTH * COLUMNS)
        for row in range(ROWS):
            put_i64(lefts, row, base + 4 * DEPTH * row)
            put_i64(outs, row, out + 4 * COLUMNS * row)
        for _ in range(TIMES):
            product_rows(outs, lefts, np.int64(ROWS), right, np.int64(DEPTH), np.int64(COLUMNS))


@kernel(types.void(types.int64, types.int64, types.int64))
def copies(job, begin, end):
    """Copies parts [begin, end) of one array into another, round and round.

    ``job`` has both addresses, a part's size, and how many parts an array has.
    """
    source, target, size, parts = get_i64(job, 0), get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    for part in range(begin, end):
        first = part % parts * size
        for i in range(first, first + size):
            put_f32(target, i, get_f32(source, i))


def tile_rate() -> float:
    """Multiply-adds a second of small products whose operands stay in L1."""
    chunks = CHUNKS * harness.cores()
    floats = np.zeros((chunks, ROWS * DEPTH + DEPTH * COLUMNS + ROWS * COLUMNS), np.float32)
    job = np.array([pointer(part) for part in floats], np.int64)
    return ROWS * DEPTH * COLUMNS * TIMES * chunks / _seconds(repeated_products, job, chunks)


def copy_rate(size: int) -> float:
    """Bytes a second, read and written, of a copy between arrays of about ``size`` float32."""
    chunks = CHUNKS * harness.cores()
    source, target = _arrays(size // chunks * chunks)
    job = np.array([pointer(source), pointer(target), size // chunks, chunks], np.int64)
    times = max(1, COPIED // (2 * source.nbytes))
    return 2 * source.nbytes * times / _seconds(copies, job, times * chunks)


@functools.lru_cache(maxsize=1)
def _arrays(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(size, np.float32), np.zeros(size, np.float32)


def _seconds(function: Kernel, job: np.ndarray, chunks: int) -> float:
    start = time.perf_counter()
    threads.run(function, pointer(job), chunks, harness.cores())
    return time.perf_counter() - start
