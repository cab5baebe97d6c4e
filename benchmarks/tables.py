"""Fills the tables of pages in docs/ from committed lines, so that no figure in them is typed by hand.

A table stands between ``<!-- lines: NAME -->`` and ``<!-- end -->``; tables.toml says what NAME shows. A paper's
claims, from claims.toml, stand between ``<!-- claims: PAPER -->`` and ``<!-- end -->``, and the count of every paper's
verdicts between ``<!-- claims -->`` and ``<!-- end -->``. Where lines of several GPUs are kept, each case has a row
for each.

Examples:
  python -m benchmarks.tables
  python -m benchmarks.tables --check
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import ages, claims
from benchmarks.harness import ROOT

FOLDER = ROOT / "benchmarks" / "results"  # with a folder for each kind of machine
SPECS = ROOT / "benchmarks" / "tables.toml"
_BLOCK = re.compile(r"(<!-- (lines|claims)(?:: ([^>]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)

Line = Mapping[str, Any]
Results = Mapping[str, list[Line]]
"""The lines of every benchmark, in their order, of all machines, by the file's name without ``.jsonl``."""


def main() -> None:
    """Fills all pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    arguments = parser.parse_args()
    results, specs = read(FOLDER), tomllib.loads(SPECS.read_text(encoding="utf-8"))
    texts = {path: (path.read_text(encoding="utf-8"), filled(path, specs, results)) for path in pages()}
    stale = {path: new for path, (old, new) in texts.items() if old != new}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'differs from the lines' if arguments.check else 'filled'}")
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    sys.exit(int(arguments.check and bool(stale)))


def read(folder: pathlib.Path) -> Results:
    """The lines of all machines' benchmarks."""
    found: dict[str, list[Line]] = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        found.setdefault(path.stem, []).extend(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    return found


def pages() -> list[pathlib.Path]:
    """The pages that may hold tables."""
    return sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def filled(path: pathlib.Path, specs: Mapping[str, Mapping[str, Any]], results: Results) -> str:
    """A page's text with its tables made from lines.

    Args:
      path: The page.
      specs: What each table shows, as tables.toml has it.
      results: The lines.

    Raises:
      SystemExit: There is no such table or paper, or a table's or a claim's lines are absent.
    """

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        try:
            rows = claims.table(name, results) if kind == "claims" else table(specs, name, results)
            return begin + "\n".join(rows) + f"\n{end}"
        except LookupError as error:
            raise SystemExit(f"{path}: {error.args[0]}") from error

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


def table(specs: Mapping[str, Mapping[str, Any]], name: str, results: Results) -> Iterator[str]:
    """The lines of Markdown of a table: rows, a note, and the commits of the lines.

    Raises:
      LookupError: There is no such table, or it has no lines.
    """
    if name not in specs:
        raise LookupError(f"no table is called {name!r}; add it to {SPECS.name}")
    spec = specs[name]
    every = [line for file in spec["files"] for line in results.get(file, [])]
    lines = [line for line in every if re.search(spec.get("cases", ""), line["case"])]
    rows = list(_columns(spec["columns"], lines) if "columns" in spec else _list(spec.get("pattern", ""), lines))
    if len(rows) <= 2:  # a title and a ruler
        if spec.get("optional"):
            yield "Not measured yet."
            return
        raise LookupError(f"table {name!r} finds no line of {', '.join(spec['files'])}.jsonl")
    yield from rows
    note = spec.get("note", "").replace("{devices}", " and one ".join(dict.fromkeys(map(_device, lines))))
    note = f"{note} Measured at commit {commits(lines)}.{ages.note(spec['files'])}"
    yield f"\n{note.lstrip()}"


def commits(lines: Iterable[Line]) -> str:
    """The commits of lines."""
    return ", ".join(dict.fromkeys(line["commit"] for line in lines))


def _columns(columns: Mapping[str, str], lines: list[Line]) -> Iterator[str]:
    """A row a case, a column a metric: the first line of each."""
    yield claims.row(["case", *columns.values()])
    yield claims.row(["---"] * (1 + len(columns)))
    said = _cases(lines)
    for case in dict.fromkeys(said):
        of_case = [line for line, named in zip(lines, said, strict=True) if named == case]
        found = [next((line for line in of_case if line["metric"] == metric), None) for metric in columns]
        if any(found):
            yield claims.row([case, *("" if line is None else _value(line) for line in found)])


def _list(pattern: str, lines: list[Line]) -> Iterator[str]:
    yield claims.row(["case", "metric", "figure"])
    yield claims.row(["---"] * 3)
    for line, case in zip(lines, _cases(lines), strict=True):
        if re.search(pattern, line["metric"]):
            yield claims.row([case, line["metric"], _value(line)])


def _cases(lines: Iterable[Line]) -> list[str]:
    """The lines' cases, each with its GPU where there are several."""
    several = len({_device(line) for line in lines}) > 1
    return [f"{line['case']}, {_device(line)}" if several else line["case"] for line in lines]


def _device(line: Line) -> str:
    """The GPU of a line; of one without a GPU no name, since all of these are compared on one machine."""
    gpu, _, _ = line.get("device", "").partition(";")
    return gpu.removeprefix("NVIDIA ") if gpu.startswith("NVIDIA ") else ""


def _value(line: Line) -> str:
    """A figure; one with a peer has its ratio beside it."""
    unit = "" if line["unit"] in ("count", "ratio") else line["unit"]
    ratio = "" if line["ratio"] is None else f" ({line['ratio']:.2f}x {line['peer']})"
    return f"{claims.number(line['value'])} {unit}".rstrip() + ratio


if __name__ == "__main__":
    main()
