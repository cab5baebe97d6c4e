"""Reads and writes of rows with their slots in host memory, multi-threaded; see ``row_kernels``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jrec.native import row_kernels as kernels
from jrec.native import threads as thread_pool
from jrec.native.compile import pointer
from jrec.native.host_segments import DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStore:
    """The arrays of a table in host memory. Shapes and dtypes are not checked here: ``jrec.host.HostTable`` does.

    Attributes:
      values: (rows, dim) float32, bfloat16 or float16.
      slots: float32, (rows, dim) or (rows,), at most two.
      initial_slots: What each slot starts as.
      tables: (tables, len(Table)) int64, see ``table_records``.
      made: (words,) int64 bitmap of the rows that ``values`` and ``slots`` hold.
      dirty: (words,) int64 bitmap of the rows written since it was last cleared.
    """

    values: np.ndarray
    slots: Mapping[str, np.ndarray]
    initial_slots: Mapping[str, float]
    tables: np.ndarray
    made: np.ndarray
    dirty: np.ndarray

    def fetch(self, rows: np.ndarray, out: np.ndarray, out_slots: Mapping[str, np.ndarray], threads: int) -> None:
        """Copies ``rows`` (n,) integers to ``out`` (n, dim), and those slots that ``out_slots`` names."""
        self._run(kernels.FETCH, rows, out, out_slots, threads)

    def store(self, rows: np.ndarray, values: np.ndarray, slots: Mapping[str, np.ndarray], threads: int) -> None:
        """Writes ``values`` and all slots to the unique ``rows`` and marks them made and dirty."""
        self._run(kernels.STORE, rows, values, slots, threads)

    def make(self, rows: np.ndarray, threads: int, *, mark: bool) -> None:
        """Gives the unique ``rows`` their first values where they are not made yet; marks all dirty if ``mark``."""
        self._run(kernels.MAKE, rows, None, {}, threads, mark=mark)

    def holds(self, rows: np.ndarray, threads: int) -> bool:
        """Whether all ``rows`` are made; negative ones do not count."""
        rows = np.ascontiguousarray(rows, np.int64)
        job = self._job(kernels.FETCH, rows, None, {})
        chunks = -(-rows.size // kernels.LOOKUPS_PER_CHUNK)
        thread_pool.run(kernels.absent_chunks, pointer(job), chunks, threads)
        return not job[kernels.Job.ABSENT]

    def _run(
        self,
        action: int,
        rows: np.ndarray,
        values: np.ndarray | None,
        slots: Mapping[str, np.ndarray],
        threads: int,
        *,
        mark: bool = False,
    ) -> None:
        rows = np.ascontiguousarray(rows, np.int64)  # a copy of 8 bytes a row: next to nothing beside the row
        job = self._job(action, rows, values, slots)
        job[kernels.Job.MARK] = mark
        thread_pool.run(kernels.row_chunks, pointer(job), -(-rows.size // kernels.ROWS_PER_CHUNK), threads)

    def _job(
        self, action: int, rows: np.ndarray, values: np.ndarray | None, slots: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """The caller keeps the arrays alive."""
        J = kernels.Job
        job = np.zeros(kernels.JOB_WORDS, np.int64)
        job[J.ACTION], job[J.ROWS], job[J.COUNT] = action, pointer(rows), rows.size
        job[J.TABLE], job[J.DTYPE], job[J.DIM] = (
            pointer(self.values),
            DTYPES[self.values.dtype.name],
            self.values.shape[1],
        )
        job[J.VALUES] = 0 if values is None else pointer(values)
        job[J.MADE], job[J.DIRTY] = pointer(self.made), pointer(self.dirty)
        job[J.TABLES], job[J.NUM_TABLES] = pointer(self.tables), len(self.tables)
        # No values: a fetch leaves such a slot out, and making rows needs none.
        for word, (name, slot) in zip((J.SLOT0, J.SLOT1, J.SLOT2), self.slots.items(), strict=False):
            job[word], job[word + 1] = pointer(slot), slot.shape[1] if slot.ndim > 1 else 1
            job[word + 2] = _bits(self.initial_slots[name])
            job[word + 3] = pointer(slots[name]) if name in slots else 0
        return job


def table_records(bases: tuple[int, ...], keys: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Where tables begin and how their first values are made: bases, (tables, 2) uint32 keys, (tables,) float32."""
    T = kernels.Table
    records = np.zeros((len(bases), kernels.TABLE_WORDS), np.int64)
    records[:, T.BASE] = bases
    records[:, T.KEY0], records[:, T.KEY1] = keys[:, 0], keys[:, 1]
    records[:, T.SCALE] = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    return records


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
