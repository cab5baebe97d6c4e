"""Rows of one checkpoint for another one, copied chunk by chunk: as they are there, whatever tier they will live in."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.saved import Saved, SavedTable
from jrec.checkpoint.sources import Piece


class CopiedRows:
    """Tables of another checkpoint, for a checkpoint; see ``jrec.checkpoint.sources.Source``.

    Rows that still have their first values there, as most in host memory may, take no space here either.

    Args:
      saved: The other checkpoint.
      rows: By table, how many of its first rows to copy.
    """

    def __init__(self, saved: Saved, rows: Mapping[str, int]):
        self._saved = {name: saved.table(name) for name in rows}
        self.tables = {name: dataclasses.replace(self._saved[name].record.shape, rows=n) for name, n in rows.items()}

    def changed(self) -> dict[str, tuple[int, int]]:
        """Nothing: changes are not counted, so that all rows are copied."""
        return {}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """All pieces of the saved rows, whatever ``full`` names."""
        del full
        return [piece for name in self.tables for piece in self._pieces(name)]

    def end(self) -> None:
        """Does nothing: the saved rows do not change."""

    undo_bytes = 0  # nothing changes meanwhile

    def _pieces(self, name: str) -> list[Piece]:
        shape, table = self.tables[name], self._saved[name]
        if shape.first is None:
            return [_CopiedPiece(table, name, None, shape.rows)]
        written = [rows[rows < shape.rows] for rows, _ in table.written([])]
        rows = np.unique(np.concatenate(written)) if written else np.empty(0, np.int64)
        return [_CopiedPiece(table, name, rows, rows.size)] if rows.size else []


@dataclasses.dataclass
class _CopiedPiece:
    """See ``jrec.checkpoint.sources.Piece``."""

    source: SavedTable
    table: str
    rows: np.ndarray | None
    count: int

    def begin(self, start: int, stop: int) -> Any:
        """Rows are read by the writing thread."""

    def finish(self, begun: Any, start: int, stop: int) -> dict[str, np.ndarray]:
        del begun
        rows = np.arange(start, stop) if self.rows is None else self.rows[start:stop].astype(np.int64)
        return {name: self.source.read(name, rows) for name in (VALUES, *self.source.record.shape.slots)}
