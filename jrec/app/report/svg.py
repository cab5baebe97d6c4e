"""Charts as inline SVG, coloured by the page's style sheet, so that one file has them in light and in dark.

A chart is 400 units wide, about as wide as a phone: its text is legible there, and two fit beside each other elsewhere.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from typing import Literal

WIDTH, HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 10, 10, 40
_TICKS = 5
_CHARACTER = 7.2  # units of width, of 12 px in the widest of the usual fonts
_APART = 8  # units between the texts of two ticks, at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """One thing that a chart draws.

    Attributes:
      kind: A "line" through points, "points" joined by a line, a "band" between ``y`` and ``upper``, "bars" from ``y``
        to ``upper`` at each ``x`` (95 % intervals), "steps" of a histogram whose edges are ``x`` (one more than ``y``),
        or a line "across" at ``y[0]`` or "down" at ``x[0]``.
      color: A class of the style sheet, such as "valid".
      name: What the legend calls it; "" for nothing.
      dash: A class of dashes, "dash1" to "dash3"; "" for none.
    """

    kind: Literal["line", "points", "band", "bars", "steps", "across", "down"]
    color: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    upper: Sequence[float] = ()
    name: str = ""
    dash: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """The range of one direction, and how it is labelled; ``low`` is above 0 on a logarithmic axis."""

    label: str
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 at ``low`` and 1 at ``high``."""
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        if not self.logarithmic:
            return _round_steps(self.low, self.high)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [n * 10.0**e for e in exponents for n in (1, 2, 5) if self.low <= n * 10.0**e <= self.high]
        return fine if len(fine) <= _TICKS + 2 else [10.0**e for e in exponents if self.low <= 10.0**e <= self.high]


def chart(marks: Sequence[Mark], *, x: Axis, y: Axis, title: str, height: int = HEIGHT) -> str:
    """A chart with its title, for screen readers, and a legend below it, as an HTML figure.

    Args:
      marks: What is drawn, in this order. What lies outside of the axes is clipped.
      x, y: The axes.
      title: What the chart shows.
      height: Units from top to bottom.
    """
    plot = _Plot(x=x, y=y, height=height)
    name = html.escape(title)
    body = "".join([*plot.grid(), *(plot.draw(mark) for mark in marks), *plot.labels()])
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 24 8" aria-hidden="true">{_key(mark)}</svg> {html.escape(mark.name)}</li>'
        for mark in marks
        if mark.name
    )
    return (
        f'<figure><svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{body}</svg>'
        f'<figcaption>{name}<ul class="legend">{legend}</ul></figcaption></figure>\n'
    )


def bar_chart(bars: Sequence[tuple[str, float, float]], *, title: str, unit: str, color: str) -> str:
    """Horizontal bars from 0 with their names, each with a line of one standard deviation to both sides.

    Args:
      bars: Names, values and deviations, from top to bottom.
      title: What the chart shows.
      unit: What the values are, and their unit.
      color: A class of the style sheet, such as "test".
    """
    most = (WIDTH // 2 - 10) // _CHARACTER  # longer names lose their end
    names = [name if len(name) <= most else f"{name[: int(most) - 1]}…" for name, _, _ in bars]
    begin = 10 + _CHARACTER * max((len(name) for name in names), default=0)
    low, high = around([0.0, *(value + sign * spread for _, value, spread in bars for sign in (-1, 1))], margin=0.02)
    axis = Axis(label=unit, low=low, high=high)
    foot, name = _TOP + 18 * len(bars), html.escape(title)

    def at(value: float) -> float:
        return begin + axis.place(value) * (WIDTH - _RIGHT - begin)

    body = []
    body.extend(_ticks_across([(at(value), value) for value in axis.ticks()], _TOP, foot))
    for line, (shown, (_, value, spread)) in enumerate(zip(names, bars, strict=True)):
        y = _TOP + 18 * line + 9
        body.append(f'<text x="{begin - 5:.1f}" y="{y + 4}" text-anchor="end">{html.escape(shown)}</text>')
        body.append(f'<path class="{color} band" d="M{at(0.0):.1f} {y - 6}H{at(value):.1f}V{y + 6}H{at(0.0):.1f}Z"/>')
        ends = f"M{at(value - spread):.1f} {y}H{at(value + spread):.1f}"
        body.append(f'<path class="{color} solid" d="{ends}M{at(value):.1f} {y - 6}V{y + 6}"/>')
    body.append(f'<text x="{WIDTH / 2:g}" y="{foot + 32}" text-anchor="middle">{html.escape(unit)}</text>')
    return (
        f'<figure><svg class="chart" viewBox="0 0 {WIDTH} {foot + 40}" role="img" aria-label="{name}">'
        f"{''.join(body)}</svg><figcaption>{name}</figcaption></figure>\n"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plot:
    x: Axis
    y: Axis
    height: int

    def at(self, x: float, y: float) -> tuple[float, float]:
        right, top = self.x.place(x), self.y.place(y)
        return (
            _LEFT + _inside(right) * (WIDTH - _LEFT - _RIGHT),
            self.height - _BOTTOM - _inside(top) * (self.height - _TOP - _BOTTOM),
        )

    def grid(self) -> Iterator[str]:
        low, high = self.height - _BOTTOM, WIDTH - _RIGHT
        yield from _ticks_across([(self.at(value, self.y.low)[0], value) for value in self.x.ticks()], _TOP, low)
        for value in self.y.ticks():
            place = self.at(self.x.low, value)[1]
            yield f'<path class="grid" d="M{_LEFT} {place:.1f}H{high}"/>'
            yield f'<text x="{_LEFT - 5}" y="{place + 4:.1f}" text-anchor="end">{tick_text(value)}</text>'

    def labels(self) -> Iterator[str]:
        middle, across = (_TOP + self.height - _BOTTOM) / 2, (_LEFT + WIDTH - _RIGHT) / 2
        yield f'<text x="{across:g}" y="{self.height - 8}" text-anchor="middle">{html.escape(self.x.label)}</text>'
        place, room = f'x="{-middle:g}" y="12" transform="rotate(-90)"', 2 * middle
        if _CHARACTER * len(self.y.label) > room:  # longer labels are made as narrow as the chart is high
            place += f' textLength="{room:g}" lengthAdjust="spacingAndGlyphs"'
        yield f'<text {place} text-anchor="middle">{html.escape(self.y.label)}</text>'

    def draw(self, mark: Mark) -> str:
        shape = f'class="{mark.color} {mark.dash or "solid"}"'
        if mark.kind == "across":
            return f'<path {shape} d="{self._path((self.x.low, self.x.high), (mark.y[0],) * 2)}"/>'
        if mark.kind == "down":
            return f'<path {shape} d="{self._path((mark.x[0],) * 2, (self.y.low, self.y.high))}"/>'
        if mark.kind == "band":
            outline = self._path((*mark.x, *reversed(mark.x)), (*mark.y, *reversed(mark.upper)))
            return f'<path class="{mark.color} band" d="{outline}Z"/>'
        if mark.kind == "bars":
            bars = zip(mark.x, mark.y, mark.upper, strict=True)
            return f'<path {shape} d="{"".join(self._path((x, x), (low, high)) for x, low, high in bars)}"/>'
        if mark.kind == "steps":
            edges = [edge for edge in mark.x for _ in range(2)]
            heights = [self.y.low, *(value for value in mark.y for _ in range(2)), self.y.low]
            return f'<path {shape} d="{self._path(edges, heights)}"/>'
        line = f'<path {shape} d="{self._path(mark.x, mark.y)}"/>'
        return line if mark.kind == "line" else line + "".join(self._dots(mark))

    def _dots(self, mark: Mark) -> Iterator[str]:
        for x, y in zip(mark.x, mark.y, strict=True):
            right, down = self.at(x, y)
            yield f'<circle class="{mark.color}" cx="{right:.1f}" cy="{down:.1f}" r="2.5"/>'

    def _path(self, x: Sequence[float], y: Sequence[float]) -> str:
        places = (self.at(*point) for point in zip(x, y, strict=True))
        return "M" + "L".join(f"{right:.1f} {down:.1f}" for right, down in places)


def _ticks_across(ticks: Sequence[tuple[float, float]], top: float, foot: float) -> Iterator[str]:
    """Lines from top to bottom, and the numbers under them as far as none runs into the one before it.

    Args:
      ticks: Places, ascending, and their values.
      top: Where lines begin.
      foot: Where they end.
    """
    end = -math.inf
    for place, value in ticks:
        yield f'<path class="grid" d="M{place:.1f} {top}V{foot}"/>'
        half = _CHARACTER * len(tick_text(value)) / 2
        if place - half >= end:
            end = place + half + _APART
            yield f'<text x="{place:.1f}" y="{foot + 14}" text-anchor="middle">{tick_text(value)}</text>'


def tick_text(value: float) -> str:
    """A tick's number: with thousands separators, and no more digits than it has."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def around(values: Sequence[float], *, margin: float = 0.06) -> tuple[float, float]:
    """A range that holds all values with some room; of 0 to 1 where there are none."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(min(values)), float(max(values))
    room = margin * (high - low) or abs(high) * margin or 1.0
    return low - room, high + room


def _inside(share: float) -> float:
    return min(1.0, max(0.0, share))


def _round_steps(low: float, high: float) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, at most ``_TICKS`` + 1 of them."""
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 2.5, 5, 10) if unit * n >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _key(mark: Mark) -> str:
    """The legend's sample of a mark."""
    if mark.kind == "band":
        return f'<path class="{mark.color} band" d="M0 0H24V8H0Z"/>'
    dot = f'<circle class="{mark.color}" cx="12" cy="4" r="2.5"/>' if mark.kind == "points" else ""
    return f'<path class="{mark.color} {mark.dash or "solid"}" d="M0 4H24"/>{dot}'
