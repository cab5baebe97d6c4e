"""Tensor Casting on NumPy arrays: what the loader computes ahead of time."""

from __future__ import annotations

from typing import Any

import numpy as np

from jrec.native import cast_kernels
from jrec.native import threads as thread_pool
from jrec.native.compile import pointer
from jrec.ops.types import Cast

_ENTRIES_PER_CHUNK = 16384


def tensor_cast(
    ids: np.ndarray,
    offsets: np.ndarray | None = None,
    *,
    num_rows: int,
    unique_capacity: int | None = None,
    segments: np.ndarray | None = None,
    threads: int | None = None,
) -> Cast:
    """Sorts lookups by row; identical to ``jrec.ops.tensor_cast``.

    Args:
      ids: int32 or int64, (num_bags, length), or (capacity,) with ``offsets``. Ids outside [0, num_rows) are padding.
      offsets: (num_bags + 1,) int32 ascending from 0, or None.
      num_rows: The table's rows, at most 2**31 - 1 where ids are int32 and 2**32 - 1 where they are int64.
      unique_capacity: How many unique rows fit; see ``jrec.ops.tensor_cast``.
      segments: (num_tables + 1, 2) integers, or None: table ``t`` owns bags ``segments[t, 0]:segments[t + 1, 0]`` and
        rows ``segments[t, 1]:segments[t + 1, 1]``. It changes nothing but the speed.
      threads: None for ``threads.num_threads()``.

    Returns:
      A ``Cast`` of NumPy arrays; its rows have the dtype of the ids.

    Raises:
      ValueError: On shapes, dtypes or offsets that do not fit, or an id of a table that its bag does not read.
    """
    ids, offsets = checked_ids(ids, offsets, wide=True)
    wide = ids.dtype == np.int64
    bits, kind = (32, "uint32 where ids are int64") if wide else (31, "int32")
    if not 1 <= num_rows < 2**bits:
        raise ValueError(f"num_rows is {num_rows}; row numbers are {kind}, so it must lie in 1..2**{bits} - 1")
    original = ids
    # The kernels sort words of a 32-bit row above a 32-bit position, which rows below 2^32 - 1 fit.
    if wide:  # as uint32, of which the last one is no row
        ids = np.where((ids < 0) | (ids >= num_rows), 2**32 - 1, ids).astype(np.uint32)
    num_bags, length = ids.shape if offsets is None else (offsets.size - 1, 0)
    if unique_capacity is None:
        unique_capacity = min(ids.size, num_rows)
    out: dict[str, Any] = {
        "rows": np.empty(unique_capacity, ids.dtype),
        "offsets": np.empty(unique_capacity + 1, np.int32),
        "sources": np.empty(ids.size, np.int32),
        "positions": np.empty(ids.size, np.int32),
        "num_unique": np.zeros((), np.int32),
    }
    tables = _table_records(segments, offsets, length, num_bags, num_rows, ids.size)
    num_threads = thread_count(threads)
    chunks = 1 if len(tables) > 1 else max(1, min(4 * num_threads, ids.size // _ENTRIES_PER_CHUNK))
    chunks = 1 if num_threads == 1 else chunks
    # Twice: a pass of the radix sort reads one half and writes the other.
    pairs = np.empty(2 * ids.size, np.uint64)
    bag_of = np.empty(0 if offsets is None else ids.size, np.int32)
    counters = np.empty(max(chunks, len(tables)) << cast_kernels.MAX_DIGIT_BITS, np.int32)
    J = cast_kernels.Job
    job = np.zeros(cast_kernels.JOB_WORDS, np.int64)
    # Only addresses, which keep nothing alive: the arrays have names here until the last phase has run.
    for word, array in (
        (J.IDS, ids), (J.PAIRS, pairs), (J.BAG_OF, bag_of), (J.COUNTERS, counters), (J.TABLES, tables),
        (J.ROWS_OUT, out["rows"]), (J.OFFSETS_OUT, out["offsets"]), (J.SOURCES_OUT, out["sources"]),
        (J.POSITIONS_OUT, out["positions"]), (J.NUM_UNIQUE_OUT, out["num_unique"]),
    ):  # fmt: skip
        job[word] = pointer(array)
    job[J.OFFSETS] = 0 if offsets is None else pointer(offsets)
    for word, value in (
        (J.LENGTH, length), (J.NUM_BAGS, num_bags), (J.CAPACITY, ids.size), (J.NUM_ROWS, num_rows),
        (J.UNIQUE_CAPACITY, unique_capacity), (J.NUM_TABLES, len(tables)), (J.CHUNKS, chunks), (J.UNSIGNED, wide),
    ):  # fmt: skip
        job[word] = value
    _run_phases(job, num_threads)
    if job[J.ERROR]:
        _raise_foreign(int(job[J.ERROR]) - 2, original)
    out["rows"] = out["rows"].astype(original.dtype, copy=False)
    return Cast(**out)


def _run_phases(job: np.ndarray, num_threads: int) -> None:
    address = pointer(job)
    while chunks := cast_kernels.cast_advance.call(address):
        thread_pool.run(cast_kernels.cast_chunks, address, chunks, num_threads)


def thread_count(requested: int | None) -> int:
    """The requested number of threads, or the environment's."""
    if requested is None:
        return thread_pool.num_threads()
    if requested < 1:
        raise ValueError(f"threads={requested} must be at least 1")
    return requested


def checked_ids(
    ids: np.ndarray, offsets: np.ndarray | None, *, wide: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """C-contiguous ids and offsets.

    Raises:
      ValueError: Where they are neither padded nor ragged segments, or ids are neither int32 nor, if
        ``wide``, int64.
    """
    form = "(num_bags, length)" if offsets is None else "(capacity,) beside offsets"
    if ids.ndim != (2 if offsets is None else 1) or ids.dtype not in ((np.int32, np.int64) if wide else (np.int32,)):
        kinds = "int32 or int64" if wide else "int32"
        raise ValueError(f"ids must be {kinds} of shape {form}, but are {ids.dtype}{list(ids.shape)}")
    if ids.size >= 2**31:
        raise ValueError(f"{ids.size} lookups do not fit int32 positions; use smaller batches")
    ids = np.ascontiguousarray(ids)
    if offsets is None:
        return ids, None
    if offsets.ndim != 1 or offsets.size < 1 or offsets.dtype != np.int32:
        raise ValueError(f"offsets must be (num_bags + 1,) int32, but are {offsets.dtype}{list(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] > ids.size or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(
            f"offsets must ascend from 0 to at most {ids.size}, the number of ids, but run from {offsets[0]} to"
            f" {offsets[-1]}" + ("" if np.all(offsets[1:] >= offsets[:-1]) else " and descend in between")
        )
    return ids, np.ascontiguousarray(offsets)


def _table_records(
    segments: np.ndarray | None, offsets: np.ndarray | None, length: int, num_bags: int, num_rows: int, capacity: int
) -> np.ndarray:
    if segments is None:
        segments = np.array([[0, 0], [num_bags, num_rows]], np.int64)
    segments = np.asarray(segments, np.int64)
    whole = segments.ndim == 2 and segments.shape[0] > 1 and segments.shape[1] == 2
    if not (whole and np.all(np.diff(segments, axis=0) >= 0) and not segments[0].any()) or (
        segments[-1].tolist() != [num_bags, num_rows]
    ):
        raise ValueError(
            f"segments must be (num_tables + 1, 2), bags and rows ascending from (0, 0) to {(num_bags, num_rows)}, but"
            f" are {segments.tolist()}"
        )
    bounds = segments[:, 0] * length if offsets is None else offsets[segments[:, 0]].astype(np.int64)
    bounds[-1] = capacity  # the unused tail of ragged ids is padding of the last table
    records = np.zeros((len(segments) - 1, cast_kernels.TABLE_WORDS), np.int64)
    T = cast_kernels.Table
    records[:, T.BEGIN], records[:, T.END] = bounds[:-1], bounds[1:]
    records[:, T.BASE], records[:, T.ROWS] = segments[:-1, 1], np.diff(segments[:, 1])
    return records


def _raise_foreign(position: int, ids: np.ndarray) -> None:
    place = [int(i) for i in np.unravel_index(position, ids.shape)]
    raise ValueError(
        f"ids{place} is {ids.reshape(-1)[position]}, a row of another table than its bag reads according to segments"
    )
