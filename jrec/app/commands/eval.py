"""``jrec eval``: the metrics of a checkpoint on a dataset."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT, COUNT_OR_ZERO, DEVICES, options_of
from jrec.app.commands.processes import Company, add_process_arguments, in_company
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.importance import ImportanceOptions

DESCRIPTION = """\
Evaluate a checkpoint on a dataset whose rows mean the same as in training.

CHECKPOINT is a run folder (its best checkpoint where it keeps one, else the latest), a folder of checkpoints that
Run.save wrote, or one checkpoint in either. The metrics go to standard output: on a terminal as a table, elsewhere or
with --json as JSON, with the share of each feature's values that training did not see; and with --out into a folder
with report.html, beside those of baselines that are fitted to the training data (evaluate.baselines of the run's
configuration)."""
EPILOG = """examples:
  jrec eval runs/quickstart data/quickstart
  jrec eval runs/kaggle data/kaggle --devices 4 --plan serving_plan
  jrec eval runs/kaggle/checkpoints/5000 data/kaggle --split valid --out reports/kaggle_5000
  jrec eval runs/movielens data/movielens --group user_id
  jrec eval runs/movielens data/movielens --importance --group-features genres,year --repeats 3
  jrec eval runs/quickstart data/quickstart --json
  srun jrec eval runs/terabyte data/terabyte --devices 8 --distributed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run folder, or one checkpoint")
    parser.add_argument("data", metavar="DATA", help="the training data, or another dataset whose rows mean the same")
    parser.add_argument("--split", default="test", help="train, valid or test (default test)")
    parser.add_argument(
        "--batches", type=COUNT_OR_ZERO, default=0, metavar="N", help="evaluate only the first N batches"
    )
    parser.add_argument(
        "--group", metavar="FEATURE", help="AUC within this feature's values (default: evaluate.group of the run)"
    )
    parser.add_argument(
        "--importance",
        action="store_true",
        help="tell how much worse the metrics get when each feature's values go to other examples (docs/importance.md)",
    )
    parser.add_argument(
        "--repeats", type=COUNT, metavar="N", help="permutations of each feature for --importance (default 5)"
    )
    parser.add_argument(
        "--group-features",
        action="append",
        default=[],
        metavar="A,B",
        help="features that --importance permutes together, such as a column and its crosses (repeatable)",
    )
    parser.add_argument(
        "--sample",
        type=COUNT_OR_ZERO,
        metavar="N",
        help="examples of the split that --importance scores, a random sample (default 100,000; 0: all)",
    )
    parser.add_argument(
        "--devices",
        type=DEVICES,
        default=1,
        metavar="N",
        help="evaluate on N devices, however many trained (default 1)",
    )
    parser.add_argument("--plan", default="", metavar="FILE", help="where rows live on N devices, by `jrec plan`")
    parser.add_argument("--out", metavar="DIR", help="write report.html and metrics.json there")
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal, too")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates; returns 0."""
    with in_company(args) as company:
        return _run(args, company)


def _run(args: argparse.Namespace, company: Company) -> int:
    import json

    from jrec.app.processes.same_run import evaluation_facts
    from jrec.data.schema import Schema

    names = ("split", "batches", "devices", "importance", "repeats", "group_features", "sample")
    options = {name.replace("_", "-"): getattr(args, name) for name in names}
    company.meet(evaluation_facts(args.checkpoint, args.data, args.plan, **options))

    from jrec.app.comparisons import comparison_sections
    from jrec.app.evaluate import evaluate_checkpoint
    from jrec.app.preflight import check_group
    from jrec.app.processes.mesh_processes import one_of_many
    from jrec.app.report import write_report
    from jrec.app.report.logs import METRICS_FILE
    from jrec.app.report.ranking import evaluated, evaluated_by_task, has_examples
    from jrec.app.report.terminal import judgement_lines, score_lines
    from jrec.app.report.writing import PAGE_FILE
    from jrec.app.run_record import find_run
    from jrec.run.processes import first

    if args.group:
        check_group(args.group, Schema.load(args.data), key="--group")
    with one_of_many():
        result = evaluate_checkpoint(
            args.checkpoint, args.data, split=args.split, limit=args.batches, devices=args.devices, plan=args.plan,
            importance=_importance(args),
        )  # fmt: skip
    if not first():
        return 0
    by_task = evaluated_by_task(result.scores)
    # Where no example has the first of several labels, the others have metrics; a report has its sections of the first.
    first_known = has_examples(result.scores) or not by_task or bool(args.out)
    metrics: JsonObject = evaluated(result.scores).to_dict() if first_known else {}
    if by_task:
        metrics["tasks"] = {task: evaluation.to_dict() for task, evaluation in by_task.items()}
    config, scores = result.config, {args.split: result.scores} if first_known else {}
    if args.group:
        config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, group=args.group))
    same = result.trained_on == result.schema.identity and not args.batches
    sections = comparison_sections(config, result.schema, scores, whole=same, slices=bool(args.out))
    sections |= {} if result.importance is None else {"importance": result.importance}
    where = {"checkpoint": args.checkpoint, "data": args.data, "step": result.step, "split": args.split}
    printed = {name: section for name, section in sections.items() if name != "slices"}
    unknown = result.unknown
    if args.json or not sys.stdout.isatty():
        print(json.dumps({**where, **metrics, **printed, "unknown_values": unknown.to_dict()}, allow_nan=False))
    else:
        tasks = {task: {"splits": {args.split: own}} for task, own in metrics.get("tasks", {}).items()}
        content = {"splits": {args.split: metrics}, "ceiling": result.schema.ceiling, **printed}
        content |= config.model.of_kind.sections(config, scores) | ({"tasks": tasks} if tasks else {})
        print("\n".join(score_lines(content)))
        read = metrics["examples"] if first_known else max(own.examples for own in by_task.values())
        print(f"step {result.step:,} of {args.checkpoint}, {read:,} examples of {args.data}")
    if not first_known:
        task = config.model.multi_task.tasks[0]
        print(f"no example of split {args.split!r} has the label {task!r}; the others are scored", file=sys.stderr)
    for remark in unknown.remarks():
        print(remark, file=sys.stderr)
    if args.out:
        history = find_run(args.checkpoint)[0].folder / METRICS_FILE
        content = write_report(
            args.out,
            config=config,
            schema=result.schema,
            scores=scores,
            parameters=result.parameters,
            steps=result.step,
            history=history if history.exists() else None,  # folders of Run.save have none
            sections=sections,
        )
        for line in judgement_lines(content):
            print(line, file=sys.stderr)
        print(f"report: {pathlib.Path(args.out) / PAGE_FILE}", file=sys.stderr)
    return 0


def _importance(args: argparse.Namespace) -> ImportanceOptions | None:
    """What --importance and the arguments beside it ask for.

    Raises:
      ConfigError: If one of these is given without it.
    """
    from jrec.app.importance import ImportanceOptions
    from jrec.errors import ConfigError

    asked = {"--repeats": args.repeats, "--group-features": args.group_features or None, "--sample": args.sample}
    if not args.importance:
        if without := [name for name, value in asked.items() if value is not None]:
            raise ConfigError(f"{without[0]} is given without --importance, for which it is; add that")
        return None
    groups = tuple(tuple(name.strip() for name in text.split(",")) for text in args.group_features)
    return options_of(ImportanceOptions, args, groups=groups)
