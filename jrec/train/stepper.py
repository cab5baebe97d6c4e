"""Who takes a run's steps: what the loop needs of a model whose tables live on the device, and of any other."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader
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

    def save(self, step: int) -> None:
        """Writes what is not on the device, for a checkpoint of ``step`` whose other part is written afterwards."""
        ...

    def saved(self, steps: list[int]) -> None:
        """Drops what no checkpoint needs any more; ``steps`` are those that are kept."""
        ...

    def restore(self, state: State, position: dict[str, Any], step: int) -> None:
        """Goes to a checkpoint; before the first step only."""
        ...

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """What the stages did during ``seconds`` of training, for the report; None where there are none."""
        ...

    def close(self) -> None:
        """Ends threads: no more steps. Rows that have not settled are lost."""
        ...


class DeviceStepper:
    """Steps of a model whose tables are all on the device."""

    def __init__(self, state: State, compiled: CompiledRun, loader: Loader):
        self.state = state
        self._compiled, self._loader = compiled, loader

    def step(self) -> tuple[jax.Array, jax.Array, Batch]:
        """See ``Stepper``."""
        batch = next(self._loader)
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

    def save(self, step: int) -> None:
        """Everything is on the device."""

    def saved(self, steps: list[int]) -> None:
        """Nothing was written."""

    def restore(self, state: State, position: dict[str, Any], step: int) -> None:
        """See ``Stepper``."""
        del step
        self.state = state
        self._loader.restore(position)

    def pipeline(self, seconds: float) -> dict[str, Any] | None:
        """There is none."""
        del seconds

    def close(self) -> None:
        """See ``Stepper``."""
        self._loader.close()
