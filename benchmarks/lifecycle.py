"""The life of a model over two days of real clicks: each command in a process of its own, scores compared on the way.

Day 1: prepare, init, train, evaluate. Day 2: prepare on the vocabulary of day 1, evaluate, predict, export, serve; then
go on training, evaluate again, export what changed as a delta, serve that. Days are the two halves of a sample in order
of time. Lines of unit "logit" are the greatest difference between scores that must be equal, by how they were made; a
difference above its bound ends the benchmark.

Examples:
  python -m benchmarks.lifecycle
  python -m benchmarks.lifecycle --case kaggle --out results.json
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import harness

DATA = harness.ROOT.parent / "shared" / "data"
SERVED = 3e-5
"""Serving sums in another program than the run's: float32's rounding, nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A sample.

    Attributes:
      file: Its name.
      format: The format of ``jrec prepare`` and its options.
      by_line: Whether a line is an example.
      columns: The columns of a line that are features.
      time: The column of times; None where lines are in order.
      delimiter: Between columns.
    """

    file: str
    format: tuple[str, ...]
    by_line: bool = True
    columns: tuple[str, ...] = ()
    time: int | None = None
    delimiter: str = ","


_CRITEO = ("label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27)))
CASES = {
    "kaggle": Case(file="criteo_kaggle_80k.tsv.gz", format=("criteo-kaggle",), columns=_CRITEO, delimiter="\t"),
    "taobao": Case(file="taobao_user_behavior_96k.csv.gz", format=("taobao", "--form", "intent"), time=4),
    "taobao sequences": Case(file="taobao_user_behavior_10k.csv.gz", format=("taobao",), by_line=False, time=4),
}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), help="default: all; with --quick the last one")
    arguments = parser.parse_args()
    names = arguments.case or (tuple(CASES)[-1:] if arguments.quick else tuple(CASES))
    with harness.Report(arguments, "lifecycle") as report:
        for name in names:
            if not (DATA / CASES[name].file).is_file():
                report.note(f"{name} skipped: {DATA / CASES[name].file} is not there")
                continue
            with tempfile.TemporaryDirectory() as folder:
                Life(report, name, pathlib.Path(folder)).live()


class Life:
    """One sample's two days."""

    def __init__(self, report: harness.Report, name: str, folder: pathlib.Path):
        self.report, self.name, self.case, self.folder = report, name, CASES[name], folder

    def live(self) -> None:
        """Goes through both days."""
        at = self.folder
        halves(DATA / self.case.file, self.case.time, at / "day1.csv", at / "day2.csv")
        self.prepare("day1", "day1")
        self.jrec("init", "init", at / "day1", "--out", at / "config.toml")
        self.jrec("train, day 1", "train", at / "config.toml", f"out={at / 'run1'}", "log.progress=off")
        metrics = json.loads((at / "run1" / "report" / "metrics.json").read_text(encoding="utf-8"))
        first = self.evaluated("day 1", "run1", "day1")
        self.equal("AUC of the report and of jrec eval", metrics["splits"]["test"]["auc"], first, unit="auc")

        on_first = ("--vocabulary-from", str(at / "day1"))
        self.prepare("day2", "day2", *on_first)
        self.prepare("day2", "day2_scored", *on_first, "--split", "0,0,1")
        self.new_values()
        self.evaluated("day 2, before it is trained on", "run1", "day2_scored")
        dataset = self.predicted("dataset of day 2", "run1", "day2_scored")
        self.jrec("export", "export", at / "run1", "--out", at / "export1", "--quiet")
        self.served("day 2", [at / "export1"], "day2_scored", dataset)
        if self.case.by_line:
            log = self.predicted("raw log", "run1", "day2.csv")
            self.equal("scores of the dataset and of the raw log", dataset, log)
        if self.case.columns:
            columns = self.raw_scores(at / "export1")
            self.equal("scores of the run and of its export from raw columns", dataset[: columns.size], columns, SERVED)

        going_on = (f"data.path={at / 'day2'}", f"out={at / 'run2'}", f"init_from={at / 'run1'}")
        self.jrec("train, day 2", "train", at / "config.toml", *going_on, "log.progress=off")
        self.evaluated("day 2, after it", "run2", "day2")
        self.evaluated("day 2's last tenth, before it is trained on", "run1", "day2")
        after = self.predicted("dataset of day 2", "run2", "day2_scored")
        self.jrec("delta", "export", at / "run2", "--since", at / "export1", "--out", at / "delta", "--quiet")
        self.jrec("export again", "export", at / "run2", "--out", at / "export2", "--quiet")
        with_delta = self.served("day 2, with the delta", [at / "export1", at / "delta"], "day2_scored", after)
        whole = self.served("day 2, the whole export", [at / "export2"], "day2_scored", after)
        self.equal("scores with the delta and of a whole export", whole, with_delta)
        for name in ("export1", "export2", "delta"):
            size = sum(path.stat().st_size for path in (at / name / "tables").iterdir())
            self.report.add(self.name, f"tables of {name}", size / 1e6, "MB")

    def prepare(self, log: str, out: str, *options: str) -> None:
        """Prepares a day."""
        name, *rest = self.case.format
        arguments = ["prepare", name, "--input", self.folder / f"{log}.csv", "--out", self.folder / out]
        self.jrec(f"prepare, {out}", *arguments, *rest, "--on-bad-line", "skip", *options, "--quiet")

    def jrec(self, what: str, *arguments: Any) -> str:
        """Runs a command; records its seconds and returns what it printed."""
        begin = time.perf_counter()
        command = [sys.executable, "-m", "jrec", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"`{' '.join(command[2:])}` ended with status {done.returncode}:\n{done.stderr}")
        self.report.add(self.name, what, time.perf_counter() - begin, "s")
        return done.stdout

    def evaluated(self, what: str, run: str, data: str) -> float:
        """The test AUC of ``jrec eval``."""
        printed = self.jrec(f"eval, {what}", "eval", self.folder / run, self.folder / data)
        auc = json.loads(printed)["auc"]
        self.report.add(self.name, f"test AUC, {what}", auc, "auc")
        return auc

    def predicted(self, what: str, run: str, source: str) -> np.ndarray:
        """The logits of ``jrec predict``."""
        import pyarrow.parquet as pq

        out = self.folder / "scores.parquet"
        arguments = ["predict", self.folder / run, self.folder / source, "--out", out, "--overwrite", "--quiet"]
        self.jrec(f"predict, {what}, {run}", *arguments)
        return pq.read_table(out)["logit"].to_numpy()

    def served(self, what: str, exports: Sequence[pathlib.Path], data: str, want: np.ndarray) -> np.ndarray:
        """The logits of exports on a dataset, compared with the run's."""
        from benchmarks.serving import test_inputs
        from jrec import serving

        model = serving.load(exports[0], exports[1:])
        dense, ids, _ = test_inputs(model, self.folder / data)
        logits = model.logits_of(dense, ids)
        self.equal(f"scores of the run and of its export, {what}", want, logits, SERVED)
        return logits

    def raw_scores(self, export: pathlib.Path) -> np.ndarray:
        """The logits of an export for the first raw lines of day 2."""
        from jrec import serving

        lines = (self.folder / "day2.csv").read_text(encoding="utf-8").splitlines()[:2000]
        fields = [line.split(self.case.delimiter) for line in lines]
        columns = {name: [field[k] for field in fields] for k, name in enumerate(self.case.columns)}
        return serving.load(export).logits(columns)

    def new_values(self) -> None:
        """Records which share of accesses of day 2 is of values that day 1 does not have."""
        schema = json.loads((self.folder / "day2" / "schema.json").read_text(encoding="utf-8"))
        found = schema["provenance"]["vocabulary"]["tables"]
        shares = {table: used["oov"] / used["accesses"] for table, used in found.items() if used.get("oov") is not None}
        for table, share in sorted(shares.items(), key=lambda item: -item[1])[:3]:
            self.report.add(self.name, f"accesses of values that day 1 lacks, table {table}", 100 * share, "%")

    def equal(self, what: str, one: Any, other: Any, bound: float = 0.0, *, unit: str = "logit") -> None:
        """Records the greatest difference; ends the benchmark where it is above the bound."""
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            raise SystemExit(f"{self.name}: {what}: {one.shape} against {other.shape}")
        off = float(np.abs(one - other).max(initial=0.0))
        self.report.add(self.name, f"difference of {what}", off, unit)
        if off > bound * max(1.0, float(np.abs(one).max(initial=0.0))):
            raise SystemExit(f"{self.name}: {what} differ by {off}, more than {bound}")


def halves(source: pathlib.Path, time_column: int | None, first: pathlib.Path, second: pathlib.Path) -> None:
    """Cuts a log into two, by time where its lines are in no order."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    if time_column is not None:
        lines.sort(key=lambda line: int(line.split(",")[time_column]))
    middle = len(lines) // 2
    first.write_text("\n".join(lines[:middle]) + "\n", encoding="utf-8")
    second.write_text("\n".join(lines[middle:]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
