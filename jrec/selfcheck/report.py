"""Verdicts for people, and the bar while they are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jrec.ops.verdicts import Choice, KernelClass, Verdict
from jrec.progress import bars, is_shown
from jrec.selfcheck.ensure import Progress
from jrec.selfcheck.runner import At

BROKEN = ("wrong", "crashed", "timed out", "does not compile")


def table(verdicts: Iterable[Verdict]) -> str:
    """One line a class: what was chosen and why, microseconds a call and XLA's by the kernel's."""
    rows = [["kernel class", "chosen", "because", "kernel us", "XLA us", "ratio"]]
    details = []
    for verdict in verdicts:
        kernel_class = str(verdict.kernel_class)
        ours, theirs = verdict.kernel_seconds, verdict.xla_seconds
        times = [_us(ours), _us(theirs), f"{theirs / ours:.2f}x"] if ours and theirs else ["-", "-", "-"]
        rows.append([kernel_class, verdict.choice, verdict.reason, *times])
        if verdict.detail and verdict.reason in BROKEN:
            details.append(f"{kernel_class}: {verdict.reason}: {verdict.detail}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return "\n".join([*lines, *details])


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def summary(verdicts: Mapping[KernelClass, Verdict]) -> str:
    """One line: how many classes take the kernel, and how many XLA and why."""
    counts: dict[str, int] = {}
    for verdict in verdicts.values():
        counts[verdict.reason] = counts.get(verdict.reason, 0) + 1
    chosen = counts.pop("faster", 0)
    rejected = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return (
        f"{chosen} of {len(verdicts)} kernel classes are right and faster than XLA{f'; {rejected}' if rejected else ''}"
    )


def record(verdicts: Mapping[KernelClass, Verdict], choices: Mapping[KernelClass, Choice]) -> dict[str, Any]:
    """For a run's report: what was chosen for each class that it traced, and the verdicts on those."""
    content = {}
    for kernel_class, choice in choices.items():
        verdict = verdicts.get(kernel_class)
        content[str(kernel_class)] = {"chosen": choice, "verdict": None if verdict is None else verdict.to_dict()}
    return content


@contextlib.contextmanager
def shown(*, show: bool | None = None) -> Iterator[Progress]:
    """A bar on standard error, on terminals unless asked for; yields what ``ensure`` tells its progress."""
    if not is_shown(show):
        yield lambda event, done, total: None
        return
    import rich.progress as columns

    with bars(
        columns.TextColumn("checking GPU kernels"),
        columns.BarColumn(),
        columns.MofNCompleteColumn(),
        columns.TimeElapsedColumn(),
        columns.TextColumn("{task.description}"),
        show=show,
    ) as bar:
        task = bar.add_task("starting", total=None)

        def progress(event: At | Verdict, done: int, total: int) -> None:
            where = event.where if isinstance(event, At) else event.reason
            bar.update(task, completed=done, total=total, description=f"{event.kernel_class}: {where}")

        yield progress
