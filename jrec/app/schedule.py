"""What is due after which step of a run, and so how many steps go to the device in one dispatch."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

import jax

from jrec.app.config import TrainConfig
from jrec.app.watch import EvaluationPlan
from jrec.ops.layout import EmbeddingLayout

_MOST = 16  # steps: what Python does for a dispatch, 0.5 ms, is then a fraction of any step
_BYTES = 128 << 20  # of a dispatch's batches, of which the device holds a few


@dataclasses.dataclass(frozen=True, kw_only=True)
class Due:
    """What is due after a step."""

    log: bool
    evaluate: bool
    save: bool
    window: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is, so that the results of all steps so far are needed."""
        return self.log or self.evaluate or self.save or self.window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run logs, evaluates and saves; never within a dispatch.

    Attributes:
      total: The steps of the run.
      log, evaluate, save: Each is due after every multiple of its number of steps; 0 for never.
      windows: The steps after which a window of time is scored, ascending (``jrec.app.progressive``).
      evaluate_last: Whether the last step is evaluated, too: it may be the best, or its calibration is the model's.
    """

    total: int
    log: int = 0
    evaluate: int = 0
    save: int = 0
    windows: tuple[int, ...] = ()
    evaluate_last: bool = False

    @classmethod
    def of(cls, config: TrainConfig, plan: EvaluationPlan, total: int, windows: Sequence[int] = ()) -> Schedule:
        """The schedule of a configuration."""
        return cls(
            total=total,
            log=config.log.every_steps,
            evaluate=plan.every_steps,
            save=config.checkpoint.every_steps,
            windows=tuple(windows),
            evaluate_last=plan.every_steps > 0 and (config.checkpoint.keep_best or config.model.calibrate),
        )

    def at(self, step: int) -> Due:
        """What is due after a step."""
        log, evaluate, save = (every > 0 and step % every == 0 for every in (self.log, self.evaluate, self.save))
        last = self.evaluate_last and step == self.total
        return Due(log=log, evaluate=evaluate or last, save=save, window=step in self.windows)

    def dispatch(self, before: int, most: int) -> int:
        """How many steps the next dispatch takes: ``most`` or a few less, one by one where something is due.

        Args:
          before: The steps before it.
          most: How many steps a dispatch takes at most.
        """
        due = [steps for steps in (self.log, self.evaluate, self.save) if steps]
        # Everything that is due falls on multiples of this, so a size that divides it ends exactly there.
        common = math.gcd(*due)  # 0 where nothing is due
        fitting = max((size for size in range(1, most + 1) if common % size == 0), default=1)
        # A size that ends where something is due leaves no steps over, which are taken one by one. One below half of
        # ``most`` is not worth that: it would more than double the dispatches.
        size = fitting if 2 * fitting >= most else most
        # The next step at which something is due, or the end: results are read back only between dispatches.
        window = self.windows[bisect.bisect_right(self.windows, before) :][:1]
        upto = min([self.total, *window, *((before // steps + 1) * steps for steps in due)])
        return size if before + size <= upto else 1


def most_steps(layout: EmbeddingLayout, *, batch_size: int, num_dense: int) -> int:
    """How many steps a dispatch takes at most where the configuration leaves it open.

    One on CPUs: a step there takes several times as long as its dispatch.

    Args:
      layout: The tables.
      batch_size: The examples of a batch.
      num_dense: The float features of an example.
    """
    if jax.default_backend() == "cpu":
        return 1
    # Of 4 bytes each: dense features, label and mask of every example, and the ids.
    numbers = batch_size * (num_dense + 2) + sum(stack.capacity(batch_size) for stack in layout.members)
    return max(1, min(_MOST, _BYTES // (4 * numbers)))
