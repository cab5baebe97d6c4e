"""What a model predicts of a line's label: a probability, of labels 0 and 1, or a number.

``model.loss`` says which (``target_of``). Kinds that score lines ask this one object for all that depends on it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, override

from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.models.reading import Reading
    from jrec.app.report.ranking import AnyScores
    from jrec.app.report.running_auc import NoRunningAuc, RunningAuc
    from jrec.batch import Batch
    from jrec.data.schema import Schema
    from jrec.nn.optimizer import Loss


class Target(abc.ABC):
    """What a label is.

    Attributes:
      metrics: What ``evaluate.early_stopping.metric`` may be; the first is the default.
      importance: The metrics that tell how important features are; see ``ModelKind.importance_metrics``.
    """

    metrics: ClassVar[tuple[str, ...]]
    importance: ClassVar[Mapping[str, tuple[int, str, str]]]

    @abc.abstractmethod
    def loss(self, model: ModelConfig) -> Loss:
        """What a step makes smaller."""

    @abc.abstractmethod
    def identity(self, model: ModelConfig) -> dict[str, Any]:
        """What a checkpoint records of how outputs are predictions."""

    @abc.abstractmethod
    def scores(
        self, predictions: Iterable[tuple[Any, Batch]], reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> AnyScores:
        """The scores of this process's examples; arguments and errors as of ``ModelKind.scores``."""

    @abc.abstractmethod
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc | NoRunningAuc:
        """What the progress bar shows of the last steps; arguments as of ``ModelKind.running_auc``."""

    @abc.abstractmethod
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> dict[str, Any]:
        """What reports compare scores with; arguments as of ``ModelKind.comparisons``."""

    @abc.abstractmethod
    def check_data(self, config: TrainConfig, schema: Schema) -> None:
        """Refuses a dataset to train on that has other labels, and keys that do not go with them.

        Raises:
          ConfigError: Names the key and the remedy.
        """


class Probability(Target):
    """Labels are 0 and 1, and outputs logits."""

    metrics = ("auc", "log_loss", "refinement")
    importance = {  # noqa: RUF012 (a Mapping to its users)
        "log_loss": (1, "log loss rises by", "nats per example"),
        "auc": (-1, "AUC falls by", "0 to 1"),
    }

    @override
    def loss(self, model: ModelConfig) -> Loss:
        from jrec.nn import binary_cross_entropy, multi_task_loss

        heads, smoothing = model.multi_task, model.label_smoothing
        if heads.tasks:
            return multi_task_loss(heads.weight_by_task, label=heads.tasks[0], label_smoothing=smoothing)
        return functools.partial(binary_cross_entropy, label_smoothing=smoothing) if smoothing else binary_cross_entropy

    @override
    def identity(self, model: ModelConfig) -> dict[str, Any]:
        return {}

    @override
    def scores(
        self, predictions: Iterable[tuple[Any, Batch]], reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> AnyScores:
        from jrec.run.evaluation import collected

        return collected(predictions, tasks=reading.config.model.multi_task.tasks, check=check, on_batch=on_batch)

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc:
        from jrec.app.report.running_auc import RunningAuc

        return RunningAuc.empty(devices=devices, task=next(iter(config.model.multi_task.tasks), ""))

    @override
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> dict[str, Any]:
        from jrec.app.comparisons import of_clicks

        return of_clicks(config, schema, scores, whole=whole, slices=slices)

    @override
    def check_data(self, config: TrainConfig, schema: Schema) -> None:
        if schema.numbers is not None:
            raise ConfigError(
                f"model.loss is {config.model.loss!r}, which is of clicks, but the label of {config.data.path} is a"
                f" number; choose one of {', '.join(_NUMBER_LOSSES)}, or leave it out"
            )


class Number(Target):
    """Labels are numbers; outputs become numbers by ``model.numbers``."""

    metrics = ("rmse", "mae", "poisson_deviance")
    importance = {  # noqa: RUF012 (a Mapping to its users)
        "rmse": (1, "RMSE rises by", "unit of the label"),
        "mae": (1, "MAE rises by", "unit of the label"),
    }

    @override
    def loss(self, model: ModelConfig) -> Loss:
        from jrec import nn

        losses = {
            "squared": nn.squared_error,
            "huber": nn.huber(delta=model.numbers.huber_delta),
            "poisson": nn.poisson,
        }
        return nn.of_numbers(losses[model.loss], self._numbers(model))

    @override
    def identity(self, model: ModelConfig) -> dict[str, Any]:
        return {"numbers": dataclasses.asdict(self._numbers(model))}

    @override
    def scores(
        self, predictions: Iterable[tuple[Any, Batch]], reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> AnyScores:
        from jrec.run.evaluation import collected_numbers

        return collected_numbers(predictions, self._numbers(reading.config.model), check=check, on_batch=on_batch)

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> NoRunningAuc:
        from jrec.app.report.running_auc import NoRunningAuc

        return NoRunningAuc()

    @override
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> dict[str, Any]:
        from jrec.app.baselines.measure import measure, wanted

        assert schema.folder is not None  # ``comparison_sections`` has looked
        compared = whole and config.schedule == "plain" and wanted(config.evaluate.baselines, schema)
        return {"baselines": measure(schema.folder, schema, list(scores))} if compared else {}

    @override
    def check_data(self, config: TrainConfig, schema: Schema) -> None:
        model, path = config.model, config.data.path
        if (numbers := schema.numbers) is None:
            raise ConfigError(
                f"model.loss is {model.loss!r}, which is of numbers, but the labels of {path} are 0 and 1; leave it"
                ' out, or prepare the log with kind = "number" in [label]'
            )
        if model.loss == "poisson" and (numbers.least < 0 or numbers.mean <= 0):
            raise ConfigError(
                f"model.loss is 'poisson', which is of counts, but the least label of {path} is {numbers.least:g} and"
                f" their mean {numbers.mean:g}; choose 'squared' or 'huber'"
            )
        odd = {
            "evaluate.group": config.evaluate.group,
            "model.calibrate": model.calibrate,
            "model.label_smoothing": model.label_smoothing,
        }
        for key, value in odd.items():
            if value:
                raise ConfigError(
                    f"{key} is {value!r}, which is of clicks, but the label of {path} is a number; leave it out"
                )

    @staticmethod
    def _numbers(model: ModelConfig) -> Any:
        numbers = model.as_numbers
        assert numbers is not None
        return numbers


_NUMBER_LOSSES = ("squared", "huber", "poisson")
_PROBABILITY, _NUMBER = Probability(), Number()
TARGETS: Mapping[str, Target] = {
    "auto": _PROBABILITY,
    "log_loss": _PROBABILITY,
    **dict.fromkeys(_NUMBER_LOSSES, _NUMBER),
}
"""By ``model.loss``, of which "auto" stays only where labels are 0 and 1 (``jrec.app.dataset``)."""


def target_of(model: ModelConfig) -> Target:
    """What a model predicts."""
    return TARGETS[model.loss]
