"""How many steps a run takes, and what it means to resume one with another number."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from jrec.app.config import TrainConfig
from jrec.app.config.optimizer import LRScheduleConfig
from jrec.app.dataset import RunData
from jrec.app.report.logs import LENGTHS, TIMING_FILE, JsonLines
from jrec.app.run_record import TrainedRun
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError


def steps_of(data: RunData) -> int:
    """Steps of the whole run.

    The number does not depend on how many processes share the batches: shares round up, or down, as whole batches do.

    Raises:
      DatasetError: If there are no examples to train on.
    """
    config = data.config
    if data.packed is not None:
        per_epoch = sum(epoch_batches(config, n) for n in (data.packed.hot_examples, data.packed.cold_examples))
    elif not data.schema.with_examples(["train"]):
        raise DatasetError(
            f"{config.data.path} has no examples in a 'train' split; prepare more rows or other split fractions"
        )
    else:
        per_epoch = epoch_batches(config, data.schema.splits["train"].examples)
    steps = config.epochs * per_epoch
    return min(steps, config.max_steps) if config.max_steps else steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewLength:
    """Another length of a run that is resumed.

    Attributes:
      config: The run's configuration.
      step: The step that it goes on from.
      before, steps: Its length so far, and from now on, in steps.
    """

    config: TrainConfig
    step: int
    before: int
    steps: int

    def announce(self, folder: pathlib.Path) -> None:
        """Says on standard error, and records in the run's ``timing.jsonl``, what becomes of the learning rates."""
        factors = {
            key: {"before": self._factor(schedule, self.before), "now": self._factor(schedule, self.steps)}
            for key, schedule in self._stretched.items()
        }
        record = {"step": self.step, "split": LENGTHS, "before": self.before, "steps": self.steps}
        lines = JsonLines(folder / TIMING_FILE)
        lines.write(record | ({"factors": factors} if factors else {}))
        lines.close()
        sys.stderr.write(f"jrec: {self._sentence(factors)}\n")

    def _factor(self, schedule: LRScheduleConfig, steps: int) -> float:
        """A schedule's factor at the next step, in a run of ``steps`` steps."""
        return float(np.asarray(schedule.build(steps)(self.step)))

    def _sentence(self, factors: Mapping[str, Mapping[str, float]]) -> str:
        length = f"from step {self.step:,} on this is a run of {self.steps:,} steps instead of {self.before:,}"
        if not factors:
            return f"{length}; the learning rates do not change"
        parts = []
        for key, factor in factors.items():
            before, now = factor["before"], factor["now"]
            rates = (
                f"{name} {rate * now:.4g} instead of {rate * before:.4g}" for name, rate in self._rates(key).items()
            )
            parts.append(f"{key} is {now:.4g} instead of {before:.4g} ({', '.join(rates)})")
        left = self.steps - self.step
        return f"{length}, and the learning rates decay until its end in {left:,} steps: {'; '.join(parts)}"

    @property
    def _stretched(self) -> dict[str, LRScheduleConfig]:
        """The schedules that last until the end of training, by their dotted keys."""
        tables = self.config.optimizer.embedding.tables
        own = {_key(name): table.lr_schedule for name, table in tables.items() if table.lr_schedule is not None}
        schedules = {"lr_schedule": self.config.lr_schedule, **own}
        return {key: s for key, s in schedules.items() if s.kind != "constant" and not s.decay_steps}

    def _rates(self, key: str) -> dict[str, float]:
        """The learning rates that a schedule multiplies, by name."""
        optimizer = self.config.optimizer
        for table in optimizer.embedding.tables:
            if key == _key(table) and (trained := optimizer.embedding.of(table)) is not None:
                return {table: trained.learning_rate}
        return {"optimizer": optimizer.learning_rate, "optimizer.embedding": optimizer.embedding.learning_rate}


def new_length(data: RunData, *, resume_from: int | None) -> NewLength | None:
    """What changes where the run in ``out`` is resumed with other ``epochs`` or ``max_steps``.

    The steps up to the checkpoint stay as they are. Those after it are the steps of a run of the new length: the
    batches do not depend on it, and a schedule of learning rates that lasts until the end of training has the values
    that it has in such a run.

    Args:
      data: The run's dataset and its configuration with the new length.
      resume_from: The step of the checkpoint to go on from; None for the latest.

    Returns:
      The new length; None where there is no checkpoint, or the number of steps is the same.

    Raises:
      ConfigError: If the run would end before the step that it goes on from.
    """
    config, record = data.config, TrainedRun(pathlib.Path(data.config.out))
    taken = [int(path.name) for path in record.checkpoints.glob("*") if path.name.isdigit()]
    if not record.began or not taken:
        return None
    step, steps = max(taken) if resume_from is None else resume_from, steps_of(data)
    if step > steps:
        raise ConfigError(
            f"epochs={config.epochs} and max_steps={config.max_steps} make a run of {steps:,} steps, but"
            f" {record.folder} has a checkpoint of step {step:,} already; give it at least as many steps, or go on from"
            " an earlier checkpoint with --resume-from STEP"
        )
    stored = record.config()
    # Only the length may differ: ``check_run_folder`` refuses to change what else decides about steps.
    old = dataclasses.replace(config, epochs=stored.epochs, max_steps=stored.max_steps)
    before = steps_of(dataclasses.replace(data, config=old))
    return None if before == steps else NewLength(config=config, step=step, before=before, steps=steps)


def epoch_batches(config: TrainConfig, examples: int) -> int:
    """The batches of an epoch of this many examples."""
    whole, rest = divmod(examples, config.data.batch_size)
    return whole if config.data.drop_remainder else whole + bool(rest)


def _key(table: str) -> str:
    return f"optimizer.embedding.tables.{table}.lr_schedule"
