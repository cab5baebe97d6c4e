"""Progress on stderr: bars on a terminal, and elsewhere, as in a notebook or a job's log, a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress as rich_progress

Advance = Callable[[float], None]


def is_shown(show: bool | None) -> bool:
    """Whether to draw bars: as asked for, or, where ``show`` is None, whether stderr is a terminal."""
    return sys.stderr.isatty() if show is None else show


def bars(*columns: rich_progress.ProgressColumn, show: bool | None = None) -> rich_progress.Progress:
    """Bars on stderr with these columns, not started; they draw nothing unless ``is_shown(show)``."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True, force_terminal=True if show else None)
    return rich.progress.Progress(*columns, console=console, disable=not is_shown(show))


class Pulse:
    """Lines about something that takes long: after ``FIRST`` seconds, then less and less often, at least each minute.

    Args:
      show: None where a line is wanted; otherwise, and on a terminal, which has bars, there is none.
    """

    def __init__(self, show: bool | None):
        self._silent = show is not None or is_shown(show)
        self._begin = self._last = time.perf_counter()

    def due(self) -> bool:
        """Whether to say a line now, which is then taken as said."""
        if self._silent:
            return False
        now = time.perf_counter()
        if now - self._last < min(MOST, max(FIRST, (now - self._begin) / 6)):
            return False
        self._last = now
        return True

    def say(self, line: str) -> None:
        """Writes a line, if one is due."""
        if self.due():
            sys.stderr.write(f"jrec: {line}\n")


FIRST, MOST = 10.0, 60.0
"""Seconds before the first line of a ``Pulse``, and at most between two."""


class Progress:
    """Bars of successive stages, or lines. ``stage`` gives a function that says how much of the stage is done now."""

    def __init__(self, show: bool | None = None):
        self._show = show

    @contextlib.contextmanager
    def stage(self, name: str, total: float) -> Iterator[Advance]:
        """One stage of ``total`` units."""
        if not is_shown(self._show):
            pulse = Pulse(self._show)
            yield lambda done: pulse.say(f"{name}: {100 * done / max(total, 1e-9):.0f} %")
            return
        import rich.progress as columns

        with bars(
            columns.TextColumn("{task.description:<24}"),
            columns.BarColumn(),
            columns.TaskProgressColumn(),
            columns.TimeElapsedColumn(),
            columns.TimeRemainingColumn(),
            show=self._show,
        ) as progress:
            task = progress.add_task(name, total=total)
            yield lambda done: progress.update(task, completed=done)
            progress.update(task, completed=total)


@contextlib.contextmanager
def counted(name: str, total: int | None, *, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A bar of examples whose number may be unknown; gives a function of how many more are done."""
    if not is_shown(show):
        pulse, done = Pulse(show), 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            pulse.say(f"{name}: {done:,}{'' if total is None else f' of {total:,}'} examples")

        yield advance
        return
    import rich.progress as columns

    parts: list[columns.ProgressColumn] = [
        columns.TextColumn("{task.description:<24}"),
        columns.BarColumn(),
        columns.MofNCompleteColumn(),
    ]
    parts += [columns.TimeElapsedColumn()] + ([] if total is None else [columns.TimeRemainingColumn()])
    with bars(*parts, show=show) as progress:
        task = progress.add_task(name, total=total)
        yield lambda more: progress.advance(task, more)
