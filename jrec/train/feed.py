"""Where a run's batches come from: ready for a step, with the rows of theirs that lie in host memory."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.train.step import HostRows, Seen, StepBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A batch to take a step with.

    Attributes:
      batch: NumPy arrays, as the loader made them.
      given: What the step takes of it.
      host: The batch's rows from host memory, by stack; the step returns new ones.
    """

    batch: Batch
    given: StepBatch
    host: HostRows = dataclasses.field(default_factory=dict)


class Feed(Protocol):
    """The batches of a run, in the order of its steps. Use it from one thread."""

    def next(self) -> Ready:
        """The next batch.

        Raises:
          RuntimeError: If all steps of the run are taken.
        """
        ...

    def stepped(self, ready: Ready, host: HostRows, seen: Seen) -> Batch:
        """Takes back a batch after its step; before the next one is asked for.

        Args:
          ready: The batch.
          host: Its rows from host memory, as the step left them.
          seen: What the step returned.

        Returns:
          The batch whose examples the step's logits are of; of several processes, with labels and mask of all.
        """
        ...

    def settle(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        ...

    def position(self) -> Any:
        """Where the run is, behind the batch of the last step; JSON."""
        ...

    def restore(self, position: Any) -> None:
        """Goes to a ``position()``. Call it before the first batch."""
        ...

    def sections(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of its batches, see ``jrec.train.report.sections``.

        Args:
          seconds: How long training took.
        """
        ...

    def close(self) -> None:
        """Ends threads: no more batches. Rows that have not settled are lost."""
        ...


class LoaderFeed:
    """Batches of a loader, for one device that holds all rows.

    Args:
      loader: The training batches.
    """

    def __init__(self, loader: Loader):
        self._loader = loader

    def next(self) -> Ready:
        """See ``Feed``."""
        batch = next(self._loader)
        return Ready(batch=batch, given=StepBatch(batch=batch))

    def stepped(self, ready: Ready, host: HostRows, seen: Seen) -> Batch:
        """See ``Feed``."""
        del host, seen
        return ready.batch

    def settle(self) -> None:
        """No row is in host memory."""

    def position(self) -> Any:
        """See ``Feed``."""
        return self._loader.state()

    def restore(self, position: Any) -> None:
        """See ``Feed``."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> dict[str, Any]:
        """There are none."""
        del seconds
        return {}

    def close(self) -> None:
        """See ``Feed``."""
        self._loader.close()
