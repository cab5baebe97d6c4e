"""What a model predicts of a line's label: a probability, of labels 0 and 1, or a number.

``model.loss`` says which, or of several labels ``model.multi_task.losses`` (``targets_of``). Kinds that score lines ask
these objects for all that depends on it; where one of several must count, it is the first (``target_of``).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, override

from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.config.model import NumbersSection
    from jrec.app.report.running_auc import NoRunningAuc, RunningAuc
    from jrec.data.schema import LabelNumbers
    from jrec.nn.optimizer import Loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(abc.ABC):
    """What a label is.

    Attributes:
      key: The key of the configuration that names its loss.
      loss_name: What that says.
      metrics: What ``evaluate.early_stopping.metric`` may be; the first is the default.
      importance: The metrics that tell how important features are; see ``ModelKind.importance_metrics``.
    """

    key: str
    loss_name: str
    metrics: ClassVar[tuple[str, ...]]
    importance: ClassVar[Mapping[str, tuple[int, str, str]]]

    @abc.abstractmethod
    def loss(self) -> Loss:
        """What a step makes smaller, of a model with this label only."""

    @abc.abstractmethod
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc | NoRunningAuc:
        """What the progress bar shows of the last steps; arguments as of ``ModelKind.running_auc``."""

    @abc.abstractmethod
    def check_label(self, path: str, numbers: LabelNumbers | None) -> None:
        """Refuses a dataset to train on whose label is another.

        Args:
          path: The dataset.
          numbers: What its label is like if it is a number; else None.

        Raises:
          ConfigError: Names the key and the remedy.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probability(Target):
    """Labels are 0 and 1, and outputs logits.

    Attributes:
      label_smoothing: See ``model.label_smoothing``.
    """

    label_smoothing: float
    metrics = ("auc", "log_loss", "refinement")
    importance = {  # noqa: RUF012 (a Mapping to its users)
        "log_loss": (1, "log loss rises by", "nats per example"),
        "auc": (-1, "AUC falls by", "0 to 1"),
    }

    @override
    def loss(self) -> Loss:
        from jrec.nn import binary_cross_entropy

        smoothing = self.label_smoothing
        return functools.partial(binary_cross_entropy, label_smoothing=smoothing) if smoothing else binary_cross_entropy

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc:
        from jrec.app.report.running_auc import RunningAuc

        return RunningAuc.empty(devices=devices, task=next(iter(config.model.multi_task.tasks), ""))

    @override
    def check_label(self, path: str, numbers: LabelNumbers | None) -> None:
        if numbers is not None:
            raise ConfigError(
                f"{self.key} is {self.loss_name!r}, which is of clicks, but the label of {path} is a number; choose one"
                f" of {', '.join(_NUMBER_LOSSES)}, or leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number(Target):
    """Labels are numbers; outputs become numbers by ``numbers``, whose "auto" is settled."""

    numbers: NumbersSection
    metrics = ("rmse", "mae", "xauc", "poisson_deviance")
    importance = {  # noqa: RUF012 (a Mapping to its users)
        "rmse": (1, "RMSE rises by", "unit of the label"),
        "mae": (1, "MAE rises by", "unit of the label"),
    }

    @override
    def loss(self) -> Loss:
        from jrec import nn

        losses = {
            "squared": nn.squared_error,
            "huber": nn.huber(delta=self.numbers.huber_delta),
            "poisson": nn.poisson,
        }
        return nn.of_numbers(losses[self.loss_name], self.numbers.by(self.loss_name))

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> NoRunningAuc:
        from jrec.app.report.running_auc import NoRunningAuc

        return NoRunningAuc()

    @override
    def check_label(self, path: str, numbers: LabelNumbers | None) -> None:
        if numbers is None:
            raise ConfigError(
                f"{self.key} is {self.loss_name!r}, which is of numbers, but the labels of {path} are 0 and 1; leave it"
                f' out, or prepare the log with kind = "number" in {_section(self.key)}'
            )
        if self.loss_name == "poisson" and (numbers.least < 0 or numbers.mean <= 0):
            raise ConfigError(
                f"{self.key} is 'poisson', which is of counts, but the least label of {path} is {numbers.least:g} and"
                f" their mean {numbers.mean:g}; choose 'squared' or 'huber'"
            )


_ONE_LABEL = "model.loss"
_NUMBER_LOSSES = ("squared", "huber", "poisson")


def targets_of(model: ModelConfig) -> dict[str, Target]:
    """What a model predicts, by task, or under "" where there is one label."""
    heads, smoothing = model.multi_task, model.label_smoothing
    if not heads.tasks:
        return {"": _target(_ONE_LABEL, model.loss, model.numbers, smoothing)}
    return {
        task: _target(f"model.multi_task.losses.{task}", loss, heads.numbers.get(task), smoothing)
        for task, loss in ((task, heads.losses.get(task, "log_loss")) for task in heads.tasks)
    }


def target_of(model: ModelConfig) -> Target:
    """What a model predicts of its first label, or its only one."""
    return next(iter(targets_of(model).values()))


def _target(key: str, loss: str, numbers: NumbersSection | None, label_smoothing: float) -> Target:
    if loss not in _NUMBER_LOSSES:  # "auto" stays only where labels are 0 and 1 (``jrec.app.dataset``)
        return Probability(key=key, loss_name=loss, label_smoothing=label_smoothing)
    from jrec.app.config.model import NumbersSection

    return Number(key=key, loss_name=loss, numbers=numbers or NumbersSection())


def _section(key: str) -> str:
    """The section of a log's schema that says what a label is."""
    return "[label]" if key == _ONE_LABEL else "its [[labels]]"
