"""What bfloat16 in the dense layers costs in quality: DLRM-DCNv2's dense part in float32 and bfloat16, paired by seed.

Both trainings of a seed start from the same weights and see the same batches, so their difference is the dtype's, not
the seed's, which is larger. The configuration is the shipped one, with tables of the log's own rows:

    kaggle    the Criteo Kaggle sample, 79,067 real clicks
    twin      `jrec synth --like mlperf-dlrm-dcnv2`, whose 214 ids an example and dims are the benchmark's

Examples:
  python -m benchmarks.dense_dtype
  python -m benchmarks.dense_dtype --log kaggle --seeds 0 1 2
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import tempfile
import time

from benchmarks import harness
from benchmarks.accuracy import SAMPLE, run_jrec

CONFIG = harness.ROOT / "configs" / "mlperf_dlrm_dcnv2.toml"
DTYPES = ("float32", "bfloat16")
METRICS = ("auc", "log_loss")
LOGS = {
    "kaggle": ("prepare", "criteo-kaggle", "--input", str(SAMPLE)),
    "twin": ("synth", "--like", "mlperf-dlrm-dcnv2", "--scale", "1/2048", "--seed", "0"),
}
# The benchmark's batch of 55,296 would make two steps of a sample; its learning rate belongs to that batch.
SMALL = ("data.batch_size=256", "data.eval_batch_size=2048", "evaluate.every_steps=100000", "checkpoint.every_steps=0")
RATES = {"kaggle": ("optimizer.learning_rate=0.01", "optimizer.embedding.learning_rate=0.02"), "twin": ()}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", nargs="+", choices=tuple(LOGS), default=list(LOGS), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="two trainings a seed")
    parser.add_argument("--rows", type=int, default=200_000, help="examples of the twin (default: 200,000)")
    arguments = parser.parse_args()
    if "kaggle" in arguments.log and not SAMPLE.is_file():
        raise SystemExit(f"dense_dtype: {SAMPLE}, the Criteo Kaggle sample, does not exist; use --log twin")
    seeds = arguments.seeds[:2] if arguments.quick else arguments.seeds
    with harness.Report(arguments, "dense_dtype") as report:
        for log in arguments.log:
            with tempfile.TemporaryDirectory() as folder:
                rows = 4_000 if arguments.quick else arguments.rows
                compare(report, log, pathlib.Path(folder), seeds, rows)


def compare(report: harness.Report, log: str, folder: pathlib.Path, seeds: list[int], rows: int) -> None:
    """Trains twice a seed and reports test metrics and their paired differences."""
    data, case = folder / "data", f"{log}, {len(seeds)} seeds"
    run_jrec(*LOGS[log], *(("--rows", str(rows)) if log == "twin" else ()), "--out", str(data), "--quiet")
    found: dict[str, dict[str, list[float]]] = {dtype: {metric: [] for metric in METRICS} for dtype in DTYPES}
    for seed in seeds:
        for dtype in DTYPES:
            test = _train(data, folder / f"{seed}-{dtype}", seed, dtype, RATES[log], report)
            for metric in METRICS:
                found[dtype][metric].append(test[metric])
    for metric in METRICS:
        for dtype in DTYPES:
            report.add(case, f"test {metric}, {dtype}, mean", statistics.mean(found[dtype][metric]), metric)
        spread = statistics.stdev(found["float32"][metric])
        report.add(case, f"test {metric}, float32, standard deviation over seeds", spread, metric)
        differences = [b - a for a, b in zip(*(found[dtype][metric] for dtype in DTYPES), strict=True)]
        report.add(case, f"test {metric}, bfloat16 less float32, mean", statistics.mean(differences), metric)
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        report.add(case, f"test {metric}, bfloat16 less float32, standard error", error, metric)
        worst = min(differences) if metric == "auc" else max(differences)
        report.add(case, f"test {metric}, bfloat16 less float32, worst seed", worst, metric)


def _train(
    data: pathlib.Path, out: pathlib.Path, seed: int, dtype: str, rates: tuple[str, ...], report: harness.Report
) -> dict[str, float]:
    start = time.perf_counter()
    options = (f"data.path={data}", f"out={out}", f"seed={seed}", f"model.compute_dtype={dtype}", *SMALL, *rates)
    run_jrec("train", str(CONFIG), *options, "log.progress=off", "log.tensorboard=false")
    test = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))["splits"]["test"]
    report.note(
        f"seed {seed}, {dtype}: AUC {test['auc']:.4f}, log loss {test['log_loss']:.4f} in"
        f" {time.perf_counter() - start:.0f} s"
    )
    return test


if __name__ == "__main__":
    main()
