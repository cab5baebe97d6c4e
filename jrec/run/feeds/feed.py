"""The source of a run's batches: ready for a step, with their rows from host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

from jrec.batch import Batch
from jrec.data.growing_tables import Grown
from jrec.json_values import JsonObject
from jrec.run.feeds.batches import Batches, Position
from jrec.run.step import HostResults, HostRows, StepBatch, StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A batch to take a step with, or several for one dispatch.

    Attributes:
      batches: NumPy arrays, as the loader made them.
      prepared: The part of the batches that the steps take.
      host: The batch's rows from host memory, by stack; the step returns new ones.
      grown: What the batch changed in tables that grow. Rows in host memory have their first values already; those on
        devices get them before the step.
    """

    batches: tuple[Batch, ...]
    prepared: StepBatch
    host: HostRows = dataclasses.field(default_factory=dict)
    grown: Grown | None = None


class Feed(Protocol):
    """The batches of a run, in the order of its steps. Use it from one thread."""

    def next(self) -> Ready:
        """The next batch.

        Raises:
          StopIteration: If there is none.
        """
        ...

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Takes back a batch after its step; before the next one is asked for.

        Args:
          ready: The batch.
          host: The batch's rows from host memory after the step, or what the host updates them with.
          results: The step's outputs.
        """
        ...

    def flush(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        ...

    def position(self) -> Position:
        """The position after the batch of the last step, in JSON types."""
        ...

    def restore(self, position: Position) -> None:
        """Continues from a ``position()``. Call before the first batch."""
        ...

    def sections(self, seconds: float) -> JsonObject:
        """The report's sections about the batches, see ``jrec.app.report.writing``.

        Args:
          seconds: The duration of training.
        """
        ...

    def close(self) -> None:
        """Ends the threads; there are no more batches. Rows that are not flushed are lost."""
        ...


def remaining(loader: Batches, total: int | None) -> Iterator[tuple[Any, tuple[Position, Grown | None]]]:
    """A run's remaining batches, for a thread that reads them ahead of the steps.

    Args:
      loader: The batches.
      total: The number of batches that the run takes; None for all.

    Yields:
      A batch, and what holds after its step: the loader's position, and what it changed in tables that grow.
    """
    while total is None or loader.position < total:
        # The generator must end by a return: a StopIteration that escapes from it would become a RuntimeError.
        try:
            batch = next(loader)
        except StopIteration:
            return
        # Taken together with the batch: by the time of its step the loader is further on.
        yield batch, (loader.state(), loader.aside)


class LoaderFeed:
    """Batches of a loader, for one device that holds all rows; the base of feeds that need nothing ahead of a step.

    Args:
      loader: The training batches.
    """

    def __init__(self, loader: Batches):
        self._loader = loader

    def next(self) -> Ready:
        """The loader's next batch."""
        batch = next(self._loader)
        return Ready(batches=(batch,), prepared=StepBatch(batch=batch), grown=self._loader.aside)

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Does nothing: all rows are on the devices."""

    def flush(self) -> None:
        """Does nothing: no row is in host memory."""

    def position(self) -> Position:
        """The loader's position after its last batch."""
        return self._loader.state()

    def restore(self, position: Position) -> None:
        """Continues from a ``position()``."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> JsonObject:
        """No sections."""
        del seconds
        return {}

    def close(self) -> None:
        """Closes the loader."""
        self._loader.close()
