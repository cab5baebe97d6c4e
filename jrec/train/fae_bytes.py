"""What the hybrid baseline would move: all tables in host memory, no row resident, for the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jrec.host.resident import ResidentRows
from jrec.host.ring import RingPlan, bucket
from jrec.ops.layout import EmbeddingLayout


class PlainBytes:
    """Plans every batch as a host pipeline without resident rows would, and counts the bytes of rows and slots.

    In a thread of its own, so that no step waits for it; ``close`` ends it.

    Args:
      layout: of the model.
      batch_size: examples in a batch.
      cached: batches whose rows the ring on the device would keep.
      resident: of the run, for the bytes of a row.
    """

    def __init__(self, layout: EmbeddingLayout, batch_size: int, cached: int, resident: Mapping[str, ResidentRows]):
        self._most = {name: stack.unique_capacity(batch_size) for name, stack in layout.stacks.items()}
        self._plans = {name: RingPlan(length=cached, most=most) for name, most in self._most.items()}
        self._row_bytes = {name: rows.row_bytes for name, rows in resident.items()}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jrec-plain-bytes")
        self._counted: Future[None] | None = None
        self._batches = 0
        self._with_ring = self._without_ring = 0

    def count(self, rows: Mapping[str, np.ndarray]) -> None:
        """Counts a batch; call it for each, in order.

        Args:
          rows: by stack, (n,) int32 ascending: the batch's unique rows, as addresses of the stack.
        """
        self._counted = self._worker.submit(self._count, self._counted, rows)

    def _count(self, before: Future[None] | None, rows: Mapping[str, np.ndarray]) -> None:
        if before is not None:
            before.result()  # done, since there is one worker; raises what it raised
        for name, unique in rows.items():
            most = self._most[name]
            _, missing = self._plans[name].next(self._batches, unique, most)
            stored = bucket(unique.size, most)
            self._with_ring += self._row_bytes[name] * (bucket(missing.size, most) + stored)
            self._without_ring += self._row_bytes[name] * 2 * stored
        self._batches += 1

    def totals(self) -> dict[str, int]:
        """Bytes both ways, in the static sizes in which rows travel: ``plain``, with the ring, and without."""
        if self._counted is not None:
            self._counted.result()
        return {"plain": self._with_ring, "plain_without_ring": self._without_ring}

    def close(self) -> None:
        """Ends the thread once all batches are counted; ``totals`` stay."""
        self._worker.shutdown()
