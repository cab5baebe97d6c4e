"""``jrec train``: a configuration and a dataset into a trained, evaluated model with a report."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT_OR_ZERO
from jrec.app.commands.processes import Company, add_process_arguments, in_company

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig
    from jrec.data.schema import Schema

DESCRIPTION = """\
Train a model as CONFIG says, evaluate it, and write a report.

Keys given as section.key=value win over the file. The run folder (out=, runs/NAME by default) receives checkpoints,
metrics.jsonl, TensorBoard files and report/ with report.html, which opens in any browser, and metrics.json. SIGINT
(Ctrl-C) and SIGTERM stop the run after the current step with a checkpoint (one more, two seconds later, gives that up);
--resume goes on from the latest one and computes the same bits as an uninterrupted run. With more epochs= or max_steps=
a run goes on for longer, also a finished one. If a run has taken all its steps already, --resume says so and exits with
code 0.

Whatever can be checked beforehand is checked within seconds: the run folder and its space, the dataset, the splits to
evaluate, and the steps of the learning rates.

On an NVIDIA GPU the kernels that the model needs are first checked and timed against XLA, once for a GPU, driver and
versions; that takes a few minutes (see jrec kernels). JREC_KERNELS=xla or pallas in the environment goes without."""
EPILOG = """examples:
  jrec train quickstart
  jrec train criteo-kaggle data.path=data/kaggle
  jrec init data/clicks --out clicks.toml && jrec train clicks.toml
  jrec train configs/criteo_kaggle.toml data.path=data/kaggle seed=1 out=runs/kaggle_seed1
  jrec train configs/rm1.toml optimizer.embedding.name=adam optimizer.embedding.learning_rate=0.001 max_steps=500
  jrec train configs/criteo_kaggle.toml data.path=data/kaggle_fae schedule=fae
  jrec train configs/criteo_kaggle.toml data.path=data/kaggle deterministic=true
  jrec train configs/quickstart.toml --resume
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from jrec.app.config import key_help, shipped_configs

    parser.epilog = (
        f"{EPILOG}\nkeys, their defaults (of hyperparameters, by optimizer) and what they take:\n{key_help()}"
    )
    parser.add_argument(
        "config", metavar="CONFIG", help=f"a TOML file, or one that comes with jrec: {', '.join(shipped_configs())}"
    )
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="what to change in it")
    add_process_arguments(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on where the run in that folder stopped, if any")
    existing.add_argument(
        "--resume-from",
        type=COUNT_OR_ZERO,
        metavar="STEP",
        help="go on from the checkpoint of this step; later ones, and what was logged since, are deleted",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace the run in that folder, if any")


def run(args: argparse.Namespace) -> int:
    """Trains; returns 0, also where a run that is to go on is finished, or 130 where a signal stopped the run."""
    with in_company(args) as company:
        return _run(args, company)


def _run(args: argparse.Namespace, company: Company) -> int:
    from jrec.app.config import load_config
    from jrec.app.preflight import check_start
    from jrec.app.processes.same_run import training_facts

    # Before JAX is loaded, so that a mistake is answered at once.
    config = load_config(args.config, args.overrides)
    resume = args.resume or args.resume_from is not None
    start = check_start(
        config, resume=resume, overwrite=args.overwrite, resume_from=args.resume_from, writes=company.first
    )
    if start.finished is not None and args.resume_from is None:
        print(_over(config.out, start.finished, start.steps), file=sys.stderr)
        return 0
    if config.deterministic:
        from jrec.app import determinism

        determinism.request()  # before JAX reads its flags
    if company.first:
        _say_unread(config, start.data.schema)
    flags = {"resume": args.resume, "resume-from": args.resume_from, "overwrite": args.overwrite}
    company.meet(training_facts(config, start.data, flags))

    from jrec.app.report import summary
    from jrec.app.reported_run import train_and_report
    from jrec.shown import counted

    outcome, content, page = train_and_report(
        config,
        start,
        resume=resume,
        overwrite=args.overwrite,
        resume_from=args.resume_from,
        writes=company.first,
    )
    if not outcome.finished:
        print(f"stopped after step {outcome.step:,}; the same command with --resume goes on", file=sys.stderr)
        return 130
    if content is not None:
        print(summary(content))
        print(f"{counted(outcome.step, 'step')}; report: {page}")
    return 0


def _say_unread(config: TrainConfig, schema: Schema) -> None:
    """Says which splits have no examples, which features a model leaves out, and which key does not apply to packs."""
    wanted = config.evaluate.final_splits
    if empty := [split for split in wanted if split not in schema.with_examples(wanted)]:
        held = f"{config.data.path} has no examples in split {' and '.join(empty)}"
        print(f"jrec: {held}, without which the report is", file=sys.stderr)
    if config.data.oov_rate and config.schedule == "fae":  # such as of `jrec init`, whose schedule is another
        print(f"jrec: data.oov_rate = {config.data.oov_rate} does not apply to the ids of packs", file=sys.stderr)
    model, kind = config.model, config.model.of_kind
    if (read := kind.reads(model)) and (names := kind.unread(model, schema)):
        print(f"jrec: model.kind {model.kind!r} reads only {read}, not {names}", file=sys.stderr)


def _over(folder: str, taken: int, steps: int) -> str:
    """What --resume says of a run that has no more to do."""
    if taken < steps:
        return (
            f"{folder} ended early, after step {taken:,} of {steps:,} (evaluate.early_stopping), and the report is"
            " there; a greater evaluate.early_stopping.patience goes on with it, --overwrite begins anew"
        )
    return (
        f"{folder} is finished: all {steps:,} steps are taken, and the report is there; more epochs= or max_steps= go"
        " on with it, --overwrite begins anew"
    )
