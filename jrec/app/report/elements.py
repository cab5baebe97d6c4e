"""Elements of a report's HTML page: tables, folded parts and the page around them. Every text is escaped here.

A page is one file that loads nothing: its style is inside, and its policy forbids all requests. It follows the reader's
choice of light or dark; tables scroll inside themselves where the window is narrow.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_SMALL, _LARGE = 0.1, 1e5
MOST_ROWS = 300
"""Of a table; what is beyond is left to the JSON."""
NONE = "-"

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f5f6f8; --text: #1b1f24; --soft: #59636e; --line: #d4d9df;
  --warn: #fff4d6; --warn-line: #b77900; --good: #e3f5e8; --good-line: #1f7a3d;
  --train: #0072b2; --valid: #b26b00; --test: #00795a; --grey: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1e2329; --text: #e7eaee; --soft: #a5afba;
  --line: #3a424c; --warn: #3a2f12; --warn-line: #e0a526; --good: #15301f; --good-line: #4cbf74;
  --train: #56b4e9; --valid: #f0b04a; --test: #3fc79d; --grey: #a0a8b3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
p, li, dd, pre { overflow-wrap: anywhere; }
.soft, figcaption { color: var(--soft); }
.note { border-left: 4px solid var(--warn-line); background: var(--warn); padding: .5rem 1rem; margin: .5rem 0; }
.note.good { border-color: var(--good-line); background: var(--good); }
.note ul { margin: .25rem 0; padding-left: 1.25rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem; margin: 1rem 0; }
.tiles div { background: var(--card); padding: .5rem .75rem; border-radius: .4rem; }
.tiles dt { color: var(--soft); font-size: .85rem; } .tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.tiles small { font-size: .8rem; font-weight: 400; color: var(--soft); display: block; }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .4rem .6rem; font-weight: 600; }
th, td { padding: .3rem .6rem; border-top: 1px solid var(--line); text-align: right; vertical-align: top; }
.text, th:first-child { text-align: left; } td.text { min-width: 8rem; }
thead th { background: var(--card); vertical-align: bottom; font-weight: 600; min-width: 5.5rem; }
thead small { display: block; font-weight: 400; color: var(--soft); }
tbody th { font-weight: 400; min-width: 7rem; }
tr.own > * { font-weight: 700; } tr.off > * { background: var(--warn); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .4rem; padding: .5rem; min-width: 0; }
figcaption { font-size: .9rem; }
.chart { width: 100%; height: auto; display: block; }
.chart text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); stroke-width: .6; fill: none; }
svg .train { --c: var(--train); } svg .valid { --c: var(--valid); } svg .test { --c: var(--test); }
svg .grey { --c: var(--grey); }
svg path.solid, svg path[class*="dash"] { stroke: var(--c); stroke-width: 1.5; fill: none; }
svg circle { fill: var(--c); } svg path.band { fill: var(--c); opacity: .2; stroke: none; }
svg .dash1 { stroke-dasharray: 6 3; } svg .dash2 { stroke-dasharray: 2 2; } svg .dash3 { stroke-dasharray: 8 3 2 3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0 0; padding: 0; }
.key { width: 24px; height: 8px; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .25rem 0; }
:focus-visible { outline: 2px solid var(--train); outline-offset: 2px; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

type Cell = str | int | float | bool | Sequence[Cell] | None


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
      title: Its name, as text.
      parts: What is below the heading, as HTML.
    """
    name = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name}</title><style>{_STYLE}</style></head>\n'
        f"<body><main><h1>{name}</h1>\n{''.join(parts)}</main></body></html>\n"
    )


def section(title: str, parts: Iterable[str]) -> Iterator[str]:
    """Parts below a heading; nothing where there are none."""
    if inside := "".join(parts):
        yield f"<section><h2>{html.escape(title)}</h2>\n{inside}</section>\n"


def folded(title: str, parts: Iterable[str]) -> Iterator[str]:
    """Parts that a click unfolds; nothing where there are none."""
    if inside := "".join(parts):
        yield f"<details><summary>{html.escape(title)}</summary>\n{inside}</details>\n"


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>\n"


def note(title: str, texts: Sequence[str], *, good: bool = False) -> str:
    """A title with a list of sentences that shall be seen; ``good`` where they are no warning."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    body = f"<ul>{items}</ul>" if items else ""
    return f'<div class="note{" good" if good else ""}" role="note"><strong>{html.escape(title)}</strong>{body}</div>\n'


def tiles(values: Mapping[str, tuple[str, str]]) -> str:
    """Figures to see at first: by name, the value and its unit, as texts."""
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)} <small>{html.escape(unit)}</small></dd></div>"
            for name, (value, unit) in values.items()
        )
        + "</dl>\n"
    )


def side_by_side(figures: Iterable[str]) -> Iterator[str]:
    """Charts beside each other as far as the window has room; nothing where there are none."""
    if inside := "".join(figures):
        yield f'<div class="charts">{inside}</div>\n'


def table(
    caption: str, columns: Mapping[str, str], rows: Sequence[Sequence[Cell]], *, marks: Mapping[int, str] | None = None
) -> str:
    """A table, of which the first ``MOST_ROWS`` rows are shown.

    Args:
      caption: What it holds.
      columns: Headings and units; "" for none.
      rows: Cells, the first of a row its name. Texts are as they are, and numbers as by ``measured``.
      marks: A class of the style sheet by row.
    """
    texts = {at for at, cell in enumerate(rows[0] if rows else ()) if isinstance(cell, str)}
    head = "".join(
        f'<th scope="col"{" class=text" * (at in texts)}>{html.escape(name)}'
        + (f"<small>{html.escape(unit)}</small>" if unit else "")
        + "</th>"
        for at, (name, unit) in enumerate(columns.items())
    )
    body = "".join(_row(row, (marks or {}).get(at, "")) for at, row in enumerate(rows[:MOST_ROWS]))
    left = len(rows) - MOST_ROWS
    more = f'<p class="soft">{left:,} more rows are in metrics.json.</p>\n' if left > 0 else ""
    name = html.escape(caption)
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n{more}"
    )


def number(value: Cell) -> str:
    """A cell's text: whole numbers with thousands separators, others with six digits, lists with commas."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.6g}"
    return ", ".join(number(one) for one in value) or NONE


def measured(value: Cell) -> str:
    """A cell's text of something measured: four decimals, or four digits where it is small."""
    if not isinstance(value, float):
        return number(value)
    return f"{value:,.4f}" if abs(value) >= _SMALL or not value else f"{value:.4g}"


def flattened(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, with their paths: "section.key"."""
    if not isinstance(content, Mapping):
        yield prefix, content
        return
    for name, value in content.items():
        yield from flattened(value, f"{prefix}.{name}" if prefix else str(name))


def _breakable(name: str) -> str:
    """A name in a cell, which a narrow window may break behind its separators: else it would hide the other cells."""
    return re.sub(r"([._])(?=\w)", r"\1<wbr>", html.escape(name))


def _row(cells: Sequence[Cell], mark: str) -> str:
    name, *values = cells
    inside = "".join(
        f'<td class="text">{_breakable(cell)}</td>'
        if isinstance(cell, str)
        else f"<td>{html.escape(measured(cell))}</td>"
        for cell in values
    )
    kind = f' class="{mark}"' if mark else ""
    return f'<tr{kind}><th scope="row">{_breakable(number(name))}</th>{inside}</tr>\n'
