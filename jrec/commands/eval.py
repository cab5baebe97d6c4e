"""``jrec eval``: the metrics of a checkpoint on a dataset."""

from __future__ import annotations

import argparse
import sys

from jrec.commands.arguments import COUNT_OR_ZERO, DEVICES
from jrec.commands.processes import Company, add_process_arguments, in_company

DESCRIPTION = """\
Evaluate a checkpoint on a dataset whose rows mean the same as in training.

CHECKPOINT is a run folder (its latest checkpoint is taken) or one checkpoint in it, RUN/checkpoints/STEP. The metrics
go to standard output as JSON, and with --out into a folder with plots."""
EPILOG = """examples:
  jrec eval runs/quickstart data/quickstart
  jrec eval runs/kaggle data/kaggle --devices 4 --plan serving_plan
  jrec eval runs/kaggle/checkpoints/5000 data/kaggle --split valid --out reports/kaggle_5000
  srun jrec eval runs/terabyte data/terabyte --devices 8 --distributed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one of its checkpoints")
    parser.add_argument("data", metavar="DATA", help="the training data, or another dataset whose rows mean the same")
    parser.add_argument("--split", default="test", help="train, valid or test (default test)")
    parser.add_argument(
        "--batches", type=COUNT_OR_ZERO, default=0, metavar="N", help="evaluate only the first N batches"
    )
    parser.add_argument(
        "--devices",
        type=DEVICES,
        default=1,
        metavar="N",
        help="evaluate on N devices, however many trained (default 1)",
    )
    parser.add_argument("--plan", default="", metavar="FILE", help="where rows live on N devices, by `jrec plan`")
    parser.add_argument("--out", metavar="DIR", help="write metrics.json and plots there")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates; returns 0."""
    with in_company(args) as company:
        return _run(args, company)


def _run(args: argparse.Namespace, company: Company) -> int:
    import json

    from jrec.train.same_run import evaluation_facts

    options = {"split": args.split, "batches": args.batches, "devices": args.devices}
    company.meet(evaluation_facts(args.checkpoint, args.data, args.plan, **options))
    company.join()

    from jrec.run.processes import first
    from jrec.train.evaluate import evaluate_checkpoint
    from jrec.train.mesh_processes import one_of_many
    from jrec.train.report import write_report
    from jrec.train.report.metrics import evaluate

    with one_of_many():
        result = evaluate_checkpoint(
            args.checkpoint, args.data, split=args.split, limit=args.batches, devices=args.devices, plan=args.plan
        )
    if not first():
        return 0
    metrics = evaluate(result.scores).to_dict()
    where = {"checkpoint": args.checkpoint, "data": args.data, "step": result.step, "split": args.split}
    print(json.dumps({**where, **metrics}, allow_nan=False))
    if args.out:
        write_report(
            args.out,
            config=result.config,
            schema=result.schema,
            scores={args.split: result.scores},
            parameters=result.parameters,
            steps=result.step,
        )
        print(f"report: {args.out}", file=sys.stderr)
    return 0
