"""Test AUC of what `jrec init` writes, as it is, against logistic regression and popularity, on real click logs.

Each log is prepared, `jrec init` writes one configuration, and `jrec train` trains it once a seed. The baselines are
those of the run's own report; of Taobao's sequences, also the rules "is the target's category in the history?" and "how
often is it?".

The rules and candidates of `jrec init` were found on the valid splits of the logs named TUNED, before any of the
others was trained on; HELD_OUT are only judged.

Examples:
  python -m benchmarks.init_quality
  python -m benchmarks.init_quality --log avazu movielens_side --seeds 0
"""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
import time

from benchmarks import harness
from benchmarks.accuracy import run_jrec
from benchmarks.accuracy_tbsm import rules

DATA = harness.ROOT.parent / "shared" / "data"
_SIDE = ("--users", "ml1m_users.dat.gz", "--movies", "ml1m_movies.dat.gz")
TUNED = {
    "criteo_kaggle": ("criteo-kaggle", "--input", "criteo_kaggle_80k.tsv.gz"),
    "movielens": ("movielens", "--input", "ml1m_user_item.csv.gz"),
    "taobao_intent": ("taobao", "--form", "intent", "--input", "taobao_user_behavior_96k.csv.gz"),
    "taobao_sequences_10k": ("taobao", "--input", "taobao_user_behavior_10k.csv.gz"),
}
HELD_OUT = {
    "avazu": ("avazu", "--input", "avazu_9k.csv.gz"),
    "movielens_side": ("movielens", "--input", "ml1m_user_item.csv.gz", *_SIDE),
    "taobao_intent_10k": ("taobao", "--form", "intent", "--input", "taobao_user_behavior_10k.csv.gz"),
    "taobao_sequences_96k": ("taobao", "--input", "taobao_user_behavior_96k.csv.gz"),
}
LOGS = TUNED | HELD_OUT


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", nargs="+", choices=tuple(LOGS), default=list(LOGS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"init_quality: {DATA}, the folder of the samples, does not exist")
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    with harness.Report(arguments, "init_quality") as report:
        for log in ["avazu"] if arguments.quick else arguments.log:
            with tempfile.TemporaryDirectory() as folder:
                _judge(report, log, pathlib.Path(folder), seeds)


def _judge(report: harness.Report, log: str, folder: pathlib.Path, seeds: list[int]) -> None:
    case = f"{log}, {'tuned' if log in TUNED else 'held out'}"
    data, config = folder / "data", folder / "init.toml"
    options = [str(DATA / option) if option.endswith(".gz") else option for option in LOGS[log]]
    run_jrec("prepare", *options, "--out", str(data), "--quiet")
    start = time.perf_counter()
    run_jrec("init", str(data), "--out", str(config))
    report.add(case, "seconds of jrec init", time.perf_counter() - start, "s")
    aucs, baselines = [], {}
    for seed in seeds:
        out = folder / f"run{seed}"
        run_jrec("train", str(config), f"out={out}", f"seed={seed}", "log.progress=off", "log.tensorboard=false")
        content = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))
        aucs.append(content["splits"]["test"]["auc"])
        report.add(case, f"test auc, seed {seed}", aucs[-1], "auc")
        baselines = {
            name: content["baselines"][name]["splits"]["test"]["auc"] for name in ("logistic_regression", "popularity")
        }
    if log.startswith("taobao_sequences"):
        baselines |= {name: auc for name, auc in rules(data).items() if name.endswith("in history")}
    for name, auc in baselines.items():
        report.add(case, f"test auc, {name}", auc, "auc")
    report.add(case, "test auc, mean", statistics.mean(aucs), "auc")
    report.add(case, "test auc, mean less the best baseline", statistics.mean(aucs) - max(baselines.values()), "auc")


if __name__ == "__main__":
    main()
