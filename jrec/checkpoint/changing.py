"""Rows on devices that steps change in place: which change, and what they were at the step of a checkpoint."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import numpy as np

from jrec.checkpoint.manifest import TableShape
from jrec.checkpoint.sources import Piece
from jrec.checkpoint.undo import DIRTY, PENDING, Undo, mark
from jrec.host.memory import allocate
from jrec.ops.layout import Stack

Where = np.ndarray | tuple[int, int]
"""Ascending addresses, or the first of a range of them and the one past its last."""


class Part(NamedTuple):
    """Rows that are being read from one device.

    Attributes:
      at: Which of the rows that were asked for they are, (n,) ascending positions; None for all.
      arrays: By name, the rows from ``first`` on, (rows, dim or more) or (rows,); others may follow them.
      first: Where they begin.
    """

    at: np.ndarray | None
    arrays: dict[str, jax.Array]
    first: int = 0


class ChangingRows(abc.ABC):
    """A stack's rows on devices, for checkpoints; see ``jrec.checkpoint.sources.CheckpointSource``.

    It keeps a byte a row in host memory.

    Args:
      stack: The tables.
      slots: The optimizer's slots, by name "row" or "element".
      ranges: By table, (n, 2) begins and ends of its rows that are here, ascending and apart; None for all rows.
    """

    def __init__(self, stack: Stack, slots: Mapping[str, str], ranges: Mapping[str, np.ndarray] | None = None):
        self.stack = stack
        self.tables = {
            t.name: TableShape(name=t.name, rows=t.rows, dim=t.dim, dtype=t.dtype, slots=dict(slots))
            for t in stack.tables
        }
        self._flags = allocate((stack.rows,), np.dtype(np.uint8), name=f"{stack.name}.changed")
        self._undo, self._writing, self._compiles = Undo(), False, False
        self._here = {
            name: _Flags(self._flags, base, np.array([[0, shape.rows]]) if ranges is None else ranges[name])
            for (name, shape), base in zip(self.tables.items(), stack.bases, strict=True)
        }

    @abc.abstractmethod
    def read(self, addresses: np.ndarray) -> list[Part]:
        """Starts to read the rows at (n,) ascending addresses, as they are now."""

    @abc.abstractmethod
    def read_range(self, begin: int, stop: int) -> list[Part]:
        """Starts to read a range of rows, as they are now."""

    @abc.abstractmethod
    def compile_all(self) -> Callable[[], None]:
        """What compiles all that reads rows; to be called in a thread."""

    def compile_reads(self) -> None:
        """Compiles in a thread what reads rows, so that steps do not wait for it while a checkpoint is written."""
        if not self._compiles:
            self._compiles = True
            threading.Thread(target=self.compile_all(), name="jrec-checkpoint-compile").start()

    def changed(self) -> dict[str, tuple[int, int]]:
        """By table: rows changed since the last checkpoint, and all of its rows that are here."""
        return {name: (flags.dirty().size, flags.count) for name, flags in self._here.items()}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """The pieces of a checkpoint of this moment; flags their rows as pending."""
        self.compile_reads()
        self._undo.clear()  # of one that failed
        pieces: list[Piece] = []
        for name, flags in self._here.items():
            if name in full and flags.count == self.tables[name].rows:
                flags.set_all()
                pieces.append(_Piece(self, name, None, flags.count, flags.base))
            elif (rows := flags.begin(full=name in full)).size:
                pieces.append(_Piece(self, name, rows, rows.size, flags.base))
        self._writing = True
        return pieces

    def end(self) -> None:
        """Says that the checkpoint is written, or will not be: old rows are kept no longer."""
        self._writing = False
        self._undo.clear()

    @property
    def undo_bytes(self) -> int:
        """Bytes of the old rows that are kept."""
        return self._undo.bytes

    def before_step(self, addresses: np.ndarray) -> None:
        """Says which rows the next step may change, before it is dispatched.

        Args:
          addresses: (n,) int, repeated or not; negative ones are none.
        """
        pending = np.empty(addresses.size, addresses.dtype)
        count = mark(self._flags, addresses.reshape(-1), pending)
        if count and self._writing:
            # The read is started before the step is dispatched, so that it sees these rows as they were.
            kept = np.sort(pending[:count])
            for part in self.read(kept):
                own = kept if part.at is None else kept[part.at]
                self._undo.add(own, part.arrays, sum(array.nbytes for array in part.arrays.values()))

    def begin_read(self, where: Where) -> list[Part]:
        """Starts to read rows of the checkpoint under way: from here on steps need not keep them."""
        if isinstance(where, tuple):
            # A row that a step has changed already is read in its new form, too; ``overlay`` puts the kept one over it.
            self._flags[where[0] : where[1]] &= ~PENDING
            return self.read_range(*where)
        self._flags[where] &= ~PENDING
        return self.read(where)

    def finish_read(self, parts: list[Part], where: Where, shape: TableShape) -> dict[str, np.ndarray]:
        """The rows of one table as of the checkpoint's step, by array; in the thread that writes."""
        count = where[1] - where[0] if isinstance(where, tuple) else where.size
        arrays: dict[str, np.ndarray] = {}
        for at, read, first in parts:
            for name, array in read.items():
                rows = np.asarray(array)[first : first + (count if at is None else at.size)]
                rows = rows[:, : shape.dim] if rows.ndim == 2 else rows
                if at is None:
                    arrays[name] = rows
                else:
                    arrays.setdefault(name, np.empty((count, *rows.shape[1:]), rows.dtype))[at] = rows
        return self._undo.overlay(where, arrays)


@dataclasses.dataclass
class _Piece:
    """See ``jrec.checkpoint.sources.Piece``."""

    source: ChangingRows
    table: str
    rows: np.ndarray | None
    count: int
    base: int

    def begin(self, start: int, stop: int) -> list[Part]:
        return self.source.begin_read(self._where(start, stop))

    def finish(self, begun: list[Part], start: int, stop: int) -> dict[str, np.ndarray]:
        return self.source.finish_read(begun, self._where(start, stop), self.source.tables[self.table])

    def _where(self, start: int, stop: int) -> Where:
        return (self.base + start, self.base + stop) if self.rows is None else self.rows[start:stop] + self.base


class _Flags:
    """The flags of one table's rows, of which some may be elsewhere.

    Args:
      flags: The stack's flags, by address.
      base: The table's first address.
      ranges: (n, 2) begins and ends of the rows that are here, ascending and apart.

    Attributes:
      count: The number of rows that are here.
    """

    def __init__(self, flags: np.ndarray, base: int, ranges: np.ndarray):
        self.base, self._ranges = base, ranges
        self.count = int((ranges[:, 1] - ranges[:, 0]).sum())
        self._first, last = (int(ranges[0, 0]), int(ranges[-1, 1])) if ranges.size else (0, 0)
        self._flags = flags[base + self._first : base + last]  # also of the rows between, which are elsewhere

    def dirty(self) -> np.ndarray:
        """(n,) ascending numbers of the rows that changed since the last checkpoint."""
        rows = np.flatnonzero((self._flags & DIRTY).view(bool)) + self._first  # of bytes it takes 10 times as long
        if self.count == self._flags.size:
            return rows
        # Flags between the ranges belong to rows that lie elsewhere, and are counted there.
        return rows[rows < self._ranges[np.searchsorted(self._ranges[:, 0], rows, side="right") - 1, 1]]

    def begin(self, *, full: bool) -> np.ndarray:
        """(n,) ascending numbers of all rows, or of those that changed: they are pending from now on."""
        rows = _numbers(self._ranges) if full else self.dirty()
        self._flags[np.flatnonzero(self._flags != 0)] = 0  # writes no page that is still zero
        self._flags[rows - self._first] = PENDING
        return rows

    def set_all(self) -> None:
        """As ``begin`` with all rows, where these are the whole table."""
        self._flags[:] = PENDING


def _numbers(ranges: np.ndarray) -> np.ndarray:
    """(n,) int64, the numbers in ascending ranges."""
    sizes = ranges[:, 1] - ranges[:, 0]
    return np.arange(sizes.sum()) + np.repeat(ranges[:, 0] - (np.cumsum(sizes) - sizes), sizes)
