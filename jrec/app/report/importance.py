"""What a report says of its section ``importance`` (``jrec.app.importance``): lines, tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jrec.app.report.content import Content, Section
from jrec.app.report.elements import Cell, paragraph, side_by_side, table
from jrec.app.report.svg import bar_chart

_SHOWN = 40  # features of a table on a terminal
_CHARTED = 25  # features of a chart
_BAR = 20  # characters of the longest bar


def _by_task(section: Section) -> Iterator[tuple[str, Section]]:
    """The name of the split, and of the label where there are several, with its metrics and features."""
    split = section["split"]
    for task, inside in section.get("tasks", {"": section}).items():
        yield f"{split}, {task}" if task else split, inside


def lines(content: Content) -> Iterator[str]:
    """Features by importance with a bar each, for the terminal; nothing where there is no such section.

    Args:
      content: As ``metrics.json`` has it.
    """
    if (section := content.get("importance")) is None:
        return
    width = len("-0.00000 ± 0.00000")
    for name, inside in _by_task(section):
        columns = inside["columns"]
        widths = [max(width, *map(len, texts)) + 2 for texts in columns.values()]
        features, decisive = inside["features"], next(iter(columns))
        first = max(8, *(len(line["feature"]) for line in features)) + 2
        second = max(5, *(len(line["kind"]) for line in features)) + 2

        def row(cells: Iterable[str], widths: Sequence[int] = (first, second, *widths)) -> str:
            return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))

        yield f"importance on {name}: {_measured_on(section)}"
        yield row(("feature", "kind", *(heading for heading, _ in columns.values()))).rstrip()
        yield row(("", "", *(unit for _, unit in columns.values()))).rstrip()
        longest = max(0.0, *(line[decisive] or 0.0 for line in features))
        for line in features[:_SHOWN]:
            share = max(0.0, line[decisive] or 0.0) / longest if longest else 0.0
            cells = (_cell(line, metric) for metric in columns)
            yield (row((line["feature"], line["kind"], *cells)) + "█" * round(_BAR * share)).rstrip()
        if len(features) > _SHOWN:
            yield f"{len(features) - _SHOWN:,} features more, each with less: --json or --out"


def parts(content: Content) -> Iterator[str]:
    """The chart and the table of every label, for the page; nothing where there is no such section."""
    if (section := content.get("importance")) is None:
        return
    yield paragraph(
        "Each feature's values went to other examples of the split at random, the other features' stayed: by how much"
        f" the model scores worse, on {_measured_on(section)}. Features that say the same share what it is worth, so"
        " that each of them may show little."
    )
    for name, inside in _by_task(section):
        columns = {"feature": "", "kind": ""}
        for heading, unit in inside["columns"].values():
            columns |= {heading: unit, f"{heading}, deviation": "of the repeats"}
        decisive, (heading, unit) = next(iter(inside["columns"].items()))
        charted = [line for line in inside["features"][:_CHARTED] if line[decisive] is not None]
        bars = [(line["feature"], line[decisive], line[f"{decisive}_deviation"] or 0.0) for line in charted]
        title = f"Importance of features on {name}"
        if bars:  # not where the metric is not defined, as of a split without a click that ranks by AUC
            yield from side_by_side([bar_chart(bars, title=title, unit=f"{heading} ({unit})", color=section["split"])])
        rows: list[list[Cell]] = [
            [line["feature"], line["kind"], *(line[key] for m in inside["columns"] for key in (m, f"{m}_deviation"))]
            for line in inside["features"]
        ]
        yield table(title, columns, rows)


def _measured_on(section: Section) -> str:
    some = "all" if section["examples"] == section["drawn_from"] else f"{section['examples']:,} of"
    repeats = "1 permutation each" if section["repeats"] == 1 else f"{section['repeats']:,} permutations each"
    return f"{some} {section['drawn_from']:,} examples, {repeats}, mean and standard deviation"


def _cell(line: Section, metric: str) -> str:
    mean, deviation = line[metric], line[f"{metric}_deviation"]
    if mean is None:
        return "-"
    return f"{mean:.5f}" + ("" if deviation is None else f" ± {deviation:.5f}")
