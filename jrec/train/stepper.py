"""Who takes a run's steps: what the loop needs of a model whose tables live on the device, and of any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jrec.batch import Batch
from jrec.checkpoint import Saved
from jrec.checkpoint.sources import Source
from jrec.data.loader import Loader
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizers
from jrec.train.checkpoint import before_step, device_rows
from jrec.train.step import CompiledRun, State


class Stepper(Protocol):
    """Takes the steps of one run, one after the other, from its loader's batches.

    Attributes:
      state: of model and optimizer, all that is on the device.
    """

    state: State

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """Takes a step; its loss, logits before it, and batch (NumPy arrays). Returns before the device is done."""
        ...

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """Logits, (batch,) float32, of the model after the last step; ``state`` is this stepper's."""
        ...

    def settle(self) -> None:
        """Waits until every row is where it lives, as the last step left it."""
        ...

    def position(self) -> dict[str, Any]:
        """The loader's position behind the batch of the last step."""
        ...

    def sources(self) -> Sequence[Source]:
        """Where the tables' rows are, as the last step left them, for a checkpoint; the same objects every time."""
        ...

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """Takes a checkpoint's rows, that are not in the state, its state, and the loader's position.

        Call it before the first step.

        Raises:
          CheckpointError: If the rows are damaged, or of other tables.
        """
        ...

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """What the stages did during ``seconds`` of training, for the report; None where there are none."""
        ...

    def close(self) -> None:
        """Ends threads: no more steps. Rows that have not settled are lost."""
        ...


class DeviceStepper:
    """Steps of a model whose tables are all on the device.

    Args:
      state: The state of model and optimizer.
      compiled: Their functions.
      loader: The training batches.
      layout: The tables.
      optimizer: The row optimizer, or that of each stack.
      saves: Whether checkpoints will be written while steps go on.
    """

    def __init__(
        self,
        state: State,
        compiled: CompiledRun,
        loader: Loader,
        layout: EmbeddingLayout,
        optimizer: RowOptimizers,
        *,
        saves: bool,
    ):
        self.state = state
        self._compiled, self._loader = compiled, loader
        self._rows = device_rows(layout, optimizer, lambda: self.state)
        if saves:
            for rows in self._rows.values():
                rows.compile_reads()

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """See ``Stepper``."""
        batch = next(self._loader)
        before_step(self._rows, batch)
        self.state, loss, logits = self._compiled.step(self.state, batch)
        return loss, logits, batch

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """See ``Stepper``."""
        return self._compiled.predict(state, batch)

    def settle(self) -> None:
        """Every row is there already."""

    def position(self) -> dict[str, Any]:
        """See ``Stepper``."""
        return self._loader.state()

    def sources(self) -> Sequence[Source]:
        """See ``Stepper``."""
        return list(self._rows.values())

    def restore(self, saved: Saved, state: State, position: Any) -> None:
        """See ``Stepper``."""
        del saved
        self.state = state
        self._loader.restore(position)

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """There is none."""
        del seconds

    def close(self) -> None:
        """See ``Stepper``."""
        self._loader.close()
