"""OPER's Figure 10: memory, lookups and communication of every strategy, greatest, mean and least, as SVG."""

from __future__ import annotations

import html
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jrec.errors import ConfigError
from jrec.outputs import new_file
from jrec.sharding.cost import Cost

_PANELS: Mapping[str, Callable[[Cost], np.ndarray]] = {
    "memory of a device (GB)": lambda c: c.memory[c.keepers] / 1e9,
    "lookups of a device (ms a step)": lambda c: c.lookup[c.keepers] * 1e3,
    "fetched over a link (MB a step)": lambda c: c.remote_bytes / 1e6 if c.remote_bytes.size else np.zeros(1),
}
_BARS = {"greatest": ("#1b4965", np.max), "mean": ("#5fa8d3", np.mean), "least": ("#9bc9e8", np.min)}
_NAMES, _PANEL, _BAR, _ROW, _TOP, _BOTTOM = 150, 230, 140, 42, 62, 34
_TEXT = "#33404d"


def draw_balance(costs: Mapping[str, Cost], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Writes Figure 10 as SVG: a row a strategy, a bar each for the greatest, the mean and the least.

    Args:
      costs: The costs, by strategy.
      path: Such as ``balance.svg``.
      title: Above the figure.

    Raises:
      ConfigError: If the path does not end in .svg.
    """
    check_ending(path)
    with new_file(path) as partial:
        pathlib.Path(partial).write_text("\n".join(_lines(costs, title)) + "\n", encoding="utf-8")


def check_ending(path: str | os.PathLike[str]) -> None:
    """Raises ConfigError if a figure's path does not end in .svg."""
    if pathlib.Path(path).suffix.lower() != ".svg":
        raise ConfigError(f"the figure is written as SVG, but {os.fspath(path)!r} does not end in .svg")


def _lines(costs: Mapping[str, Cost], title: str) -> Iterator[str]:
    width, height = _NAMES + len(_PANELS) * _PANEL, _TOP + len(costs) * _ROW + _BOTTOM
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield f' font-family="sans-serif" font-size="12" fill="{_TEXT}">'
    yield f'<title>{html.escape(title)}</title><rect width="{width}" height="{height}" fill="white"/>'
    yield f'<text x="{width / 2:g}" y="20" font-size="14" text-anchor="middle">{html.escape(title)}</text>'
    for row, name in enumerate(costs):
        yield f'<text x="{_NAMES - 10}" y="{_TOP + row * _ROW + 22}" text-anchor="end">{html.escape(name)}</text>'
    for panel, (label, measure) in enumerate(_PANELS.items()):
        left = _NAMES + panel * _PANEL
        values = [measure(cost) for cost in costs.values()]
        most = max(float(np.max(each)) for each in values) or 1.0
        yield f'<text x="{left}" y="48" font-weight="bold">{html.escape(label)}</text>'
        yield f'<path d="M{left} {_TOP}V{height - _BOTTOM}" stroke="{_TEXT}"/>'
        for row, each in enumerate(values):
            for number, (color, reduce) in enumerate(_BARS.values()):
                value, top = float(reduce(each)), _TOP + row * _ROW + 4 + number * 11
                long = _BAR * value / most
                yield f'<rect x="{left}" y="{top}" width="{long:.1f}" height="9" fill="{color}"/>'
                yield f'<text x="{left + long + 4:.1f}" y="{top + 9}" font-size="10">{value:.3g}</text>'
    for number, (name, (color, _)) in enumerate(_BARS.items()):
        left = _NAMES + number * 90
        yield f'<rect x="{left}" y="{height - 20}" width="12" height="9" fill="{color}"/>'
        yield f'<text x="{left + 17}" y="{height - 11}">{name}</text>'
    yield "</svg>"
