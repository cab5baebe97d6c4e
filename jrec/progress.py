"""Progress bars on stderr: shown on a terminal, silent elsewhere unless asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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


class Progress:
    """Bars of successive stages. ``stage`` gives a function that says how much of the stage is done now."""

    def __init__(self, show: bool | None = None):
        self._show = show

    @contextlib.contextmanager
    def stage(self, name: str, total: float) -> Iterator[Advance]:
        """One stage of ``total`` units."""
        if not is_shown(self._show):
            yield lambda done: None
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
        yield lambda more: None
        return
    import rich.progress as columns

    parts: list[Any] = [columns.TextColumn("{task.description:<24}"), columns.BarColumn(), columns.MofNCompleteColumn()]
    parts += [columns.TimeElapsedColumn()] + ([] if total is None else [columns.TimeRemainingColumn()])
    with bars(*parts, show=show) as progress:
        task = progress.add_task(name, total=total)
        yield lambda more: progress.advance(task, more)
