"""FAE, static half: the Rand-Em Box's bounds, what a 5 % sample costs and finds beside exact counts, packing speed.

Calibration runs on synthetic Criteo datasets; a full scan does without the counts that these hold. Jaccard indices
compare hot rows with those by exact counts at the same budget: with rarely counted neighbours averaged, which is the
default, and as they are. A sample decides by its bounds, so its hot rows are fewer than the budget has room for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import harness
from jrec.access.calibrate import CalibrateOptions, Calibration, SampleOptions, calibrate
from jrec.access.calibrate.sample import RandEmBox, hot_rows
from jrec.access.profile import TableProfile
from jrec.data.schema import Schema
from jrec.prepare.fae_pack import PackOptions, pack
from jrec.prepare.synth import SynthOptions, shape_like, synthesize

MEASURES = ("boxes", "calibration", "packing")
TRIALS, QUICK_TRIALS = 1000, 200
EXAMPLES, QUICK_EXAMPLES = 5_000_000, 400_000
QUICK_BLOCK = 512  # so that a sample of few examples has enough blocks
REPEATS = 4  # 16 M inputs
TABLE_ROWS = 10_000_000  # cap of the Terabyte-like dataset's tables: its full 204 M rows take minutes to make
INPUTS = 2_250_000  # 5 % of the 45 M inputs of Criteo Kaggle, FAE's largest sample that is published with its threshold
SIZES = (1_000_000, 10_131_227)
MODELS = ("criteo-kaggle", "taobao", "criteo-terabyte")  # FAE's three, whose tables all together are one threshold's
SHARES = (0.068, 0.03, 0.01, 0.0001, 0.000002)  # of hot rows; 6.8 % is the paper's of Kaggle
# For thresholds of 1e-5 to 1e-6 of the inputs, as FAE's Figure 2 has them, and the paper's budget.
BUDGETS = (8e6, 24e6, 256e6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this part's flags: what to measure, and datasets to use; where one is given, the other is left out."""
    group = parser.add_argument_group("calibration")
    group.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES, help="default: all")
    group.add_argument("--kaggle", metavar="DIR", help="a dataset of `jrec synth --like criteo-kaggle` to use")
    group.add_argument("--terabyte", metavar="DIR", help="a dataset of `jrec synth --like criteo-terabyte` to use")


def measure(report: harness.Report, arguments: argparse.Namespace) -> None:
    """Runs all cases."""
    if "boxes" in arguments.measure:
        _measure_boxes(report)
    given = {"kaggle": arguments.kaggle, "terabyte": arguments.terabyte}
    names = [name for name, folder in given.items() if folder is not None] or (["kaggle"] if report.quick else given)
    parts = {"calibration": _measure_calibration, "packing": _measure_packing}
    if chosen := [part for name, part in parts.items() if name in arguments.measure]:
        for name in names:
            with _dataset(report, name, given[name]) as folder:
                for part in chosen:
                    part(report, name, folder)


def _measure_boxes(report: harness.Report) -> None:
    """How often the 99.9 % upper bound holds, and how far above the truth it lies, over seeds of the rows drawn."""
    trials = QUICK_TRIALS if report.quick else TRIALS
    for rows in SIZES:
        profile = _zipf_profile(rows)
        cutoffs = {share: _cutoff(profile, share) for share in SHARES}
        truth = {share: hot_rows(profile, cutoff) for share, cutoff in cutoffs.items()}
        estimates_of: dict[float, list] = {share: [] for share in SHARES}
        for seed in range(trials):
            box = RandEmBox(profile, SampleOptions(seed=seed))
            for share, cutoff in cutoffs.items():
                estimates_of[share].append(box.estimate(cutoff))
        for share, estimates in estimates_of.items():
            bounds = np.array([e.bound for e in estimates]) / truth[share]
            errors = np.abs(np.array([e.rows for e in estimates]) / truth[share] - 1)
            case = f"Rand-Em Box, {rows:,} rows, {100 * truth[share] / rows:.2g} % hot"
            report.add(case, f"99.9 % upper bound holds, of {trials:,} trials", 100 * np.mean(bounds >= 1), "%")
            report.add(case, "upper bound above the truth, median", 100 * (np.median(bounds) - 1), "%")
            report.add(case, "upper bound within 10 % of the truth", 100 * np.mean(bounds <= 1.1), "%")
            report.add(case, "error of the estimate, median", 100 * np.median(errors), "%")
        _measure_scan(report, f"{rows:,} rows", [profile])
    for name in MODELS[:1] if report.quick else MODELS:
        options = CalibrateOptions()
        tables = sorted(
            rows for rows in shape_like(name).rows.values() if options.row_bytes * rows >= options.small_bytes
        )
        _measure_scan(report, f"all {len(tables)} large tables of {name}", [_zipf_profile(rows) for rows in tables])


def _measure_scan(report: harness.Report, case: str, profiles: list[TableProfile]) -> None:
    """A threshold's price: the boxes' drawn rows against a scan of the counts of all rows."""
    cutoff = _cutoff(max(profiles, key=lambda profile: profile.rows), SHARES[0])
    boxes = [RandEmBox(profile, SampleOptions(), number=number) for number, profile in enumerate(profiles)]
    dense = [profile.dense() for profile in profiles]
    report.compare(
        f"Rand-Em Box, {case}",
        "one threshold",
        harness.timed(lambda: [box.estimate(cutoff) for box in boxes]),
        peer="scan of all rows' counts",
        theirs=harness.timed(lambda: [np.count_nonzero(counts >= cutoff) for counts in dense]),
        seconds=1.0,
    )


def _zipf_profile(rows: int) -> TableProfile:
    """Counts of a sample of a power law of exponent 1.05, descending: the box draws at random, whatever the order."""
    weights = np.arange(1, rows + 1) ** -1.05
    counts = np.random.default_rng(0).poisson(INPUTS * weights / weights.sum())
    # Ties would move the share of hot rows: within equal counts the order decides by next to nothing.
    graded = np.sort(counts)[::-1] + np.linspace(1e-3, 0, rows)
    return TableProfile.from_counts("t", graded)


def _cutoff(profile: TableProfile, share: float) -> float:
    return float(profile.counts[max(round(share * profile.rows), 2) - 1])


@contextlib.contextmanager
def _dataset(report: harness.Report, name: str, existing: str | None) -> Iterator[pathlib.Path]:
    """The dataset given, or a synthetic one for the time of the measurement."""
    if existing is not None:
        yield pathlib.Path(existing)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / name
        examples = QUICK_EXAMPLES if report.quick else EXAMPLES
        block_size = QUICK_BLOCK if report.quick else None
        report.note(f"making {examples:,} examples like {name}")
        cap = TABLE_ROWS if name == "terabyte" else None
        options = SynthOptions(rows=examples, block_size=block_size)
        synthesize(shape_like(f"criteo-{name}", table_rows=cap, exponent=None), folder, options)
        yield folder


def _measure_calibration(report: harness.Report, name: str, folder: pathlib.Path) -> None:
    schema = Schema.load(folder)
    hidden = dataclasses.replace(
        schema, tables=tuple(dataclasses.replace(table, counts=None) for table in schema.tables)
    )
    case = f"{name}, {schema.splits['train'].examples:,} inputs"
    for budget in BUDGETS:
        options = CalibrateOptions(budget=budget)
        by_sample = dataclasses.replace(options, sample=SampleOptions())
        sampled = calibrate(folder, by_sample, schema=schema)
        exact = calibrate(folder, options, schema=schema)
        exact_raw = calibrate(folder, dataclasses.replace(options, smooth=False), schema=schema)
        at = f"{case}, budget {budget / 1e6:g} MB"
        report.add(at, "threshold found in the sample", 1e6 * (sampled.threshold or 0), "accesses a million inputs")
        report.add(at, "Jaccard index with exact counts", _jaccard(sampled, exact), "")
        report.add(at, "Jaccard index with exact counts as they are", _jaccard(sampled, exact_raw), "")
        raw = calibrate(folder, dataclasses.replace(by_sample, smooth=False), schema=schema)
        report.add(at, "Jaccard index, counts as sampled", _jaccard(raw, exact), "")
        report.add(at, "hot inputs, of the sample", 100 * sampled.hot_inputs.share, "%")
        report.add(at, "hot inputs, of the sample's counts as they are", 100 * raw.hot_inputs.share, "%")
        report.add(at, "hot inputs, by exact counts", 100 * exact.hot_inputs.share, "%")
        report.add(at, "hot inputs, by exact counts as they are", 100 * exact_raw.hot_inputs.share, "%")
    _measure_counts(report, name, folder, schema)
    for repeats in (1, REPEATS) if name == "kaggle" and not report.quick else (1,):
        _measure_time(report, name, folder, hidden, repeats)


def _measure_counts(report: harness.Report, name: str, folder: pathlib.Path, schema: Schema) -> None:
    """The dataset's own counts, the default, against a 5 % sample."""
    options = CalibrateOptions(budget=BUDGETS[1])
    report.compare(
        f"{name}, {schema.splits['train'].examples:,} inputs",
        "calibration by the dataset's counts",
        harness.timed(lambda: calibrate(folder, options, schema=schema)),
        peer="5 % sample",
        theirs=harness.timed(
            lambda: calibrate(folder, dataclasses.replace(options, sample=SampleOptions()), schema=schema)
        ),
        seconds=0.0,
    )


def _measure_time(report: harness.Report, name: str, folder: pathlib.Path, schema: Schema, repeats: int) -> None:
    """A 5 % sample against a full scan; of the split ``repeats`` times over, as the time of a larger log.

    What a calibration costs however large the log is weighs less there.
    """
    train = dataclasses.replace(schema.splits["train"], shards=schema.splits["train"].shards * repeats)
    schema = dataclasses.replace(schema, splits={**schema.splits, "train": train})
    options = CalibrateOptions(budget=BUDGETS[1])
    measured = harness.alternate(
        harness.timed(lambda: calibrate(folder, dataclasses.replace(options, sample=SampleOptions()), schema=schema)),
        harness.timed(lambda: calibrate(folder, options, schema=schema)),
        seconds=0.0,
        warmup=0,
        min_pairs=1 if report.quick else 3,
    )
    again = "" if repeats == 1 else f", the same {repeats} times over"
    case = f"{name}, {train.examples:,} inputs{again}"
    for statistic, value, ratio in (
        ("median", measured.median, measured.ratio),
        ("fastest", measured.fastest, measured.ratio_of_fastest),
    ):
        report.add(case, f"calibration at 5 %, {statistic}", value, "s", peer="full scan", ratio=ratio)
    report.add(case, "calibration, fastest, full scan", min(measured.theirs), "s")


def _jaccard(one: Calibration, other: Calibration) -> float:
    both = sum(len(np.intersect1d(one.rows[n], rows, assume_unique=True)) for n, rows in other.rows.items())
    return both / (sum(map(len, one.rows.values())) + sum(map(len, other.rows.values())) - both)


def _measure_packing(report: harness.Report, name: str, folder: pathlib.Path) -> None:
    """The whole of ``pack``, verification included, and how well the share of hot inputs was foreseen."""
    schema = Schema.load(folder)
    calibration = calibrate(folder, CalibrateOptions(), schema=schema)
    inputs, seconds = schema.splits["train"].examples, []
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        out = pathlib.Path(temporary) / "fae"
        for _ in range(1 if report.quick else 3):
            shutil.rmtree(out, ignore_errors=True)
            start = time.perf_counter()
            packed = pack(folder, out, calibration.hot_set(), PackOptions(threads=harness.cores()))
            seconds.append(time.perf_counter() - start)
        case = f"{name}, {inputs:,} inputs"
        report.add(case, "packing, median", inputs / statistics.median(seconds), "inputs/s")
        report.add(case, "packing, fastest", inputs / min(seconds), "inputs/s")
        report.add(case, "packing, slowest run", max(seconds), "s")
        report.add(case, "hot inputs foreseen", 100 * calibration.hot_inputs.share, "%")
        report.add(case, "hot inputs packed", 100 * packed.hot_examples / inputs, "%")
