"""Rows of stacks in host memory, for checkpoints: those that were ever made, or that changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from jrec.checkpoint.manifest import FirstValues, TableShape
from jrec.checkpoint.saved import Saved
from jrec.checkpoint.sources import Piece
from jrec.errors import CheckpointError
from jrec.host.table import HostTable


class HostRows:
    """A table in host memory, for checkpoints; see ``jrec.checkpoint.sources.Source``.

    Args:
      table: The stack's rows.
    """

    def __init__(self, table: HostTable):
        self._table, stack, optimizer = table, table.stack, table.optimizer
        self.tables = {
            t.name: TableShape(
                name=t.name,
                rows=t.rows,
                dim=t.dim,
                dtype=t.dtype,
                slots=dict(optimizer.slots),
                first=FirstValues(
                    key=[int(word) for word in key],
                    of_rows=t.table_rows,
                    slots={name: float(optimizer.initial_slot(name)) for name in optimizer.slots},
                ),
            )
            for t, key in zip(stack.tables, table.keys, strict=True)
        }

    def changed(self) -> dict[str, tuple[int, int]]:
        """See ``Source``."""
        dirty, made = self._split(self._table.dirty_rows()), self._split(self._table.made_rows())
        return {name: (dirty[name].size, made[name].size) for name in self.tables}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """See ``Source``."""
        dirty, made = self._split(self._table.dirty_rows()), self._split(self._table.made_rows())
        self._table.clear_dirty()
        rows = {name: made[name] if name in full else dirty[name] for name in self.tables}
        return [_HostPiece(self._table, n, rows[n], rows[n].size, self._base(n)) for n in rows if rows[n].size]

    def end(self) -> None:
        """See ``Source``."""

    def restore(self, saved: Saved) -> None:
        """Takes the rows of a checkpoint; rows that it does not have become what they were at first.

        Raises:
          CheckpointError: If it is damaged, or of other tables, slots or first values. The table is as new then.
        """
        table = self._table
        table.reset()
        try:
            for shape, base, one in zip(
                self.tables.values(), table.stack.bases, saved.stack_tables(table.stack), strict=True
            ):
                _check_same(saved, shape, one.record.shape)
                for rows, arrays in one.written(["values", *shape.slots]):
                    table.store((rows + base).astype(np.int32), arrays.pop("values"), arrays)
        except CheckpointError:
            table.reset()
            raise
        table.clear_dirty()

    def _split(self, addresses: np.ndarray) -> dict[str, np.ndarray]:
        """Ascending addresses by table, as its rows' numbers."""
        stack = self._table.stack
        bounds = np.searchsorted(addresses, [*stack.bases, stack.rows])
        return {
            name: addresses[begin:stop] - base
            for name, base, begin, stop in zip(self.tables, stack.bases, bounds, bounds[1:], strict=False)
        }

    def _base(self, name: str) -> int:
        return self._table.stack.bases[list(self.tables).index(name)]


@dataclasses.dataclass
class _HostPiece:
    """See ``jrec.checkpoint.sources.Piece``."""

    source: HostTable
    table: str
    rows: np.ndarray
    count: int
    base: int
    folder: str = ""

    def begin(self, start: int, stop: int) -> Any:
        """Rows in host memory are read by the writing thread."""

    def finish(self, begun: Any, start: int, stop: int) -> dict[str, np.ndarray]:
        del begun
        values, slots = self.source.fetch((self.rows[start:stop] + self.base).astype(np.int32))
        return {"values": values, **slots}


def _check_same(saved: Saved, own: TableShape, stored: TableShape) -> None:
    for what, ours, theirs in (("slots", own.slots, stored.slots), ("first values", own.first, stored.first)):
        if ours != theirs:
            raise CheckpointError(
                f"{saved.folder}: {what} of table {own.name!r} were {theirs} and are {ours} in this run; use the run's"
                " own configuration and seed, or another folder"
            )
