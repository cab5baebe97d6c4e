"""``jrec synth``: a synthetic dataset of published table sizes, with labels from a known model, the teacher."""

from __future__ import annotations

import argparse
import shlex
import sys

from jrec.app.commands.arguments import (
    COUNT,
    LARGE_COUNT,
    SEED,
    THREADS,
    add_quiet,
    fractions,
    integer,
    number,
    options_of,
    progress_of,
    ratio,
)

DESCRIPTION = """\
Make a synthetic dataset that `jrec train` reads: tables of published sizes, power-law ids whose popularity drifts from
day to day, correlated features, and labels drawn from a known model, the teacher. The teacher's own AUC and log
loss on each split are stored and printed: they are the upper bound for any model.
"""
EPILOG = """examples:
  jrec synth --like quickstart --rows 300000 --out data/quickstart
  jrec synth --like criteo-kaggle --rows 1000000 --seed 0 --out data/kaggle_like
  jrec synth --like criteo-terabyte --table-rows 1000000 --rows 5000000 --out data/terabyte_like
  jrec synth --like mlperf-dlrm-dcnv2 --scale 1/64 --rows 500000 --out data/mlperf_dlrm_dcnv2
  jrec synth --like taobao --rows 2000000 --out data/taobao_like
  jrec synth --like rm1 --rows 100000 --table-rows 500000 --exponent 1.2 --out data/rm1

The same seed gives the same dataset. The output folder appears when it is complete.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from jrec.prepare.synth.shapes import SHAPES

    parser.add_argument("--like", required=True, choices=tuple(SHAPES), help="whose tables and features to imitate")
    parser.add_argument("--rows", required=True, type=LARGE_COUNT, metavar="N", help="examples in all splits together")
    parser.add_argument("--seed", type=SEED, default=0, help="default 0")
    parser.add_argument("--out", required=True, metavar="DIR", help="the dataset folder to make")
    parser.add_argument(
        "--table-rows", type=integer(1, 2**31 - 2), metavar="N",
        help="for rm1 to rm4 the rows of every table (default 1,000,000), for the others a cap",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=ratio, metavar="A/B", help="multiply the rows of every table by this, such as 1/64"
    )
    parser.add_argument(
        "--exponent", type=number(0, 10), metavar="A",
        help="rank k of a table is drawn in proportion to k**-A (default 1.05; quickstart 1.2)",
    )  # fmt: skip
    parser.add_argument("--no-drift", action="store_true", help="popularity stays the same from day to day")
    parser.add_argument(
        "--split", type=fractions, default=(0.8, 0.1, 0.1), metavar="A,B,C",
        help="fractions of the examples, in order of time, for train, valid and test (default 0.8,0.1,0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=COUNT, metavar="N", help="examples a block (default up to 8192, in blocks below 8 MiB)"
    )
    parser.add_argument("--threads", type=THREADS, metavar="N", help="default: the cores, at most 8")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished dataset at DIR")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Makes the dataset and says what is in it."""
    from jrec.prepare.synth import SynthOptions, shape_like, synthesize

    schema = synthesize(
        shape_like(args.like, table_rows=args.table_rows, scale=args.scale, exponent=args.exponent),
        args.out,
        options_of(SynthOptions, args, drift=not args.no_drift),
        command=shlex.join(["jrec", *sys.argv[1:]]),
        progress=progress_of(args),
        report=lambda message: print(message, file=sys.stderr),
    )
    print(f"{args.out}: {schema.sizes}")
    for split, metrics in schema.ceiling.items():
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"ceiling on {split}: {shown}")
    return 0
