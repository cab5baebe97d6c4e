"""Fills tables of pages in docs/ from committed lines, so that no figure in them is typed by hand.

A table stands between ``<!-- lines: NAME -->`` and ``<!-- end -->``; NAME is a key of ``TABLES``.

Examples:
  python -m benchmarks.doc_tables
  python -m benchmarks.doc_tables --check
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Mapping

from benchmarks import page
from benchmarks.harness import ROOT
from benchmarks.page_sections import PREFIXES, Section

FOLDER = ROOT / "benchmarks" / "results" / "cpu-2-cores"
_BLOCK = re.compile(r"(<!-- lines: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: Mapping[str, Section] = {
    "fae-calibration": Section(
        title="Exact counts and samples",
        files=("fae_calibration",),
        text="At equal budgets; in brackets against a 5 % sample or a full scan.",
        pattern=r"^(Jaccard|hot inputs, |calibration by the dataset's counts, median|calibration at 5 %, median)",
    ),
    "reorder-prefixes": Section(
        title="What reordering saves",
        files=("reorder",),
        text="Mean unique prefixes of a batch; in brackets how many times as many the order of frequency needs.",
        columns=PREFIXES,
        cases=r"degree 16, .*batch 1,024$",
    ),
    "reorder-steps": Section(
        title="What a step gains",
        files=("reorder",),
        text="Forward, backward and Adagrad of the cores, dim 16, rank 16; in brackets by frequency / reordered.",
        columns={"step, fastest": "step"},
    ),
    "reorder-cost": Section(
        title="What reordering costs",
        files=("reorder",),
        text="Memory while a dataset's tables are reordered; passes over its training split, in brackets against stored"
        " rows.",
        columns={"memory": "memory", "loader, fastest": "loader"},
        cases=r"^\w+, degree 16$",
    ),
    "reorder-sampling": Section(
        title="Sampled edges against all pairs",
        files=("reorder",),
        text="Hot ratio 0.1.",
        columns={
            "edges": "edges",
            "graph": "graph",
            "communities": "communities",
            "modularity of all pairs": "modularity on all pairs",
        },
        cases=r"^(taobao, degree \w+, user_id|criteo, degree \w+, C16)$",
    ),
}
"""The tables by name. ``text`` becomes a line below the table; ``title`` says what it is for readers of this file."""


def main() -> None:
    """Fills all pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    arguments = parser.parse_args()
    stale = [path for path in pages() if path.read_text(encoding="utf-8") != filled(path)]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from the lines' if arguments.check else 'filled'}")
        if not arguments.check:
            path.write_text(filled(path), encoding="utf-8")
    sys.exit(int(arguments.check and bool(stale)))


def pages() -> list[pathlib.Path]:
    """The pages that may hold tables."""
    return sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def filled(path: pathlib.Path, tables: Mapping[str, Section] = TABLES, folder: pathlib.Path = FOLDER) -> str:
    """A page's text with its tables made from lines.

    Args:
      path: The page.
      tables: The tables by name.
      folder: The folder of JSON lines.

    Raises:
      SystemExit: A name is not in ``tables``, or its lines are absent.
    """
    results = page.read_folder(folder)

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in tables:
            raise SystemExit(f"{path}: no table is called {name!r}; add it to TABLES in benchmarks/doc_tables.py")
        found = page.section_results(tables[name], results)
        rows = list(page.table(tables[name], found))
        if len(rows) <= 2:  # a title and a ruler
            files = ", ".join(f"{file}.jsonl" for file in tables[name].files)
            raise SystemExit(f"{path}: table {name!r} finds no line of {files} in {folder}")
        commits = ", ".join(dict.fromkeys(line["commit"] for line in found.lines))
        note = f"{tables[name].text} Measured at commit {commits}.".strip()
        return match[1] + "\n".join([*rows, "", note]) + f"\n{match[3]}"

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
