"""Writes docs/performance.md from the JSON lines of earlier runs, so that no figure on that page is typed by hand.

Files are NAME.jsonl as ``python -m benchmarks.NAME --out`` wrote it; a section whose files are missing is left out.

Examples:
  python -m benchmarks.page benchmarks/results/cpu-2-cores
  python -m benchmarks.page benchmarks/results/cpu-2-cores --check
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.page_sections import HEAD, SECTIONS, Section

PAGE = ROOT / "docs" / "performance.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The lines of one benchmark, in their order."""

    lines: tuple[dict[str, Any], ...]

    def cases(self) -> list[str]:
        """Every case once."""
        return list(dict.fromkeys(line["case"] for line in self.lines))

    def find(self, case: str, metric: str) -> dict[str, Any] | None:
        """The first line of a case and a metric."""
        return next((line for line in self.lines if (line["case"], line["metric"]) == (case, metric)), None)


def main() -> None:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="of the JSON lines of one machine")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    arguments = parser.parse_args()
    text = render(arguments.folder)
    if arguments.check:
        sys.exit(int(PAGE.read_text(encoding="utf-8") != text))
    PAGE.write_text(text, encoding="utf-8")


def render(folder: pathlib.Path) -> str:
    """The page's text from a folder of results."""
    results_by_file = read_folder(folder)
    devices = {line["device"] for results in results_by_file.values() for line in results.lines}
    folder = folder.resolve()
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    found = [(section, section_results(section, results_by_file)) for section in SECTIONS]
    found = [(section, results) for section, results in found if results.lines]
    contents = "".join(f"- [{section.title}](#{anchor(section.title)})\n" for section, _ in found)
    head = HEAD.format(devices="; ".join(sorted(devices)), folder=shown.as_posix())
    return "\n".join([head, contents, *("\n".join(_section(section, results)) for section, results in found)])


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def read_folder(folder: pathlib.Path) -> dict[str, Results]:
    """The lines of every benchmark in a folder, by the file's name without ``.jsonl``."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.jsonl"))}


def read(path: pathlib.Path) -> Results:
    """One benchmark's lines."""
    return Results(lines=tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()))


def section_results(section: Section, results_by_file: Mapping[str, Results]) -> Results:
    """The lines of the cases and files that a section shows."""
    files = (results_by_file[name] for name in section.files if name in results_by_file)
    lines = (line for results in files for line in results.lines)
    return Results(lines=tuple(line for line in lines if re.search(section.cases, line["case"])))


def table(section: Section, results: Results) -> Iterator[str]:
    """A section's lines of Markdown: a table of its columns, or a list of what its pattern matches."""
    return _table(section, results) if section.columns else _list(section, results.lines)


def _section(section: Section, results: Results) -> Iterator[str]:
    commits = ", ".join(dict.fromkeys(line["commit"] for line in results.lines))
    yield f"## {section.title}\n\n{section.text}\n"
    yield from table(section, results)
    for figure in section.figures:
        yield f"\n![{section.title}](figures/{figure})"
    yield f"\nMeasured at commit {commits}.\n"


def _table(section: Section, results: Results) -> Iterator[str]:
    """A row a case, a column a metric; a metric with a peer has its ratio beside it."""
    titles = ["case", *section.columns.values()]
    yield _row(titles)
    yield _row("---" for _ in titles)
    for case in results.cases():
        lines = [results.find(case, metric) for metric in section.columns]
        if any(lines):
            yield _row([case, *("" if line is None else _value(line) for line in lines)])


def _list(section: Section, lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield _row(("case", "metric", "figure"))
    yield _row(("---",) * 3)
    for line in lines:
        if re.search(section.pattern, line["metric"]):
            yield _row((line["case"], line["metric"], _value(line)))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _value(line: dict[str, Any]) -> str:
    unit = "" if line["unit"] in ("count", "ratio") else line["unit"]
    text = f"{number(line['value'])} {unit}".rstrip()
    if line["ratio"] is not None:
        text += f" ({line['ratio']:.2f}x {line['peer']})"
    return text


def number(value: float) -> str:
    """A figure of three to four digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 10 else f"{value:.4g}"


if __name__ == "__main__":
    main()
