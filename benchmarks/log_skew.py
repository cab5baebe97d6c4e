"""How uneven the accesses of click logs are, on samples of real ones: EL-Rec's Figure 4, FAE's Figures 2 and 4.

A row is a value of one of the log's columns. Of each sample: which share of all accesses the most frequent rows get,
how many distinct rows a batch reads by its ids, which share the rows above a 100,000th of the accesses get, and what
those take at 16 float32 each. And how often a batch of the log's order has hot inputs alone, which read hot rows only.

That is measured on a synthetic log, too, whose tables are small enough for 99 % of its inputs to be hot: in samples as
short as these nearly every line has a value that is there once.

Examples:
  python -m benchmarks.log_skew
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import pathlib
import tempfile
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks import harness

DATA = harness.ROOT.parent / "shared" / "data"
BATCHES = (16, 256, 1_024, 4_096)
TOP = (1, 10)
"""Per cent of the rows, the most frequent first."""
HOT, ROW_BYTES = 1e-5, 64
LEAST_ACCESSES = 1_000_000
"""Of a log whose rows above ``HOT`` of the accesses are told: below, one access is nearly as many."""
SYNTHETIC = {"rows": 400_000, "scale": 6_400, "hot": 0.99}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=DATA, help=f"the samples' folder (default: {DATA})")
    arguments = parser.parse_args()
    with harness.Report(arguments, "log_skew") as report:
        for file, read in READERS.items():
            if not (arguments.data / file).is_file():
                report.note(f"{arguments.data / file} is no file: left out")
                continue
            measure(report, file.split(".")[0], Log.of(read(arguments.data / file)))
        log = synthetic(40_000 if arguments.quick else SYNTHETIC["rows"])
        least = np.sort(log.least)
        cutoff = least[int((1 - SYNTHETIC["hot"]) * log.lines)]
        measure_batches(report, f"Criteo Kaggle by {SYNTHETIC['scale']:,}, {log.lines:,} inputs", log, cutoff)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """A log's accesses.

    Attributes:
      rows: (columns, lines) int64, numbers of rows over all columns; -1 where a line has no value.
      counts: (rows,) int64, the accesses of each row.
    """

    rows: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray]) -> Log:
        """The rows of columns of texts or numbers, (lines,) each; an empty text is none."""
        numbered, first = [], 0
        for values in columns.values():
            distinct, rows = np.unique(values, return_inverse=True)
            absent = values == b"" if values.dtype.kind == "S" else np.zeros(len(values), bool)
            numbered.append(np.where(absent, -1, first + rows))
            first += len(distinct)
        rows = np.stack(numbered).astype(np.int64)
        return cls(rows=rows, counts=np.bincount(rows[rows >= 0], minlength=first))

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return self.rows.shape[1]

    @property
    def least(self) -> np.ndarray:
        """(lines,) int64: the accesses of each line's least frequent row."""
        return np.where(self.rows >= 0, self.counts[self.rows], np.iinfo(np.int64).max).min(axis=0)


def measure(report: harness.Report, case: str, log: Log) -> None:
    """A log's lines of figures."""
    accesses = int(log.counts.sum())
    report.add(case, "lines", log.lines, "")
    report.add(case, "rows that are read", int(np.count_nonzero(log.counts)), "")
    descending = np.sort(log.counts[log.counts > 0])[::-1]
    for top in TOP:
        share = descending[: max(1, len(descending) * top // 100)].sum() / accesses
        report.add(case, f"accesses of the {top} % most frequent rows", 100 * share, "%")
    for batch in (size for size in BATCHES if size >= 256 and size <= log.lines):
        report.add(f"{case}, batches of {batch:,}", "distinct rows by ids", 100 * distinct(log, batch), "%")
    if accesses >= LEAST_ACCESSES:
        hot = log.counts > HOT * accesses
        report.add(case, f"accesses of rows above {HOT:g} of them", 100 * log.counts[hot].sum() / accesses, "%")
        report.add(case, f"size of rows above {HOT:g}", int(hot.sum()) * ROW_BYTES / 1e6, "MB")
    measure_batches(report, case, log, 2)


def measure_batches(report: harness.Report, case: str, log: Log, cutoff: int) -> None:
    """How many batches have hot inputs alone, where a row of ``cutoff`` accesses and more is hot."""
    hot = log.least >= cutoff
    report.add(f"{case}, rows of {cutoff:,} accesses", "hot inputs", 100 * hot.mean(), "%")
    for batch in (size for size in BATCHES if size <= log.lines):
        whole = hot[: log.lines // batch * batch].reshape(-1, batch).all(axis=1)
        share = {"batches": len(whole), "by chance": 100 * hot.mean() ** batch}
        name = f"{case}, rows of {cutoff:,} accesses, batches of {batch:,}"
        report.add(name, "batches of hot inputs alone", 100 * whole.mean(), "%", details=share)


def distinct(log: Log, batch: int) -> float:
    """The distinct rows of a batch of the log's order by its ids, the mean over whole batches."""
    shares = []
    for begin in range(0, log.lines - batch + 1, batch):
        rows = log.rows[:, begin : begin + batch]
        rows = rows[rows >= 0]
        shares.append(len(np.unique(rows)) / len(rows))
    return float(np.mean(shares))


def synthetic(rows: int) -> Log:
    """A synthetic log like Criteo Kaggle, in its order."""
    from jrec.data.blocks import ShardReader
    from jrec.data.schema import Schema
    from jrec.prepare.synth import SynthOptions, shape_like, synthesize

    shape = shape_like("criteo-kaggle")
    tables = {name: max(2, count // SYNTHETIC["scale"]) for name, count in shape.rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "log"
        synthesize(dataclasses.replace(shape, rows=tables), data, SynthOptions(rows=rows))
        schema, names = Schema.load(data), list(tables)
        readers = [ShardReader(data, shard) for shard in schema.splits["train"].shards]
        blocks = [reader.read(block) for reader in readers for block in range(len(reader))]
        return Log.of({name: np.concatenate([np.asarray(block[name]) for block in blocks]) for name in names})


def read_kaggle(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The 26 categories of a log in Criteo Kaggle's format."""
    with gzip.open(path, "rb") as file:
        lines = [line.rstrip(b"\n").split(b"\t")[14:] for line in file]
    return {f"C{number}": np.array(values) for number, values in enumerate(zip(*lines, strict=True), 1)}


def read_avazu(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The 21 categories of a log in Avazu's format."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        head, *lines = csv.reader(file)
    columns = dict(zip(head, zip(*lines, strict=True), strict=True))
    return {name: np.array(values, "S") for name, values in columns.items() if name not in ("id", "click", "hour")}


def read_taobao(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Users, items and categories of Taobao's user behavior."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        user, item, category, _, _ = zip(*csv.reader(file), strict=True)
    return {name: np.array(values, "S") for name, values in (("user", user), ("item", item), ("category", category))}


READERS: Mapping[str, Callable[[pathlib.Path], dict[str, np.ndarray]]] = {
    "criteo_kaggle_80k.tsv.gz": read_kaggle,
    "avazu_9k.csv.gz": read_avazu,
    "taobao_user_behavior_96k.csv.gz": read_taobao,
}


if __name__ == "__main__":
    main()
