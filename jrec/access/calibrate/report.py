"""A calibration as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jrec.access.calibrate.file import Calibration

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(calibration: Calibration) -> Table:
    """A row for each large table, the greatest first, and one for all small tables, whose rows are all hot."""
    from rich.table import Table

    table = Table(title=f"{calibration.name}: hot rows", title_justify="left")
    for column in ("table", "rows", "hot rows", "hot", "size", "estimate", "bound"):
        table.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    for t in sorted(calibration.tables, key=lambda t: -t.rows):
        if t.large:
            judged = ("counted", "") if t.how == "counted" else (f"{t.estimate:,.0f}", f"{t.bound:,.0f}")
            table.add_row(*_cells(calibration, t.name, t.rows, t.hot), *judged)
    if small := [t for t in calibration.tables if not t.large]:
        rows = sum(t.rows for t in small)
        table.add_row(*_cells(calibration, f"{len(small)} small", rows, rows), "whole", "")
    table.add_section()
    rows, hot = (sum(getattr(t, name) for t in calibration.tables) for name in ("rows", "hot"))
    table.add_row(*_cells(calibration, "all", rows, hot), "", "")
    return table


def summary_lines(calibration: Calibration) -> list[str]:
    """What was counted, what the threshold means, and what to expect of it."""
    size = _size(calibration.row_bytes * sum(t.rows for t in calibration.tables))
    inputs = calibration.hot_inputs
    apart = " that were not counted" if inputs.held_out else ""
    return [
        f"counted: {calibration.source}, in {calibration.seconds:.1f} s",
        f"threshold: {_threshold(calibration)}",
        f"hot rows: {_size(calibration.hot_bytes)} of {size}, {calibration.row_bytes} bytes a row with its optimizer's"
        f" slots; the budget is {_size(calibration.options['budget'])}",
        f"hot inputs: {100 * inputs.share:.1f} % expected (standard error {100 * inputs.error:.1f} %, on"
        f" {inputs.inputs:,} inputs{apart})",
        *(f"note: {note}" for note in calibration.notes),
    ]


def _cells(calibration: Calibration, name: str, rows: int, hot: int) -> tuple[str, ...]:
    return name, f"{rows:,}", f"{hot:,}", f"{100 * hot / rows:.2f} %", _size(hot * calibration.row_bytes)


def _threshold(calibration: Calibration) -> str:
    if calibration.threshold is None:
        return "none: no row of a large table is hot, the budget has no room for one"
    if not calibration.threshold:
        return "0: every row fits the budget and is hot"
    return (
        f"{calibration.threshold:.3g} of the inputs, {calibration.cutoff:,.3g} accesses as counted; the optimizer tried"
        f" {len(calibration.steps)} thresholds"
    )


def _size(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"
