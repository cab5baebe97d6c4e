"""What compression costs in AUC on real data: tensor-train tables against whole ones, and their initializations.

Criteo Kaggle's sample and MovieLens-1M go through `jrec prepare`; then every variant is trained once a seed, as
`jrec train` does it: whole tables, and the largest ones as tensor trains that start from sampled Gaussian, Gaussian and
uniform cores (TT-Rec, Figure 6c). Learning rate and decay of the cores were chosen by AUC on the split valid; the
figures are of the split test.

Examples:
  python -m benchmarks.accuracy_tt
  python -m benchmarks.accuracy_tt --dataset movielens --seeds 0 1 2 --set tables.tt.rank=8
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import harness
from benchmarks.accuracy import run_jrec

SHARED = harness.ROOT.parent / "shared" / "data"
INITIALIZERS = ("sampled_gaussian", "gaussian", "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A dataset, its configuration, and which tables are compressed how.

    Attributes:
      prepare: The arguments of `jrec prepare`, files by their name in ``shared/data``.
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
        prepare=("criteo-kaggle", "--input", "criteo_kaggle_80k.tsv.gz"),
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
    "movielens_1m": Setting(
        prepare=(
            *("movielens", "--input", "ml1m_user_item.csv.gz"),
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
    parser.add_argument("--dataset", choices=tuple(SETTINGS), nargs="+", default=list(SETTINGS), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of compressed variants")
    arguments = parser.parse_args()
    with harness.Report(arguments, "accuracy_tt") as report, tempfile.TemporaryDirectory() as folder:
        _compile_once(pathlib.Path(folder) / "compiled")
        for name in arguments.dataset:
            _compare(report, name, pathlib.Path(folder), arguments)


def _compile_once(folder: pathlib.Path) -> None:
    """Runs of other seeds are the same programs."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _compare(report: harness.Report, name: str, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
    setting, data = SETTINGS[name], folder / name
    if missing := [f for f in setting.prepare if f.endswith(".gz") and not (SHARED / f).is_file()]:
        report.note(f"{name} is left out: {', '.join(missing)} not found in {SHARED}")
        return
    files = [str(SHARED / a) if a.endswith(".gz") else a for a in setting.prepare]
    run_jrec("prepare", *files, "--out", str(data), "--quiet")
    seeds = arguments.seeds[:1] if report.quick else arguments.seeds
    compressed = (*setting.compressed, *arguments.set)
    variants: dict[str, tuple[str, ...]] = {"whole": ()}
    for initializer in INITIALIZERS[:1] if report.quick else INITIALIZERS:
        variants[f"{setting.shape}, {initializer}"] = (*compressed, f"tables.tt.initializer={initializer}")
    if not report.quick:
        variants |= {name: (*compressed, *more) for name, more in setting.variants.items()}
    aucs: dict[str, list[float]] = {}
    case = f"{name}, {len(seeds)} seed(s)"
    report.note(f"{name}, every variant: {' '.join(setting.common) or 'no overrides'}")
    report.note(f"{name}, compressed ones: {' '.join(compressed)}")
    for variant, overrides in variants.items():
        runs = [_train(report, setting, data, seed, variant, overrides) for seed in seeds]
        aucs[variant] = [run["auc"] for run in runs]
        for metric in ("auc", "log_loss"):
            report.add(case, f"test {metric}, {variant}, mean", statistics.mean(run[metric] for run in runs), metric)
        if variant != "whole":
            losses = [100 * (whole - auc) / whole for whole, auc in zip(aucs["whole"], aucs[variant], strict=True)]
            report.add(case, f"AUC lost, {variant}, mean", statistics.mean(losses), "%")
            report.add(case, f"AUC lost, {variant}, greatest", max(losses), "%")
            for metric, value in runs[0]["compression"].items():
                report.add(case, f"compression of {metric}, {variant}", value, "times smaller")


def _train(
    report: harness.Report, setting: Setting, data: pathlib.Path, seed: int, variant: str, overrides: tuple[str, ...]
) -> dict[str, Any]:
    from jrec.train.config import load_config
    from jrec.train.loop import train
    from jrec.train.report.metrics import evaluate
    from jrec.train.tables import describe_tables, tables_total

    start = time.perf_counter()
    watch = ("log.progress=off", "log.tensorboard=false", "evaluate.every_steps=0", "checkpoint.every_steps=0")
    places = (f"data.path={str(data)!r}", f"out={str(data.with_name('run'))!r}", f"seed={seed}")
    config = load_config(harness.ROOT / "configs" / setting.config, [*places, *watch, *setting.common, *overrides])
    outcome = train(config, overwrite=True)
    if not outcome.finished:
        raise SystemExit("accuracy_tt: stopped by a signal")
    valid, test = (evaluate(outcome.scores[split]) for split in ("valid", "test"))
    report.note(
        f"{variant}, seed {seed}: AUC {test.auc:.4f} on test, {valid.auc:.4f} on valid,"
        f" in {time.perf_counter() - start:.0f} s"
    )
    described = describe_tables(config, outcome.schema)
    trains = {name: table for name, table in described.items() if table["tier"] == "tt"}
    compression = {"all tables": tables_total(described)["compression"]}
    if trains:
        compression[f"{len(trains)} compressed tables"] = tables_total(trains)["compression"]
    return {"auc": test.auc, "log_loss": test.log_loss, "compression": compression}


if __name__ == "__main__":
    main()
