"""Draws what `jrec reorder` reports of a dataset: the unique prefixes of a batch over batch sizes.

python -m benchmarks.studies.reorder data/kaggle --out prefixes.png
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jrec.data.bijection import FOLDER
from jrec.outputs import check_output, write_file
from jrec.prepare.reorder.driver import REPORT_FILE
from jrec.prepare.reorder.effect import Effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {  # Okabe and Ito: apart for the colour-blind too
    "random": ("#666666", "s:", "rows at random"),
    "frequency": ("#0072B2", "o--", "by frequency"),
    "reordered": ("#D55E00", "o-", "hot rows and communities"),
}
MOST_TABLES = 8
DPI = 150


def main() -> None:
    """Reads a dataset's report and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="a dataset that `jrec reorder` has reordered")
    parser.add_argument("--out", metavar="FILE", required=True, help="the PNG to write")
    arguments = parser.parse_args()
    check_output(arguments.out, inputs=[arguments.data])
    report = json.loads((pathlib.Path(arguments.data) / FOLDER / REPORT_FILE).read_text(encoding="utf-8"))
    effects = [Effect(**effect) for effect in report["effects"]]
    figure = plot_prefixes(effects, title=f"{report['dataset']}: unique prefixes of a batch")
    write_file(arguments.out, image(figure))


def plot_prefixes(effects: Sequence[Effect], *, title: str) -> Figure:
    """A row of panels for each table, the greatest first, and a column for each way of reading batches.

    Args:
      effects: Effects on any tables, splits and batch sizes.
      title: The figure's title.
    """
    from matplotlib.figure import Figure

    tables = list(dict.fromkeys(e.table for e in effects))[:MOST_TABLES]
    readings = list(dict.fromkeys((e.split, e.window_blocks) for e in effects))
    figure = Figure(figsize=(4.2 * len(readings), 3.2 * len(tables) + 0.6), layout="constrained")
    panels = figure.subplots(len(tables), len(readings), squeeze=False, sharey="row")
    for row, table in zip(panels, tables, strict=True):
        for axes, (split, window_blocks) in zip(row, readings, strict=True):
            shown = [e for e in effects if (e.table, e.split, e.window_blocks) == (table, split, window_blocks)]
            _draw(axes, sorted(shown, key=lambda e: e.batch_size))
            way = f"shuffled, {window_blocks} blocks" if window_blocks else "in order of time"
            axes.set_title(f"{table}: {split}, {way}", loc="left", fontsize="medium")
        row[0].set_ylabel("unique prefixes of a batch")
        row[0].set_ylim(bottom=0)  # shared by the row; only now, when all of it is drawn, does the top not freeze
        row[0].legend(fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("batch size (examples)")
    figure.suptitle(title, fontweight="bold")
    return figure


def _draw(axes: Axes, effects: Sequence[Effect]) -> None:
    sizes = [e.batch_size for e in effects]
    for name, (color, style, label) in STYLES.items():
        if all(name in e.prefixes for e in effects):
            axes.plot(sizes, [e.prefixes[name] for e in effects], style, color=color, label=label, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def image(figure: Figure) -> bytes:
    """The figure as PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()


if __name__ == "__main__":
    main()
