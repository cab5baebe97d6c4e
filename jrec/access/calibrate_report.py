"""A calibration as people read it."""

from __future__ import annotations

from jrec.access.calibrate_file import Calibration


def print_calibration(found: Calibration) -> None:
    """Prints a table of the dataset's tables, and what the threshold means, to stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.name}: hot rows", title_justify="left")
    columns = ("table", "rows", "hot rows", "hot", "Rand-Em estimate", "upper bound", "size", "hot size")
    for column in columns:
        table.add_column(column, justify="left" if column == "table" else "right")
    for t in sorted(found.tables, key=lambda t: -t.rows):
        estimate, bound = ("whole", "") if t.how == "whole" else (f"{t.estimate:,.0f}", f"{t.bound:,.0f}")
        table.add_row(
            t.name,
            f"{t.rows:,}",
            f"{t.hot:,}",
            f"{100 * t.hot / t.rows:.2f} %",
            "counted" if t.how == "counted" else estimate,
            "" if t.how == "counted" else bound,
            _size(t.rows * found.row_bytes),
            _size(t.hot * found.row_bytes),
        )
    rows = sum(t.rows for t in found.tables)
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
    for line in (
        f"counted: {found.source}, in {found.seconds:.1f} s",
        f"threshold: {_threshold(found)}",
        f"hot rows: {sum(t.hot for t in found.tables):,} of {rows:,}, {_size(found.hot_bytes)} of"
        f" {_size(rows * found.row_bytes)} ({found.row_bytes} bytes a row with its optimizer's slots); the budget is"
        f" {_size(found.options['budget'])}",
        f"hot inputs: {100 * found.hot_inputs.share:.1f} % expected, +- {100 * found.hot_inputs.error:.1f} %, on"
        f" {found.hot_inputs.inputs:,} inputs {'that were not counted' if found.hot_inputs.held_out else 'of a sample'}",
        *(f"note: {note}" for note in found.notes),
    ):
        print(line)


def _threshold(found: Calibration) -> str:
    if found.threshold is None:
        return "none: no row of a large table is hot, the budget has no room for one"
    if not found.threshold:
        return "0: every row fits the budget and is hot"
    return (
        f"{found.threshold:.3g} of the inputs, {found.cutoff:,.3g} of the accesses counted; the Rand-Em Box tried"
        f" {len(found.steps)} thresholds"
    )


def _size(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"
