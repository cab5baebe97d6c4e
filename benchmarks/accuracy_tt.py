"""What compression costs in AUC: tensor-train tables against whole ones, their initializations, and loss on the way.

Criteo Kaggle's sample and MovieLens-1M go through `jrec prepare`, and a synthetic twin of Kaggle is made, with a 64th
of its rows; then every variant is trained once a seed, as `jrec train` does it: whole tables, and the largest ones as
tensor trains that start from sampled Gaussian, Gaussian and uniform cores (TT-Rec, Figure 6c). Learning rate and decay
of the cores were chosen by AUC on the split valid of the samples; scores are of the split test, and the loss on the way
(EL-Rec, Figure 15) is that of the split valid, by the whole tables' at the same step.

Examples:
  python -m benchmarks.accuracy_tt
  python -m benchmarks.accuracy_tt --dataset movielens_1m --seeds 0 1 2 --set tables.tt.rank=8
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping

from benchmarks import harness, trainings
from benchmarks.accuracy import run_jrec
from benchmarks.trainings import CURVE, Trained
from jrec.app.tables import describe_tables, tables_total

SHARED = harness.ROOT.parent / "shared" / "data"
WHOLE = "whole"
INITIALIZERS = ("sampled_gaussian", "gaussian", "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A dataset, its configuration, and which tables are compressed how.

    Attributes:
      prepare: The command that makes the dataset, files by their name in ``shared/data``.
      config: A shipped configuration.
      common: Overrides of every variant.
      shape: What ``compressed`` compresses, for readers.
      compressed: Overrides of the compressed ones.
      variants: Further overrides of more compressed variants, by name: how AUC is bought with memory.
    """

    prepare: tuple[str, ...]
    config: str
    common: tuple[str, ...]
    shape: str
    compressed: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


SETTINGS = {
    "criteo_kaggle_80k": Setting(
        prepare=("prepare", "criteo-kaggle", "--input", "criteo_kaggle_80k.tsv.gz"),
        config="criteo_kaggle.toml",
        common=(),
        shape="7 tables, 2 cores, rank 16",
        compressed=(
            "tables.tt.largest=7",
            "tables.tt.cores=2",
            "tables.tt.rank=16",
            "tables.tt.learning_rate=0.04",
            "tables.tt.weight_decay=0",
        ),
        # TT-Rec's three cores, at the ranks of its Figure 6 (a); shapes of these small tables are searched.
        variants={
            "7 tables, 2 cores, rank 16, the first 1,000 rows of each whole": ("tables.tt.whole_rows=1000",),
            **{
                f"{tables} tables, 3 cores, rank {rank}": (
                    f"tables.tt.largest={tables}",
                    "tables.tt.cores=3",
                    f"tables.tt.rank={rank}",
                )
                for tables, rank in ((3, 8), (5, 32), (7, 64))
            },
        },
    ),
    # Tables of a 64th of Kaggle's rows, more of them than examples read often: what the sample is too short for.
    "criteo_kaggle_twin": Setting(
        prepare=("synth", "--like", "criteo-kaggle", "--scale", "1/64", "--rows", "400000"),
        config="criteo_kaggle.toml",
        common=("data.batch_size=1024", "optimizer.embedding.weight_decay=0"),
        shape="5 tables, 3 cores, rank 32",
        compressed=(
            "tables.tt.largest=5",
            "tables.tt.cores=3",
            "tables.tt.rank=32",
            "tables.tt.learning_rate=0.04",
            "tables.tt.weight_decay=0",
        ),
        variants={
            f"{tables} tables, 3 cores, rank {rank}": (f"tables.tt.largest={tables}", f"tables.tt.rank={rank}")
            for tables, rank in ((3, 8), (7, 64))
        },
    ),
    "movielens_1m": Setting(
        prepare=(
            *("prepare", "movielens", "--input", "ml1m_user_item.csv.gz"),
            *("--users", "ml1m_users.dat.gz", "--movies", "ml1m_movies.dat.gz"),
        ),
        config="movielens.toml",
        common=(
            "data.batch_size=4096",
            "optimizer.learning_rate=0.02",
            "optimizer.embedding.name=adam",
            "optimizer.embedding.learning_rate=0.005",
        ),
        shape="2 tables, 2 cores, rank 32",
        compressed=("tables.tt.largest=2", "tables.tt.cores=2", "tables.tt.rank=32"),
        variants={
            f"1 table, 2 cores, rank {rank}": ("tables.tt.largest=1", f"tables.tt.rank={rank}")
            for rank in (32, 64, 128)
        }
        | {
            f"2 tables, 2 cores, rank 8, {says}": ("tables.tt.rank=8", f"tables.tt.whole_rows={rows}")
            for rows, says in ((0, "no row whole"), (1000, "the first 1,000 rows of each whole"))
        },
    ),
}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--dataset", choices=tuple(SETTINGS), nargs="+", default=list(SETTINGS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of compressed variants")
    arguments = parser.parse_args()
    with harness.Report(arguments, "accuracy_tt") as report, tempfile.TemporaryDirectory() as folder:
        trainings.compile_once(pathlib.Path(folder) / "compiled")
        for name in arguments.dataset:
            _compare(report, name, pathlib.Path(folder), arguments)


def _compare(report: harness.Report, name: str, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
    setting, data = SETTINGS[name], folder / name
    if missing := [f for f in setting.prepare if f.endswith(".gz") and not (SHARED / f).is_file()]:
        report.note(f"{name} is left out: {', '.join(missing)} not found in {SHARED}")
        return
    files = [str(SHARED / a) if a.endswith(".gz") else a for a in setting.prepare]
    run_jrec(*files, "--out", str(data), "--quiet")
    seeds = arguments.seeds[:1] if report.quick else arguments.seeds
    compressed = (*setting.compressed, *arguments.set)
    variants: dict[str, tuple[str, ...]] = {WHOLE: ()}
    for initializer in INITIALIZERS[:1] if report.quick else INITIALIZERS:
        variants[f"{setting.shape}, {initializer}"] = (*compressed, f"tables.tt.initializer={initializer}")
    if not report.quick:
        variants |= {name: (*compressed, *more) for name, more in setting.variants.items()}
    report.note(f"{name}, every variant: {' '.join(setting.common) or 'no overrides'}")
    report.note(f"{name}, compressed ones: {' '.join(compressed)}")
    runs = {
        variant: [_train(report, setting, data, seed, variant, overrides) for seed in seeds]
        for variant, overrides in variants.items()
    }
    for variant, own in runs.items():
        _report(report, f"{name}, {len(seeds)} seed(s), {variant}", own, runs[WHOLE])
    starts = {start: runs[of] for start in INITIALIZERS if (of := f"{setting.shape}, {start}") in runs}
    for start in INITIALIZERS[1:]:
        if start in starts:
            ratio = _mean(starts[INITIALIZERS[0]], "auc") / _mean(starts[start], "auc")
            case = f"{name}, {len(seeds)} seed(s), {setting.shape}, {INITIALIZERS[0]}"
            report.add(case, f"test auc by the {start} start's", ratio, "ratio")


def _report(report: harness.Report, case: str, runs: list[Trained], whole: list[Trained]) -> None:
    """A variant's scores, and what it loses against the whole tables' trainings of the same seeds."""
    for metric in ("auc", "accuracy", "log_loss"):
        report.add(case, f"test {metric}, mean", _mean(runs, metric), metric)
    if runs is whole:
        return
    for metric in ("auc", "accuracy"):
        pairs = zip(whole, runs, strict=True)
        lost = [100 * (plain.score(metric) - run.score(metric)) for plain, run in pairs]
        report.add(case, f"{metric} points lost, mean", statistics.mean(lost), "points")
        report.add(case, f"{metric} points lost, greatest", max(lost), "points")
    losses = [
        own["log_loss"] / other["log_loss"]
        for run, plain in zip(runs, whole, strict=True)
        for own, other in zip(run.curve, plain.curve, strict=True)
    ]
    report.add(case, f"valid log loss by the whole tables', greatest of {CURVE} on the way", max(losses), "ratio")
    described = describe_tables(runs[0].config, runs[0].outcome.schema)
    trains = {name: table for name, table in described.items() if table["tier"] == "tt"}
    for tables, chosen in (("all tables", described), (f"{len(trains)} compressed tables", trains)):
        report.add(case, f"compression of {tables}", tables_total(chosen)["compression"], "times smaller")


def _mean(runs: list[Trained], metric: str) -> float:
    return statistics.mean(run.score(metric) for run in runs)


def _train(
    report: harness.Report, setting: Setting, data: pathlib.Path, seed: int, variant: str, overrides: tuple[str, ...]
) -> Trained:
    start = time.perf_counter()
    config = harness.ROOT / "configs" / setting.config
    run = trainings.train(config, data, seed, (*setting.common, *overrides), curve_of=data)
    report.note(
        f"{variant}, seed {seed}: AUC {run.score('auc'):.4f} on test, {run.curve[-1]['auc']:.4f} on valid,"
        f" in {time.perf_counter() - start:.0f} s"
    )
    return run


if __name__ == "__main__":
    main()
