"""Rows of one checkpoint for another one, copied chunk by chunk: as they are there, whatever tier they will live in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.saved import Saved
from jrec.checkpoint.sources import FixedRows, HostPiece, Piece


class CopiedRows(FixedRows):
    """Tables of another checkpoint, for a checkpoint; see ``jrec.checkpoint.sources.CheckpointSource``.

    Rows that still have their first values there, as most in host memory may, take no space here either.

    Args:
      saved: The other checkpoint.
      rows: By table, how many of its first rows to copy.
    """

    def __init__(self, saved: Saved, rows: Mapping[str, int]):
        self._saved = {name: saved.table(name) for name in rows}
        shapes = {name: dataclasses.replace(table.record.shape, rows=rows[name]) for name, table in self._saved.items()}
        super().__init__(shapes, lambda: [piece for name in shapes for piece in self._pieces_of(name)])

    def _pieces_of(self, name: str) -> list[Piece]:
        shape, table = self.tables[name], self._saved[name]
        rows = None
        if shape.first is not None:
            written = [rows[rows < shape.rows] for rows, _ in table.written([])]
            rows = np.unique(np.concatenate(written)) if written else np.empty(0, np.int64)
            if not rows.size:
                return []

        def read(start: int, stop: int) -> dict[str, np.ndarray]:
            wanted = np.arange(start, stop) if rows is None else rows[start:stop].astype(np.int64)
            return {array: table.read(array, wanted) for array in (VALUES, *table.record.shape.slots)}

        return [HostPiece(table=name, rows=rows, count=shape.rows if rows is None else rows.size, read=read)]
