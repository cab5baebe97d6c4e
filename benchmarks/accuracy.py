"""Test AUC on real clicks: `jrec train configs/criteo_kaggle.toml` against scikit-learn's logistic regression.

The log is prepared by `jrec prepare criteo-kaggle`, whose test split is the last tenth of the file. jrec trains on the
train split, once a seed. The logistic regression, on hashed features of the same lines, is fitted to the train split,
and also to train and valid together; its regularization is the best on valid. Both are scored on the same test lines.

Examples:
  python -m benchmarks.accuracy
  python -m benchmarks.accuracy --input train.txt --seeds 0 1 2 --set epochs=2
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import harness, hashed_logistic

SAMPLE = harness.ROOT.parent / "shared" / "data" / "criteo_kaggle_80k.tsv.gz"
CONFIG = harness.ROOT / "configs" / "criteo_kaggle.toml"
REGULARIZATIONS = (0.05, 0.1, 0.2)


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if not arguments.input.is_file():
        raise SystemExit(f"accuracy: {arguments.input} is no file; name a Criteo Kaggle log with --input")
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    with harness.Report(arguments, "accuracy") as report, tempfile.TemporaryDirectory() as folder:
        runs = [_train(arguments.input, pathlib.Path(folder), seed, arguments.set, report) for seed in seeds]
        case = f"{arguments.input.name}, {len(seeds)} seed(s)"
        for name in ("auc", "log_loss"):
            values = [run["splits"]["test"][name] for run in runs]
            report.add(case, f"test {name}, jrec, mean", statistics.mean(values), name)
            report.add(case, f"test {name}, jrec, least", min(values), name)
            report.add(case, f"test {name}, jrec, greatest", max(values), name)
        examples = runs[0]["data"]["examples"]
        _logistic(report, case, arguments.input, examples["train"], examples["valid"])


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--input", type=pathlib.Path, default=SAMPLE, help="a log in Criteo Kaggle's format")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the configuration")
    return parser


def _train(log: pathlib.Path, folder: pathlib.Path, seed: int, overrides: list[str], report: harness.Report) -> dict:
    data, out = folder / "data", folder / f"run{seed}"
    if not data.exists():
        run_jrec("prepare", "criteo-kaggle", "--input", str(log), "--out", str(data), "--quiet")
    start = time.perf_counter()
    run_jrec("train", str(CONFIG), f"data.path={data}", f"out={out}", f"seed={seed}", "log.progress=off", *overrides)
    metrics = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))
    auc = metrics["splits"]["test"]["auc"]
    report.note(f"seed {seed}: test AUC {auc:.4f} in {time.perf_counter() - start:.0f} s")
    return metrics


def run_jrec(*arguments: str, devices: int = 1) -> None:
    """Runs a command in a process of its own, on virtual devices; ends the benchmark with its message if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "jrec", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=harness.with_virtual_devices(devices),
    )
    if done.returncode:
        raise SystemExit(f"`jrec {' '.join(arguments)}` ended with status {done.returncode}:\n{done.stderr}")


def _logistic(report: harness.Report, case: str, log: pathlib.Path, train: int, valid: int) -> None:
    labels, features = hashed_logistic.read_hashed(log)
    candidates = REGULARIZATIONS[1:2] if report.quick else REGULARIZATIONS
    best = hashed_logistic.choose_regularization(labels, features, candidates, train=train, valid=train + valid)
    for name, stop in (("train", train), ("train and valid", train + valid)):
        scores = hashed_logistic.fit_and_score(labels, features, train=stop, test=train + valid, regularization=best)
        for metric, value in scores.items():
            report.add(case, f"test {metric}, logistic regression on {name}, C={best}", value, metric)


if __name__ == "__main__":
    main()
