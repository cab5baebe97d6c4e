"""Pictures and figures of docs/ that come from real runs of the quickstart model, and from committed lines.

python -m scripts.site_pictures report runs/quickstart
python -m scripts.site_pictures timeline runs/piped/trace.json
python -m scripts.site_pictures rows
"""

from __future__ import annotations

import argparse
import html
import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from jrec.app.report.svg import HEIGHT, WIDTH, Axis, Mark, chart
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
ROWS_LINES = DOCS.parent / "benchmarks" / "results" / "cpu-2-cores" / "sparse_gradients.jsonl"
_ROWS_CASE = re.compile(r"(?P<rows>[\d,]+) rows x (?P<dim>\d+), (?P<bags>[\d,]+) bags of (?P<length>\d+), adagrad")
_ROWS_SIDES = {
    "plain": ("step, median, table[ids] and optax", "table[ids] and optax"),
    "jrec": ("step, median", "jrec.Table and jrec.optax"),
}
"""By class of the style the metric and the name of each side of draw_rows."""
_CHART_STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #59636e; }
.grid { stroke: #d4d9df; stroke-width: .6; fill: none; }
.solid { stroke-width: 2; fill: none; }
path.plain { stroke: #b26b00; } circle.plain { fill: #b26b00; }
path.jrec { stroke: #0072b2; } circle.jrec { fill: #0072b2; }
"""
"""As the light page of a report; the site makes the dark picture of it (scripts/site_hooks.py)."""


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
    """Draws the time of a step against the rows of its table, both axes logarithmic, as reports draw their charts.

    Args:
      lines: What ``benchmarks.sparse_gradients`` measured.
      out: The picture, SVG.
    """
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    cases = {case["case"]: match for case in records if (match := _ROWS_CASE.fullmatch(case["case"]))}
    marks = []
    for color, (metric, name) in _ROWS_SIDES.items():
        points = sorted(
            (int(cases[record["case"]]["rows"].replace(",", "")), record["value"])
            for record in records
            if record["metric"] == metric
        )
        x, y = zip(*points, strict=True)
        marks.append(Mark(kind="points", color=color, name=name, x=x, y=y))
    rows, times = [x for mark in marks for x in mark.x], [y for mark in marks for y in mark.y]
    bags, length, dim = next(iter(cases.values())).group("bags", "length", "dim")
    titles = f"A step of {bags} examples of {length} ids, by Adagrad", records[0]["device"]
    x_axis = Axis(label=f"rows of the table, of {dim} float32 each", low=min(rows), high=max(rows), logarithmic=True)
    y_axis = Axis(label="ms", low=3, high=max(times), logarithmic=True)
    out.write_text(_picture(chart(marks, x=x_axis, y=y_axis, title=titles[0]), marks, titles))


def _picture(figure: str, marks: Sequence[Mark], titles: Sequence[str]) -> str:
    """A report's chart as a picture of its own, with its colours, and two lines of title and a legend above it."""
    [inside] = re.findall(r'<svg class="chart"[^>]*>(.*?)</svg>', figure, re.DOTALL)
    legend = "".join(
        f'<circle class="{mark.color}" cx="{14 + 180 * place}" cy="-12" r="4"/>'
        f'<text x="{24 + 180 * place}" y="-8">{html.escape(mark.name)}</text>'
        for place, mark in enumerate(marks)
    )
    first, second = map(html.escape, titles)
    top, height = -64, HEIGHT + 64
    view = f'width="600" height="{1.5 * height:g}" viewBox="0 {top} {WIDTH} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="{first}">'
        f"\n<style>{_CHART_STYLE}</style>\n"
        f'<rect y="{top}" width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="10" y="-48">{first}</text><text x="10" y="-32">{second}</text>{legend}\n{inside}\n</svg>\n'
    )


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
    commands.add_parser(
        "rows", help="the home page's chart, a step against the rows of its table, from committed lines"
    )
    arguments = parser.parse_args()
    if arguments.command == "report":
        write_report(arguments.run)
    elif arguments.command == "rows":
        draw_rows(ROWS_LINES, DOCS / "images" / "rows.svg")
    else:
        draw_timeline(arguments.trace, arguments.first, arguments.last, DOCS / "images" / "timeline.svg")


if __name__ == "__main__":
    main()
