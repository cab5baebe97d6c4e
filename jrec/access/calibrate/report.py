"""A calibration as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jrec.access.calibrate.file import Calibration

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(found: Calibration) -> Table:
    """A row for each large table, the greatest first, and one for all that are hot whole."""
    from rich.table import Table

    table = Table(title=f"{found.name}: hot rows", title_justify="left")
    for column in ("table", "rows", "hot rows", "hot", "size", "estimate", "bound"):
        table.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    for t in sorted(found.tables, key=lambda t: -t.rows):
        if t.large:
            judged = ("counted", "") if t.how == "counted" else (f"{t.estimate:,.0f}", f"{t.bound:,.0f}")
            table.add_row(*_cells(found, t.name, t.rows, t.hot), *judged)
    if small := [t for t in found.tables if not t.large]:
        rows = sum(t.rows for t in small)
        table.add_row(*_cells(found, f"{len(small)} small", rows, rows), "whole", "")
    table.add_section()
    table.add_row(*_cells(found, "all", sum(t.rows for t in found.tables), sum(t.hot for t in found.tables)), "", "")
    return table


def summary_lines(found: Calibration) -> list[str]:
    """What was counted, what the threshold means, and what to expect of it."""
    size = _size(found.row_bytes * sum(t.rows for t in found.tables))
    inputs = found.hot_inputs
    apart = " that were not counted" if inputs.held_out else ""
    return [
        f"counted: {found.source}, in {found.seconds:.1f} s",
        f"threshold: {_threshold(found)}",
        f"hot rows: {_size(found.hot_bytes)} of {size}, {found.row_bytes} bytes a row with its optimizer's slots; the"
        f" budget is {_size(found.options['budget'])}",
        f"hot inputs: {100 * inputs.share:.1f} % expected (standard error {100 * inputs.error:.1f} %, on"
        f" {inputs.inputs:,} inputs{apart})",
        *(f"note: {note}" for note in found.notes),
    ]


def _cells(found: Calibration, name: str, rows: int, hot: int) -> tuple[str, ...]:
    return name, f"{rows:,}", f"{hot:,}", f"{100 * hot / rows:.2f} %", _size(hot * found.row_bytes)


def _threshold(found: Calibration) -> str:
    if found.threshold is None:
        return "none: no row of a large table is hot, the budget has no room for one"
    if not found.threshold:
        return "0: every row fits the budget and is hot"
    return (
        f"{found.threshold:.3g} of the inputs, {found.cutoff:,.3g} accesses as counted; the optimizer tried"
        f" {len(found.steps)} thresholds"
    )


def _size(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"
