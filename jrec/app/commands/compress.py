"""``jrec compress``: trained tables into tensor trains, with the error and the metrics before and after."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT_OR_ZERO, add_quiet, integer, number, options_of, progress_of
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.compress import Compression

DESCRIPTION = """\
Compress tables of a trained model into tensor trains (TT-SVD), and write a run that `jrec eval` and
`jrec train --resume` take.

CHECKPOINT is a run folder (its best checkpoint where it keeps one, else the latest), a folder of checkpoints that
Run.save wrote, or one checkpoint in either; OUT is of the same kind. Tables may have been trained on devices or in host
memory; their rows are read from the checkpoint's files, some at a time. Prints each table's error and compression, and
AUC and log loss (RMSE and MAE where the label is a number, HR, NDCG and MRR of a model that ranks items) before and
after on the splits valid and test, of several labels the first one's; the same goes into
OUT/report/compression.json. To train on, raise epochs: `jrec train OUT/config.toml epochs=2 --resume`; what
Run.save wrote goes on by Run.restore. The slots of the cores begin fresh."""
EPILOG = """examples:
  jrec compress runs/kaggle --rank 32 --largest 7 --out runs/kaggle_tt32
  jrec compress runs/kaggle --rank 64 --min-rows 1000000 --out runs/kaggle_tt64
  jrec compress runs/kaggle/checkpoints/5000 --relative-error 0.1 --tables C3,C12 --out runs/kaggle_10_percent
  jrec compress runs/kaggle --relative-error 0.05 --rank 128 --largest 3 --cores 4 --out runs/kaggle_tt4
  jrec compress runs/kaggle --rank 32 --largest 7 --whole-rows 10000 --out runs/kaggle_hot_rows_whole
"""
REPORT_FILE = "compression.json"
METRICS = {"auc": "AUC", "log_loss": "log loss", "rmse": "RMSE", "mae": "MAE", "xauc": "XAUC", "mrr": "MRR"}
"""The metrics to print, of those that the model has, beside HR@k and NDCG@k."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one checkpoint")
    parser.add_argument("--out", required=True, metavar="RUN", help="the folder of the compressed run")
    parser.add_argument("--rank", type=integer(1, 2**16), metavar="R", help="the rank between neighbouring cores")
    parser.add_argument(
        "--relative-error",
        type=number(0, 1, below=True),
        metavar="E",
        help="take the least ranks, at most R, whose error is within this fraction of a table's norm",
    )
    parser.add_argument("--largest", type=COUNT_OR_ZERO, default=0, metavar="K", help="compress the K largest tables")
    parser.add_argument(
        "--min-rows", type=COUNT_OR_ZERO, default=0, metavar="N", help="compress tables of N rows or more"
    )
    parser.add_argument("--tables", default="", metavar="A,B", help="compress these tables")
    parser.add_argument(
        "--whole-rows",
        type=COUNT_OR_ZERO,
        default=0,
        metavar="N",
        help="keep each table's N most frequent rows uncompressed",
    )
    parser.add_argument("--cores", type=integer(2, 4), default=3, help="cores of a table (default 3)")
    parser.add_argument("--data", metavar="DATA", help="the dataset, if it is no longer where the run says")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in that folder, if any")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Compresses; returns 0."""
    from jrec.app.compress import Selection, compress_run
    from jrec.outputs import write_file

    tables = tuple(name for name in args.tables.split(",") if name)
    done = compress_run(
        args.checkpoint,
        args.out,
        options_of(Selection, args, tables=tables),
        data=args.data,
        overwrite=args.overwrite,
        progress=progress_of(args),
    )
    content = report(done)
    folder = done.run.folder / "report"
    write_file(folder / REPORT_FILE, json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(summary(content))
    print(f"step {done.run.saved.step:,}; run: {done.run.folder}; report: {folder / REPORT_FILE}")
    return 0


def report(done: Compression) -> JsonObject:
    """The content of ``compression.json``."""
    from jrec.app.report.ranking import evaluated
    from jrec.app.tables import described_tables, tables_total

    tables = {}
    for name, table in done.tables.items():
        entry: JsonObject = {"rows": table.rows, "dim": table.dim}
        if (shape := table.shape) is not None:
            entry |= {key: list(getattr(shape, key)) for key in ("row_factors", "dim_factors", "ranks")}
            compression = table.rows * table.dim / table.parameters
            entry |= {"whole_rows": table.whole_rows, "parameters": table.parameters, "compression": compression}
            entry["relative_error"] = table.relative_error
        tables[name] = entry | ({"note": table.note} if table.note else {})
    return {
        "step": done.run.saved.step,
        "tables": tables,
        "tables_total": tables_total(described_tables(done.run.layout.tables, done.run.config.tables.tt.cache)),
        "before": {split: evaluated(scores).to_dict() for split, scores in done.before.items()},
        "after": {split: evaluated(scores).to_dict() for split, scores in done.after.items()},
    }


def summary(content: JsonObject) -> str:
    """The report as lines for the terminal."""
    lines = [f"{'table':<16}{'rows':>13}{'ranks':>12}{'parameters':>13}{'smaller':>10}{'error':>10}"]
    for name, table in content["tables"].items():
        if "ranks" in table:
            ranks = "x".join(map(str, table["ranks"]))
            lines.append(
                f"{name:<16}{table['rows']:>13,}{ranks:>12}{table['parameters']:>13,}{table['compression']:>9,.1f}x"
                f"{table['relative_error']:>10.4f}"
            )
        if "note" in table:
            lines.append(f"  {name}: {table['note']}")
    total = content["tables_total"]
    lines.append(
        f"all tables: {total['bytes']:,} bytes instead of {total['uncompressed_bytes']:,}, {total['compression']:,.1f}"
        " times fewer parameters"
    )
    keys = dict.fromkeys(key for metrics in content["before"].values() for key in metrics)
    shown = {key: METRICS.get(key, key.upper()) for key in keys if key in METRICS or "@" in key}
    if content["before"]:
        lines.append(f"{'split':<8}" + "".join(f"{f'{name} before':>17}{'after':>10}" for name in shown.values()))
    for split, before in content["before"].items():
        after = content["after"][split]
        lines.append(f"{split:<8}" + "".join(f"{_cell(before[key]):>17}{_cell(after[key]):>10}" for key in shown))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:.6g}"
