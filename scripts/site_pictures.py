"""Pictures and figures of docs/ that come from real runs of the quickstart model, and from committed lines.

python -m scripts.site_pictures report runs/quickstart
python -m scripts.site_pictures timeline runs/piped/trace.json
python -m scripts.site_pictures rows benchmarks/results/cpu-2-cores/sparse_gradients.jsonl
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import tempfile
from typing import Any

from scripts import chromium

DOCS = pathlib.Path(__file__).parents[1] / "docs"
REPORT_PAGE = DOCS / "sample_report.md"
PICTURES = {1280: 1700, 390: 1700}
"""Heights, by width, of the report's pictures: on a desk and on a phone, in pixels."""
BLOCK = re.compile(r"(?<=<!-- report -->\n).*?(?=<!-- end -->)", re.DOTALL)
COLUMNS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
}
STAGES = ("read", "plan", "host gather", "transfer", "device step", "transfer back", "host store")


def report_table(metrics: dict[str, Any]) -> str:
    """The metrics of a run's last split beside its baselines and its ceiling, as a Markdown table.

    Args:
      metrics: What ``RUN/report/metrics.json`` holds, of a synthetic dataset.
    """
    split = list(metrics["splits"])[-1]
    rows = {
        "**the model**": metrics["splits"][split],
        "logistic regression": metrics["baselines"]["logistic_regression"]["splits"][split],
        f"popularity of {metrics['baselines']['popularity']['feature']}": metrics["baselines"]["popularity"]["splits"][
            split
        ],
        "the teacher that made the labels (ceiling)": metrics["ceiling"][split],
    }
    lines = [f"| {split} split | {' | '.join(COLUMNS.values())} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, values in rows.items():
        shown = [f"{values[key]:.4f}" if key in values else "" for key in COLUMNS]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def write_report(run: pathlib.Path) -> None:
    """Copies a run's report, takes pictures of it, and fills the table of docs/sample_report.md."""
    metrics = json.loads((run / "report" / "metrics.json").read_text())
    page = REPORT_PAGE.read_text()
    REPORT_PAGE.write_text(BLOCK.sub(lambda _: report_table(metrics), page))
    folder = DOCS / "images" / "report"
    shutil.copyfile(run / "report" / "report.html", folder / "quickstart.html")
    for width, height in PICTURES.items():
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place)
            chromium.look_at((folder / "quickstart.html").read_text(), file, width=width, height=height)
            _save_small(file / f"{width}.png", folder / f"{width}.png", (width, height))


def _save_small(picture: pathlib.Path, out: pathlib.Path, size: tuple[int, int]) -> None:
    """Cuts a window's picture to the page, in 64 colours: a report has few, and the file is a third as large."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").crop((0, 0, *size)).quantize(64).save(out, optimize=True)


def spans_between(events: list[dict[str, Any]], first: int, last: int) -> list[tuple[str, int, float, float]]:
    """Spans of batches ``first`` to ``last``: (stage, batch, start, length), in milliseconds from the first start."""
    spans = [
        (event["cat"], event["args"]["batch"], event["ts"] / 1e3, event["dur"] / 1e3)
        for event in events
        if event["ph"] == "X" and event["cat"] in STAGES and first <= event["args"]["batch"] <= last
    ]
    if not spans:
        raise SystemExit(f"the trace has no span of batches {first} to {last}; name others by --first and --last")
    origin = min(start for _, _, start, _ in spans)
    return [(stage, batch, start - origin, length) for stage, batch, start, length in spans]


def draw_timeline(trace: pathlib.Path, first: int, last: int, out: pathlib.Path) -> None:
    """Draws when each stage of the host tier's pipeline worked on which batch.

    Args:
      trace: ``RUN/trace.json`` of a run with ``log.trace=true``.
      first: The first batch to draw.
      last: The last one.
      out: The picture, SVG.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 3.4))
    for stage, batch, start, length in spans_between(json.loads(trace.read_text())["traceEvents"], first, last):
        row = STAGES.index(stage)
        axes.broken_barh([(start, length)], (row - 0.4, 0.8), facecolor=f"C{batch % 10}", edgecolor="white", lw=0.3)
        if length > 2:
            axes.text(start + length / 2, row, str(batch), ha="center", va="center", color="white", fontsize=8)
    axes.set(yticks=range(len(STAGES)), yticklabels=STAGES, xlabel="milliseconds; one colour a batch")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def draw_rows(lines: pathlib.Path, out: pathlib.Path) -> None:
    """Draws the time of a step against the rows of its table, both axes logarithmic.

    Args:
      lines: What ``benchmarks.sparse_gradients`` measured.
      out: The picture, SVG.
    """
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.4))
    sides = {"step, median, table[ids] and optax": "table[ids] and optax", "step, median": "jrec.Table and jrec.optax"}
    for metric, label in sides.items():
        points = [
            (int(record["case"].split(" ")[0].replace(",", "")), record["value"])
            for record in records
            if record["metric"] == metric
        ]
        axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xlabel="rows of the table, of 16 float32 each", ylabel="a step, ms", ylim=(1, None))
    axes.set_title(f"4,096 bags of 20 ids, Adagrad; {records[0]['device']}", fontsize=9)
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "jrec", "svg.fonttype": "none", "font.size": 10}
    from matplotlib import pyplot

    return pyplot


def main() -> None:
    """Reads the command line and writes into docs/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="the sample report, from a run's folder")
    report.add_argument("run", type=pathlib.Path)
    timeline = commands.add_parser("timeline", help="the pipeline's timeline, from a run's trace.json")
    timeline.add_argument("trace", type=pathlib.Path)
    timeline.add_argument("--first", type=int, default=514, help="first batch to draw")
    timeline.add_argument("--last", type=int, default=519, help="last batch to draw")
    rows = commands.add_parser("rows", help="a step against the rows of its table, from committed lines")
    rows.add_argument("lines", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "report":
        write_report(arguments.run)
    elif arguments.command == "rows":
        draw_rows(arguments.lines, DOCS / "images" / "rows.svg")
    else:
        draw_timeline(arguments.trace, arguments.first, arguments.last, DOCS / "images" / "timeline.svg")


if __name__ == "__main__":
    main()
