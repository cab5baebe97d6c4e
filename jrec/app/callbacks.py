"""Functions of a user's own that a training calls: after log records, evaluations and checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jrec.app.config import TrainConfig
from jrec.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What a callback is told. With several processes each calls it, and is told the same.

    Attributes:
      kind: "log" after a log record, "evaluation" after one in training, "checkpoint" once one has begun to be written.
      step: How many steps were taken.
      values: Of a log record "loss", "running_auc" and what else it has; of an evaluation metrics by "SPLIT/METRIC",
        such as "valid/auc". None where there is none, as an AUC of one class.
      run: The run after the step, to predict with, or to read rows of.
      folder: The run's folder.
    """

    kind: Literal["log", "evaluation", "checkpoint"]
    step: int
    values: Mapping[str, float | None]
    run: Run
    folder: pathlib.Path
    _stopping: list[int] = dataclasses.field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Ends training after this step: the run is complete, evaluated and reported, as one that stopped early.

        Of several processes all must call it at the same event.
        """
        self._stopping.append(self.step)


Callback = Callable[[Event], object]


class Callbacks:
    """The callbacks of a run.

    Args:
      callbacks: The functions.
      run: The run.
      folder: Its folder.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run, folder: pathlib.Path):
        self._callbacks, self._run, self._folder, self._stopping = callbacks, run, folder, list[int]()

    @property
    def stopped(self) -> bool:
        """Whether one of them has asked to stop."""
        return bool(self._stopping)

    def __call__(
        self, kind: Literal["log", "evaluation", "checkpoint"], step: int, values: Mapping[str, float | None]
    ) -> None:
        """Calls each; what one raises ends the run."""
        event = Event(kind=kind, step=step, values=values, run=self._run, folder=self._folder, _stopping=self._stopping)
        for callback in self._callbacks:
            callback(event)


def named_callbacks(config: TrainConfig) -> list[Callback]:
    """The functions that ``config.callbacks`` names.

    Raises:
      ConfigError: If one is not there.
    """
    from jrec.app.models.factory import load_factory

    return [load_factory(name, "callbacks") for name in config.callbacks]
