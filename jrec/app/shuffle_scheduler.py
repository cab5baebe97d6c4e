"""The Shuffle Scheduler: in which order hot and cold batches are trained (FAE, section III-C, Equation 7).

A *schedule* at rate ``r`` takes ``r`` per cent of an epoch's cold batches and then ``r`` per cent of its hot ones: at
100 all cold batches come before the first hot one. After each schedule the test loss ``T(i)`` decides the next rate:

    r(i + 1) = max(r(i) / 2, R(1))     if T(i) > T(i - 1)
               min(r(i) * 2, R(100))   if T(i) < T(i - 1) < ... < T(i - u)
               r(i)                    otherwise

This is Equation 7 read with its text: printed, ``min`` and ``max`` are exchanged, the first case compares with "≥", and
the second compares ``T(i)`` only with ``T(i - u)``. At ``R(1)`` "hot and cold are scheduled after every mini-batch":
the schedule's batches, still one per cent of each kind, alternate one by one, and where one kind is more numerous, in
proportion. Shares are counted from the epoch's start and rounded up, so an epoch takes every batch once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

from jrec.app.config import FAEConfig
from jrec.errors import CheckpointError
from jrec.json_values import JsonObject

Kind = Literal["hot", "cold"]

_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A completed schedule and its outcome.

    Attributes:
      start: Batches of the run before it.
      rate: Its rate, in per cent of an epoch's batches.
      cold, hot: How many batches of each kind it took.
      test_loss: The test loss after it: log loss in nats per example, or of labels that are numbers RMSE.
      next_rate: The rate of the next schedule.
    """

    start: int
    rate: float
    cold: int
    hot: int
    test_loss: float
    next_rate: float


def next_rate(rate: float, losses: list[float], config: FAEConfig) -> float:
    """The rate of the next schedule, in per cent (FAE, Equation 7).

    Args:
      rate: The last schedule's rate, in per cent.
      losses: Test losses after every schedule so far, in order.
      config: Bounds and patience.
    """
    recent = losses[-config.patience - 1 :]
    if len(losses) > 1 and losses[-1] > losses[-2]:
        return max(rate / 2, float(config.least_rate))
    falls = all(later < earlier for earlier, later in itertools.pairwise(recent))
    if falls and len(recent) == config.patience + 1:
        return min(rate * 2, float(config.greatest_rate))
    return rate


class ShuffleScheduler:
    """Decides for each batch whether it is a hot or a cold one. Every epoch takes every batch once.

    Rates are halves and doubles of whole numbers, so that the arithmetic is exact.

    Args:
      config: Rates and patience.
      cold, hot: Batches of an epoch; at least one in all.
      epochs: Epochs of the run.

    Attributes:
      rate: The current schedule's rate, or the next one's where ``awaits_loss``.
      history: The completed schedules.
      switches: How often a hot batch followed a cold one or a cold one a hot one.
      issued: Batches so far.

    Example:
      >>> scheduler = ShuffleScheduler(FAEConfig(), cold=2, hot=4, epochs=1)
      >>> [scheduler.next() for _ in range(3)]
      ['cold', 'hot', 'hot']
      >>> scheduler.awaits_loss
      True
      >>> scheduler.observe(0.5).next_rate
      50.0
    """

    def __init__(self, config: FAEConfig, *, cold: int, hot: int, epochs: int):
        if min(cold, hot) < 0 or cold + hot < 1 or epochs < 1:
            raise ValueError(f"an epoch of {cold} cold and {hot} hot batches, {epochs} times over, is nothing to train")
        self._config, self._totals, self._epochs = config, {"cold": cold, "hot": hot}, epochs
        self.rate = float(config.initial_rate)
        self.history: list[Schedule] = []
        self.switches = self.issued = 0
        self._progress = 0.0  # per cent of the epoch, the current schedule included
        self._done: dict[str, int] = {"cold": 0, "hot": 0}  # in this epoch
        self._share: dict[str, int] = {"cold": 0, "hot": 0}  # of the current schedule
        self._left: dict[str, int] = {"cold": 0, "hot": 0}  # in it
        self._last: Kind | None = None
        self._begin()

    @property
    def total(self) -> int:
        """Batches of the whole run."""
        return self._epochs * sum(self._totals.values())

    @property
    def awaits_loss(self) -> bool:
        """Whether a schedule is over and ``observe`` must come before ``next``."""
        return not any(self._left.values()) and not self._over

    def next(self) -> Kind:
        """The kind of the next batch.

        Raises:
          RuntimeError: If the run is over, or a loss is awaited.
        """
        if self.issued == self.total:
            raise RuntimeError(f"all {self.total} batches of the run are taken")
        if self.awaits_loss:
            raise RuntimeError("the schedule is over: observe the loss first")
        kind = self._kind()
        self.switches += self._last not in (None, kind)
        self._last = kind
        self._left[kind] -= 1
        self._done[kind] += 1
        self.issued += 1
        return kind

    def observe(self, loss: float) -> Schedule:
        """Takes the loss after a schedule and decides the rate of the next one.

        Raises:
          RuntimeError: If the schedule is not over.
        """
        if not self.awaits_loss:
            raise RuntimeError(f"the schedule has {sum(self._left.values())} more batches; its loss comes after them")
        rate = self.rate
        self.rate = next_rate(rate, [*(s.test_loss for s in self.history), loss], self._config)
        share = self._share
        schedule = Schedule(
            start=self.issued - sum(share.values()), rate=rate, cold=share["cold"], hot=share["hot"],
            test_loss=loss, next_rate=self.rate,
        )  # fmt: skip
        self.history.append(schedule)
        self._over = self.issued == self.total
        if not self._over:
            self._begin()
        return schedule

    def state(self) -> JsonObject:
        """The state that determines the order, in JSON types."""
        return {
            "version": _STATE_VERSION,
            "batches": dict(self._totals),
            "config": self._config.to_dict(),
            "rate": self.rate,
            "progress": self._progress,
            "done": dict(self._done),
            "share": dict(self._share),
            "left": dict(self._left),
            "last": self._last,
            "issued": self.issued,
            "over": self._over,
            "switches": self.switches,
            "history": [dataclasses.asdict(schedule) for schedule in self.history],
        }

    def restore(self, state: JsonObject) -> None:
        """Continues from a state; there may be more epochs than before.

        Raises:
          CheckpointError: If the state belongs to another run.
        """
        own = {"version": _STATE_VERSION, "batches": self._totals, "config": self._config.to_dict()}
        if different := [key for key, value in own.items() if state.get(key) != value]:
            saved = ", ".join(f"{key}={state.get(key)!r}" for key in different)
            ours = ", ".join(f"{key}={own[key]!r}" for key in different)
            raise CheckpointError(
                f"the Shuffle Scheduler was saved with {saved}, but this run has {ours}; resume with the same packed"
                " dataset, data.batch_size and [fae], or start a new run"
            )
        if state["issued"] > self.total:
            raise CheckpointError(
                f"the Shuffle Scheduler was saved after {state['issued']:,} batches, but this run has {self.total:,};"
                " resume with at least as many epochs as before"
            )
        self.rate, self._progress = float(state["rate"]), float(state["progress"])
        self._done, self._share, self._left = ({**state[key]} for key in ("done", "share", "left"))
        self._last, self.issued, self.switches = state["last"], state["issued"], state["switches"]
        self.history = [Schedule(**schedule) for schedule in state["history"]]
        self._over = state["over"]
        if self._over and self.issued < self.total:  # the run has more epochs than it had
            self._begin()

    def _begin(self) -> None:
        """Begins the next schedule that has a batch; a small share of few batches may have none."""
        self._over = False
        while not any(self._left.values()):
            # Exactly: rates are whole numbers halved and doubled, and the sum is cut off at 100.
            if self._progress == 100:
                self._progress, self._done = 0.0, {"cold": 0, "hot": 0}
            self._progress = min(100.0, self._progress + self.rate)
            for kind, total in self._totals.items():
                # By the epoch's sum, not schedule by schedule, whose rounding would add up to more than the epoch has.
                self._share[kind] = math.ceil(total * self._progress / 100) - self._done[kind]
            self._left = dict(self._share)

    def _kind(self) -> Kind:
        left, share = self._left, self._share
        if not left["cold"] or not left["hot"]:
            return "cold" if left["cold"] else "hot"
        if self.rate > 1:
            return "cold"
        taken = {kind: share[kind] - left[kind] for kind in share}
        return "cold" if taken["cold"] * share["hot"] <= taken["hot"] * share["cold"] else "hot"
