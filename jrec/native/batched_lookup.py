"""Lookups in many tables as one native call, for serving: float rows and quantized ones, on all threads."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
    STEP = 11  # bytes from bag to bag


class Chunk(enum.IntEnum):
    """Words of a chunk: some bags of a job."""

    JOB = 0
    BEGIN = 1
    END = 2


JOB_WORDS, CHUNK_WORDS = len(Job), len(Chunk)
SOURCE, KIND, DIM, STRIDE, ROWS, INDICES, CAPACITY, OFFSETS, LENGTH, WEIGHTS, OUT, STEP = (int(word) for word in Job)


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
            # The null address stands for bags of one length: then a bag's place follows from its number, and no offsets
            # are read.
            if offsets != 0:
                first, last = np.int64(get_i32(offsets, bag)), np.int64(get_i32(offsets, bag + 1))
            out = get_i64(job, OUT) + get_i64(job, STEP) * bag
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


class TableRows(NamedTuple):
    """Rows that lookups read, checked once however often they are read: ``table_rows``.

    Attributes:
      values: The array.
      dim: Elements of a row.
      words: The first ones of a ``Job``.
    """

    values: np.ndarray
    dim: int
    words: tuple[int, int, int, int, int]


class Lookup(NamedTuple):
    """Bags of one table.

    Attributes:
      rows: The table.
      ids: int32, (bags, length) or, with ``offsets``, (capacity,). Negative ids are absent, an id past the table makes
        its bag NaN.
      offsets: (bags + 1,) int32, ascending from 0, or None.
      weights: float32 of the shape of ``ids``, or None.
    """

    rows: TableRows
    ids: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def bags(self) -> int:
        """How many there are."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1


def quantized_dtype(bits: int, dim: int) -> np.dtype:
    """A quantized row as NumPy has it: ``scale`` and ``bias``, float32, and ``values``, the bytes.

    Args:
      bits: 8 or 4 of a value.
      dim: Elements of a row; of INT4, element 2 i is in the low bits of byte i and element 2 i + 1 in its high bits.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits}; choose 8 or 4")
    return np.dtype([("scale", "<f4"), ("bias", "<f4"), ("values", "u1", (-(-dim * bits // 8),))])


def table_rows(values: np.ndarray, dim: int) -> TableRows:
    """Rows as lookups take them.

    Args:
      values: C-contiguous, (rows, dim) float32, bfloat16 or float16; or (rows,) of ``quantized_dtype``.
      dim: Elements of a row.

    Raises:
      ValueError: If they are no such array.
    """
    if not values.flags.c_contiguous:
        raise ValueError(f"rows must be C-contiguous, but have strides {values.strides}")
    kind = None
    if values.shape[1:] == (dim,) and values.dtype.name in ("float32", "bfloat16", "float16"):
        kind = KINDS[values.dtype.name]
    elif values.ndim == 1:
        kind = next((KINDS[f"int{bits}"] for bits in (8, 4) if values.dtype == quantized_dtype(bits, dim)), None)
    if kind is None:
        raise ValueError(
            f"rows must be (rows, {dim}) float32, bfloat16 or float16, or (rows,) of quantized_dtype, but are"
            f" {values.dtype}{list(values.shape)}"
        )
    stride = values.dtype.itemsize * (dim if values.ndim == 2 else 1)
    return TableRows(values, dim, (pointer(values), kind, dim, stride, len(values)))


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
    outs = [np.empty((one.bags, one.rows.dim), np.float32) for one in lookups]
    _look_up(lookups, [(pointer(out), 4 * out.shape[1]) for out in outs], threads)
    return outs


def lookup_beside(lookups: Sequence[Lookup], out: np.ndarray, *, threads: int | None = None) -> None:
    """Writes the sums of ``lookup_many`` side by side, of lookups that have equally many bags.

    Args:
      lookups: The bags of each table.
      out: (bags, sum of dims) float32, of which each row lies together.
      threads: As of ``lookup_many``.

    Raises:
      ValueError: On shapes or dtypes that do not fit.
    """
    begins = [0, *itertools.accumulate(one.rows.dim for one in lookups)]
    bags = {one.bags for one in lookups}
    apart = out.size > 0 and out.strides[1] != 4  # NumPy gives an array of no elements any strides
    if out.dtype != np.float32 or out.shape[1:] != (begins[-1],) or apart or bags - {len(out)}:
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)}, strides {out.strides}; give float32 for the sums of"
            f" {' or '.join(map(str, sorted(bags)))} bags of {begins[-1]} elements, which lie together"
        )
    address, stride = pointer(out), out.strides[0]
    _look_up(lookups, [(address + 4 * begin, stride) for begin in begins[:-1]], threads)


def _look_up(lookups: Sequence[Lookup], places: Sequence[tuple[int, int]], threads: int | None) -> None:
    """Writes each lookup's sums to its place: the address of its first bag, and the bytes from bag to bag."""
    words, chunks, cost, kept = [], [], 0, []
    for number, ((rows, ids, offsets, weights), (out, step)) in enumerate(zip(lookups, places, strict=True)):
        # What is checked is what the job's addresses point to: ``checked_ids`` may have made a copy that lies together.
        ids, offsets = checked_ids(ids, offsets)
        if weights is not None:
            weights = _checked_weights(weights, ids)
        bags, length = ids.shape if offsets is None else (offsets.size - 1, 0)
        words += rows.words
        words += (
            pointer(ids), ids.size, 0 if offsets is None else pointer(offsets), length,
            0 if weights is None else pointer(weights), out, step,
        )  # fmt: skip
        kept.append((ids, offsets, weights))  # whose addresses the job holds
        # A bag's sum is written even where it is empty, so bags count beside ids.
        own = ids.size + bags
        cost += own
        each = bags if own <= _COST else max(1, _COST * bags // own)
        # Chunks of one table each: a kernel's kind, dim and stride are then those of the whole chunk.
        for begin in range(0, bags, each or 1):
            chunks += (number, begin, min(begin + each, bags))
    if chunks:
        # Names of their own, since ``work`` holds only addresses: the arrays must live until the call has returned.
        every, jobs = np.array(chunks, np.int64), np.array(words, np.int64)
        work = np.array([pointer(every), pointer(jobs)], np.int64)
        used = thread_count(threads) if cost > _COST else 1  # waking a thread costs more than a chunk does
        thread_pool.run(lookup_chunks, pointer(work), len(every) // CHUNK_WORDS, used)
    del kept


def _checked_weights(weights: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if weights.shape != ids.shape or weights.dtype != np.float32:
        raise ValueError(
            f"weights must be float32 of the ids' shape {ids.shape}, but are {weights.dtype}{list(weights.shape)}"
        )
    return np.ascontiguousarray(weights)
