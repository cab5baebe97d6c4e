"""FAE's Figures 2, 6, 7 and 9 for a dataset: how much is hot, at which threshold, and how good samples are.

  python -m benchmarks.studies.fae.figures data/kaggle --budget 24MB --out figures

Hot rows are chosen by the dataset's exact counts, or with --sample as the paper does; the Rand-Em Box's estimates are
drawn beside the truth either way.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.studies.fae.report import summary_table
from benchmarks.studies.reorder import image
from jrec.access.calibrate import CalibrateOptions, Calibration, SampleOptions, calibrate
from jrec.access.calibrate.calibrator import boxes_of, count_accesses
from jrec.access.calibrate.sample import hot_rows
from jrec.access.count import Block
from jrec.access.profile import AccessProfile, TableProfile
from jrec.app.commands.arguments import number, size
from jrec.data.blocks import ListColumn, ShardReader
from jrec.data.schema import Schema, Table
from jrec.outputs import check_output, write_file

POINTS = 16  # thresholds of a curve
MOST_TABLES = 8
FILES = ("figure2_hot_size.png", "figure6_threshold.png", "figure7_profile.png", "figure9_estimate.png")
BLUE, ORANGE, GREY, GREEN = "#0072B2", "#D55E00", "#999999", "#009E73"  # Okabe and Ito


def main() -> None:
    """Calibrates, prints the estimates and draws the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="a dataset folder")
    parser.add_argument("--out", metavar="DIR", required=True, help="the figures' folder, made if it is not there")
    parser.add_argument("--budget", type=size(0), default=256_000_000, metavar="SIZE", help="default 256MB")
    parser.add_argument("--sample", type=number(0, 1, above=True), metavar="X", help="decide by a sample, as the paper")
    arguments = parser.parse_args()
    check_output(arguments.out, inputs=[arguments.data])
    sample = None if arguments.sample is None else SampleOptions(rate=arguments.sample)
    for path in draw_figures(arguments.data, CalibrateOptions(budget=arguments.budget, sample=sample), arguments.out):
        print(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """What the figures show, at thresholds descending: megabytes of hot rows, and the share of inputs that are hot."""

    thresholds: np.ndarray
    true_megabytes: np.ndarray
    estimated_megabytes: np.ndarray
    bound_megabytes: np.ndarray
    hot_inputs: np.ndarray


def draw_figures(
    folder: str | os.PathLike[str], options: CalibrateOptions, into: str | os.PathLike[str]
) -> list[pathlib.Path]:
    """Calibrates a dataset, prints the table of estimates and draws the figures; returns the files, PNG.

    Args:
      folder: The dataset.
      options: How to calibrate.
      into: The folder to write to, made if it is not there.
    """
    from rich.console import Console

    schema = Schema.load(folder)
    calibration = calibrate(folder, options, schema=schema)
    profile, _ = count_accesses(folder, schema, options)
    Console(width=120).print(summary_table(calibration, schema, profile, options))
    curve = threshold_curve(folder, schema, options)
    figures = (
        _figure2(calibration),
        _figure6(calibration, curve, options),
        _figure7(folder, schema, profile),
        _figure9(calibration, curve, options),
    )
    paths = [pathlib.Path(into) / name for name in FILES]
    for path, figure in zip(paths, figures, strict=True):
        write_file(path, image(figure))
    return paths


def threshold_curve(folder: str | os.PathLike[str], schema: Schema, options: CalibrateOptions) -> Curve:
    """Sizes and hot inputs at thresholds from the greatest count to the least; the Rand-Em Box's beside the truth."""
    profile, judged = count_accesses(folder, schema, options)
    profiles = {t.name: profile.table(t.name) for t in schema.tables if options.is_large(t)}
    small = sum(t.rows for t in schema.tables if not options.is_large(t))
    boxes = boxes_of(schema, profiles, options.sample or SampleOptions())
    inputs = InputSample(folder, schema, judged, profiles)
    positive = [p.counts[p.counts > 0] for p in profiles.values()]
    shares = np.concatenate([np.ones(1), *positive])
    cutoffs = np.geomspace(shares.max(), shares.min(), POINTS)
    scale = options.row_bytes / 1e6
    estimates = [[box.estimate(cutoff) for box in boxes] for cutoff in cutoffs]
    return Curve(
        thresholds=cutoffs / profile.examples,
        true_megabytes=scale * np.array([small + sum(hot_rows(p, c) for p in profiles.values()) for c in cutoffs]),
        estimated_megabytes=scale * np.array([small + sum(e.rows for e in row) for row in estimates]),
        bound_megabytes=scale * np.array([small + sum(e.bound for e in row) for row in estimates]),
        hot_inputs=np.array([inputs.share(cutoff) for cutoff in cutoffs]),
    )


class InputSample:
    """The least accessed row of every example of some blocks: an example is hot where that row is.

    Args:
      folder, schema: The dataset.
      blocks: Blocks of its training split.
      profiles: The accesses of tables whose rows may be cold; others are hot as a whole.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema,
        blocks: Sequence[Block],
        profiles: Mapping[str, TableProfile],
    ):
        readers = [ShardReader(folder, shard) for shard in schema.splits["train"].shards]
        self._least: list[np.ndarray] = []
        for shard, block in blocks:
            columns = readers[shard].read(block)
            label = columns["label"]
            least = np.full(len(label.offsets) - 1 if isinstance(label, ListColumn) else len(label), np.inf)
            for feature in schema.categorical:
                if feature.table not in profiles:
                    continue
                column, profile = columns[feature.name], profiles[feature.table]
                if not isinstance(column, ListColumn):
                    np.minimum(least, profile.count_of(column), out=least)
                    continue
                example = np.repeat(np.arange(len(least)), np.diff(column.offsets))
                np.minimum.at(least, example, profile.count_of(column.values))
            self._least.append(np.sort(least))

    def share(self, cutoff: float) -> float:
        """The share of examples that read no row below the cutoff."""
        hot = sum(len(b) - np.searchsorted(b, cutoff, side="left") for b in self._least)
        return float(hot / sum(map(len, self._least)))


def _figure2(calibration: Calibration):
    figure, axes = _panel(f"{calibration.name}: size of tables and of their hot rows", "MB")
    shown = sorted(calibration.tables, key=lambda t: -t.rows)[:MOST_TABLES]
    sizes = [sum(t.rows for t in calibration.tables), *(t.rows for t in shown)]
    hot = [sum(t.hot for t in calibration.tables), *(t.hot for t in shown)]
    places = np.arange(len(sizes))
    megabytes = calibration.row_bytes / 1e6
    axes.bar(places - 0.2, np.array(sizes) * megabytes, 0.4, color=GREY, label="all rows")
    axes.bar(places + 0.2, np.maximum(hot, 1e-9) * megabytes, 0.4, color=ORANGE, label="hot rows")
    axes.axhline(calibration.options["budget"] / 1e6, color=BLUE, linestyle="--", label="budget")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5 * megabytes * min(filter(None, hot), default=1))
    axes.set_xticks(places, ["all", *(t.name for t in shown)], rotation=30, ha="right")
    axes.legend(fontsize="small")
    return figure


def _figure6(calibration: Calibration, curve: Curve, options: CalibrateOptions):
    figure, axes = _panel(f"{calibration.name}: the threshold's price and gain", "hot rows (MB)")
    axes.plot(curve.thresholds, curve.true_megabytes, "o-", color=ORANGE, label="size of hot rows")
    axes.axhline(options.budget / 1e6, color=GREY, linestyle=":", label="budget")
    axes.set_yscale("log")
    other = axes.twinx()
    other.plot(curve.thresholds, 100 * curve.hot_inputs, "s--", color=BLUE, label="hot inputs")
    other.set_ylabel("hot inputs (%)")
    other.set_ylim(0, 100)
    _thresholds(axes, calibration)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize="small", loc="upper left")
    return figure


def _figure7(folder: str | os.PathLike[str], schema: Schema, profile: AccessProfile):
    table = max(schema.tables, key=lambda t: t.rows)
    figure, axes = _panel(f"{schema.name}: accesses of the rows of table {table.name}", "accesses a million inputs")
    edges = np.unique(np.geomspace(1, table.rows + 1, 80).astype(np.int64)) - 1
    full = _full(folder, schema, table)
    if full is not None:
        total = schema.splits["train"].examples
        axes.plot(edges[:-1] + 1, 1e6 * _means(full, edges) / total, color=GREY, linewidth=3, label="all inputs")
    sampled = _means(profile.table(table.name), edges)
    label = f"{profile.examples:,.0f} inputs"
    axes.plot(edges[:-1] + 1, 1e6 * sampled / profile.examples, "o", markersize=3, color=BLUE, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("row, by frequency")
    axes.legend(fontsize="small")
    return figure


def _figure9(calibration: Calibration, curve: Curve, options: CalibrateOptions):
    title = f"{calibration.name}: the Rand-Em Box's estimate against the truth"
    figure, axes = _panel(title, "hot rows (MB)")
    axes.plot(curve.thresholds, curve.true_megabytes, color=GREY, linewidth=3, label="measured")
    axes.plot(curve.thresholds, curve.estimated_megabytes, "o", markersize=4, color=BLUE, label="estimated")
    confidence = 100 * (options.sample or SampleOptions()).confidence
    axes.plot(
        curve.thresholds, curve.bound_megabytes, "^", markersize=4, color=GREEN, label=f"{confidence:g} % upper bound"
    )
    axes.set_yscale("log")
    _thresholds(axes, calibration)
    axes.legend(fontsize="small")
    return figure


def _panel(title: str, ylabel: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel(ylabel)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top"]].set_visible(False)
    return figure, axes


def _thresholds(axes, calibration: Calibration) -> None:
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("threshold (share of inputs that access a row)")
    if calibration.threshold:
        axes.axvline(calibration.threshold, color=GREEN, linewidth=1, label="chosen")


def _full(folder: str | os.PathLike[str], schema: Schema, table: Table) -> TableProfile | None:
    """The counts that the dataset holds, if it does."""
    if table.counts is None:
        return None
    path = schema.check_file(folder, table.counts)
    return TableProfile.from_counts(table.name, np.load(path, mmap_mode="r", allow_pickle=False))


def _means(profile: TableProfile, edges: Sequence[int] | np.ndarray) -> np.ndarray:
    mass = np.append(0.0, np.cumsum(profile.counts * np.diff(profile.starts)))
    means = np.diff(np.interp(edges, profile.starts, mass)) / np.diff(edges)
    return np.where(means > 0, means, np.nan)


if __name__ == "__main__":
    main()
