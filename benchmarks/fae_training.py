"""FAE's training against the hybrid baseline: bytes between host and device, time, schedules, and test AUC.

End to end: a synthetic log like Criteo Kaggle, all its sizes divided by --scale (tables, and with them examples, budget
and the size below which a table is hot whole), so that examples, rows and hot rows stand in the published proportion.
The baseline keeps all tables in host memory (tables.tier=host); FAE keeps the calibrated hot rows on the device. Runs
of the two alternate. On a CPU, "device" memory is the same memory: bytes and schedules are the result, not seconds.

Accuracy: the real Criteo Kaggle sample through `jrec prepare`, configs/criteo_kaggle.toml as it is, one pair of runs a
seed.

Examples:
  python -m benchmarks.fae_training
  python -m benchmarks.fae_training --rows 5000000 --scale 1 --pairs 1     (tables at full size; hours)
  python -m benchmarks.fae_training --only accuracy --set fae.initial_rate=1
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from typing import Any

from benchmarks import harness
from benchmarks.accuracy import CONFIG, SAMPLE, run_jrec

PUBLISHED_BYTES, BUDGET, SMALL = 2.296e9, 256e6, 1e6
"""Of Criteo Kaggle's 33.8 million rows, each 16 float32 and row-wise Adagrad's slot; FAE's; of a small table."""
ROW_BYTES = 68


def main() -> None:
    """Runs both parts, or the one that is named."""
    parser = harness.parser(__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    with harness.Report(arguments, "fae_training") as report:
        measure(report, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part of the FAE benchmark takes."""
    group = parser.add_argument_group("training")
    group.add_argument("--rows", type=int, default=400_000, metavar="N", help="examples of the synthetic log")
    group.add_argument("--scale", type=int, default=64, metavar="K", help="divisor of the tables' rows and the budget")
    group.add_argument("--pairs", type=int, default=2, metavar="N", help="runs of each side, alternating")
    group.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the accuracy runs")
    group.add_argument("--only", choices=("bytes", "accuracy"), help="one of the two parts")
    group.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of FAE's runs")


def measure(report: harness.Report, arguments: argparse.Namespace) -> None:
    """Both parts, with the arguments of ``add_arguments``."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _compile_once(folder / "compiled")
        if arguments.only != "accuracy":
            _bytes(report, arguments, folder)
        if arguments.only != "bytes":
            _accuracy(report, arguments, folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run came to: seconds of training, and of all, losses between schedules and the test split included."""

    seconds: float
    whole: float
    auc: float
    log_loss: float
    moved: int
    fae: dict[str, Any] | None


def _compile_once(folder: pathlib.Path) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _bytes(report: harness.Report, arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    from jrec.data.synth import SynthOptions, shape_like, synthesize

    rows, scale, pairs = arguments.rows, arguments.scale, arguments.pairs
    if report.quick:
        rows, scale, pairs = 40_000, 640, 1
    shape = shape_like("criteo-kaggle")
    shape = dataclasses.replace(shape, rows={n: max(2, count // scale) for n, count in shape.rows.items()})
    data = folder / "kaggle"
    synthesize(shape, data, SynthOptions(rows=rows))
    hot = _pack(report, data, data.with_name("kaggle_fae"))
    common = ("data.batch_size=1024", "data.eval_batch_size=4096", "evaluate.final_splits=['test']")
    common += ("optimizer.embedding.weight_decay=0", "lr_schedule.kind=constant", "lr_schedule.warmup_steps=0")
    sides: dict[str, list[Run]] = {"hybrid": [], "FAE": []}
    for side, source, more in (("hybrid", data, ()), ("FAE", hot, ("fae.initial_rate=1", "fae.batches=1"))):
        _run(side, source, 0, folder, (*common, "max_steps=4", *more))  # compiles
    for pair in range(pairs):
        order = ("hybrid", "FAE") if pair % 2 == 0 else ("FAE", "hybrid")
        for side in order:
            source, more = (data, ()) if side == "hybrid" else (hot, tuple(arguments.set))
            sides[side].append(_run(side, source, 0, folder, (*common, *more)))
    case = f"Criteo Kaggle by {scale}, {rows:,} examples"
    _report_bytes(report, case, sides)


def _report_bytes(report: harness.Report, case: str, sides: dict[str, list[Run]]) -> None:
    hybrid, fae = sides["hybrid"][0], sides["FAE"][0]
    summary = fae.fae
    assert summary is not None
    ratio = hybrid.moved / fae.moved if fae.moved else None
    report.add(case, "rows and slots moved, FAE", fae.moved / 1e6, "MB", peer="hybrid", ratio=ratio)
    report.add(case, "rows and slots moved, hybrid", hybrid.moved / 1e6, "MB")
    report.add(case, "the paper's synchronization would move", summary["bytes"]["paper_synchronization"] / 1e6, "MB")
    report.add(case, "hot rows with slots", summary["hot_row_bytes"] / 1e6, "MB")
    report.add(case, "hot examples", 100 * summary["hot_share"], "%")
    report.add(case, "switches", summary["switches"], "count")
    report.add(case, "least rate", min([*summary["rates"], summary["rate"]]), "%")
    report.add(case, "greatest rate", max([*summary["rates"], summary["rate"]]), "%")
    for metric, field in (("training", "seconds"), ("whole run, compiled before", "whole")):
        own, theirs = ([getattr(run, field) for run in sides[side]] for side in ("FAE", "hybrid"))
        ratios = [b / a for a, b in zip(own, theirs, strict=True)]
        report.add(case, f"{metric}, FAE", min(own), "s", peer="hybrid", ratio=statistics.median(ratios))
        report.add(case, f"{metric}, hybrid", min(theirs), "s")
    report.add(case, "test auc, FAE", fae.auc, "auc")
    report.add(case, "test auc, hybrid", hybrid.auc, "auc")


def _accuracy(report: harness.Report, arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    if not SAMPLE.is_file():
        report.note(f"the accuracy part is left out: {SAMPLE} is no file")
        return
    data, seeds = folder / "sample", arguments.seeds[:1] if report.quick else arguments.seeds
    run_jrec("prepare", "criteo-kaggle", "--input", str(SAMPLE), "--out", str(data), "--quiet")
    hot = _pack(report, data, folder / "sample_fae")
    case, lost, aucs = f"{SAMPLE.name.split('.')[0]}, {len(seeds)} seed(s)", [], {"hybrid": [], "FAE": []}
    for seed in seeds:
        runs = {"hybrid": _run("hybrid", data, seed, folder, ()), "FAE": _run("FAE", hot, seed, folder, arguments.set)}
        for side, run in runs.items():
            aucs[side].append(run.auc)
            rates = "" if run.fae is None else f", rates {', '.join(f'{rate:g}' for rate in run.fae['rates'])}"
            report.note(f"seed {seed}, {side}: test AUC {run.auc:.4f}, log loss {run.log_loss:.4f}{rates}")
        lost.append(100 * (runs["hybrid"].auc - runs["FAE"].auc) / runs["hybrid"].auc)
    for side, values in aucs.items():
        report.add(case, f"test auc, {side}, mean", statistics.mean(values), "auc")
    report.add(case, "AUC lost, mean", statistics.mean(lost), "%")
    report.add(case, "AUC lost, greatest", max(lost), "%")


def _pack(report: harness.Report, data: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Packs with exact counts and the published budget's share of the tables' bytes."""
    from jrec.access.calibrate import CalibrateOptions, calibrate
    from jrec.data.fae.pack import pack
    from jrec.data.schema import Schema

    share = ROW_BYTES * sum(t.rows for t in Schema.load(data).tables) / PUBLISHED_BYTES
    options = CalibrateOptions(budget=BUDGET * share, small_bytes=SMALL * share, row_bytes=ROW_BYTES)
    calibration = calibrate(data, options)
    packed = pack(data, out, calibration.hot_set())
    total = packed.hot_examples + packed.cold_examples
    report.note(
        f"{data.name}: {100 * packed.hot_examples / total:.1f} % of {total:,} training examples are hot on a budget of"
        f" {BUDGET * share / 1e6:.2f} MB"
    )
    return out


def _run(side: str, data: pathlib.Path, seed: int, folder: pathlib.Path, overrides: Any) -> Run:
    from jrec.train.config import load_config
    from jrec.train.loop import train
    from jrec.train.report.metrics import evaluate

    place = (f"data.path={str(data)!r}", f"out={str(folder / 'run')!r}", f"seed={seed}")
    watch = ("log.progress=off", "log.tensorboard=false", "evaluate.every_steps=0", "checkpoint.every_steps=0")
    kind = ("tables.tier=host",) if side == "hybrid" else ("schedule=fae",)
    config = load_config(CONFIG, [*place, *watch, *kind, *overrides])
    start = time.perf_counter()
    outcome = train(config, overwrite=True)
    if not outcome.finished:
        raise SystemExit("fae_training: stopped by a signal")
    scores = evaluate(outcome.scores["test"])
    rows = outcome.sections["pipeline"]["rows"].values()
    return Run(
        seconds=outcome.seconds,
        whole=time.perf_counter() - start,
        auc=scores.auc or float("nan"),
        log_loss=scores.log_loss,
        moved=sum(counters["bytes_to_device"] + counters["bytes_to_host"] for counters in rows),
        fae=outcome.sections.get("fae"),
    )


if __name__ == "__main__":
    main()
