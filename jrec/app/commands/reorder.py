"""``jrec reorder``: rows that training reads together come to lie together."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import (
    COUNT,
    COUNT_OR_ZERO,
    LARGE_COUNT,
    SEED,
    add_quiet,
    integer,
    number,
    options_of,
    progress_of,
)

if TYPE_CHECKING:
    from jrec.prepare.reorder.options import ReorderOptions

DESCRIPTION = """\
Renumber the rows of a dataset's large tables so that rows which training reads together lie together (EL-Rec, section
IV): the most frequent rows stay on top, the others are grouped by the communities of a graph that joins rows of one
batch. Tensor-train tables then compute fewer distinct products per batch.

The shards are not touched: DATA gets a checksummed bijection for each table, and the loader applies it to every split.
A table whose new order does not pay on training's own batches stays as it is. DATA/reorder/ receives report.json.
Checkpoints belong to the numbering they were trained with and are refused with another one.

It pays where batches are read in order of time (data.window_blocks=0 in `jrec train`), and little or not where examples
are shuffled over many blocks; the report shows both."""
EPILOG = """examples:
  jrec reorder data/kaggle
  jrec reorder data/kaggle --out data/kaggle_reordered --batch-size 8192
  jrec reorder data/taobao --tables user_id item_id --hot-ratio 0.05 --always
  jrec reorder data/ml1m --min-rows 2000 --degree all --max-edges 20000000
  jrec reorder --verify data/kaggle
  jrec reorder --remove data/kaggle

Memory: about 250 bytes for each of --max-edges, 40 for each row of the largest table, and the loader's. The same seed
gives the same bijections. An interrupted run leaves DATA as it was.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from jrec.prepare.reorder.options import METHODS, ReorderOptions

    default = ReorderOptions()
    parser.add_argument("data", metavar="DATA", help="the dataset folder")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="only check the bijections, against every example")
    action.add_argument("--remove", action="store_true", help="only remove the bijections again")
    action.add_argument(
        "--out", metavar="DIR", help="make a reordered dataset that shares DATA's files; default: in place"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a finished dataset at --out")
    parser.add_argument("--tables", nargs="+", metavar="NAME", help="which tables (default: all large ones)")
    parser.add_argument(
        "--min-rows", type=COUNT, default=default.min_rows, metavar="N",
        help=f"smaller tables stay as they are (default {default.min_rows:,})",
    )  # fmt: skip
    parser.add_argument(
        "--hot-ratio", type=number(0, 1, below=True), default=default.hot_ratio, metavar="R",
        help=f"share of the rows that stays on top by frequency (default {default.hot_ratio:g})",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=integer(2, 2**31 - 1), default=default.batch_size, metavar="N",
        help=f"examples in a batch, as in training (default {default.batch_size:,})",
    )  # fmt: skip
    parser.add_argument(
        "--window-blocks", type=COUNT_OR_ZERO, default=default.window_blocks, metavar="N",
        help="as training's data.window_blocks; 0 (default) reads in order of time",
    )  # fmt: skip
    parser.add_argument(
        "--degree", type=_degree, default=default.degree, metavar="K",
        help=f"partners that a row of a batch draws, or 'all' pairs (default {default.degree:g})",
    )  # fmt: skip
    parser.add_argument(
        "--max-edges", type=LARGE_COUNT, default=default.max_edges, metavar="N",
        help=f"edges of a table's graph, which bound memory and K (default {default.max_edges:,})",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=METHODS, default=default.method, help=f"finds communities (default {default.method})"
    )
    gain = parser.add_mutually_exclusive_group()
    gain.add_argument(
        "--min-gain", type=number(-1, 1, below=True), default=default.min_gain, metavar="G",
        help=f"share of its prefixes that a table's new order has to save (default {default.min_gain:g})",
    )  # fmt: skip
    gain.add_argument("--always", action="store_true", help="keep every new order, whether it pays or not")
    parser.add_argument("--seed", type=SEED, default=default.seed, help=f"default {default.seed}")
    parser.add_argument(
        "--report-batch-sizes", type=COUNT, nargs="+", default=default.report_batch_sizes, metavar="N",
        help=f"default {' '.join(map(str, default.report_batch_sizes))}",
    )  # fmt: skip
    parser.add_argument(
        "--report-batches", type=COUNT, default=default.report_batches, metavar="N",
        help=f"batches that a figure of the report is the mean of (default {default.report_batches})",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=integer(0, 4096), default=default.threads, metavar="N", help="that read; no result changes"
    )
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Reorders, verifies or restores; returns 0."""
    from jrec.errors import value_errors_are_config_errors
    from jrec.prepare.reorder import reorder, restore, summary
    from jrec.prepare.reorder.options import ReorderOptions
    from jrec.prepare.reorder.verify import verify

    progress = progress_of(args)
    with value_errors_are_config_errors("jrec reorder"):
        lists = {name: tuple(value) for name in ("tables", "report_batch_sizes") if (value := getattr(args, name))}
        options = options_of(ReorderOptions, args, **lists, **({"min_gain": None} if args.always else {}))
    if args.verify or args.remove:
        _refuse_unread(options, args)
    if args.verify:
        verified = verify(args.data, progress=progress)
        tables = ", ".join(f"{name} ({moved:,} rows moved)" for name, moved in verified.moved.items()) or "none"
        print(
            f"{args.data}: reordered tables: {tables}; {verified.examples:,} examples are unchanged but for their rows"
        )
        return 0
    if args.remove:
        print(f"{args.data}: stored order again; tables that were reordered: {', '.join(restore(args.data)) or 'none'}")
        return 0
    outcome = reorder(
        args.data,
        options,
        out=args.out,
        overwrite=args.overwrite,
        command=shlex.join(["jrec", *sys.argv[1:]]),
        progress=progress,
        report=lambda message: print(message, file=sys.stderr),
    )
    for line in summary(outcome):
        print(line)
    print(f"report: {args.out or args.data}/reorder")
    return 0


def _refuse_unread(options: ReorderOptions, args: argparse.Namespace) -> None:
    """Refuses what only a new order reads, such as tables that --remove would not choose among.

    Raises:
      ConfigError: Naming an option.
    """
    from jrec.errors import ConfigError
    from jrec.prepare.reorder.options import ReorderOptions

    default = dataclasses.replace(ReorderOptions(), threads=options.threads)  # which change no result
    unread = [name for name, value in vars(options).items() if value != getattr(default, name)]
    unread = ["always" if name == "min_gain" and args.always else name for name in unread]
    if unread := [*unread, *(["overwrite"] if args.overwrite else [])]:
        action = "--verify" if args.verify else "--remove"
        option = unread[0].replace("_", "-")
        raise ConfigError(f"--{option} is given with {action}, which takes all of DATA as it is; leave it out")


def _degree(text: str) -> float:
    return math.inf if text == "all" else number(0, 1e9, above=True)(text)
