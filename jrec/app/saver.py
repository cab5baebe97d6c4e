"""The checkpoints of a training run: opened to go on from, and written while steps go on."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jrec.app.config.train import CheckpointConfig
from jrec.app.processes.mesh_processes import SilentLog
from jrec.app.recorder import Recorder
from jrec.app.report.logs import CHECKPOINTS, MetricLog
from jrec.app.run_record import CHECKPOINT_FOLDER
from jrec.checkpoint import Checkpoints, Saved
from jrec.json_values import JsonMapping
from jrec.run.processes import first
from jrec.run.run import Run
from jrec.run.run_checkpoints import Loaded

if TYPE_CHECKING:
    import numpy as np


class Saver:
    """Begins checkpoints, waits for them, and logs their time once they are complete.

    Args:
      folder: The run's folder.
      config: The ``[checkpoint]`` section.

    Attributes:
      checkpoints: The run's checkpoints.
      saved: The step of the last one that was begun; -1 for none.
    """

    def __init__(self, folder: pathlib.Path, config: CheckpointConfig):
        self._folder, self._config = folder / CHECKPOINT_FOLDER, config
        self.checkpoints = Checkpoints(self._folder)
        self.saved = -1
        self._preparing = 0.0  # seconds that the last checkpoint took before anything was written

    def open(self, step: int | None) -> Saved | None:
        """The checkpoint to continue from, of a step or the latest; None to begin."""
        if step is None and self.checkpoints.latest_step() is None:
            return None
        with self.advising(step):
            return self.checkpoints.open(step)

    def go_on(self, saved: Saved, run: Run, recorder: Recorder, log: MetricLog | SilentLog) -> Loaded:
        """Has a run and its recorder go on from a checkpoint; drops later checkpoints, and log records after it."""
        with self.advising(saved.step):
            loaded = run.load(saved)
        # Later checkpoints go only once this one has been read: where it is damaged, all of them stay.
        if first():
            self.checkpoints.drop_after(saved.step)
        # With the losses since the last log record: the next record averages over them, too.
        recorder.restore(saved.step, loaded.meta, loaded.arrays)
        self.saved = saved.step
        log.truncate_after(saved.step)
        return loaded

    def advising(self, step: int | None) -> contextlib.AbstractContextManager[None]:
        """Around reads of a checkpoint: errors about damaged files name the earlier checkpoint to continue from."""
        step = self.checkpoints.latest_step() if step is None else step
        return self.checkpoints.reading(step or 0, resume_remedy)

    def save(
        self,
        run: Run,
        log: MetricLog | SilentLog,
        step: int,
        *,
        meta: JsonMapping,
        arrays: Mapping[str, np.ndarray],
        best: int | None,
    ) -> None:
        """Begins a checkpoint of a step.

        Args:
          run: The run, after the step.
          log: Its log, which is on disk before the checkpoint is.
          step: The step.
          meta: What else it keeps, in JSON types.
          arrays: What else it keeps, in arrays.
          best: The best step so far, whose checkpoint stays; None for none.
        """
        # One checkpoint at a time: the one before is completed, and its time logged, first.
        self.finish(run, log, step)
        # A resumed run cuts its log after the checkpoint's step, but could not bring back records that are missing.
        log.sync()
        # ``Run.save`` flushes, too, but its record does not count that time, in which steps wait as well.
        begin = time.perf_counter()
        run.flush()
        self._preparing = time.perf_counter() - begin
        run.save(self._folder, meta=dict(meta), arrays=dict(arrays), keep=self._config.keep, protected=best, wait=False)
        self.saved = step
        # With several processes ``Run.save`` waits, so that the checkpoint may be complete already.
        self.note(run, log, step)

    def finish(self, run: Run, log: MetricLog | SilentLog, step: int) -> None:
        """Waits for the checkpoint under way."""
        run.finish_saving()
        self.note(run, log, step)

    def note(self, run: Run, log: MetricLog | SilentLog, step: int) -> None:
        """Logs the time of a checkpoint once it is complete."""
        if (written := run.written()) is not None:
            # A record's ``step`` is the one at which the checkpoint was complete; ``of`` is the checkpoint's own.
            record = dataclasses.asdict(written)
            record["of"] = record.pop("step")
            for name in ("blocking_seconds", "seconds"):
                record[name] += self._preparing
            log.write_timing(step, record, split=CHECKPOINTS)

    @contextlib.contextmanager
    def rescuing(self, run: Run) -> Iterator[None]:
        """Completes the checkpoint under way, of an earlier step, before an error from inside ends the run."""
        try:
            yield
        # Not for a KeyboardInterrupt: a deliberate second signal gives up what is under way.
        except Exception:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                run.finish_saving()
            raise

    def kept(self) -> str:
        """What is saved, for a message."""
        return f"the checkpoint of step {self.saved} is untouched" if self.saved >= 0 else "nothing was saved yet"


def resume_remedy(step: int | None) -> str:
    """The remedy for a damaged checkpoint; ``step`` is the newest older whole checkpoint, None if there is none."""
    if step is None:
        return "no earlier checkpoint is whole; begin anew with --overwrite"
    return f"go on from the checkpoint of step {step:,} with --resume-from {step}"
