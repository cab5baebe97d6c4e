"""How early the most frequent rows of a log are known (TT-Rec, Figure 9): counted on the Criteo Kaggle sample.

For each share of the log's lines, in their order: how many of its most frequent rows so far are among the most frequent
rows of the whole sample, as many of each.

Examples:
  python -m benchmarks.hot_rows
"""

from __future__ import annotations

import collections
import gzip
import pathlib

from benchmarks import harness
from benchmarks.accuracy import SAMPLE

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)
HOTTEST = (100, 300, 1_000, 10_000)
INTEGERS = 13  # columns between the label and the categories


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--input", type=pathlib.Path, default=SAMPLE, help="a log in Criteo Kaggle's format, .gz")
    arguments = parser.parse_args()
    if not arguments.input.is_file():
        raise SystemExit(f"hot_rows: {arguments.input} is no file; name a Criteo Kaggle log with --input")
    with harness.Report(arguments, "hot_rows") as report:
        with gzip.open(arguments.input, "rt", encoding="ascii") as file:
            lines = [line.rstrip("\n").split("\t")[1 + INTEGERS :] for line in file]
        lines = lines[:4_000] if arguments.quick else lines
        counts: collections.Counter[tuple[int, str]] = collections.Counter()
        found, begin = {}, 0
        for share in (*SHARES, 1.0):
            stop = int(share * len(lines))
            for values in lines[begin:stop]:
                counts.update((column, value) for column, value in enumerate(values) if value)
            found[share], begin = [row for row, _ in counts.most_common(max(HOTTEST))], stop
        report.add(arguments.input.name, "lines", len(lines), "")
        report.add(arguments.input.name, "rows that are read", len(counts), "")
        for hottest in HOTTEST:
            whole = set(found[1.0][:hottest])
            for share in SHARES:
                same = len(whole.intersection(found[share][:hottest])) / hottest
                report.add(f"{hottest:,} rows", f"hottest after {100 * share:g} % of the lines", 100 * same, "%")


if __name__ == "__main__":
    main()
