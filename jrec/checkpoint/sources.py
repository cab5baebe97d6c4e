"""Where a checkpoint's rows come from: pieces of tables, read in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np

from jrec.checkpoint.manifest import TableShape


class Piece(Protocol):
    """Rows of one table, all of them or some, that one folder of a checkpoint will hold."""

    @property
    def table(self) -> str:
        """The table's name."""
        ...

    @property
    def rows(self) -> np.ndarray | None:
        """Their numbers in the table, (count,) ascending; None for all rows."""
        ...

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    def begin(self, start: int, stop: int) -> Any:
        """Starts to read rows ``start`` to ``stop`` of the piece; in the thread that takes steps, between two steps."""
        ...

    def finish(self, begun: Any, start: int, stop: int) -> dict[str, np.ndarray]:
        """The rows as of the checkpoint's step, "values" and slots; in the thread that writes."""
        ...


class CheckpointSource(Protocol):
    """Tables in one place: a stack on a device, a stack in host memory, a device's share of a plan."""

    @property
    def tables(self) -> Mapping[str, TableShape]:
        """The shapes of its tables by name."""
        ...

    def changed(self) -> Mapping[str, tuple[int, int]]:
        """By table: rows changed since the last checkpoint, and rows that a full one would hold."""
        ...

    def begin(self, full: Collection[str]) -> list[Piece]:
        """The pieces of a checkpoint of this moment.

        What changes from here on is counted for the next one.

        Args:
          full: Tables of which all rows are wanted; of others those that changed.
        """
        ...

    def end(self) -> None:
        """Says that the checkpoint is written, or will not be."""
        ...

    @property
    def undo_bytes(self) -> int:
        """Bytes of rows that are kept as they were, see ``jrec.checkpoint.undo``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPiece:
    """A ``Piece`` whose rows the writing thread reads itself, from host memory or from files.

    Attributes:
      read: The rows ``start`` to ``stop`` of the piece, "values" and slots.
    """

    table: str
    rows: np.ndarray | None
    count: int
    read: Callable[[int, int], dict[str, np.ndarray]]

    def begin(self, start: int, stop: int) -> None:
        """Does nothing."""

    def finish(self, begun: None, start: int, stop: int) -> dict[str, np.ndarray]:
        """The rows, "values" and slots."""
        del begun
        return self.read(start, stop)


class FixedRows:
    """A ``CheckpointSource`` of rows that do not change, all of which are written.

    Args:
      tables: The tables' shapes by name.
      pieces: The pieces of all rows.
    """

    undo_bytes = 0

    def __init__(self, tables: Mapping[str, TableShape], pieces: Callable[[], list[Piece]]):
        self.tables, self._pieces = tables, pieces

    def changed(self) -> dict[str, tuple[int, int]]:
        """Nothing: changes are not counted, so that all rows are written."""
        return {}

    def begin(self, full: Collection[str]) -> list[Piece]:
        """All pieces, whatever ``full`` names."""
        del full
        return self._pieces()

    def end(self) -> None:
        """Does nothing."""
