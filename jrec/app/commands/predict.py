"""``jrec predict``: the scores of a trained model on a raw log, a Parquet file or a dataset; labels are not needed."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT, DEVICES, add_join, add_quiet, by_name, number
from jrec.app.commands.processes import Company, add_process_arguments, in_company

if TYPE_CHECKING:
    from jrec.app.models.predictor import Piece
    from jrec.app.predict import LoadedRun

DESCRIPTION = """\
Score examples with a trained model.

CHECKPOINT is a run folder (its best checkpoint where it keeps one, else the latest), a folder of checkpoints that
Run.save wrote, or one checkpoint in either. INPUT is a raw log of the format that the training data was prepared
from (files, folders, URIs, - for standard input), Parquet files of its columns, or a dataset whose rows mean the same
(`jrec prepare --vocabulary-from`). Values that training did not see are scored as unknown; of a raw log the command
says how many each column has, and warns where they are many more than in training. Scores come in the order of the
input: row (its number from 0), score (the probability) and logit; label where the input has one; split where it is
a dataset. A run with several labels has score_TASK, logit_TASK and label_TASK of each. What is a number has prediction,
or prediction_TASK, in place of score and logit. --why K adds why_1, the feature whose absence would change the score
most, why_1_change, by how much, and so on to K. Memory does not grow with the input.

A model that ranks items reads histories (model.kind "hstu" or "sasrec"), of a Parquet file that column alone, or the
user's columns ("two_tower"), and writes the --k best items for each: row, rank (from 1), item (its value) and score (a
cosine). --why K then tells which of the user's features, and which items of the history (HISTORY=ITEM), move it.
Where Parquet, Arrow or JSON lines files have a column "candidates", lists of items, it writes the score of each of
these instead: row, item and score, empty of an item that training did not see."""
EPILOG = """examples:
  jrec predict runs/kaggle test.txt.gz --out scores.parquet
  jrec predict runs/clicks tomorrow.parquet --out scores.csv
  jrec predict runs/clicks tomorrow.parquet --keep user,item --out scores.parquet
  jrec predict runs/clicks tomorrow.parquet --why 3 --out scores.csv
  jrec predict runs/clicks tomorrow.parquet --max-unknown 0.3 --out scores.csv
  jrec predict runs/clicks tomorrow.csv --join users=new_users.csv --out scores.csv
  jrec predict runs/next histories.parquet --k 20 --out best.parquet
  jrec predict runs/next histories.parquet --k 5 --why 2 --out best.parquet
  jrec predict runs/next histories_and_candidates.parquet --out scores.parquet
  jrec predict runs/kaggle data/kaggle_tuesday --split test --out scores.parquet
  jrec predict runs/kaggle data/kaggle_tuesday --split test --why 3 --out why.csv
  jrec predict runs/terabyte day_23.gz --devices 8 --plan serving_plan --out scores.parquet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one checkpoint")
    parser.add_argument("input", metavar="INPUT", nargs="+", help="files of a raw log, Parquet files, or one dataset")
    parser.add_argument("--out", required=True, metavar="FILE", help="scores.parquet or scores.csv")
    parser.add_argument(
        "--k", type=COUNT, metavar="N", help="of a model that ranks items: how many for each example (default 10)"
    )
    parser.add_argument("--split", action="append", metavar="SPLIT", help="of a dataset: only this split (repeatable)")
    parser.add_argument(
        "--keep",
        metavar="COLUMN[,COLUMN]",
        help="of a raw log: copy these columns beside the scores, such as ids",
    )
    parser.add_argument(
        "--why",
        type=COUNT,
        metavar="K",
        help="beside each score the K features whose absence would change it most (docs/importance.md)",
    )
    add_join(parser)
    parser.add_argument(
        "--data", metavar="DATA", help="the training data, if it is no longer where the run says, for its vocabulary"
    )
    parser.add_argument(
        "--devices", type=DEVICES, default=1, metavar="N", help="predict on N devices, however many trained (default 1)"
    )
    parser.add_argument("--plan", default="", metavar="FILE", help="where rows live on N devices, by `jrec plan`")
    parser.add_argument(
        "--max-unknown",
        type=number(0, 1),
        metavar="SHARE",
        help="of a raw log: write no scores where more than this share of a feature's values is unknown, such as 0.2",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    add_quiet(parser)
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts; returns 0."""
    with in_company(args) as company:
        return _run(args, company)


def _run(args: argparse.Namespace, company: Company) -> int:
    from jrec.app.processes.same_run import evaluation_facts
    from jrec.errors import ConfigError
    from jrec.outputs import check_file, check_output

    out = pathlib.Path(args.out)
    options = {
        "split": args.split,
        "devices": args.devices,
        "inputs": len(args.input),
        "why": args.why,
        "join": sorted(by_name(args.join)),
    }
    company.meet(evaluation_facts(args.checkpoint, args.input[0], args.plan, **options))

    from jrec.app.predict import check_score_file, is_dataset, load_run, write_pieces
    from jrec.app.processes.mesh_processes import one_of_many
    from jrec.run.processes import first

    dataset = is_dataset(args.input[0])
    if dataset and len(args.input) > 1:
        raise ConfigError(f"{args.input[0]} is a dataset; give one dataset, or files of a raw log")
    if args.split and not dataset:
        raise ConfigError(f"--split is of datasets, but {args.input[0]} is none; leave it out")
    if args.join and dataset:
        raise ConfigError(f"--join is of raw logs, but {args.input[0]} is a dataset, which is joined; leave it out")
    if args.max_unknown is not None and dataset:
        raise ConfigError(f"--max-unknown is of raw logs, but {args.input[0]} is a dataset; leave it out")
    if args.keep and dataset:
        raise ConfigError(f"--keep copies columns of raw logs, but {args.input[0]} is a dataset; leave it out")
    read = [*args.input, args.checkpoint, args.data or "", args.plan, *by_name(args.join).values()]
    check_score_file(out)
    check_output(out, inputs=read)
    check_file(out, overwrite=args.overwrite)
    begin = time.perf_counter()
    with one_of_many():
        loaded = load_run(
            args.checkpoint, args.input[0] if dataset else args.data, devices=args.devices, plan=args.plan
        )
        predicted = _predicted(args, loaded, dataset)
        if not first():
            for _ in predicted:
                pass
            return 0
        shown = _shown(predicted, loaded, args, dataset)
        kept = loaded.kept(args.input, args.keep.split(",")) if args.keep else None
        nothing = loaded.nothing(why=args.why)
        count = write_pieces(out, shown, nothing, splits=dataset, overwrite=args.overwrite, kept=kept)
    seconds = time.perf_counter() - begin
    print(f"{out}: {count:,} scores of step {loaded.restored.saved.step:,} in {seconds:.1f} s", file=sys.stderr)
    return 0


def _predicted(args: argparse.Namespace, loaded: LoadedRun, dataset: bool) -> Iterator[Piece]:
    if dataset:
        return loaded.of_dataset(args.split or (), k=args.k, why=args.why)
    joined = by_name(args.join)
    return loaded.of_log(args.input, k=args.k, joined=joined, report=_say, max_unknown=args.max_unknown, why=args.why)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _shown(predicted: Iterator[Piece], loaded: LoadedRun, args: argparse.Namespace, dataset: bool) -> Iterator[Piece]:
    """The same predictions; a bar shows how many there are, of a dataset out of how many."""
    from jrec.progress import counted

    total = None
    if dataset:
        splits = loaded.restored.schema.splits
        total = sum(split.examples for name, split in splits.items() if not args.split or name in args.split)
    with counted("predicting", total, show=False if args.quiet else None) as advance:
        for one in predicted:
            advance(one.examples)
            yield one
