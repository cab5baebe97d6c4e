"""The progress of a run, on standard error: steps, examples per second, loss and running AUC; a bar, or lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from jrec.progress import Pulse, bars

_SHOW = {"auto": None, "on": True, "off": False}

REFRESH = 0.2  # seconds between updates of the numbers


class TrainingProgress:
    """Shows a run's progress: "on" by a bar, "auto" by a bar on a terminal and by lines elsewhere."""

    def __init__(self, mode: Literal["auto", "on", "off"], *, total: int, start: int):
        self._progress = bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            show=_SHOW[mode],
        )
        self._task: TaskID = self._progress.add_task("train", total=total, completed=start, numbers="")
        self._pulse, self._total, self._start, self._begin = Pulse(_SHOW[mode]), total, start, time.perf_counter()
        self._done = start
        self._examples = 0
        self._since = self._last = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, steps: int, examples: int, loss: float | None, auc: Callable[[], float | None]) -> None:
        """Counts training steps, of ``examples`` examples together."""
        self._done += steps
        self._examples += examples
        now = time.perf_counter()
        if self._progress.disable:
            if self._pulse.due():
                share = (now - self._begin) / max(1, self._done - self._start)
                left = (self._total - self._done) * share
                numbers = ", ".join(self._numbers(now, loss, auc))
                sys.stderr.write(
                    f"jrec: step {self._done:,} of {self._total:,}, {numbers}, about {left / 60:.1f} min left\n"
                )
        elif now - self._last >= REFRESH:
            self._progress.update(self._task, completed=self._done, numbers="  ".join(self._numbers(now, loss, auc)))

    def _numbers(self, now: float, loss: float | None, auc: Callable[[], float | None]) -> list[str]:
        """What is shown of the steps since the last time."""
        rate = self._examples / (now - self._since)
        self._examples, self._since, self._last = 0, now, now
        area = auc()
        numbers = [f"{rate:,.0f} examples/s"]
        numbers += [] if loss is None else [f"loss {loss:.4f}"]
        return numbers + ([] if area is None else [f"AUC {area:.4f}"])

    @contextlib.contextmanager
    def evaluating(self, split: str, batches: int) -> Iterator[Callable[[], None]]:
        """A second bar while a split is evaluated; yields a function that counts one batch."""
        task, done = self._progress.add_task(f"evaluate {split}", total=batches, numbers=""), 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._progress.advance(task)
            self._pulse.say(f"evaluate {split}: batch {done:,} of {batches:,}")

        try:
            yield advance
        finally:
            self._progress.remove_task(task)
            self._progress.update(self._task, completed=self._done)
            self._examples, self._since = 0, time.perf_counter()
