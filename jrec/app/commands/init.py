"""``jrec init``: a first configuration for a dataset."""

from __future__ import annotations

import argparse
import pathlib
import sys

from jrec.app.commands.arguments import MINUTES

DESCRIPTION = """\
Write a configuration that fits a dataset: dims, layers, batch size, optimizers, learning rates, epochs and early
stopping by its numbers of examples, features and rows, each with its reason in a comment. Of the few kinds of model
that may suit a dataset of up to 5 million training examples, each is trained for a short while, and the best by log
loss on the valid split is taken; --quick goes by the numbers alone, and --minutes goes on with variants of the best
one: dims, rates, weight decay and dropout, one at a time. Where pairs of ids have click rates of their own, it says so,
and which lines of the log's schema would make features of them. A dataset without labels that has histories, or any
with --next-item, gets a model of the next item: HSTU with and without times, or SASRec, by NDCG. --two-towers ITEM asks
for retrieval by features instead: which of them the item decides is found in the data, the others are the user's. Of
several labels the first decides; where it is a number, trials are compared by RMSE.

Probabilities are calibrated on the valid split, and dense features are read by pieces between their quantiles, so that
their scale does not matter. Edit the file as you like; `jrec train CONFIG` trains it, and the report compares the model
with logistic regression. A page beside it, of the same name and .html, shows the trials and the reasons in any
browser."""
EPILOG = """examples:
  jrec init data/clicks --out clicks.toml
  jrec init data/clicks --out clicks.toml --minutes 10 --overwrite
  jrec init data/plays --next-item --out plays.toml
  jrec init data/views --two-towers item --out towers.toml
  jrec train clicks.toml
  jrec train clicks.toml seed=1 out=runs/clicks_seed1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("data", metavar="DATASET", help="a dataset made by jrec prepare or jrec synth")
    parser.add_argument("--out", required=True, metavar="CONFIG.toml", help="the file to write")
    parser.add_argument("--quick", action="store_true", help="train nothing; choose the kind of model by a rule")
    parser.add_argument(
        "--minutes", type=MINUTES, metavar="M",
        help="try variants of the best kind of model, too, for about M minutes; trials are kept in CONFIG.trials.jsonl,"
        " so that the same command goes on after an interruption, or with more minutes",
    )  # fmt: skip
    ranked = parser.add_mutually_exclusive_group()
    ranked.add_argument(
        "--next-item", action="store_true",
        help="rank the item that follows a history, although the dataset has labels (without labels it always does)",
    )  # fmt: skip
    ranked.add_argument(
        "--two-towers", default="", metavar="ITEM", help="rank the values of this feature by those of the user"
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the file, if it exists")


def run(args: argparse.Namespace) -> int:
    """Writes the configuration and its page; returns 0."""
    from jrec.app.config import load_config
    from jrec.app.first_choice import first_choice
    from jrec.errors import ConfigError
    from jrec.outputs import new_file

    if args.quick and args.minutes is not None:
        raise ConfigError(f"--quick trains nothing, but --minutes is {args.minutes:g}; leave out one of them")
    out = pathlib.Path(args.out)
    page = out.with_suffix(".html")
    if page == out:
        raise ConfigError(f"--out is {out}, where the report would be; name the configuration, such as {out.stem}.toml")
    writes = {"overwrite": args.overwrite, "inputs": [args.data]}
    # The page gets its name first: where the configuration is new, so is the page.
    with new_file(out, **writes) as partial, new_file(page, **writes) as page_partial:
        options = {
            "quick": args.quick,
            "minutes": args.minutes,
            "next_item": args.next_item,
            "two_towers": args.two_towers,
        }
        choice = first_choice(args.data, args.out, say=_say, **options)
        partial.write_text(choice.config, encoding="utf-8")
        page_partial.write_text(choice.page, encoding="utf-8")
    load_config(out)
    print(f"{out}: train it by `jrec train {out}`; what was tried, and why this: {page}")
    return 0


def _say(line: str) -> None:
    print(f"jrec: {line}", file=sys.stderr)
