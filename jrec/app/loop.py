"""The training loop: steps, logs, evaluations and checkpoints; a killed and resumed run computes the same bits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from jrec import memory
from jrec.app import determinism
from jrec.app.build import build_layout, build_loss, described, run_parameters
from jrec.app.calibration import bias_of, calibrated, fit_calibration, refinement
from jrec.app.config import TrainConfig
from jrec.app.dataset import RunData, open_data, with_capacities, with_tasks
from jrec.app.dispatches import most_steps, steps_of_dispatches
from jrec.app.evaluate import restore_run, score_split
from jrec.app.hot_cold_feed import FaeLoaders, HotColdFeed
from jrec.app.initial import Initial, initial_of
from jrec.app.loaders import train_loader
from jrec.app.make_run import make_run
from jrec.app.models.catalogue import Catalogue
from jrec.app.processes.interrupt import StopRequest, stop_on_signals
from jrec.app.processes.mesh_processes import AgreedStop, SilentLog, one_of_many, shared_run_folder
from jrec.app.progress import TrainingProgress
from jrec.app.report.hit_rates import HitRates
from jrec.app.report.logs import CHECKPOINTS, FORMS, SCHEDULE, MetricLog
from jrec.app.report.metrics import Evaluation, Scores, evaluate_tasks, log_loss
from jrec.app.report.ranking import AnyScores, RankingEvaluation, evaluated
from jrec.app.report.trackers import Trackers
from jrec.app.report.writing import merged
from jrec.app.run_dataset import keep_dataset
from jrec.app.run_folder import CHECKPOINT_FOLDER, TRACE_FILE
from jrec.app.run_length import new_length
from jrec.app.shuffle_scheduler import ShuffleScheduler
from jrec.app.watch import BestStep, plan_evaluations
from jrec.checkpoint import Checkpoints, Saved
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.errors import DivergedError
from jrec.run.feeds.batches import Position
from jrec.run.feeds.makers import Steps
from jrec.run.feeds.run_feed import RunFeed
from jrec.run.processes import first, several
from jrec.run.step import StepResults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished or stopped run.

    Attributes:
      folder: The run's folder.
      step: Steps taken.
      finished: False where a signal stopped the run; it can be resumed.
      scores: The scores of the final splits, by name; empty if not finished.
      scored_step: The step that was scored: the last, or with ``checkpoint.keep_best`` the best.
      stopped_early: Whether ``evaluate.early_stopping`` ended training.
      parameters: Counts and bytes, see ``parameter_counts``.
      schema: The dataset's schema.
      seconds, examples: Training time and examples of this process, without evaluations and checkpoints.
      sections: Sections of the report, by name (``jrec.app.report.writing``).
      reports: Whether this process writes the report.
    """

    folder: pathlib.Path
    step: int
    finished: bool
    scores: dict[str, AnyScores]
    scored_step: int
    stopped_early: bool
    parameters: dict[str, dict[str, Any]]
    schema: Schema
    seconds: float
    examples: int
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)
    reports: bool = True


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_from: int | None = None,
    data: RunData | None = None,
) -> Outcome:
    """Trains as ``config`` says, and evaluates the result.

    Args:
      config: The run's configuration; the run writes to ``config.out``.
      resume: Continues from the latest checkpoint in that folder, or begins if there is none.
      overwrite: Replaces an existing run in that folder.
      resume_from: Continues from the checkpoint of this step instead; later checkpoints and log records are deleted.
      data: What ``open_data`` has read of this configuration; None to read it.

    Returns:
      The run's outcome. A SIGINT or SIGTERM ends the run after the current step, with a checkpoint.

    Raises:
      KeyboardInterrupt: If one more comes, two seconds after the first was answered or later.
      ConfigError: If the configuration does not fit the data or the folder, or asks for deterministic programs after
        JAX has started GPUs without them.
      DatasetError: If the dataset cannot be used.
      CheckpointError: If a checkpoint cannot be used or written.
      DivergedError: If the loss or a logit becomes NaN or infinite.
      ProcessError: If another process of the run has died.
    """
    if config.deterministic:
        determinism.request()
    data, resume = data or open_data(config), resume or resume_from is not None
    config = with_tasks(with_capacities(config, data.schema), data.schema)
    longer = new_length(data, resume_from=resume_from) if resume else None
    folder = shared_run_folder(config, resume=resume, overwrite=overwrite)
    with one_of_many(), folder as folder, stop_on_signals() as stop:
        keep_dataset(folder, data.schema.identity, resume=resume)
        initial = initial_of(config, folder, data.schema.identity, resume=resume)
        training = _Training(data, folder, initial, resume=resume, resume_from=resume_from)
        with contextlib.closing(training):
            training.begin(resume=resume)
            if longer is not None and first():
                longer.announce(folder)
            memory.started()
            with training.rescuing_checkpoint():
                outcome = training.go(AgreedStop(stop))
        del training
        if outcome.finished and outcome.scored_step < outcome.step:
            outcome = dataclasses.replace(outcome, scores=_scores_of(config, data.schema, folder, outcome.scored_step))
        return outcome


def _scores_of(config: TrainConfig, schema: Schema, folder: pathlib.Path, step: int) -> dict[str, AnyScores]:
    """The scores of the final splits by an earlier checkpoint."""
    saved = restore_run(folder / CHECKPOINT_FOLDER / str(step), devices=max(1, config.mesh.devices), plan=config.plan)
    return {split: saved.scores(split) for split in _final_splits(config, schema)}


def _final_splits(config: TrainConfig, schema: Schema) -> list[str]:
    return [split for split in config.evaluate.final_splits if split in schema.splits]


class _Training:
    """A run, and what happens beside its steps: logs, evaluations, checkpoints."""

    def __init__(
        self,
        data: RunData,
        folder: pathlib.Path,
        initial: Initial | None,
        *,
        resume: bool,
        resume_from: int | None,
    ):
        config, schema = data.config, data.schema
        self.config, self.schema, self.folder, self.initial = config, schema, folder, initial
        self.layout = build_layout(config, schema, data.plan)
        self.checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER)
        self.resumed = self._open_saved(resume_from) if resume else None
        self.begins_from: Saved | None = None
        if self.resumed is None and initial is not None:
            self.begins_from = Checkpoints(initial.checkpoints).open(initial.step)
        self.batches: FaeLoaders | Loader
        if data.packed is not None:
            self.batches = FaeLoaders(config, data.packed, self.layout)
        else:
            self.batches = train_loader(config, schema, self.layout)
        self.total = self.batches.total_batches or 0
        self.total = min(self.total, config.max_steps) if config.max_steps else self.total
        self.run = make_run(
            config,
            schema,
            self.layout,
            total_steps=self.total,
            first_step=0 if initial is None else initial.optimizer_step,
            plan=data.plan,
            packed=data.packed,
            abstract=self.resumed is not None or (initial is not None and initial.configured),
        )
        self.parameters = run_parameters(self.run)
        self.log = self._opened_log() if first() else SilentLog()
        self.auc = config.model.of_kind.running_auc(
            config, None if self.run.mesh is None else self.run.mesh.devices.size
        )
        self.logged_auc: float | None = None
        self.hits = HitRates(self.layout, lambda: self.run.state)
        self.plan = plan_evaluations(config, schema, self.total)
        self.best = BestStep(config.evaluate.early_stopping.metric, config.evaluate.early_stopping.patience)
        self.evaluations, self.evaluating = 0, 0.0  # during training: how many, and their seconds
        self.losses: list[float] = []  # since the last log record, as the norms are
        self.norms: list[float] = []  # of all gradients, where these are clipped
        self.step = self.absorbed = 0  # steps taken, and those whose results were read
        self.saved = -1
        self.preparing = 0.0  # seconds that the last checkpoint took before anything was written
        self.seconds, self.examples = 0.0, 0
        self.rated = 0.0, 0  # seconds and examples up to the last log record

    def _opened_log(self) -> MetricLog:
        log = self.config.log
        trackers = Trackers(log.to, self.folder, title=self.config.name, config=self.config.flatten())
        return MetricLog(self.folder, tensorboard=log.tensorboard, trackers=trackers)

    def begin(self, *, resume: bool) -> None:
        """Loads the checkpoint that the run goes on or begins from, and opens its batches."""
        position = None
        if self.resumed is not None:
            position = self._restore(self.resumed)
        elif resume:
            self.log.truncate_after(-1)
        if self.initial is not None and self.begins_from is not None:
            of = described(self.config, self.schema, trained_on=self.initial.trained_on)
            self.run.load(self.begins_from, goes_on=False, dense_optimizer=self.initial.configured, expected=of)
        self.feed = self._open_feed(self.batches, position)
        self.resumed = self.begins_from = None

    def _open_feed(self, batches: FaeLoaders | Loader, position: Position | None) -> HotColdFeed | RunFeed:
        config, folder = self.config, self.folder
        open_feed = functools.partial(
            self.run.feed,
            workers=config.data.threads,
            prefetch=config.data.prefetch,
            trace=folder / TRACE_FILE if config.log.trace else None,
        )
        if isinstance(batches, FaeLoaders):
            return HotColdFeed(batches, self.run, open_feed, position=position)
        return open_feed(batches, position=position, total=self.total, steps=self._steps())

    def _steps(self) -> Steps:
        """How many steps go to the device in one dispatch."""
        config, schema = self.config, self.schema
        most = config.data.steps_per_dispatch
        if most is None:
            size, num_dense = config.data.batch_size, len(schema.dense)
            most = 1 if self.run.one_by_one else most_steps(self.layout, batch_size=size, num_dense=num_dense)
        due = config.log.every_steps, self.plan.every_steps, config.checkpoint.every_steps
        return 1 if most == 1 else steps_of_dispatches(most, total=self.total, every=due)

    def _open_saved(self, step: int | None) -> Saved | None:
        """The checkpoint to continue from; None to begin."""
        if step is None and self.checkpoints.latest_step() is None:
            return None
        with self._advising(step):
            return self.checkpoints.open(step)

    def _advising(self, step: int | None) -> contextlib.AbstractContextManager[None]:
        """Around reads of a checkpoint: errors about damaged files name the earlier checkpoint to continue from."""
        step = self.checkpoints.latest_step() if step is None else step
        return self.checkpoints.reading(step or 0, resume_remedy)

    def _restore(self, saved: Saved) -> Position:
        """Goes on from a checkpoint; drops log records after it. Returns the position in the batches."""
        with self._advising(saved.step):
            loaded = self.run.load(saved)
        if first():
            self.checkpoints.drop_after(saved.step)
        self.auc = self.auc.restored(loaded.arrays)
        self.hits.restore(loaded.meta.get("hits", {}))
        self.losses = list(loaded.meta["losses"])
        self.norms = list(loaded.meta.get("norms", []))
        self.best.restore(loaded.meta.get("best", {}))
        self.step = self.absorbed = self.saved = saved.step
        self.log.truncate_after(self.step)
        return loaded.meta["loader"]

    def go(self, stop: StopRequest) -> Outcome:
        """Trains to the end or to a stop request, then evaluates."""
        mode = self.config.log.progress if first() else "off"
        if self.step == 0 and "forms" in (sections := self.feed.sections(0.0)):
            self.log.write(0, {"tables": sections["forms"]}, split=FORMS)
        with TrainingProgress(mode, total=self.total, start=self.step) as progress:
            stopped = self._train(stop, progress)
            self.save()
            self._finish_saving()
            scored = self._scored_step()
            scores = {} if stopped or scored < self.step else self._final_scores(progress)
        return Outcome(
            folder=self.folder,
            step=self.step,
            finished=not stopped,
            scores=scores,
            scored_step=scored,
            stopped_early=not stopped and self.step < self.total,
            parameters=self.parameters,
            schema=self.schema,
            seconds=self.seconds,
            examples=self.examples,
            sections=self._sections(),
            reports=first(),
        )

    def _sections(self) -> dict[str, Any]:
        of_plan = self.run.plan_sections(self.folder)
        evaluations = {}
        if self.evaluations:
            evaluations = {
                "every_steps": self.plan.every_steps,
                "batches": self.plan.batches,
                "count": self.evaluations,
                "seconds": self.evaluating,
                "share": self.evaluating / (self.seconds + self.evaluating),
            }
        of_evaluations = {"evaluations": evaluations} if evaluations else {}
        growing = self.run.growing_tables
        of_growing = {"growing": growing.sections()} if growing else {}
        of_feed = self.feed.sections(self.seconds)
        return merged(of_feed, of_plan, self.hits.sections(), of_growing, of_evaluations)

    def _scored_step(self) -> int:
        """The step to score at the end."""
        best = self.best.step
        kept = self.config.checkpoint.keep_best and best is not None and best in self.checkpoints.steps()
        return best if kept and best is not None else self.step

    def _train(self, stop: StopRequest, progress: TrainingProgress) -> bool:
        config = self.config
        loss = build_loss(config.model, self.schema)
        step_on = self.run.compile(loss=loss, micro_batches=config.data.micro_batches, metrics=self.auc)
        scheduler = self.feed.scheduler if isinstance(self.feed, HotColdFeed) else None
        # Results are read back only after further steps are under way, which keeps the device busy.
        pending: collections.deque[StepResults] = collections.deque()
        clock = time.perf_counter()
        while self.step < self.total and not self.best.over and not stop:
            self._note_saved()
            fed = next(self.feed)
            _, outputs = step_on(fed)
            pending.append(outputs)
            self.step += len(fed.batches)
            if len(pending) > 1:
                self._absorb(pending.popleft())
            examples = sum(len(batch.labels) for batch in fed.batches) * jax.process_count()
            progress.advance(len(fed.batches), examples, self.losses[-1] if self.losses else None, self._shown_auc)
            due = [
                every and self.step % every == 0  # never within a dispatch
                for every in (config.log.every_steps, self.plan.every_steps, config.checkpoint.every_steps)
            ]
            of_last = config.checkpoint.keep_best or config.model.calibrate  # which may be the best, or is the model
            if self.step == self.total and self.plan.every_steps and of_last:
                due[1] = True
            awaited = scheduler is not None and scheduler.awaits_loss
            if any(due) or awaited:
                self._absorb(*pending)
                pending.clear()
                self._count_time(clock)
                if scheduler is not None and awaited:
                    self._decide(scheduler, progress)
                self._do(due, progress)
                clock = time.perf_counter()
        self._absorb(*pending)
        self.run.flush()
        if pending:
            self._count_time(clock)
        return self.step < self.total and not self.best.over

    def _do(self, due: list[bool | int], progress: TrainingProgress) -> None:
        log, evaluation, checkpoint = due
        if log:
            self._write_log()
        improved = bool(evaluation) and self._evaluate(progress)
        if checkpoint or (improved and self.config.checkpoint.keep_best):
            self.save()

    def _evaluate(self, progress: TrainingProgress) -> bool:
        """Evaluates the model as it is; returns whether it is the best so far."""
        begin, improved = time.perf_counter(), False
        for number, split in enumerate(self.plan.splits):
            calibrates = number == 0 and self.config.model.calibrate
            if calibrates:
                self.run.calibrate(1.0, 0.0)
            scores = self._score(split, self.plan.batches, progress)
            if calibrates and isinstance(scores, Scores):
                scores = self._calibrated(scores, progress)
            found = self._measured(scores)
            for task, own in found.items():
                self.log.write(self.step, own.to_dict(), split=f"{split}/{task}" if task else split)
            if number == 0 and (decides := found.get(self._deciding_task)) is not None:
                improved = self.best.observe(self.step, decides)
        self.evaluations, self.evaluating = self.evaluations + 1, self.evaluating + time.perf_counter() - begin
        return improved

    def _calibrated(self, scores: Scores, progress: TrainingProgress) -> Scores:
        """Fits the model's calibration to scores, and to as many examples of training; returns the scores by it."""
        limit, bias = -(-scores.labels.size // self.config.data.eval_batch_size), 0.0
        if self.config.schedule == "plain":  # what else has the training split's name has the cold examples alone
            training = score_split(
                self.config, self.schema, self.run, "train", limit=limit, shuffle=True, progress=progress
            )
            assert isinstance(training, Scores)  # as the others are
            bias = bias_of(training)
        scale, shift = fit_calibration(scores, bias=bias)
        self.run.calibrate(scale, shift)
        return calibrated(scores, scale, shift)

    def _measured(self, scores: AnyScores) -> dict[str, Evaluation | RankingEvaluation]:
        """The metrics, and of several labels by task those of the others; the first task's name is ""."""
        found: dict[str, Evaluation | RankingEvaluation] = {"": evaluated(scores)}
        if not isinstance(scores, Scores):
            return found
        found |= dict(itertools.islice(evaluate_tasks(scores).items(), 1, None))
        task, stopping = self._deciding_task, self.config.evaluate.early_stopping
        if stopping.metric == "refinement" and isinstance(own := found.get(task), Evaluation):
            found[task] = dataclasses.replace(own, refinement=refinement(scores.of(task)))
        return found

    @property
    def _deciding_task(self) -> str:
        """The task by which steps are compared; "" is the first, or the only one."""
        chosen = self.config.evaluate.early_stopping.task
        return "" if chosen == next(iter(self.config.model.multi_task.tasks), "") else chosen

    def _decide(self, scheduler: ShuffleScheduler, progress: TrainingProgress) -> None:
        """Tells the Shuffle Scheduler the loss after a schedule, and logs its decision."""
        scores = self._score(self.config.fae.split, self.config.fae.batches, progress)
        assert isinstance(scores, Scores)  # a model that ranks items has no such schedule
        schedule = scheduler.observe(log_loss(scores.logits, scores.labels))
        self.log.write(self.step, dataclasses.asdict(schedule), split=SCHEDULE)

    def _absorb(self, *of_steps: StepResults) -> None:
        """Reads the results of steps, in their order."""
        for results in of_steps:
            losses, examples, norms = jax.device_get((results.loss, results.examples, results.gradient_norm))
            for value in np.atleast_1d(losses).tolist():
                self.absorbed += 1
                if not math.isfinite(value):
                    self._diverged(value)
                self.losses.append(value)
            if norms is not None:
                self.norms += np.atleast_1d(norms).tolist()
            self.auc = results.metrics
            self.examples += int(np.sum(examples))

    def _diverged(self, loss: float) -> NoReturn:
        kept = f"the checkpoint of step {self.saved} is untouched" if self.saved >= 0 else "nothing was saved yet"
        raise DivergedError(
            f"the loss became {loss} at step {self.absorbed}: training has diverged. Lower the learning rates, or look"
            f" at the data around there; {kept}"
        )

    def _shown_auc(self) -> float | None:
        """For the progress bar, which only one of several processes has: these read it together, for the log."""
        return self.logged_auc if several() else self.auc.value()

    def _count_time(self, since: float) -> None:
        self.seconds += time.perf_counter() - since

    def _write_log(self) -> None:
        self.logged_auc = self.auc.value()
        record = {"loss": math.fsum(self.losses) / len(self.losses), "running_auc": self.logged_auc}
        if (limit := self.config.optimizer.max_global_norm) is not None and self.norms:
            clipped = sum(norm > limit for norm in self.norms)
            record |= {"gradient_norm": math.fsum(self.norms) / len(self.norms), "clipped": clipped / len(self.norms)}
        record |= self.hits.record()
        # Since the last record: a rate from the start would hold the compiler's time for ever.
        seconds, examples = self.seconds - self.rated[0], self.examples - self.rated[1]
        self.rated = self.seconds, self.examples
        rate = examples / seconds if seconds else None
        self.log.write(self.step, record, timing={"examples_per_second": rate})
        self.losses, self.norms = [], []

    def save(self) -> None:
        """Begins a checkpoint of this step, unless there is one."""
        if self.saved == self.step:
            return
        self._finish_saving()
        self.log.sync()
        begin = time.perf_counter()
        meta = {"loader": self.feed.position(), "losses": self.losses, "hits": self.hits.position()}
        meta |= {"norms": self.norms} if self.norms else {}
        meta |= {"best": self.best.state()} if self._watches else {}
        self.run.flush()
        self.preparing = time.perf_counter() - begin
        self.run.save(
            self.folder / CHECKPOINT_FOLDER,
            meta=meta,
            arrays=self.auc.state(),
            keep=self.config.checkpoint.keep,
            protected=self.best.step if self.config.checkpoint.keep_best else None,
            wait=False,
        )
        self.saved = self.step
        self._note_saved()

    @property
    def _watches(self) -> bool:
        """Whether anything depends on which step is the best."""
        return self.config.checkpoint.keep_best or self.config.evaluate.early_stopping.patience > 0

    @contextlib.contextmanager
    def rescuing_checkpoint(self) -> Iterator[None]:
        """Completes the checkpoint under way, of an earlier step, before an error from inside ends the run."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                self._finish_saving()
            raise

    def _finish_saving(self) -> None:
        """Waits for the checkpoint under way."""
        self.run.finish_saving()
        self._note_saved()

    def _note_saved(self) -> None:
        """Logs the time of a checkpoint once it is complete."""
        if (written := self.run.written()) is not None:
            record = dataclasses.asdict(written)
            record["of"] = record.pop("step")
            for name in ("blocking_seconds", "seconds"):
                record[name] += self.preparing
            self.log.write_timing(self.step, record, split=CHECKPOINTS)

    def _score(self, split: str, limit: int, progress: TrainingProgress) -> AnyScores:
        return score_split(
            self.config, self.schema, self.run, split, limit=limit, progress=progress, catalogue=self.catalogue
        )

    @functools.cached_property
    def catalogue(self) -> Catalogue | None:
        """The items that the model ranks, where a tower makes their vectors; the first process keeps them."""
        kind = self.config.model.of_kind
        return kind.catalogue(self.folder, self.config, self.schema, self.schema.identity, keep=first())

    def _final_scores(self, progress: TrainingProgress) -> dict[str, AnyScores]:
        return {split: self._score(split, 0, progress) for split in _final_splits(self.config, self.schema)}

    def close(self) -> None:
        """Releases threads and files."""
        self.run.close(finish=False)
        self.log.close()


def resume_remedy(step: int | None) -> str:
    """The remedy for a damaged checkpoint; ``step`` is the newest older whole checkpoint, None if there is none."""
    if step is None:
        return "no earlier checkpoint is whole; begin anew with --overwrite"
    return f"go on from the checkpoint of step {step:,} with --resume-from {step}"
