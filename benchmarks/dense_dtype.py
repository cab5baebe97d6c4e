"""What bfloat16 costs in quality, paired by seed: in the dense layers, or on the links between devices.

Both trainings of a seed start from the same weights and see the same batches, so their difference is the dtype's, not
the seed's, which is larger. ``--of dense`` trains DLRM-DCNv2 with ``model.compute_dtype`` in both. ``--of links``
trains DLRM on four devices, over which rows are sharded: three of four rows travel, and their gradients back, as
``mesh.exchange_rows`` and ``mesh.exchange_gradients`` say. The configurations are the shipped ones, with tables of the
log's own rows:

    kaggle    the Criteo Kaggle sample, 79,067 real clicks
    twin      `jrec synth --like mlperf-dlrm-dcnv2`, whose 214 ids an example and dims are the benchmark's; of links
              `--like criteo-kaggle`

Examples:
  python -m benchmarks.dense_dtype
  python -m benchmarks.dense_dtype --log kaggle --seeds 0 1 2
  python -m benchmarks.dense_dtype --of links
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping

from benchmarks import harness
from benchmarks.accuracy import SAMPLE, run_jrec

DTYPES = ("float32", "bfloat16")
METRICS = ("auc", "log_loss")
LOGS = ("kaggle", "twin")
KAGGLE = ("prepare", "criteo-kaggle", "--input", str(SAMPLE))
# The benchmark's batch of 55,296 would make two steps of a sample; its learning rate belongs to that batch.
SMALL = ("data.batch_size=256", "data.eval_batch_size=2048", "evaluate.every_steps=100000", "checkpoint.every_steps=0")
RATES = ("optimizer.learning_rate=0.01", "optimizer.embedding.learning_rate=0.02")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What has the dtype.

    Attributes:
      config: A shipped configuration.
      twin: What the twin is like.
      devices: Virtual devices.
      keys: What both sides set, by log.
      of_dtype: What each side sets.
    """

    config: str
    twin: tuple[str, ...]
    devices: int
    keys: Mapping[str, tuple[str, ...]]
    of_dtype: Mapping[str, tuple[str, ...]]


COMPARISONS = {
    "dense": Comparison(
        config="mlperf_dlrm_dcnv2.toml",
        twin=("mlperf-dlrm-dcnv2", "--scale", "1/2048"),
        devices=1,
        keys={"kaggle": (*SMALL, *RATES), "twin": SMALL},
        of_dtype={dtype: (f"model.compute_dtype={dtype}",) for dtype in DTYPES},
    ),
    "links": Comparison(
        config="criteo_kaggle.toml",
        twin=("criteo-kaggle", "--scale", "1/64"),
        devices=4,
        keys=dict.fromkeys(LOGS, ("mesh.devices=4",)),
        of_dtype={
            "float32": (),
            "bfloat16": ("mesh.exchange_rows=bfloat16", "mesh.exchange_gradients=bfloat16"),
        },
    ),
}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", nargs="+", choices=LOGS, default=list(LOGS), help="default: both")
    parser.add_argument("--of", choices=tuple(COMPARISONS), default="dense", help="what has the dtype (default: dense)")
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
                compare(report, arguments.of, log, pathlib.Path(folder), seeds, rows)


def compare(report: harness.Report, name: str, log: str, folder: pathlib.Path, seeds: list[int], rows: int) -> None:
    """Trains twice a seed and reports test metrics and their paired differences."""
    comparison, data = COMPARISONS[name], folder / "data"
    case = f"{'' if name == 'dense' else f'{name}, '}{log}, {len(seeds)} seeds"
    twin = ("synth", "--like", *comparison.twin, "--seed", "0", "--rows", str(rows))
    run_jrec(*(twin if log == "twin" else KAGGLE), "--out", str(data), "--quiet")
    found: dict[str, dict[str, list[float]]] = {dtype: {metric: [] for metric in METRICS} for dtype in DTYPES}
    for seed in seeds:
        for dtype in DTYPES:
            test = _train(comparison, log, data, folder / f"{seed}-{dtype}", seed, dtype, report)
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
    comparison: Comparison,
    log: str,
    data: pathlib.Path,
    out: pathlib.Path,
    seed: int,
    dtype: str,
    report: harness.Report,
) -> dict[str, float]:
    start, config = time.perf_counter(), str(harness.ROOT / "configs" / comparison.config)
    options = (f"data.path={data}", f"out={out}", f"seed={seed}", *comparison.keys[log], *comparison.of_dtype[dtype])
    quiet = ("log.progress=off", "log.tensorboard=false")
    run_jrec("train", config, *options, *quiet, devices=comparison.devices)
    test = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))["splits"]["test"]
    report.note(
        f"seed {seed}, {dtype}: AUC {test['auc']:.4f}, log loss {test['log_loss']:.4f} in"
        f" {time.perf_counter() - start:.0f} s"
    )
    return test


if __name__ == "__main__":
    main()
