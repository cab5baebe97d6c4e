"""Tables that grow, against fixed vocabularies: seconds of a step, and AUC on clicks in order of time.

Steps: the Kaggle model on the sample, with keys that get rows as they come, against the same model on a dataset whose
values have their rows already; both take turns in one process. "growing" is the first pass, in which most values are
new; "grown" are later ones, without new values; "evicting" has room for a tenth of the values in every table, so that
every step takes rows from some. A ratio above 0.87 is a step within 1.15 times the fixed one's.

AUC: one pass over the training part in order of time, and the AUC of the last tenth, mean of the seeds: all tables of
about as many rows by hashing, by leaving rare values out, and by growth; and without a limit. Rows are those of all
tables together.

Examples:
  python -m benchmarks.growing
  python -m benchmarks.growing --part auc --seeds 0
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import jax

from benchmarks import harness
from benchmarks.accuracy import run_jrec
from jrec.data.schema import Schema

LOG = harness.ROOT.parent / "shared" / "data" / "criteo_kaggle_80k.tsv.gz"
BATCH_SIZES = (512, 2048)
CAPACITIES = (300, 1000, 3000)
"""Rows of every table, at the most."""
_STEPS = 8  # of one side before it is the other's turn


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--part", choices=("steps", "auc"), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    arguments = parser.parse_args()
    if not LOG.is_file():
        raise SystemExit(f"growing: the sample {LOG} does not exist")
    with harness.Report(arguments, "growing") as report, tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        if arguments.part != "auc":
            _steps(report, folder, BATCH_SIZES[-1:] if arguments.quick else BATCH_SIZES)
        if arguments.part != "steps":
            seeds, capacities = (
                (arguments.seeds[:1], CAPACITIES[1:2]) if arguments.quick else (arguments.seeds, CAPACITIES)
            )
            _aucs(report, folder, seeds, capacities)


def _prepare(folder: pathlib.Path, name: str, *options: str) -> pathlib.Path:
    data = folder / name
    if not data.exists():
        run_jrec("prepare", "criteo-kaggle", "--input", str(LOG), "--out", str(data), "--quiet", *options)
    return data


def _steps(report: harness.Report, folder: pathlib.Path, batch_sizes: tuple[int, ...]) -> None:
    fixed = _prepare(folder, "fixed", "--min-count", "1")
    growing = _prepare(folder, "growing", "--growing", "all")
    few = [f"tables.overrides.{t.name}.capacity={max(2, t.rows // 10)}" for t in Schema.load(growing).tables]
    few.append("tables.growth.evict=lru")
    for size in batch_sizes:
        for state, overrides in (("growing", []), ("evicting", few)):
            with _trainer(fixed, size) as theirs, _trainer(growing, size, *overrides) as ours:
                passes = 54_000 // size // _STEPS  # the training part has some 63,000 examples
                for name in (state, "grown") if state == "growing" else (state,):
                    pairs = [(theirs(_STEPS), ours(_STEPS)) for _ in range(passes)][1:]
                    ratio = statistics.median(fixed_time / time for fixed_time, time in pairs)
                    case = f"kaggle, batch {size:,}, {name}"
                    report.add(case, "step, fixed vocabulary", statistics.median(p[0] for p in pairs) / _STEPS, "s")
                    report.add(case, "step", statistics.median(p[1] for p in pairs) / _STEPS, "s")
                    report.add(case, "step of a fixed vocabulary by ours", ratio, "ratio")


@contextlib.contextmanager
def _trainer(data: pathlib.Path, size: int, *overrides: str) -> Iterator[Callable[[int], float]]:
    """Takes that many steps and returns the seconds."""
    from jrec.app.build import build_layout
    from jrec.app.config import load_config
    from jrec.app.dataset import open_data
    from jrec.app.loaders import train_loader
    from jrec.app.make_run import make_run

    keys = [f"data.path={str(data)!r}", f"data.batch_size={size}", "epochs=1000", "data.window_blocks=0"]
    keys += ["data.workers=1", "data.prefetch=1"]  # what is made ahead in the other side's turn is not counted
    read = open_data(load_config("criteo-kaggle", [*keys, *overrides]))
    layout = build_layout(read.config, read.schema)
    run = make_run(read.config, read.schema, layout, total_steps=1_000_000)  # of a schedule that goes on
    step = run.compile()
    feed = run.feed(train_loader(read.config, read.schema, layout), workers=1, prefetch=1)

    def take(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            loss, _ = step(next(feed))
        jax.block_until_ready(loss)
        return time.perf_counter() - begin

    with run:
        yield take


def _aucs(report: harness.Report, folder: pathlib.Path, seeds: list[int], capacities: tuple[int, ...]) -> None:
    grown = _prepare(folder, "growing", "--growing", "all")
    values = {table.name: table.rows for table in Schema.load(grown).tables}

    def judge(case: str, data: pathlib.Path, rows: int, *overrides: str) -> None:
        aucs = []
        for seed in seeds:
            out = folder / "run"
            keys = [f"data.path={data}", "data.window_blocks=0", f"out={out}", f"seed={seed}", "evaluate.baselines=off"]
            run_jrec(
                "train", "criteo-kaggle", *keys, *overrides, "log.progress=off", "log.tensorboard=false", "--overwrite"
            )
            content = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))
            aucs.append(content["splits"]["test"]["auc"])
        report.add(case, "rows", rows, "rows")
        report.add(case, "test auc, mean", statistics.mean(aucs), "auc")
        report.add(case, "test auc, greatest less least of the seeds", max(aucs) - min(aucs), "auc")

    def rows_of(data: pathlib.Path) -> int:
        return sum(table.rows for table in Schema.load(data).tables)

    for least in (1, 2):
        data = _prepare(folder, f"least-{least}", "--min-count", str(least))
        judge(f"all values, min-count {least}", data, rows_of(data))
    judge("all values, growing", grown, sum(rows + 1 for rows in values.values()))
    for capacity in capacities:
        limit = f"at most {capacity:,} rows a table"
        data = _prepare(folder, f"hashed-{capacity}", "--max-rows", str(capacity), "--min-count", "1")
        judge(f"{limit}, hashed (--max-rows)", data, rows_of(data))
        least = next(
            n for n in itertools.count(2) if _fits(_prepare(folder, f"least-{n}", "--min-count", str(n)), capacity)
        )
        data = folder / f"least-{least}"
        judge(f"{limit}, rare values left out (--min-count {least})", data, rows_of(data))
        rows = sum(min(capacity, rows + 1) for rows in values.values())
        sizes = [f"tables.overrides.{name}.capacity={max(2, min(capacity, rows + 1))}" for name, rows in values.items()]
        for evict, admit_after in (("lru", 1), ("lru", 2), ("lfu", 1), ("lfu", 2)):
            policy = (f"tables.growth.evict={evict}", f"tables.growth.admit_after={admit_after}")
            judge(f"{limit}, growing, {evict}, admitted after {admit_after}", grown, rows, *sizes, *policy)


def _fits(data: pathlib.Path, capacity: int) -> bool:
    return max(table.rows for table in Schema.load(data).tables) <= capacity


if __name__ == "__main__":
    main()
