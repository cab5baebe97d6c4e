"""``jrec init``: a first configuration for a dataset."""

from __future__ import annotations

import argparse
import pathlib
import sys

DESCRIPTION = """\
Write a configuration that fits a dataset: dims, layers, batch size, optimizers, learning rates, epochs and early
stopping by its numbers of examples, features and rows, each with its reason in a comment. Of the few kinds of model
that may suit a dataset of up to 5 million training examples, each is trained for a short while, and the best by log
loss on the valid split is taken; --quick goes by the numbers alone. Where pairs of ids have click rates of their own,
it says so, and which lines of the log's schema would make features of them.

Probabilities are calibrated on the valid split, and dense features are read by pieces between their quantiles, so that
their scale does not matter. Edit the file as you like; `jrec train CONFIG` trains it, and the report compares the model
with logistic regression. A page beside it, of the same name and .html, shows the trials and the reasons in any
browser."""
EPILOG = """examples:
  jrec init data/clicks --out clicks.toml
  jrec train clicks.toml
  jrec train clicks.toml seed=1 out=runs/clicks_seed1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("data", metavar="DATASET", help="a dataset made by jrec prepare or jrec synth")
    parser.add_argument("--out", required=True, metavar="CONFIG.toml", help="the file to write")
    parser.add_argument("--quick", action="store_true", help="train nothing; choose the kind of model by a rule")
    parser.add_argument("--overwrite", action="store_true", help="replace the file, if it exists")


def run(args: argparse.Namespace) -> int:
    """Writes the configuration and its page; returns 0."""
    from jrec.app.config import load_config
    from jrec.errors import ConfigError
    from jrec.outputs import new_file

    out = pathlib.Path(args.out)
    page = out.with_suffix(".html")
    if page == out:
        raise ConfigError(f"--out is {out}, where the report would be; name the configuration, such as {out.stem}.toml")
    writes = {"overwrite": args.overwrite, "inputs": [args.data]}
    # The page gets its name first: where the configuration is new, so is the page.
    with new_file(out, **writes) as partial, new_file(page, **writes) as page_partial:
        config, text = _first(args)
        partial.write_text(config, encoding="utf-8")
        page_partial.write_text(text, encoding="utf-8")
    load_config(out)
    print(f"{out}: train it by `jrec train {out}`; what was tried, and why this: {page}")
    return 0


def _first(args: argparse.Namespace) -> tuple[str, str]:
    """The configuration, as TOML, and its page, as HTML."""
    from jrec.app.first_config import LARGE, candidates, facts_of, first_config, render, warnings
    from jrec.app.first_page import first_page
    from jrec.app.first_trials import Trial, notes_of, try_all
    from jrec.app.pairs import proposal, telling_pairs
    from jrec.data.schema import DatasetError, Schema

    schema = Schema.load(args.data)
    if not schema.labels:
        raise DatasetError(
            f"{args.data} has no labels, and `jrec init` writes models of clicks; prepare it with them, or train a"
            " model that ranks items: docs/next_item.md has the configuration for histories, docs/two_towers.md for"
            " features of users and items"
        )
    schema.check_one_label("`jrec init` tries models of one label")
    facts = facts_of(args.data, schema)
    for line in warnings(facts):
        print(f"jrec: {line}", file=sys.stderr)
    chosen, notes, trials = candidates(facts), [], []
    if not args.quick and facts.valid and facts.examples < LARGE:

        def say(trial: Trial) -> None:
            auc = "" if trial.auc is None else f", AUC {trial.auc:.4f}"
            print(f"jrec: {trial.candidate.name}: valid log loss {trial.log_loss:.4f}{auc}", file=sys.stderr)

        trials = try_all(args.data, facts, chosen, on_trial=say)
        chosen, notes = [trial.candidate for trial in trials], notes_of(trials)
    if not args.quick:
        notes += (proposed := proposal(telling_pairs(args.data, schema)))
        print("".join(f"jrec: {line}\n" for line in proposed), file=sys.stderr, end="")
    keys = first_config(args.data, facts, chosen[0], best_step=trials[0].best_step if trials else 0)
    return render(schema.name, keys, facts, notes), first_page(schema.name, args.out, keys, facts, chosen, trials)
