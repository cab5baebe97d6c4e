"""Takes the steps of a run: what it has learned, and where its batches come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jrec.batch import Batch
from jrec.checkpoint import Saved
from jrec.checkpoint.sources import Source
from jrec.train.feed import Feed
from jrec.train.run_state import RunState
from jrec.train.step import State


class Trainer:
    """Takes the steps of one run, one after the other.

    Args:
      run: What it has learned.
      feed: Its batches.
    """

    def __init__(self, run: RunState, feed: Feed):
        self.run, self.feed = run, feed

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """Takes a step; its loss, logits before it, and batch (NumPy arrays). Returns before the device is done."""
        ready = self.feed.next()
        if (setup := self.run.setup) is not None and setup.monitor is not None:
            setup.monitor.observe(ready.batch)
        host, seen = self.run.step(ready)
        return seen.loss, seen.logits, self.feed.stepped(ready, host, seen)

    def settle(self) -> None:
        """Waits until every row is where it lives, as the last step left it."""
        self.feed.settle()

    def position(self) -> Any:
        """The position of the batches behind that of the last step."""
        return self.feed.position()

    def sources(self) -> Sequence[Source]:
        """Where the tables' rows are, as the last step left them, for a checkpoint."""
        self.settle()
        return self.run.sources()

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """Takes a checkpoint's rows, its state, and the position of the batches. Call it before the first step.

        Raises:
          CheckpointError: If the rows are damaged, or of other tables.
        """
        self.feed.restore(position)
        self.run.restore(saved, state)

    def close(self) -> None:
        """Ends threads: no more steps. Rows that have not settled are lost."""
        self.feed.close()
