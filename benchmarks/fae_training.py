"""FAE's training against the hybrid baseline: bytes between host and device, time, schedules, and AUC.

End to end: a synthetic log like Criteo Kaggle, all its sizes divided by --scale (tables, and with them examples, budget
and the size below which a table is hot whole), so that examples, rows and hot rows stand in the published proportion;
with --like the paper's other two logs, Taobao for TBSM, each with its own model, batch and proportion.
The baseline keeps all tables in host memory, whose rows travel through the pipeline, as FAE's cold rows do (a CPU's
default, updating them in place, moves none); FAE keeps the calibrated hot rows on the device. Runs of the two
alternate. On a CPU, "device" memory is the same memory: bytes and schedules are the result, not seconds.

Accuracy: one pair of runs a seed on the synthetic log and on the real Criteo Kaggle sample, with
configs/criteo_kaggle.toml as it is, on the synthetic one also with a constant learning rate. The split valid is
evaluated on the way too, and its AUC compared after every eighth of the steps.

Examples:
  python -m benchmarks.fae_training
  python -m benchmarks.fae_training --rows 5000000 --scale 1 --pairs 1     # tables at full size; hours
  python -m benchmarks.fae_training --only accuracy --set fae.initial_rate=1
  python -m benchmarks.fae_training --only bytes --like criteo-terabyte taobao
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

from benchmarks import harness, trainings
from benchmarks.accuracy import CONFIG, SAMPLE, run_jrec
from benchmarks.trainings import CURVE, Trained

BUDGET, SMALL = 256e6, 1e6
"""Bytes of the hot rows, as FAE has it, and of a table that is small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """One of the paper's logs, and how jrec trains on it.

    Attributes:
      name: What cases call it.
      config: The configuration.
      overrides: Of the configuration.
      row_bytes: Of a row with its slots.
      scale: Divisor of the rows, by which 400,000 examples stand to them as the paper's examples do.
    """

    name: str
    config: pathlib.Path
    overrides: tuple[str, ...]
    row_bytes: int
    scale: int


LOGS = {
    "criteo-kaggle": Log(
        name="Criteo Kaggle",
        config=CONFIG,
        overrides=("data.batch_size=1024", "data.eval_batch_size=4096", "optimizer.embedding.weight_decay=0"),
        row_bytes=68,  # 16 float32 and row-wise Adagrad's slot
        scale=64,
    ),
    "criteo-terabyte": Log(
        name="Criteo Terabyte",
        config=CONFIG.with_name("criteo_terabyte.toml"),
        overrides=("data.batch_size=1024", "data.eval_batch_size=4096"),
        row_bytes=256,
        scale=200,
    ),
    "taobao": Log(
        name="Taobao",
        config=CONFIG.with_name("tbsm_taobao.toml"),
        overrides=("data.eval_batch_size=4096", "optimizer.embedding.name=sgd"),
        row_bytes=64,
        scale=25,
    ),
}


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
    group.add_argument(
        "--like", nargs="+", choices=tuple(LOGS), default=["criteo-kaggle"], help="logs (default: criteo-kaggle)"
    )
    group.add_argument("--scale", type=int, metavar="K", help="divisor of the tables' rows and the budget")
    group.add_argument("--pairs", type=int, default=2, metavar="N", help="runs of each side, alternating")
    group.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the accuracy runs")
    group.add_argument("--only", choices=("bytes", "accuracy"), help="one of the two parts")
    group.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of FAE's runs")


def measure(report: harness.Report, arguments: argparse.Namespace) -> None:
    """Both parts, with the arguments of ``add_arguments``."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        trainings.compile_once(folder / "compiled")
        for like in arguments.like:
            _synthetic(report, arguments, like, folder)
        if arguments.only != "bytes":
            _sample(report, arguments, folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A training, and the seconds of all of it, losses between schedules and the test split included."""

    run: Trained
    seconds: float


def _synthetic(report: harness.Report, arguments: argparse.Namespace, like: str, folder: pathlib.Path) -> None:
    from jrec.prepare.synth import SynthOptions, shape_like, synthesize

    log = LOGS[like]
    rows, scale, pairs = arguments.rows, arguments.scale or log.scale, arguments.pairs
    if report.quick:
        rows, scale, pairs = 40_000, 10 * scale, 1
    shape = shape_like(like)
    shape = dataclasses.replace(shape, rows={n: max(2, count // scale) for n, count in shape.rows.items()})
    data = folder / like
    synthesize(shape, data, SynthOptions(rows=rows))
    hot = _pack(report, log, data, data.with_name(f"{like}_fae"), sum(shape_like(like).rows.values()))
    constant = (*log.overrides, "lr_schedule.kind=constant", "lr_schedule.warmup_steps=0")
    case = f"{log.name} by {scale}, {rows:,} examples"
    if arguments.only != "accuracy":
        _measure_bytes(report, arguments, log, case, data, hot, constant, pairs)
    if arguments.only != "bytes":
        # A constant rate leaves in the model whatever kind the last batches were of; one that falls to 0 does not.
        _accuracy(report, arguments, log, f"{case}, constant rate", data, hot, constant)
        _accuracy(report, arguments, log, f"{case}, rate falling to 0", data, hot, log.overrides)


def _measure_bytes(
    report: harness.Report,
    arguments: argparse.Namespace,
    log: Log,
    case: str,
    data: pathlib.Path,
    hot: pathlib.Path,
    common: Sequence[str],
    pairs: int,
) -> None:
    sides: dict[str, list[Timed]] = {"hybrid": [], "FAE": []}
    for side, source, more in (("hybrid", data, ()), ("FAE", hot, ("fae.initial_rate=1", "fae.batches=1"))):
        _run(log, side, source, 0, (*common, "max_steps=4", *more))  # compiles
    for pair in range(pairs):
        order = ("hybrid", "FAE") if pair % 2 == 0 else ("FAE", "hybrid")
        for side in order:
            source, more = (data, ()) if side == "hybrid" else (hot, tuple(arguments.set))
            sides[side].append(_run(log, side, source, 0, (*common, *more)))
    _report_bytes(report, case, sides)


def _report_bytes(report: harness.Report, case: str, sides: dict[str, list[Timed]]) -> None:
    hybrid, fae = sides["hybrid"][0], sides["FAE"][0]
    summary = fae.run.outcome.sections["fae"]
    moved, hybrid_moved = _moved(fae), _moved(hybrid)
    ratio = hybrid_moved / moved if moved else None
    report.add(case, "rows and slots moved, FAE", moved / 1e6, "MB", peer="hybrid", ratio=ratio)
    report.add(case, "rows and slots moved, hybrid", hybrid_moved / 1e6, "MB")
    report.add(case, "the paper's synchronization would move", summary["bytes"]["paper_synchronization"] / 1e6, "MB")
    report.add(case, "hot rows with slots", summary["hot_row_bytes"] / 1e6, "MB")
    report.add(case, "hot examples", 100 * summary["hot_share"], "%")
    report.add(case, "switches", summary["switches"], "count")
    report.add(case, "least rate", min([*summary["rates"], summary["rate"]]), "%")
    report.add(case, "greatest rate", max([*summary["rates"], summary["rate"]]), "%")
    for metric, seconds in (
        ("training", lambda timed: timed.run.outcome.seconds),
        ("whole run, compiled before", lambda timed: timed.seconds),
    ):
        own, theirs = ([seconds(timed) for timed in sides[side]] for side in ("FAE", "hybrid"))
        ratios = [b / a for a, b in zip(own, theirs, strict=True)]
        report.add(case, f"{metric}, FAE", min(own), "s", peer="hybrid", ratio=statistics.median(ratios))
        report.add(case, f"{metric}, hybrid", min(theirs), "s")


def _moved(timed: Timed) -> int:
    rows = timed.run.outcome.sections["pipeline"]["rows"].values()
    return sum(counters["bytes_to_device"] + counters["bytes_to_host"] for counters in rows)


def _sample(report: harness.Report, arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    if not SAMPLE.is_file():
        report.note(f"the accuracy part is left out: {SAMPLE} is no file")
        return
    data = folder / "sample"
    run_jrec("prepare", "criteo-kaggle", "--input", str(SAMPLE), "--out", str(data), "--quiet")
    from jrec.prepare.synth import shape_like

    log = LOGS["criteo-kaggle"]
    hot = _pack(report, log, data, folder / "sample_fae", sum(shape_like("criteo-kaggle").rows.values()))
    _accuracy(report, arguments, log, SAMPLE.name.split(".")[0], data, hot, ())


def _accuracy(
    report: harness.Report,
    arguments: argparse.Namespace,
    log: Log,
    case: str,
    data: pathlib.Path,
    hot: pathlib.Path,
    common: Sequence[str],
) -> None:
    seeds = arguments.seeds[:1] if report.quick else arguments.seeds
    hybrid = [_run(log, "hybrid", data, seed, common, curve_of=data) for seed in seeds]
    fae = [_run(log, "FAE", hot, seed, (*common, *arguments.set), curve_of=data) for seed in seeds]
    for seed, timed in zip(seeds, fae, strict=True):
        rates = ", ".join(f"{rate:g}" for rate in timed.run.outcome.sections["fae"]["rates"])
        report.note(f"seed {seed}, FAE: test AUC {timed.run.score('auc'):.4f}, rates {rates}")
    _report_aucs(report, f"{case}, {len(seeds)} seed(s)", hybrid, fae)


def _report_aucs(report: harness.Report, case: str, hybrid: list[Timed], fae: list[Timed]) -> None:
    """Scores of both sides, and how far FAE's are behind at the end and on the way; one run a seed."""
    for side, runs in (("hybrid", hybrid), ("FAE", fae)):
        for metric in ("auc", "accuracy"):
            mean = statistics.mean(timed.run.score(metric) for timed in runs)
            report.add(case, f"test {metric}, {side}, mean", mean, metric)
    for metric in ("auc", "accuracy"):
        lost = [100 * (a.run.score(metric) - b.run.score(metric)) for a, b in zip(hybrid, fae, strict=True)]
        report.add(case, f"{metric} points lost, mean", statistics.mean(lost), "points")
        report.add(case, f"{metric} points lost, greatest", max(lost), "points")
    for part in range(CURVE):
        behind = [100 * (a.run.curve[part]["auc"] - b.run.curve[part]["auc"]) for a, b in zip(hybrid, fae, strict=True)]
        after = f"{case}, after {part + 1}/{CURVE} of the steps"
        report.add(after, "valid auc points behind, greatest", max(behind), "points")


def _pack(report: harness.Report, log: Log, data: pathlib.Path, out: pathlib.Path, published_rows: int) -> pathlib.Path:
    """Packs with exact counts and the published budget's share of the tables' bytes."""
    from jrec.access.calibrate import CalibrateOptions, calibrate
    from jrec.data.schema import Schema
    from jrec.prepare.fae_pack import pack

    share = sum(t.rows for t in Schema.load(data).tables) / published_rows
    options = CalibrateOptions(budget=BUDGET * share, small_bytes=SMALL * share, row_bytes=log.row_bytes)
    calibration = calibrate(data, options)
    packed = pack(data, out, calibration.hot_set())
    total = packed.hot_examples + packed.cold_examples
    report.note(
        f"{data.name}: {100 * packed.hot_examples / total:.1f} % of {total:,} training examples are hot on a budget of"
        f" {BUDGET * share / 1e6:.2f} MB"
    )
    return out


def _run(
    log: Log,
    side: str,
    data: pathlib.Path,
    seed: int,
    overrides: Sequence[str],
    *,
    curve_of: pathlib.Path | None = None,
) -> Timed:
    kind = ("tables.tier=host", "tables.host.pipeline=on") if side == "hybrid" else ("schedule=fae",)
    start = time.perf_counter()
    run = trainings.train(log.config, data, seed, (*kind, *overrides), curve_of=curve_of)
    return Timed(run=run, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
