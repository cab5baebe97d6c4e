"""What a run's log and checkpoints tell of its steps: losses, gradient norms, the running AUC and the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.typing import ArrayLike

from jrec.app.config import TrainConfig
from jrec.app.processes.mesh_processes import SilentLog
from jrec.app.report.hit_rates import HitRates
from jrec.app.report.logs import MetricLog
from jrec.app.report.running_auc import NoRunningAuc, RunningAuc
from jrec.errors import DivergedError
from jrec.json_values import JsonMapping, JsonObject
from jrec.run.processes import several
from jrec.run.run import Run
from jrec.run.step import StepResults


class Recorder:
    """Reads the results of steps and writes them to the log.

    Args:
      log: The run's log.
      metrics: The running AUC, which the step carries on.
      hits: Hit rates of the tables with a cache.
      max_norm: The norm at which gradients are clipped; None where they are not.
      kept: Says, for the message of a run that diverged, what is saved.

    Attributes:
      absorbed: The steps whose results were read.
      seconds, examples: Training time and examples of this process.
    """

    def __init__(
        self,
        log: MetricLog | SilentLog,
        metrics: RunningAuc | NoRunningAuc,
        hits: HitRates,
        *,
        max_norm: float | None,
        kept: Callable[[], str],
    ):
        self._log, self._hits, self._max_norm, self._kept = log, hits, max_norm, kept
        self._metrics = metrics
        self.absorbed = 0
        self.seconds, self.examples = 0.0, 0
        self._losses: list[float] = []  # since the last log record, as the norms are
        self._norms: list[float] = []  # of all gradients, where these are clipped
        self._logged_auc: float | None = None
        self._rated = 0.0, 0  # seconds and examples up to the last log record
        self._clock: float | None = None  # when the steps under way began

    @classmethod
    def of(cls, config: TrainConfig, run: Run, log: MetricLog | SilentLog, *, kept: Callable[[], str]) -> Recorder:
        """The recorder of a run of a configuration."""
        return cls(
            log,
            config.model.of_kind.running_auc(config, None if run.mesh is None else run.mesh.devices.size),
            HitRates(run.layout, lambda: run.state),
            max_norm=config.optimizer.max_global_norm,
            kept=kept,
        )

    @property
    def metrics(self) -> RunningAuc | NoRunningAuc:
        """The running AUC after the steps that were read."""
        return self._metrics

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step that was read, None right after a log record."""
        return self._losses[-1] if self._losses else None

    def shown_auc(self) -> float | None:
        """For the progress bar, which only one of several processes has: these read it together, for the log."""
        return self._logged_auc if several() else self._metrics.value()

    def start_clock(self) -> None:
        """Counts the time from here on as training's."""
        self._clock = time.perf_counter()

    def stop_clock(self) -> None:
        """Counts it no longer."""
        if self._clock is not None:
            self.seconds += time.perf_counter() - self._clock
            self._clock = None

    def absorb(self, *of_steps: StepResults) -> None:
        """Reads the results of steps, in their order.

        Raises:
          DivergedError: If a loss is NaN or infinite; names the step.
        """
        for results in of_steps:
            losses, examples, norms = jax.device_get((results.loss, results.examples, results.gradient_norm))
            # Results of several steps in one dispatch have an axis of steps in front.
            for loss in np.atleast_1d(losses).tolist():
                self.absorbed += 1
                if not math.isfinite(loss):
                    raise DivergedError(
                        f"the loss became {loss} at step {self.absorbed}: training has diverged. Lower the learning"
                        f" rates, or look at the data around there; {self._kept()}"
                    )
                self._losses.append(loss)
            if norms is not None:
                self._norms += np.atleast_1d(norms).tolist()
            # Stays on the devices; only a log record, a checkpoint or the progress bar reads its value.
            self._metrics = results.metrics
            self.examples += int(np.sum(examples))

    def write(self, step: int) -> dict[str, float | None]:
        """Writes a log record of the steps since the last one, and returns it."""
        self._logged_auc = self._metrics.value()
        # At least one step lies between two records: what is due, and a file that was learnt, come after one.
        record = {"loss": math.fsum(self._losses) / len(self._losses), "running_auc": self._logged_auc}
        if self._max_norm is not None and self._norms:
            clipped = sum(norm > self._max_norm for norm in self._norms)
            mean = math.fsum(self._norms) / len(self._norms)
            record |= {"gradient_norm": mean, "clipped": clipped / len(self._norms)}
        record |= self._hits.record()
        # Since the last record: a rate from the start would hold the compiler's time for ever.
        seconds, examples = self.seconds - self._rated[0], self.examples - self._rated[1]
        self._rated = self.seconds, self.examples
        self._log.write(step, record, timing={"examples_per_second": examples / seconds if seconds else None})
        self._losses, self._norms = [], []
        return record

    def position(self) -> JsonObject:
        """What a checkpoint keeps of it in JSON types, beside ``arrays``."""
        norms = {"norms": self._norms} if self._norms else {}
        return {"losses": self._losses, "hits": self._hits.position(), **norms}

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it in arrays."""
        return self._metrics.state()

    def restore(self, step: int, position: JsonMapping, arrays: Mapping[str, ArrayLike]) -> None:
        """Goes on from a checkpoint of a step."""
        self._metrics = self._metrics.restored(arrays)
        self._hits.restore(position.get("hits", {}))
        self._losses, self._norms = list(position["losses"]), list(position.get("norms", []))
        self.absorbed = step

    def sections(self) -> JsonObject:
        """Its sections of the report."""
        return self._hits.sections()
