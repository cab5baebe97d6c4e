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
    "plain-jax": Section(
        title="A plain JAX user's choice",
        files=("plain_jax",),
        text="In brackets the step of `nnx.Embed`s trained by optax, by jrec's; on two cores of a CPU.",
        columns={"step, median": "jrec's step", "step, cast in loader, median": "with the cast in the loader"},
    ),
    "tt-steps": Section(
        title="Steps of compressed tables",
        files=("tt",),
        text="In brackets the uncompressed table's step, by the compressed one's.",
        columns={"compression": "compression", "step, median": "step"},
        cases=r"rank \d+, 32,768 lookups(, uniform ids)?$",
    ),
    "tt-floor": Section(
        title="Steps beside their floor",
        files=("tt_floor",),
        text="In brackets the floor by the time: at 1 nothing could be faster.",
        columns={
            "step": "step",
            "step, floor": "its floor",
            "step, cast ahead": "with the cast ahead",
            "step, cast ahead, floor": "its floor",
            "step, cores near": "cores near",
            "step, cores far": "cores far",
        },
        cases="lookups$",
    ),
    "tt-cache": Section(
        title="Steps with a cache",
        files=("tt",),
        text="",
        pattern=r"^step, hit rate [0-9.]+%, median$",
    ),
    "oper-rules": Section(
        title="The frequency rule",
        files=("oper",),
        text="DGX-A100: 8 A100; a100-4x4, h200x8, h200-2x8: nodes by GPUs.",
        columns={
            "rules: a step with no replicas": "no replicas",
            "rules: a step with the paper's rule": "paper's rule",
            "rules: a step with per-device rule": "per-device rule",
            "rules: costliest link by the cheapest": "inference: links",
        },
    ),
    "oper-table2": Section(
        title="Table 2",
        files=("oper",),
        text="Megabytes of the paper are MiB here.",
        columns={
            "table 2: mean a link": "mean a link",
            "table 2: mean a link, the paper's": "the paper's",
            "table 2: copies": "copies",
            "table 2: degree of balance, links": "balance of links",
        },
        cases="power law.*extra (0|1|5|20) %$",
    ),
    "oper-table3": Section(
        title="Table 3",
        files=("oper",),
        text="`greedy` is the paper's algorithm, `oper` exchanges pieces afterwards, as `jrec plan` does.",
        columns={
            "table 3: degree of balance, links": "balance of links",
            "table 3: degree of balance, links, the paper's": "the paper's",
            "table 3: time": "time",
            "table 3: time, the paper's": "the paper's",
        },
        cases="^kaggle, power law",
    ),
    "oper-strategies": Section(
        title="Strategies",
        files=("oper",),
        text="",
        columns={
            "figure 10: a step by OPER's": "step by OPER's",
            "figure 10: memory, max": "memory, max",
            "figure 10: lookup, max": "lookup, max",
            "figure 10: link, max": "link, max",
        },
        cases="power law",
    ),
    "oper-exact": Section(
        title="Distance to the optimum",
        files=("oper",),
        text="",
        columns={
            "milp: proved optimal": "optimum proved in",
            "milp: greedy above the solver's best": "greedy above it",
            "milp: greedy and exchanges above the solver's best": "with exchanges",
        },
        cases="no copies",
    ),
    "oper-planning": Section(
        title="Planning",
        files=("oper",),
        text="",
        columns={
            "plan from row counts: time": "plan",
            "plan from row counts: peak memory of the benchmark": "peak memory",
            "addresses of random rows, NumPy": "`locate`, random rows",
            "addresses of random rows, compiled": "`Locator`, random rows",
        },
    ),
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
