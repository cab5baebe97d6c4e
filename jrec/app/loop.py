"""The training loop: steps, logs, evaluations and checkpoints; a killed and resumed run computes the same bits."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Sequence

import jax

from jrec import memory
from jrec.app import determinism
from jrec.app.build import build_layout, build_loss, run_parameters
from jrec.app.callbacks import Callback, Callbacks, named_callbacks
from jrec.app.config import TrainConfig
from jrec.app.dataset import RunData, open_data, with_capacities, with_tasks
from jrec.app.evaluate import RestoredRun, restore_run
from jrec.app.evaluator import Evaluator
from jrec.app.hot_cold_feed import FaeLoaders, HotColdFeed
from jrec.app.initial_rows import set_initial_rows
from jrec.app.loaders import train_loader
from jrec.app.make_run import load_initial, make_run
from jrec.app.processes.interrupt import StopRequest, stop_on_signals
from jrec.app.processes.mesh_processes import AgreedStop, SilentLog, one_of_many, shared_run_folder
from jrec.app.progress import TrainingProgress
from jrec.app.progressive import windows_of
from jrec.app.recorder import Recorder
from jrec.app.report.logs import FORMS, SCHEDULE, MetricLog
from jrec.app.report.ranking import NONE_COUNTS, AnyScores, has_examples
from jrec.app.report.trackers import Trackers
from jrec.app.report.writing import merged
from jrec.app.run_folder import TRACE_FILE
from jrec.app.run_length import new_length
from jrec.app.run_record import CHECKPOINT_FOLDER, Initial, TrainedRun
from jrec.app.saver import Saver
from jrec.app.schedule import Due, Schedule, most_steps
from jrec.app.shuffle_scheduler import ShuffleScheduler
from jrec.app.watch import plan_evaluations
from jrec.checkpoint import Checkpoints, Saved
from jrec.data.loader import Loader
from jrec.data.schema import Schema
from jrec.json_values import JsonObject
from jrec.run.feeds.batches import Position
from jrec.run.feeds.options import Steps
from jrec.run.feeds.run_feed import RunFeed
from jrec.run.processes import first
from jrec.run.step import StepResults

_LOGGER = logging.getLogger(__name__)


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
    parameters: dict[str, dict[str, int]]
    schema: Schema
    seconds: float
    examples: int
    sections: JsonObject = dataclasses.field(default_factory=dict)
    reports: bool = True


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_from: int | None = None,
    data: RunData | None = None,
    callbacks: Sequence[Callback] = (),
    stoppable: bool = True,
) -> Outcome:
    """Trains as ``config`` says, and evaluates the result.

    Args:
      config: The run's configuration; the run writes to ``config.out``.
      resume: Continues from the latest checkpoint in that folder, or begins if there is none.
      overwrite: Replaces an existing run in that folder.
      resume_from: Continues from the checkpoint of this step instead; later checkpoints and log records are deleted.
      data: What ``open_data`` has read of this configuration; None to read it.
      callbacks: Functions that are called as ``config.callbacks`` are, before them; what one raises ends the
        run.
      stoppable: Whether a SIGINT or SIGTERM ends the run after the current step, with a checkpoint; else it does what
        it does elsewhere, for runs that nobody goes on with.

    Returns:
      The run's outcome, also where a signal ended it.

    Raises:
      KeyboardInterrupt: If one more comes, two seconds after the first was answered or later.
      ConfigError: If the configuration does not fit the data or the folder, or asks for deterministic programs after
        JAX has started GPUs without them.
      DatasetError: If the dataset cannot be used.
      CheckpointError: If a checkpoint cannot be used or written.
      DivergedError: If the loss or a logit becomes NaN or infinite.
      ProcessError: If another process of the run has died.
    """
    # JAX reads XLA_FLAGS when it starts its devices, so this comes before anything that could start them.
    if config.deterministic:
        determinism.request()
    callbacks = [*callbacks, *named_callbacks(config)]
    data, resume = data or open_data(config), resume or resume_from is not None
    config = with_tasks(with_capacities(config, data.schema), data.schema)
    longer = new_length(data, resume_from=resume_from) if resume else None
    folder = shared_run_folder(config, resume=resume, overwrite=overwrite)
    # ``one_of_many`` is outermost: opening the folder already waits for the other processes.
    stopping = stop_on_signals() if stoppable else contextlib.nullcontext(StopRequest())
    with one_of_many(), folder as folder, stopping as stop:
        record = TrainedRun(folder)
        record.keep_dataset(data.schema.identity, resume=resume)
        initial = record.keep_initial(config, data.schema.identity, resume=resume)
        training = _Training(data, folder, initial, callbacks, resume=resume, resume_from=resume_from)
        with contextlib.closing(training):
            training.begin(resume=resume)
            # Only now: ``begin`` cuts timing.jsonl after the checkpoint's step, and would cut this record with the
            # rest.
            if longer is not None and first():
                longer.announce(folder)
            memory.started()
            with training.saver.rescuing(training.run):
                outcome = training.go(AgreedStop(stop))
        # Frees the rows of this run: scoring an earlier step restores a second one.
        del training
        if outcome.finished and outcome.scored_step < outcome.step:
            saved = _restored(config, folder, outcome.scored_step)
            outcome = dataclasses.replace(outcome, scores=_final_scores(config, data.schema, saved.scores))
        return outcome


def _restored(config: TrainConfig, folder: pathlib.Path, step: int) -> RestoredRun:
    """The run at an earlier checkpoint."""
    checkpoint = folder / CHECKPOINT_FOLDER / str(step)
    return restore_run(checkpoint, devices=max(1, config.mesh.devices), plan=config.plan)


def _final_scores(config: TrainConfig, schema: Schema, score: Callable[[str], AnyScores]) -> dict[str, AnyScores]:
    """The scores of the final splits, without those of which no example counts; a warning names them."""
    scores = {split: score(split) for split in schema.with_examples(config.evaluate.final_splits)}
    for split in [split for split, scored in scores.items() if not has_examples(scored)]:
        _LOGGER.warning("split %r of %s is not scored: %s", split, config.data.path, NONE_COUNTS)
        del scores[split]
    return scores


class _Training:
    """A run, and what happens beside its steps: logs, evaluations, checkpoints."""

    def __init__(
        self,
        data: RunData,
        folder: pathlib.Path,
        initial: Initial | None,
        callbacks: Sequence[Callback],
        *,
        resume: bool,
        resume_from: int | None,
    ):
        config, schema = data.config, data.schema
        self.config, self.schema, self.folder, self.initial = config, schema, folder, initial
        self.layout = build_layout(config, schema, data.plan)
        self.saver = Saver(folder, config.checkpoint)
        self.resumed = self.saver.open(resume_from) if resume else None
        self.begins_from: Saved | None = None
        if self.resumed is None and initial is not None:
            self.begins_from = Checkpoints(initial.record.checkpoints).open(initial.step)
        # The batches come before the run: schedules of learning rates stretch over the total number of steps.
        self.batches: FaeLoaders | Loader
        if data.packed is not None:
            self.batches = FaeLoaders(config, data.packed, self.layout)
        else:
            self.batches = train_loader(config, schema, self.layout)
        total = self.batches.total_batches or 0
        total = min(total, config.max_steps) if config.max_steps else total
        self.run = make_run(
            config,
            schema,
            self.layout,
            total_steps=total,
            first_step=0 if initial is None else initial.optimizer_step,
            plan=data.plan,
            packed=data.packed,
            # A folder of Run.save brings no state of the dense optimizer, so that run makes its own values first.
            abstract=self.resumed is not None or (initial is not None and initial.record.keeps_dense_optimizer),
        )
        self.parameters = run_parameters(self.run)
        self.log = self._opened_log() if first() else SilentLog()
        self.recorder = Recorder.of(config, self.run, self.log, kept=self.saver.kept)
        plan = plan_evaluations(config, schema, total)
        self.windows = {window.step: window for window in windows_of(config, schema, total)}
        self.schedule = Schedule.of(config, plan, total, [*self.windows])
        self.evaluator = Evaluator(config, schema, self.run, folder, plan)
        self.callbacks = Callbacks(callbacks, self.run, folder)
        self.step = 0

    def _opened_log(self) -> MetricLog:
        log = self.config.log
        trackers = Trackers(log.to, self.folder, title=self.config.name, config=self.config.flatten())
        return MetricLog(self.folder, tensorboard=log.tensorboard, trackers=trackers)

    def begin(self, *, resume: bool) -> None:
        """Loads the checkpoint that the run goes on or begins from, and opens its batches."""
        position = None
        if self.resumed is not None:
            position = self._restore(self.resumed)
        # No checkpoint was completed before the run ended: it begins again, and so do its logs.
        elif resume:
            self.log.truncate_after(-1)
        if self.initial is not None and self.begins_from is not None:
            load_initial(self.run, self.initial, self.begins_from, self.config, self.schema)
        elif self.resumed is None:
            set_initial_rows(self.run, self.config, self.schema)
        # After loading: a feed may read ahead of rows, which a checkpoint would change under it (``Run.load`` refuses).
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
        return open_feed(batches, position=position, total=self.schedule.total, steps=self._steps())

    def _steps(self) -> Steps:
        """How many steps go to the device in one dispatch."""
        config, most = self.config, self.config.data.steps_per_dispatch
        if most is None:
            size, num_dense = config.data.batch_size, len(self.schema.dense)
            most = 1 if self.run.one_by_one else most_steps(self.layout, batch_size=size, num_dense=num_dense)
        return 1 if most == 1 else functools.partial(self.schedule.dispatch, most=most)

    def _restore(self, saved: Saved) -> Position:
        """Goes on from a checkpoint; drops log records after it. Returns the position in the batches."""
        loaded = self.saver.go_on(saved, self.run, self.recorder, self.log)
        self.evaluator.best.restore(loaded.meta.get("best", {}))
        self.step = saved.step
        return loaded.meta["loader"]

    def go(self, stop: StopRequest) -> Outcome:
        """Trains to the end or to a stop request, then evaluates."""
        mode = self.config.log.progress if first() else "off"
        if self.step == 0 and "forms" in (sections := self.feed.sections(0.0)):
            self.log.write(0, {"tables": sections["forms"]}, split=FORMS)
        with TrainingProgress(mode, total=self.schedule.total, start=self.step) as progress:
            stopped = self._train(stop, progress)
            self.save()
            # Complete before the final splits are scored: an error or interrupt there loses no step.
            self.saver.finish(self.run, self.log, self.step)
            scored = self._scored_step()
            scores = (
                {}
                if stopped or scored < self.step
                else _final_scores(self.config, self.schema, lambda split: self.evaluator.scores(split, progress))
            )
        return Outcome(
            folder=self.folder,
            step=self.step,
            finished=not stopped,
            scores=scores,
            scored_step=scored,
            stopped_early=not stopped and self.step < self.schedule.total,
            parameters=self.parameters,
            schema=self.schema,
            seconds=self.recorder.seconds,
            examples=self.recorder.examples,
            sections=self._sections(),
            reports=first(),
        )

    def _sections(self) -> JsonObject:
        seconds, growing = self.recorder.seconds, self.run.growing_tables
        of_growing = {"growing": growing.sections()} if growing else {}
        of_feed, of_plan = self.feed.sections(seconds), self.run.plan_sections(self.folder)
        return merged(of_feed, of_plan, self.recorder.sections(), of_growing, self.evaluator.sections(seconds))

    def _scored_step(self) -> int:
        """The step to score at the end."""
        best = self.evaluator.best.step
        kept = self.config.checkpoint.keep_best and best is not None and best in self.saver.checkpoints.steps()
        return best if kept and best is not None else self.step

    def _train(self, stop: StopRequest, progress: TrainingProgress) -> bool:
        """Takes steps to the end, or to a stop request; returns whether it was stopped."""
        recorder, schedule, best = self.recorder, self.schedule, self.evaluator.best
        loss = build_loss(self.config.model, self.schema)
        micro_batches = self.config.data.micro_batches
        step_on = self.run.compile(loss=loss, micro_batches=micro_batches, metrics=recorder.metrics)
        scheduler = self.feed.scheduler if isinstance(self.feed, HotColdFeed) else None
        # Results are read back only after further steps are under way, which keeps the device busy.
        pending: collections.deque[StepResults] = collections.deque()
        recorder.start_clock()
        while self.step < schedule.total and not best.over and not self.callbacks.stopped and not stop:
            self.saver.note(self.run, self.log, self.step)
            fed = next(self.feed)
            _, outputs = step_on(fed)
            pending.append(outputs)
            self.step += len(fed.batches)
            if len(pending) > 1:
                recorder.absorb(pending.popleft())
            # ``fed`` has this process's share of each batch; the shares of all processes are equal.
            examples = sum(len(batch.labels) for batch in fed.batches) * jax.process_count()
            progress.advance(len(fed.batches), examples, recorder.last_loss, recorder.shown_auc)
            # Whatever is due sees the run after exactly this step, so every result up to it is read back first. The
            # clock stops meanwhile: rates count steps, not evaluations and checkpoints.
            due, awaited = schedule.at(self.step), scheduler is not None and scheduler.awaits_loss
            if due.any or awaited:
                recorder.absorb(*pending)
                pending.clear()
                recorder.stop_clock()
                if scheduler is not None and awaited:
                    # Before a checkpoint of this step, whose position has the scheduler's state with this decision.
                    self._decide(scheduler, progress)
                self._do(due, progress)
                recorder.start_clock()
        recorder.absorb(*pending)
        self.run.flush()
        # Nothing pending: no step ran since ``start_clock`` after what was due, so that this time is not training's.
        if pending:
            recorder.stop_clock()
        return self.step < schedule.total and not best.over and not self.callbacks.stopped

    def _do(self, due: Due, progress: TrainingProgress) -> None:
        # The log record comes first, and empties the recorder's losses. A resumed run keeps the log up to this step:
        # with the losses in its checkpoint, too, they would count again in its next record.
        if due.log:
            self.callbacks("log", self.step, self.recorder.write(self.step))
        # Also before the checkpoint, which has the best step so far and the calibration of this evaluation.
        improved = due.evaluate and self.evaluator.evaluate(self.step, self.log, progress)
        if due.evaluate:
            self.callbacks("evaluation", self.step, self.evaluator.last)
        if due.window:
            self.evaluator.progressive(self.windows[self.step], self.log, progress)
        if due.save or (improved and self.config.checkpoint.keep_best):
            self.save()

    def _decide(self, scheduler: ShuffleScheduler, progress: TrainingProgress) -> None:
        """Tells the Shuffle Scheduler the loss after a schedule, and logs its decision."""
        fae = self.config.fae
        schedule = scheduler.observe(self.evaluator.loss(fae.split, progress, limit=fae.batches))
        self.log.write(self.step, dataclasses.asdict(schedule), split=SCHEDULE)

    def save(self) -> None:
        """Begins a checkpoint of this step, unless there is one."""
        # The end of a run saves its last step, which may have been due before.
        if self.saver.saved == self.step:
            return
        keep_best, best = self.config.checkpoint.keep_best, self.evaluator.best
        watches = keep_best or self.config.evaluate.early_stopping.patience > 0
        meta = {"loader": self.feed.position(), **self.recorder.position()}
        self.saver.save(
            self.run,
            self.log,
            self.step,
            meta=meta | ({"best": best.state()} if watches else {}),
            arrays=self.recorder.arrays(),
            best=best.step if keep_best else None,
        )
        self.callbacks("checkpoint", self.step, {})

    def close(self) -> None:
        """Releases threads and files."""
        # Nothing is left to finish: ``go`` has waited for the last checkpoint, or ``rescuing`` for one under way when
        # an error came. After a deliberate second signal, one under way is given up.
        self.run.close(finish=False)
        self.log.close()
