"""Gather-reduces and in-place row updates on NumPy arrays, multi-threaded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jrec.native import segment_kernels as kernels
from jrec.native import threads as thread_pool
from jrec.native.compile import pointer
from jrec.native.host_cast import checked_ids, thread_count
from jrec.native.hyper import HYPER_WORDS, host_hyperparameters, kind_of
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.storage import real_dim
from jrec.ops.types import Cast

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


def gather_reduce(
    source: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray | None = None,
    *,
    weights: np.ndarray | None = None,
    out: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Sums (weighted) rows of ``source`` per segment; see ``jrec.ops.gather_reduce``.

    Args:
      source: (rows, dim) float32, bfloat16 (of ml_dtypes) or float16, C-contiguous.
      indices: int32, (num_segments, length) or, with ``offsets``, (capacity,). Negative entries are skipped, entries
        past the source make their segment NaN.
      offsets: (num_segments + 1,) int32 or None.
      weights: float32 of the shape of ``indices``, or None.
      out: (num_segments, dim) float32 to write to, or None for a new array.
      threads: None for ``threads.num_threads()``.

    Returns:
      (num_segments, dim) float32.

    Raises:
      ValueError: On shapes, dtypes or offsets that do not fit, or an ``out`` that is not writable and C-contiguous.
    """
    indices, offsets = checked_ids(indices, offsets)
    _check_matrix("source", source)
    if weights is not None:
        _check_array("weights", weights, indices.shape)
        weights = np.ascontiguousarray(weights)
    segments = indices.shape[0] if offsets is None else offsets.size - 1
    if out is None:
        out = np.empty((segments, source.shape[1]), np.float32)
    _check_array("out", out, (segments, source.shape[1]))
    _check_writable("out", out)
    job = _segment_job(source, indices, offsets, weights)
    job[kernels.Job.OUT] = pointer(out)
    job[kernels.Job.SEGMENT_COST] = kernels.GATHER_COST
    longest = indices.shape[1] if offsets is None else indices.size
    _run(job, longest, threads)
    return out


def row_update(
    optimizer: RowOptimizer,
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    rows: np.ndarray,
    gradients: np.ndarray,
    *,
    step: int = 0,
    gradient_scale: float = 1.0,
    rounding_key: np.ndarray | None = None,
    dim: int | None = None,
    threads: int | None = None,
) -> None:
    """One optimizer step on ``table[rows]``, in place; see ``jrec.ops.row_update``.

    Raises:
      ValueError: If shapes, dtypes or slots do not fit, or an array to be written is not writable and C-contiguous.
    """
    _check_array("rows", rows, (rows.size,), np.int32)
    _check_array("gradients", gradients, (rows.size, real_dim(table.shape[1], dim)))
    rows, gradients = np.ascontiguousarray(rows), np.ascontiguousarray(gradients)
    hyper = host_hyperparameters(optimizer, step, gradient_scale, _checked_key(rounding_key))
    job = np.zeros(kernels.JOB_WORDS, np.int64)
    # Segments without lookups: their gradients are there already, and are copied.
    job[kernels.Job.SEGMENTS] = rows.size
    job[kernels.Job.GRADIENTS], job[kernels.Job.DIM] = pointer(gradients), gradients.shape[1]
    _set_table(job, optimizer, table, slots, rows, hyper)
    _run(job, 0, threads)


def casted_update(
    optimizer: RowOptimizer,
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    cast: Cast,
    bag_gradients: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    step: int = 0,
    gradient_scale: float = 1.0,
    rounding_key: np.ndarray | None = None,
    rounding_rows: np.ndarray | None = None,
    hyperparameters: np.ndarray | None = None,
    dim: int | None = None,
    threads: int | None = None,
) -> None:
    """The whole backward pass of a lookup, in place and in one pass over the rows; see ``jrec.ops.casted_update``.

    Rows of the cast may be int64, below 2^32 - 1; stochastic rounding hashes them modulo 2^32. ``rounding_rows``, which
    it hashes in their place, are (n,) int32, one for each of the cast's unique rows.
    ``hyperparameters`` of a jitted step (``jrec.native.hyper``) take the place of ``step``, ``gradient_scale`` and
    ``rounding_key``.

    Raises:
      ValueError: If shapes, dtypes or slots do not fit, or an array to be written is not writable and C-contiguous.
    """
    rows, positions = np.ascontiguousarray(cast.rows), np.ascontiguousarray(cast.positions)
    sources, offsets = checked_ids(np.asarray(cast.sources), np.asarray(cast.offsets))
    _check_array("bag_gradients", bag_gradients, (bag_gradients.shape[0], real_dim(table.shape[1], dim)))
    bag_gradients = np.ascontiguousarray(bag_gradients)
    if weights is not None:
        _check_array("weights", weights, weights.shape)
        if weights.size != positions.size:
            raise ValueError(f"weights of shape {weights.shape} do not fit a cast of {positions.size} lookups")
        weights = np.ascontiguousarray(weights)
    if hyperparameters is None:
        hyper = host_hyperparameters(optimizer, step, gradient_scale, _checked_key(rounding_key))
    else:
        _check_array("hyperparameters", hyperparameters, (HYPER_WORDS,), np.int32)
        hyper = np.ascontiguousarray(hyperparameters)
    job = _segment_job(bag_gradients, sources, offsets, weights)
    # ``num_unique`` also counts rows that found no room.
    segments, wide = min(int(cast.num_unique), rows.size), rows.dtype == np.int64
    if wide:
        rows = _unsigned(rows[:segments])
    if rounding_rows is not None:
        _check_array("rounding_rows", rounding_rows, (segments,), np.int32)
        rounding_rows = np.ascontiguousarray(rounding_rows)
        job[kernels.Job.ROUNDING_ROWS] = pointer(rounding_rows)
    job[kernels.Job.SEGMENTS], job[kernels.Job.UNSIGNED] = segments, wide
    job[kernels.Job.POSITIONS] = pointer(positions)
    _set_table(job, optimizer, table, slots, rows, hyper)
    _run(job, sources.size, threads)


def _segment_job(
    source: np.ndarray, indices: np.ndarray, offsets: np.ndarray | None, weights: np.ndarray | None
) -> np.ndarray:
    """A job that reads these arrays; the caller keeps them alive."""
    J = kernels.Job
    job = np.zeros(kernels.JOB_WORDS, np.int64)
    job[J.SOURCE], job[J.INDICES] = pointer(source), pointer(indices)
    job[J.DTYPE] = DTYPES[source.dtype.name]
    job[J.SOURCE_ROWS], job[J.DIM] = source.shape
    job[J.CAPACITY] = indices.size
    job[J.WEIGHTS] = 0 if weights is None else pointer(weights)
    if offsets is None:
        job[J.SEGMENTS], job[J.LENGTH] = indices.shape
    else:
        job[J.SEGMENTS], job[J.OFFSETS] = offsets.size - 1, pointer(offsets)
    return job


def _set_table(
    job: np.ndarray,
    optimizer: RowOptimizer,
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    rows: np.ndarray,
    hyper: np.ndarray,
) -> None:
    J = kernels.Job
    _check_matrix("table", table)
    _check_writable("table", table)
    if slots.keys() != optimizer.slots.keys():
        raise ValueError(
            f"{type(optimizer).__name__} keeps slots {sorted(optimizer.slots)}, but was given {sorted(slots)}"
        )
    for word, (name, shape) in zip((J.SLOT0, J.SLOT1, J.SLOT2), optimizer.slots.items(), strict=False):
        _check_array(f"slot {name!r}", slots[name], table.shape if shape == "element" else table.shape[:1])
        _check_writable(f"slot {name!r}", slots[name])
        job[word] = pointer(slots[name])
    job[J.TABLE], job[J.TABLE_DTYPE] = pointer(table), DTYPES[table.dtype.name]
    job[J.TABLE_ROWS], job[J.STRIDE] = table.shape
    job[J.ROWS], job[J.HYPER] = pointer(rows), pointer(hyper)
    job[J.KIND], job[J.SEGMENT_COST] = kind_of(optimizer), kernels.UPDATE_COST


def _run(job: np.ndarray, longest: int, threads: int | None) -> None:
    J = kernels.Job
    chunks = kernels.max_chunks(int(job[J.CAPACITY]), int(job[J.SEGMENTS]), int(job[J.SEGMENT_COST]))
    pieces = kernels.max_pieces(longest, chunks)
    partials = np.empty((pieces, int(job[J.DIM])), np.float32)
    long = np.full(chunks if pieces else 0, -1, np.int32)
    job[J.PARTIALS], job[J.LONG] = pointer(partials), pointer(long) if pieces else 0
    # ``max_chunks`` may pass what the kernel counts, whose offsets
    # end earlier: a chunk behind the last one has no segments.
    thread_pool.run(kernels.segment_chunks, pointer(job), chunks, thread_count(threads))
    kernels.finish_segments.call(pointer(job))
    if job[J.ERROR]:
        raise MemoryError("a native kernel could not allocate its scratch row")


def _unsigned(rows: np.ndarray) -> np.ndarray:
    """int64 rows as uint32, of which the last one is no row: past every table, as negative ones are."""
    return np.where((rows < 0) | (rows >= 2**32), 2**32 - 1, rows).astype(np.uint32)


def _check_matrix(name: str, array: np.ndarray) -> None:
    if array.ndim != 2 or array.dtype.name not in DTYPES or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be a C-contiguous (rows, dim) array of float32, bfloat16 or float16, but is"
            f" {array.dtype}{list(array.shape)} with strides {array.strides}"
        )


def _check_array(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type = np.float32) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} must be {np.dtype(dtype)} of shape {shape}, but is {array.dtype}{list(array.shape)}")


def _checked_key(key: np.ndarray | None) -> np.ndarray | None:
    if key is None:
        return None
    _check_array("rounding_key", key, (2,), np.uint32)
    return np.ascontiguousarray(key)


def _check_writable(name: str, array: np.ndarray) -> None:
    if not (array.flags.writeable and array.flags.c_contiguous):
        raise ValueError(f"{name} is written in place and must be writable and C-contiguous; make a copy of it")
