"""Evaluations in training: scores of the watched splits, the model's calibration, and the best step so far."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import time

from jrec.app.calibration import bias_of, calibrated, fit_calibration, refinement
from jrec.app.config import TrainConfig
from jrec.app.evaluate import score_split
from jrec.app.models.reading import Reading
from jrec.app.processes.mesh_processes import SilentLog
from jrec.app.progress import TrainingProgress
from jrec.app.progressive import Window, moment
from jrec.app.report.logs import PROGRESSIVE, MetricLog
from jrec.app.report.ranking import NONE_COUNTS, AnyEvaluation, AnyScores, evaluated, evaluated_by_task, has_examples
from jrec.app.run_length import epoch_batches
from jrec.app.watch import BestStep, EvaluationPlan
from jrec.data.schema import Schema
from jrec.json_values import JsonObject
from jrec.metrics import Evaluation, Scores, log_loss
from jrec.regression import NumberScores, evaluate_numbers
from jrec.run.processes import first
from jrec.run.run import Run

_LOGGER = logging.getLogger(__name__)


class Evaluator:
    """Scores a run as its last step left it.

    Args:
      config: The run's configuration.
      schema: What its model reads.
      run: The run.
      folder: Its folder.
      plan: When which splits are scored.

    Attributes:
      best: The best step so far.
      last: The metrics of the last evaluation, by "SPLIT/METRIC", or "SPLIT/TASK/METRIC" of further labels.
    """

    def __init__(self, config: TrainConfig, schema: Schema, run: Run, folder: pathlib.Path, plan: EvaluationPlan):
        self._config, self._schema, self._run, self._folder, self._plan = config, schema, run, folder, plan
        stopping = config.evaluate.early_stopping
        self.best = BestStep(stopping.metric, stopping.patience)
        # The task by which steps are compared; "" is the first, or the only one.
        first_task = next(iter(config.model.multi_task.tasks), "")
        self._task = "" if stopping.task == first_task else stopping.task
        self._count, self._seconds = 0, 0.0
        self.last: dict[str, float | None] = {}

    @functools.cached_property
    def _reading(self) -> Reading:
        # Items are read once, and the first process keeps them: they and their features are training's. Their vectors
        # are new at every evaluation.
        config, schema = self._config, self._schema
        catalogue = config.model.of_kind.catalogue(self._folder, config, schema, schema.identity, keep=first())
        return Reading(run=self._run, config=config, schema=schema, catalogue=catalogue)

    def scores(
        self,
        split: str,
        progress: TrainingProgress,
        *,
        start: int = 0,
        stop: int | None = None,
        limit: int = 0,
        shuffle: bool = False,
    ) -> AnyScores:
        """``score_split`` of the run."""
        return score_split(
            self._reading, split, start=start, stop=stop, limit=limit, shuffle=shuffle, progress=progress
        )

    def loss(self, split: str, progress: TrainingProgress, *, limit: int) -> float:
        """The log loss on the first ``limit`` batches of a split, of labels that are numbers the RMSE."""
        scores = self.scores(split, progress, limit=limit)
        if isinstance(scores, NumberScores):
            return evaluate_numbers(scores).rmse
        assert isinstance(scores, Scores)  # models that rank have another schedule
        return log_loss(scores.logits, scores.labels, weights=scores.weights)

    def evaluate(self, step: int, log: MetricLog | SilentLog, progress: TrainingProgress) -> bool:
        """Evaluates the model as it is and logs that; returns whether it is the best so far."""
        begin, improved = time.perf_counter(), False
        self.last = {}
        for number, split in enumerate(self._plan.splits):
            # The first split fits the calibration and decides about the best step; the others are scored with that fit.
            calibrates = number == 0 and self._config.model.calibrate
            if calibrates:
                # The fit takes the model's own logits, without the last evaluation's calibration.
                self._run.calibrate(1.0, 0.0)
            scores = self.scores(split, progress, limit=self._plan.batches)
            if calibrates and isinstance(scores, Scores) and has_examples(scores):
                scores = self._calibrated(scores, step, progress)
            measured = self._measured(scores)
            if not (has_examples(scores) or self._count):  # said of the first evaluation only
                _LOGGER.warning("what is evaluated of split %r says nothing: %s", split, NONE_COUNTS)
            for task, evaluation in measured.items():
                name, metrics = f"{split}/{task}" if task else split, evaluation.to_dict()
                log.write(step, metrics, split=name)
                self.last |= {f"{name}/{metric}": value for metric, value in metrics.items()}
            if number == 0 and (decides := measured.get(self._task)) is not None:
                improved = self.best.observe(step, decides)
        self._count, self._seconds = self._count + 1, self._seconds + time.perf_counter() - begin
        return improved

    def progressive(self, window: Window, log: MetricLog | SilentLog, progress: TrainingProgress) -> None:
        """Scores a window of the training split that comes next, and logs that.

        The model's own logits count: what calibrates them was fitted to a split that may be later than the window.
        """
        begin, calibrates = time.perf_counter(), self._config.model.calibrate
        before = self._run.calibrate(1.0, 0.0) if calibrates else (1.0, 0.0)
        scores = self.scores("train", progress, start=window.start, stop=window.stop)
        if calibrates:
            self._run.calibrate(*before)
        for task, evaluation in self._measured(scores, refined=False).items():
            name = f"{PROGRESSIVE}/{task}" if task else PROGRESSIVE
            log.write(window.step, {"since": moment(window.since), **evaluation.to_dict()}, split=name)
        self._seconds += time.perf_counter() - begin

    def _calibrated(self, scores: Scores, step: int, progress: TrainingProgress) -> Scores:
        """Fits the model's calibration to scores, and to as many examples of training; returns the scores by it."""
        data = self._config.data
        limit, bias = -(-scores.labels.size // data.eval_batch_size), 0.0
        # A single step leaves the mean prediction off by up to a tenth (docs/first_configuration.md). As many examples
        # of training measure that; under FAE the split of that name has only the cold ones.
        if self._config.schedule == "plain":
            start, stop = 0, None
            if recent := data.order == "time" or bool(data.half_life):  # such a model predicts as the last ones were
                learnt = examples = self._schema.splits["train"].examples
                if data.order == "time":
                    learnt = ((step - 1) % epoch_batches(self._config, examples) + 1) * data.batch_size
                start, stop = max(0, learnt - limit * data.eval_batch_size), learnt
            training = self.scores("train", progress, start=start, stop=stop, limit=limit, shuffle=not recent)
            assert isinstance(training, Scores)  # as the others are
            bias = bias_of(training)
        scale, shift = fit_calibration(scores, bias=bias)
        self._run.calibrate(scale, shift)
        return calibrated(scores, scale, shift)

    def _measured(self, scores: AnyScores, *, refined: bool = True) -> dict[str, AnyEvaluation]:
        """The metrics by task of which any example counts; the first task, or the only one, has the name ""."""
        measured: dict[str, AnyEvaluation] = {"": evaluated(scores)} if has_examples(scores) else {}
        # ``scores`` itself is the first task's, which "" has already.
        first_task = next(iter(self._config.model.multi_task.tasks), "")
        measured |= {task: own for task, own in evaluated_by_task(scores).items() if task != first_task}
        stopping = self._config.evaluate.early_stopping
        # Only where steps are compared by it: it takes a fit of its own.
        if refined and stopping.metric == "refinement" and isinstance(decides := measured.get(self._task), Evaluation):
            assert isinstance(scores, Scores | NumberScores)
            own = scores.tasks[self._task] if self._task else scores
            assert isinstance(own, Scores)  # of which the metric is
            measured[self._task] = dataclasses.replace(decides, refinement=refinement(own))
        return measured

    def sections(self, training_seconds: float) -> JsonObject:
        """Its section of the report; ``training_seconds`` is the time that steps took."""
        if not self._count:
            return {}
        return {
            "evaluations": {
                "every_steps": self._plan.every_steps,
                "batches": self._plan.batches,
                "count": self._count,
                "seconds": self._seconds,
                "share": self._seconds / (training_seconds + self._seconds),
            }
        }
