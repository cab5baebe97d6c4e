"""``jrec access``: how often every row of a dataset is accessed."""

from __future__ import annotations

import argparse

from jrec.app.commands.arguments import SEED, add_quiet, number, progress_of

DESCRIPTION = """\
Count how often every row of every table is accessed, exactly or from a sample, and write an access profile.

For the training split, the dataset already has exact counts. A sample reads only its share of the blocks; rows that it
hits rarely get the mean of their neighbours in frequency order."""
EPILOG = """examples:
  jrec access data/kaggle --out kaggle.access
  jrec access data/kaggle --sample 0.05 --seed 1 --out kaggle.access
  jrec access data/kaggle --split test --out test.access
  jrec replan plan test.access
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("data", metavar="DATA", help="a dataset folder")
    parser.add_argument("--out", metavar="FILE", help="write the profile there")
    parser.add_argument(
        "--sample", type=number(0, 1, above=True), metavar="X", help="read this share of the blocks, such as 0.05"
    )
    parser.add_argument("--split", default="train", help="train, valid or test (default train)")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the sample (default 0)")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Counts, and says how uneven the accesses are."""
    from jrec.access.count import exact_profile, sampled_profile
    from jrec.data.schema import Schema
    from jrec.outputs import check_output

    if args.out:
        check_output(args.out, inputs=[args.data])
    schema = Schema.load(args.data)
    schema.check_numbered(
        "`jrec access` counts the accesses of rows",
        remedy="`jrec plan` takes them as accessed alike, and a run with its plan counts them itself, in RUN/access",
    )
    progress = progress_of(args)
    if args.sample is None:
        profile = exact_profile(args.data, schema, split=args.split, progress=progress)
    else:
        profile = sampled_profile(
            args.data, schema, fraction=args.sample, split=args.split, seed=args.seed, progress=progress
        )
    if args.out:
        profile.save(args.out)
    print(summary(profile))
    return 0


def summary(profile) -> str:
    """A line a table: rows, accesses an example, and the share that its most accessed rows have."""
    import numpy as np

    lines = [f"{profile.source}", f"{'table':<24}{'rows':>14}{'ids/example':>13}{'top 0.1 %':>11}{'top 1 %':>10}"]
    for table in profile.tables:
        order = np.argsort(-table.counts, kind="stable")
        rows = np.append(0, np.cumsum(np.diff(table.starts)[order]))
        mass = np.append(0.0, np.cumsum(table.counts[order] * np.diff(table.starts)[order]))
        top = np.interp([max(1.0, 0.001 * table.rows), max(1.0, 0.01 * table.rows)], rows, mass)
        shares = 100 * top / max(float(mass[-1]), 1e-300)
        lines.append(
            f"{table.name:<24}{table.rows:>14,}{table.accesses / profile.examples:>13.3f}"
            f"{shares[0]:>9.1f} %{shares[1]:>8.1f} %"
        )
    return "\n".join(lines)
