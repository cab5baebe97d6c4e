"""Takes the steps of a run, from its state and its source of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrec.batch import Batch
from jrec.checkpoint import Saved
from jrec.checkpoint.sources import Source
from jrec.run.feed import Feed
from jrec.run.state import RunState
from jrec.run.step import Seen, State


class Trainer:
    """Takes the steps of one run, one after the other.

    Args:
      run: The run's state.
      feed: The run's batches.
    """

    def __init__(self, run: RunState, feed: Feed):
        self.run, self.feed = run, feed

    def step(self) -> tuple[Seen, Batch]:
        """Takes a step; returns what it computed, and its batch (NumPy arrays), before the device is done."""
        ready = self.feed.next()
        if (setup := self.run.setup) is not None and setup.monitor is not None:
            setup.monitor.observe(ready.batch)
        host, outputs = self.run.step(ready)
        return outputs, self.feed.stepped(ready, host, outputs)

    def settle(self) -> None:
        """Waits until the last step's rows are stored where they live."""
        self.feed.settle()

    def position(self) -> Any:
        """The position in the batches after the last step."""
        return self.feed.position()

    def sources(self) -> Sequence[Source]:
        """The tables' rows after the last step, for a checkpoint."""
        self.settle()
        return self.run.sources()

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """Restores a checkpoint: its rows, its state, and the position in the batches. Call before the first step.

        Raises:
          CheckpointError: If the rows are damaged, or belong to other tables.
        """
        self.feed.restore(position)
        self.run.restore(saved, state)

    def close(self) -> None:
        """Ends the threads; no step may follow. Rows that are not settled are lost."""
        self.feed.close()
