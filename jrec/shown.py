"""Objects as people see them: what ``repr`` of a run, a layout or a schema shows, and notebooks as HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

MOST = 12
"""Rows of a table that ``repr`` shows."""
MOST_IN_NOTEBOOKS = 30
"""Rows of a table that a notebook shows."""


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


@dataclasses.dataclass(frozen=True)
class Shown:
    """What an object shows of itself: a line or more, and a table below.

    Attributes:
      heads: The lines, such as "Run: step 2, 1 device".
      rows: Cells of the table, equally many in each row. A cell is a phrase that needs no heading: "read by user".
    """

    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]] = ()

    def text(self) -> str:
        """For terminals: the table in aligned columns, its first ``MOST`` rows."""
        rows, more = _cut(self.rows, MOST)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*self.heads, *(f"  {line}".rstrip() for line in [*table, *more])])

    def html(self) -> str:
        """For notebooks: the heads, and an HTML table of the first ``MOST_IN_NOTEBOOKS`` rows.

        Every text is escaped, since names of tables and features come from logs. Colours are the notebook's.
        """
        rows, more = _cut(self.rows, MOST_IN_NOTEBOOKS)
        heads = "<br/>".join(html.escape(head) for head in self.heads)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        foot = "".join(f'<tr><td colspan="{len(rows[0])}">{html.escape(line)}</td></tr>' for line in more)
        return f"<div>{heads}<table><tbody>{body}{foot}</tbody></table></div>"


def _cut(rows: Sequence[Sequence[str]], most: int) -> tuple[Sequence[Sequence[str]], list[str]]:
    """The first rows, and a line that counts the others where there are some."""
    return rows[:most], [f"… and {len(rows) - most:,} more"] if len(rows) > most else []


def _cell(text: str) -> str:
    return f'<td style="text-align: left">{html.escape(text)}</td>'
