"""A calibration as people read it: hot rows by table, with the Rand-Em Box's estimates beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jrec.access.calibrate import CalibrateOptions, Calibration, SampleOptions
from jrec.access.calibrate.calibrator import boxes_of
from jrec.access.profile import AccessProfile
from jrec.data.schema import Schema
from jrec.shown import human_bytes

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(calibration: Calibration, schema: Schema, profile: AccessProfile, options: CalibrateOptions) -> Table:
    """A row for each large table, the greatest first, and one for all small tables, whose rows are all hot.

    Args:
      calibration: What to show.
      schema: The dataset's schema.
      profile: The accesses that it was made of, from ``count_accesses``.
      options: The options that it was made with.
    """
    from rich.table import Table

    table = Table(title=f"{calibration.name}: hot rows", title_justify="left")
    for column in ("table", "rows", "hot rows", "hot", "size", "estimate", "bound"):
        table.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    large = sorted((t for t in calibration.tables if t.large), key=lambda t: -t.rows)
    boxes = boxes_of(schema, {t.name: profile.table(t.name) for t in large}, options.sample or SampleOptions())
    cutoff = float("inf") if calibration.cutoff is None else calibration.cutoff
    for t, box in zip(large, boxes, strict=True):
        found = box.estimate(cutoff)
        judged = ("counted", "") if found.method == "counted" else (f"{found.rows:,.0f}", f"{found.bound:,.0f}")
        table.add_row(*_cells(calibration, t.name, t.rows, t.hot), *judged)
    if small := [t for t in calibration.tables if not t.large]:
        rows = sum(t.rows for t in small)
        table.add_row(*_cells(calibration, f"{len(small)} small", rows, rows), "whole", "")
    table.add_section()
    rows, hot = (sum(getattr(t, name) for t in calibration.tables) for name in ("rows", "hot"))
    table.add_row(*_cells(calibration, "all", rows, hot), "", "")
    return table


def _cells(calibration: Calibration, name: str, rows: int, hot: int) -> tuple[str, ...]:
    size = human_bytes(hot * calibration.row_bytes)
    return name, f"{rows:,}", f"{hot:,}", f"{100 * hot / rows:.2f} %", size
