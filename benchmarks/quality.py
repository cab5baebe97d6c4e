"""Test AUC, log loss and calibration of what `jrec init` writes, against tuned peers.

Each log is prepared, `jrec init` writes one configuration, and `jrec train` trains it, as it is, once a seed. Where
`jrec init` proposes target means, they are added to the log's schema, and kept where its trials are better on valid, as
`jrec.fit` does. The peers, scikit-learn's logistic regression, LightGBM and CatBoost, are fitted to the same splits of
the log's own columns, as `jrec prepare` made them, and choose their parameters by log loss on valid, from the grids in
benchmarks/peers/tabular.py. Beside them are the baselines of jrec's own reports; of sequences, the rule "is the
target's category in the history?"; and of synthetic logs the ceiling, the metrics of the teacher that drew the labels.
Logs that are held out played no part in any choice.

What was measured is kept in --work, jrec's by the commit, so that the same command goes on where it was cut off.

Examples:
  python -m benchmarks.quality
  python -m benchmarks.quality --log kaggle frappe --seeds 0
  python -m benchmarks.quality --peers-only
  python -m benchmarks.quality --log --also monday.jsonl tuesday.jsonl
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness, quality_logs
from benchmarks.accuracy import run_jrec
from benchmarks.accuracy_tbsm import rules
from benchmarks.peers import client
from jrec.app.baselines.examples import Split
from jrec.data.blocks import LABEL, Column, ListColumn
from jrec.data.schema import Schema
from jrec.metrics import Scores, evaluate

METRICS = ("auc", "log_loss", "calibration_error")
RANKED = ("jrec", "logistic regression", "LightGBM", "CatBoost")
_PEER = "tabular"

Metrics = Mapping[str, float]
"""Of the split test, by name."""


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--log", nargs="*", choices=tuple(quality_logs.LOGS), default=list(quality_logs.LOGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    parser.add_argument("--work", type=pathlib.Path, default=harness.ROOT / "build" / "quality", help="what is kept")
    parser.add_argument("--packages", type=pathlib.Path, default=quality_logs.PACKAGES, help="downloaded packages")
    also = "results of other logs, which count in the mean ranks"
    parser.add_argument("--also", nargs="+", type=pathlib.Path, default=[], metavar="FILE", help=also)
    parser.add_argument("--peers-only", action="store_true", help="only fit the peers, for a later run")
    arguments = parser.parse_args()
    logs = ["avazu"] if arguments.quick else arguments.log
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    with harness.Report(arguments, "quality") as report, client.start_or_skip(_PEER) as peer:
        judged = _measured_before(arguments.also)
        for name in logs:
            folder = (arguments.work / name).resolve()
            places = quality_logs.Places(packages=arguments.packages, work=folder)
            try:
                _make(quality_logs.LOGS[name], places)
            except quality_logs.AbsentError as absent:
                report.note(f"{name} skipped: {absent}")
                continue
            found = {} if peer is None else _peers(peer, folder, seeds)
            if not arguments.peers_only:
                found |= _jrec(report, name, places, seeds)
                judged[_case(name)] = _report(report, name, found, None if peer is None else peer.versions)
        again = {_case(name) for name, log in quality_logs.LOGS.items() if log.again}
        whole = {case: one for case, one in judged.items() if all(model in one for model in RANKED)}
        _ranks(report, [one for case, one in whole.items() if case not in again])


def _measured_before(files: Sequence[pathlib.Path]) -> dict[str, dict[str, dict[str, float]]]:
    """By log, the means by model and metric that are in files of results."""
    judged: dict[str, dict[str, dict[str, float]]] = {}
    for line in (json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()):
        if match := re.fullmatch(r"test (\w+), (.+), mean", line["metric"]):
            metric, model = match.groups()
            judged.setdefault(line["case"], {}).setdefault(model, {})[metric] = line["value"]
    return judged


def _make(log: quality_logs.Log, places: quality_logs.Places) -> None:
    places.work.mkdir(parents=True, exist_ok=True)
    if not (places.work / "data").is_dir():
        run_jrec(*log.arguments(places), "--out", str(places.work / "data"), "--quiet")


def _peers(peer: client.Peer, folder: pathlib.Path, seeds: Sequence[int]) -> dict[str, list[Metrics]]:
    """The peers' metrics by model, one a seed; logistic regression has no seed."""
    arrays = None

    def fitted(case: str, **options: Any) -> dict[str, float]:
        nonlocal arrays
        arrays = columns_of(folder / "data") if arrays is None else arrays
        peer.setup(case, arrays, **options)
        begin, answer = time.perf_counter(), peer.call("predict")
        scores = Scores(logits=answer["test"].astype(np.float32), labels=arrays["test.labels"])
        test = {name: getattr(evaluate(scores), name) for name in METRICS}
        return {**test, "choice": int(answer["choice"]), "seconds": time.perf_counter() - begin}

    def by_seed(case: str) -> list[Metrics]:
        runs, choice = [], None
        for seed in seeds:
            options = {"seed": seed, "choice": choice, "threads": harness.cores()}
            kept = folder / "peers" / f"{case}-{seed}.json"
            runs.append(harness.kept(kept, lambda options=options: fitted(case, **options)))
            choice = runs[0]["choice"]
        return runs

    linear = harness.kept(folder / "peers" / "logistic.json", lambda: fitted("logistic"))
    return {"logistic regression": [linear], "LightGBM": by_seed("trees"), "CatBoost": by_seed("ordered")}


def columns_of(data: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays that benchmarks/peers/tabular.py takes, of a dataset's three splits."""
    schema = Schema.load(data)
    arrays: dict[str, np.ndarray] = {}
    for name in ("train", "valid", "test"):
        split = Split(data, schema, name)
        blocks = list(split.read(split.blocks))
        labels = np.concatenate([np.asarray(block[LABEL]) > 0 for block in blocks])
        arrays[f"{name}.labels"] = labels
        dense, ids, lists = [np.empty((len(labels), 0), np.float32)], [np.empty((len(labels), 0), np.int32)], 0
        dense += [np.concatenate([np.asarray(b[feature.name]) for b in blocks])[:, None] for feature in schema.dense]
        for feature in schema.categorical:
            columns = [block[feature.name] for block in blocks]
            if isinstance(columns[0], ListColumn):
                arrays |= {f"{name}.{lists}.{key}": value for key, value in _lists(columns).items()}
                lists += 1
            else:
                ids.append(np.concatenate([np.asarray(column) for column in columns])[:, None])
        arrays[f"{name}.dense"] = np.concatenate(dense, axis=1).astype(np.float32)
        arrays[f"{name}.ids"] = np.concatenate(ids, axis=1).astype(np.int32)
    return arrays


def _lists(columns: Sequence[Column]) -> dict[str, np.ndarray]:
    lists = [column for column in columns if isinstance(column, ListColumn)]
    lengths = np.concatenate([np.diff(column.offsets) for column in lists])
    values = np.concatenate([np.asarray(column.values) for column in lists])
    return {"offsets": np.concatenate([[0], np.cumsum(lengths)]), "values": values.astype(np.int32)}


def _jrec(
    report: harness.Report, name: str, places: quality_logs.Places, seeds: Sequence[int]
) -> dict[str, list[Metrics]]:
    """Metrics of jrec's models, one a seed, and of its report's baselines."""
    folder = places.work
    own = folder / f"jrec-{harness.commit()}"
    if own.name.endswith("-dirty"):
        shutil.rmtree(own, ignore_errors=True)  # made by some other state of the checkout
    config = own / "init.toml"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))  # seeds share programs

    def chosen() -> dict[str, float]:
        """Writes the configuration; how long it took, and how many target means it proposed and valid kept."""
        begin = time.perf_counter()
        own.mkdir(parents=True, exist_ok=True)
        run_jrec("init", str(folder / "data"), "--out", str(config), "--overwrite")
        if kept := proposed(config.read_text(encoding="utf-8")):
            arguments = quality_logs.with_sections(kept, quality_logs.LOGS[name].arguments(places))
            run_jrec(*arguments, "--out", str(own / "data"), "--quiet", "--overwrite")
            run_jrec("init", str(own / "data"), "--out", str(own / "means.toml"), "--overwrite")
            if best_trial(own / "means.toml") < best_trial(config):
                (own / "means.toml").replace(config)
            else:
                kept = ""
        return {"seconds": time.perf_counter() - begin, "means": kept.count("[[target_mean]]")}

    def trained(seed: int) -> dict[str, Any]:
        out = own / f"run{seed}"
        begin = time.perf_counter()
        quiet = ("log.progress=off", "log.tensorboard=false", "--overwrite")
        run_jrec("train", str(config), f"out={out}", f"seed={seed}", *quiet)
        seconds = time.perf_counter() - begin
        content = json.loads((out / "report" / "metrics.json").read_text(encoding="utf-8"))
        shutil.rmtree(out)  # checkpoints
        return {"content": content, "seconds": seconds}

    choice = harness.kept(own / "init.json", chosen)
    report.add(_case(name), "time of jrec init", choice["seconds"], "s")
    report.add(_case(name), "target means that jrec init proposed and valid kept", choice["means"], "count")
    runs = [harness.kept(own / f"seed{seed}.json", lambda seed=seed: trained(seed)) for seed in seeds]
    report.add(_case(name), "time of jrec train, mean", statistics.mean(run["seconds"] for run in runs), "s")
    contents = [run["content"] for run in runs]
    baselines = contents[0]["baselines"]
    found = {
        "jrec": [{metric: content["splits"]["test"][metric] for metric in METRICS} for content in contents],
        "jrec's logistic regression": [baselines["logistic_regression"]["splits"]["test"]],
    }
    if "popularity" in baselines:
        found["popularity"] = [baselines["popularity"]["splits"]["test"]]
    if name.endswith("sequences"):
        found["category in history"] = [{"auc": rules(folder / "data")["category in history"]}]
    if (ceiling := Schema.load(folder / "data").ceiling.get("test")) is not None:
        found["ceiling"] = [ceiling]
    return found


def proposed(config: str) -> str:
    """The sections for the log's schema that a configuration's first comment proposes; "" for none."""
    lines = [line.removeprefix("#").strip() for line in config.splitlines() if line.startswith("#   ")]
    return "".join(f"{line}\n" for line in lines if line == "[[target_mean]]" or line.startswith("of = "))


def best_trial(config: pathlib.Path) -> float:
    """The log loss on valid that the first comment of a configuration says of the best trial."""
    scores = re.findall(r"^#   (\d\.\d+)  ", config.read_text(encoding="utf-8"), re.MULTILINE)
    return min(map(float, scores))


def _case(name: str) -> str:
    return f"{name}, held out" if quality_logs.LOGS[name].held_out else name


def _report(
    report: harness.Report, name: str, found: Mapping[str, Sequence[Metrics]], versions: Mapping[str, str] | None
) -> dict[str, dict[str, float]]:
    """Adds a log's figures; returns the means, by model and metric."""
    means = {}
    for model, runs in found.items():
        means[model] = {
            metric: statistics.mean(run[metric] for run in runs)
            for metric in METRICS
            if all(run.get(metric) is not None for run in runs)
        }
        details = {"seeds": [{metric: run.get(metric) for metric in METRICS} for run in runs]}
        for metric, mean in means[model].items():
            worst = (min if metric == "auc" else max)(run[metric] for run in runs)
            options: dict[str, Any] = {"peer_versions": versions, "details": details}
            report.add(_case(name), f"test {metric}, {model}, mean", mean, metric, **options)
            report.add(_case(name), f"test {metric}, {model}, worst seed", worst, metric, peer_versions=versions)
    others = [means[model] for model in RANKED[1:] if model in means]
    if len(others) == len(RANKED) - 1:
        best_auc, best_loss = max(one["auc"] for one in others), min(one["log_loss"] for one in others)
        report.add(_case(name), "test auc, jrec less the better peer", means["jrec"]["auc"] - best_auc, "auc")
        ratio = means["jrec"]["log_loss"] / best_loss - 1
        report.add(_case(name), "test log_loss, jrec by the better peer", 100 * ratio, "%")
    return means


def _ranks(report: harness.Report, judged: Sequence[Mapping[str, Metrics]]) -> None:
    """Each model's mean rank over the logs, 1 for the best."""
    for metric, sign in (("auc", -1), ("log_loss", 1), ("calibration_error", 1)):
        for model in RANKED if judged else ():
            ranks = [1 + sum(sign * (one[m][metric] - one[model][metric]) < 0 for m in RANKED) for one in judged]
            report.add(f"mean rank in {len(judged)} logs", f"{metric}, {model}", statistics.mean(ranks), "count")


if __name__ == "__main__":
    main()
