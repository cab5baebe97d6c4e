"""Objects as a few lines for people: what ``repr`` of a run, a layout or a schema shows."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 12
"""Lines of a table that are shown."""


def human_bytes(value: float) -> str:
    """``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def counted(count: int, noun: str) -> str:
    """``1 table``, ``26 tables``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def lines(head: str, rows: Sequence[Sequence[str]]) -> str:
    """A line, and below it rows of cells in aligned columns, the first ``MOST`` of them.

    Args:
      head: The line.
      rows: Cells of equally many columns.
    """
    shown = rows[:MOST]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    text += [f"… and {len(rows) - MOST:,} more"] if len(rows) > MOST else []
    return "\n".join([head, *(f"  {line}".rstrip() for line in text)])
