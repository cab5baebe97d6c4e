"""Rows of stacks in host memory, for checkpoints: those that were ever made, or that changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import numpy as np

from jrec.checkpoint.manifest import VALUES, FirstValues, TableShape
from jrec.checkpoint.saved import Saved
from jrec.checkpoint.sources import HostPiece, Piece
from jrec.checkpoint.undo import Undo
from jrec.errors import CheckpointError
from jrec.host.table import HostTable


class HostRows:
    """A table in host memory, for checkpoints; see ``jrec.checkpoint.sources.CheckpointSource``.

    Args:
      table: The stack's rows, or with several processes this one's share of them.
    """

    def __init__(self, table: HostTable):
        self._table, stack, optimizer = table, table.stack, table.optimizer
        self._lock, self._undo = threading.Lock(), Undo()
        self._rows, self._pending = np.empty(0, np.int32), np.empty(0, bool)
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
                    bound=t.initial_bound,
                ),
            )
            for t, key in zip(stack.tables, table.keys, strict=True)
        }

    def changed(self) -> dict[str, tuple[int, int]]:
        """By table: rows changed since the last checkpoint, and rows that were ever made."""
        dirty, made = self._split(self._table.dirty_rows()), self._split(self._table.made_rows())
        return {name: (dirty[name].size, made[name].size) for name in self.tables}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """The pieces of a checkpoint of this moment. Not to be called while another thread writes rows."""
        dirty, made = self._split(self._table.dirty_rows()), self._split(self._table.made_rows())
        self._table.clear_dirty()
        rows = {name: made[name] if name in full else dirty[name] for name in self.tables}
        self._undo.clear()
        ends = np.cumsum([changed.size for changed in rows.values()])
        self._rows = np.concatenate(
            [changed + base for changed, base in zip(rows.values(), self._table.stack.bases, strict=True)]
        )
        self._pending = np.ones(self._rows.size, bool)
        # From here on a write to a pending row keeps its old values first.
        self._table.watch(self._keep)
        return [
            HostPiece(table=name, rows=changed, count=changed.size, read=self._reader(int(end) - changed.size))
            for (name, changed), end in zip(rows.items(), ends, strict=True)
            if changed.size
        ]

    def end(self) -> None:
        """Says that the checkpoint is written, or will not be: old rows are kept no longer."""
        self._table.watch(None)
        with self._lock:  # a thread may be writing rows, and have looked who watches before
            self._undo.clear()
            self._rows, self._pending = np.empty(0, np.int32), np.empty(0, bool)

    @property
    def undo_bytes(self) -> int:
        """Bytes of the old rows that are kept."""
        return self._undo.bytes

    def _reader(self, first: int) -> Callable[[int, int], dict[str, np.ndarray]]:
        """Reads rows of a piece that begins at ``first`` among all that the checkpoint under way wants."""
        return lambda start, stop: self._read(first + start, first + stop)

    def _read(self, begin: int, stop: int) -> dict[str, np.ndarray]:
        """Rows ``begin`` to ``stop`` of all that the checkpoint under way wants, as they were when it began."""
        addresses = np.ascontiguousarray(self._rows[begin:stop])
        with self._lock:  # from here on nobody needs to keep them
            values, slots = self._table.fetch(addresses)
            self._pending[begin:stop] = False
        return self._undo.overlay(addresses, {VALUES: values, **slots})

    def _keep(self, addresses: np.ndarray) -> None:
        """Keeps the rows that the checkpoint still needs, before they are overwritten."""
        with self._lock:
            if not self._rows.size:
                return
            at = np.minimum(np.searchsorted(self._rows, addresses), self._rows.size - 1)
            # ``at`` is the nearest place, at the end the last one: it counts only where the address stands there.
            wanted = (self._rows[at] == addresses) & self._pending[at]
            if wanted.any():
                kept = np.ascontiguousarray(addresses[wanted])
                values, slots = self._table.fetch(kept)
                arrays = {VALUES: values, **slots}
                self._undo.add(kept, arrays, sum(array.nbytes for array in arrays.values()))
                # Kept once, as of the checkpoint; what is written later is newer.
                self._pending[at[wanted]] = False

    def restore(self, saved: Saved, *, slots: bool = True) -> None:
        """Takes the rows of a checkpoint; rows that it does not have become what they were at first.

        Args:
          saved: The checkpoint.
          slots: False to read no slots, for a table whose optimizer has none.

        Raises:
          CheckpointError: If it is damaged, or of other tables, slots or first values. The table is as new then.
        """
        table = self._table
        table.reset()
        try:
            for shape, base, one in zip(
                self.tables.values(), table.stack.bases, saved.stack_tables(table.stack), strict=True
            ):
                check_same(saved, shape, one.record.shape, slots)
                for rows, arrays in one.written(["values", *shape.slots]):
                    table.store((rows + base).astype(np.int64), arrays.pop("values"), arrays)
                if one.record.shape.first is None and not any(piece.whole for piece in one.record.pieces):
                    restored = self._split(table.made_rows())[shape.name].size
                    if restored < shape.rows:
                        raise CheckpointError(
                            f"{saved.folder}: table {shape.name!r} has {restored:,} of its {shape.rows:,} rows there;"
                            " go on from an earlier checkpoint"
                        )
        except CheckpointError:
            table.reset()
            raise
        # ``store`` has marked the rows as changed, but they are as the checkpoint has them.
        table.clear_dirty()

    def _split(self, addresses: np.ndarray) -> dict[str, np.ndarray]:
        """Splits ascending addresses by table, into row numbers."""
        stack = self._table.stack
        bounds = np.searchsorted(addresses, [*stack.bases, stack.rows])
        return {
            name: addresses[begin:stop] - base
            for name, base, begin, stop in zip(self.tables, stack.bases, bounds, bounds[1:], strict=False)
        }


def check_same(saved: Saved, own: TableShape, stored: TableShape, slots: bool) -> None:
    """Refuses a checkpoint whose rows began as others did. One that has every row says nothing of how they began.

    Args:
      saved: The checkpoint.
      own: The table of this run.
      stored: The table of the checkpoint.
      slots: Whether slots have to be the same, too.

    Raises:
      CheckpointError: Naming what differs.
    """
    nothing = FirstValues(key=[], of_rows=0, slots={})
    firsts = [shape.first or nothing for shape in (own, own if stored.first is None else stored)]
    keys = [(first.key, first.of_rows, first.slots if slots else {}) for first in firsts]
    bounds = [first.bound for first in firsts]
    aspects = (("slots", own.slots, stored.slots), ("keys of first values", *keys), ("initial bounds", *bounds))
    for aspect, ours, theirs in aspects:
        if ours != theirs and (slots or aspect != "slots"):
            raise CheckpointError(
                f"{saved.folder}: {aspect} of table {own.name!r} were {theirs} and are {ours} in this run; use the"
                " run's own configuration and seed, or another folder"
            )
