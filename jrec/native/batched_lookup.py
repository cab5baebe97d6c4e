"""Lookups in many tables as one native call, for serving: float rows and quantized ones, on all threads."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import numpy as np
from numba import types

from jrec.native import threads as thread_pool
from jrec.native.accumulate import sum_bf16, sum_f16, sum_f32
from jrec.native.compile import kernel, pointer
from jrec.native.host_cast import checked_ids, thread_count
from jrec.native.memory import get_i32, get_i64
from jrec.native.quantized_rows import sum_int4, sum_int8

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
_COST = 4096  # lookups of a chunk, and bags count as one each: some ten microseconds


class Job(enum.IntEnum):
    """Words of one table's lookups. Names of arrays hold addresses."""

    SOURCE = 0
    KIND = 1
    DIM = 2
    STRIDE = 3  # bytes from row to row
    ROWS = 4
    INDICES = 5  # int32
    CAPACITY = 6  # of the indices
    OFFSETS = 7  # int32, or 0 for bags of LENGTH indices
    LENGTH = 8
    WEIGHTS = 9  # float32, or 0
    OUT = 10  # float32, (bags, DIM)


class Chunk(enum.IntEnum):
    """Words of a chunk: some bags of a job."""

    JOB = 0
    BEGIN = 1
    END = 2


JOB_WORDS, CHUNK_WORDS = len(Job), len(Chunk)
SOURCE, KIND, DIM, STRIDE, ROWS, INDICES, CAPACITY, OFFSETS, LENGTH, WEIGHTS, OUT = (int(word) for word in Job)


@kernel(types.void(types.int64, types.int64, types.int64))
def lookup_chunks(work, begin, end):
    """Runs chunks [begin, end) of ``work``: the addresses of chunks and of jobs."""
    for number in range(begin, end):
        chunk = get_i64(work, 0) + 8 * CHUNK_WORDS * number
        job = get_i64(work, 1) + 8 * JOB_WORDS * get_i64(chunk, 0)
        source, kind, dim, stride = get_i64(job, SOURCE), get_i64(job, KIND), get_i64(job, DIM), get_i64(job, STRIDE)
        rows, indices, limit = get_i64(job, ROWS), get_i64(job, INDICES), get_i64(job, CAPACITY)
        offsets, length, weights = get_i64(job, OFFSETS), get_i64(job, LENGTH), get_i64(job, WEIGHTS)
        for bag in range(get_i64(chunk, 1), get_i64(chunk, 2)):
            first, last = bag * length, (bag + 1) * length
            if offsets != 0:
                first, last = np.int64(get_i32(offsets, bag)), np.int64(get_i32(offsets, bag + 1))
            out = get_i64(job, OUT) + 4 * dim * bag
            if kind == 0:
                sum_f32(out, source, dim, rows, indices, first, last, limit, weights, 0)
            elif kind == 1:
                sum_bf16(out, source, dim, rows, indices, first, last, limit, weights, 0)
            elif kind == 2:
                sum_f16(out, source, dim, rows, indices, first, last, limit, weights, 0)
            elif kind == 3:
                sum_int8(out, source, dim, stride, rows, indices, first, last, limit, weights)
            else:
                sum_int4(out, source, dim, stride, rows, indices, first, last, limit, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """Bags of one table.

    Attributes:
      rows: The table, C-contiguous: (rows, dim) float32, bfloat16 or float16; or (rows,) of ``quantized_dtype``.
      dim: Elements of a row.
      ids: int32, (bags, length) or, with ``offsets``, (capacity,). Negative ids are absent, an id past the table makes
        its bag NaN.
      offsets: (bags + 1,) int32, ascending from 0, or None.
      weights: float32 of the shape of ``ids``, or None.
    """

    rows: np.ndarray
    dim: int
    ids: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None


def quantized_dtype(bits: int, dim: int) -> np.dtype:
    """A quantized row as NumPy has it: ``scale`` and ``bias``, float32, and ``values``, the bytes.

    Args:
      bits: 8 or 4 of a value.
      dim: Elements of a row; of INT4, element 2 i is in the low bits of byte i and element 2 i + 1 in its high bits.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits}; choose 8 or 4")
    return np.dtype([("scale", "<f4"), ("bias", "<f4"), ("values", "u1", (-(-dim * bits // 8),))])


def lookup_many(lookups: Sequence[Lookup], *, threads: int | None = None) -> list[np.ndarray]:
    """Sums (weighted) rows per bag, of all tables in one call.

    Args:
      lookups: The bags of each table.
      threads: None for ``jrec.native.threads.num_threads()``.

    Returns:
      (bags, dim) float32 each; empty bags are zeros.

    Raises:
      ValueError: On shapes or dtypes that do not fit.
    """
    jobs, outs, kept, chunks, cost = np.zeros((len(lookups), JOB_WORDS), np.int64), [], [], [], 0
    for number, (job, one) in enumerate(zip(jobs, lookups, strict=True)):
        ids, offsets = checked_ids(one.ids, one.offsets)
        weights = None if one.weights is None else np.ascontiguousarray(one.weights)
        if weights is not None and (weights.shape != ids.shape or weights.dtype != np.float32):
            raise ValueError(
                f"weights must be float32 of the ids' shape {ids.shape}, but are {weights.dtype}{list(weights.shape)}"
            )
        bags = ids.shape[0] if offsets is None else offsets.size - 1
        out = np.empty((bags, one.dim), np.float32)
        kind, stride = _kind(one)
        length = ids.shape[1] if offsets is None else 0
        job[:] = (
            pointer(one.rows), kind, one.dim, stride, one.rows.shape[0], pointer(ids), ids.size,
            0 if offsets is None else pointer(offsets), length, 0 if weights is None else pointer(weights),
            pointer(out),
        )  # fmt: skip
        outs.append(out)
        kept.append((ids, offsets, weights))  # whose addresses the job holds
        cost += ids.size + bags
        each = max(1, int(_COST / (1 + ids.size / max(bags, 1))))
        chunks += [(number, begin, min(begin + each, bags)) for begin in range(0, bags, each)]
    if chunks:
        every = np.array(chunks, np.int64)
        work = np.array([pointer(every), pointer(jobs)], np.int64)
        used = thread_count(threads) if cost > _COST else 1  # waking a thread costs more than a chunk does
        thread_pool.run(lookup_chunks, pointer(work), len(every), used)
    del kept
    return outs


def _kind(lookup: Lookup) -> tuple[int, int]:
    rows = lookup.rows
    if not rows.flags.c_contiguous:
        raise ValueError(f"rows must be C-contiguous, but have strides {rows.strides}")
    code = _code(rows.dtype, rows.shape[1:], lookup.dim)
    if code is None:
        raise ValueError(
            f"rows must be (rows, {lookup.dim}) float32, bfloat16 or float16, or (rows,) of quantized_dtype, but are"
            f" {rows.dtype}{list(rows.shape)}"
        )
    return code, rows.dtype.itemsize * (lookup.dim if rows.ndim == 2 else 1)


@functools.lru_cache
def _code(dtype: np.dtype, tail: tuple[int, ...], dim: int) -> int | None:
    """The kind of rows, of an array's shape but for their number; None where they are none."""
    if tail == (dim,) and dtype.name in ("float32", "bfloat16", "float16"):
        return KINDS[dtype.name]
    return next((KINDS[f"int{bits}"] for bits in (8, 4) if not tail and dtype == quantized_dtype(bits, dim)), None)
