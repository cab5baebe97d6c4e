"""Test AUC of TBSM on samples of real behaviour of Taobao's users, against rules that need no model.

`jrec prepare taobao` makes the sequences: is an item the user's next one after a history? A negative is the item of an
event of another user at about the same time, as popular and as new as positives are: only the history tells them apart.
(Drawn from all items alike, `--draw uniform`, most negatives of a small sample are items without any other event.
Popularity does better then, and what a model learns of single items does not hold for the new items of the test split.)

Baselines score test examples by how often their item, or their category, was a positive in the train split, and never
for items that train lacks. Rules without training stand beside them: is the target's category in the history, and how
often? The best of them all on the test split itself counts.

"TBSM" is `configs/tbsm_taobao_sample.toml` as it is, chosen by AUC on the valid split of the sample of 10,000 events.
"RMC1" is FAE's architecture, `configs/tbsm_taobao.toml`. Its published run takes dozens of times as many steps as these
samples give, so optimizers, batch and epochs are others here, chosen by validation AUC.

Examples:
  python -m benchmarks.accuracy_tbsm
  python -m benchmarks.accuracy_tbsm --input UserBehavior.csv --seeds 0 --set epochs=1
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np

from benchmarks import harness
from benchmarks.accuracy import run_jrec
from jrec.data.blocks import ListColumn, ShardReader
from jrec.data.schema import Schema
from jrec.metrics import Scores, evaluate

DATA = harness.ROOT.parent / "shared" / "data"
SAMPLES = [DATA / "taobao_user_behavior_10k.csv.gz", DATA / "taobao_user_behavior_96k.csv.gz"]
RECIPE = (
    "epochs=2", "max_steps=1000", "data.batch_size=64", "optimizer.name=adam", "optimizer.learning_rate=0.003",
    "optimizer.embedding.name=rowwise_adagrad", "optimizer.embedding.learning_rate=0.15", "evaluate.every_steps=0",
)  # fmt: skip
MODELS = {"TBSM": ("tbsm_taobao_sample.toml", ()), "RMC1": ("tbsm_taobao.toml", RECIPE)}


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if missing := [path for path in arguments.input if not path.is_file()]:
        raise SystemExit(f"accuracy_tbsm: {missing[0]} is no file; name logs of Taobao's UserBehavior with --input")
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    logs = arguments.input[:1] if arguments.quick else arguments.input
    with harness.Report(arguments, "accuracy_tbsm") as report:
        for log in logs:
            with tempfile.TemporaryDirectory() as folder:
                _compare(report, log, pathlib.Path(folder), seeds, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--input", type=pathlib.Path, nargs="+", default=SAMPLES, help="logs, each for itself")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--draw", choices=("popularity", "uniform"), default="popularity", help="of negatives")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the configuration")
    return parser


def _compare(
    report: harness.Report, log: pathlib.Path, folder: pathlib.Path, seeds: list[int], arguments: argparse.Namespace
) -> None:
    data = folder / "data"
    run_jrec("prepare", "taobao", "--draw", arguments.draw, "--input", str(log), "--out", str(data), "--quiet")
    case = f"{log.name}, {arguments.draw}, {len(seeds)} seed(s)"
    baselines = rules(data)
    for name, auc in baselines.items():
        report.add(case, f"test auc, {name}", auc, "auc")
    best = max(baselines.values())
    for model in arguments.model:
        runs = [_train(model, data, folder / f"{model}{seed}", seed, arguments.set, report) for seed in seeds]
        report.add(case, f"test auc, {model}, mean", statistics.mean(runs), "auc")
        report.add(case, f"test auc, {model}, least", min(runs), "auc")
        report.add(case, f"test auc, {model}, greatest", max(runs), "auc")
        report.add(case, f"test auc, {model}, mean less the best baseline", statistics.mean(runs) - best, "auc")


def _train(
    model: str, data: pathlib.Path, out: pathlib.Path, seed: int, overrides: list[str], report: harness.Report
) -> float:
    start, (file, recipe) = time.perf_counter(), MODELS[model]
    place = f"data.path={data}", f"out={out}", f"seed={seed}", "log.progress=off", "log.tensorboard=false"
    run_jrec("train", str(harness.ROOT / "configs" / file), *place, *recipe, *overrides)
    metrics = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))
    auc = metrics["splits"]["test"]["auc"]
    report.note(f"{model}, seed {seed}: test AUC {auc:.4f} in {time.perf_counter() - start:.0f} s")
    return auc


def rules(folder: pathlib.Path) -> dict[str, float]:
    """Test AUC of popularity of items and of categories in the train split, and of categories in the history.

    Args:
      folder: A dataset of Taobao's sequences.
    """
    schema = Schema.load(folder)
    train, test = (_columns(folder, schema, split) for split in ("train", "test"))
    labels = test["label"]
    scores = {}
    for name in ("item_id", "category_id"):
        table = schema.table(name)
        positives = np.bincount(train[name][train["label"] > 0], minlength=table.rows).astype(np.float64)
        if table.oov_row is not None:
            positives[table.oov_row] = 0
        scores[f"popularity of {name.removesuffix('_id')}"] = _auc(labels, positives[test[name]])
    offsets, history = test["category_history"]
    owner = np.repeat(np.arange(len(labels)), np.diff(offsets))
    times = np.bincount(owner, history == test["category_id"][owner], len(labels))
    scores["category in history"] = _auc(labels, np.minimum(times, 1))
    scores["times of category in history"] = _auc(labels, times)
    return scores


def _columns(folder: pathlib.Path, schema: Schema, split: str) -> dict:
    """Columns of a split; of lists, offsets and values."""
    blocks = [
        reader.read(i)
        for shard in schema.splits[split].shards
        for reader in [ShardReader(folder, shard)]
        for i in range(len(reader))
    ]
    columns = {}
    for name in blocks[0]:
        pieces = [block[name] for block in blocks]
        if lists := [piece for piece in pieces if isinstance(piece, ListColumn)]:
            lengths = np.concatenate([np.diff(piece.offsets) for piece in lists])
            columns[name] = np.cumsum(np.r_[0, lengths]), np.concatenate([piece.values for piece in lists])
        else:
            columns[name] = np.concatenate(pieces)
    return columns


def _auc(labels: np.ndarray, scores: np.ndarray) -> float:
    auc = evaluate(Scores(labels=labels, logits=scores.astype(np.float32))).auc
    assert auc is not None
    return auc


if __name__ == "__main__":
    main()
