"""Progress bars on stderr: shown on a terminal, silent elsewhere unless asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[float], None]


class Progress:
    """Bars of successive stages. ``stage`` gives a function that says how much of the stage is done now."""

    def __init__(self, show: bool | None = None):
        self._show = sys.stderr.isatty() if show is None else show

    @contextlib.contextmanager
    def stage(self, what: str, total: float) -> Iterator[Advance]:
        """One stage of ``total`` units."""
        if not self._show:
            yield lambda done: None
            return
        import rich.console
        import rich.progress as bars

        columns = (
            bars.TextColumn("{task.description:<24}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=rich.console.Console(stderr=True)) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)
            progress.update(task, completed=total)
