"""``jrec replan``: what present accesses do to a plan, and a new plan."""

from __future__ import annotations

import argparse

from jrec.app.commands.arguments import number

DESCRIPTION = """\
Report how balanced a plan is under present accesses and what it costs, make a plan for these accesses, and report how
many rows would move. Rows stay where they are as far as balance allows. The hardware and options are the same as when
the plan was made.

PROFILE is an access profile, from a training run's own monitor (RUN/access) or from `jrec access`. Its rows have to
mean the same: a log that was prepared separately numbers its values by its own frequencies, and is refused."""
EPILOG = """examples:
  jrec access data/kaggle --split test --out test.access
  jrec replan plan test.access
  jrec replan plan runs/kaggle/access --before kaggle.access --out plan_now
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="the plan in force")
    parser.add_argument("profile", metavar="PROFILE", help="the present accesses")
    parser.add_argument("--before", metavar="PROFILE", help="the accesses that the plan was made from, to compare")
    parser.add_argument("--out", metavar="FILE", help="write the new plan there")
    parser.add_argument("--anew", action="store_true", help="do not keep rows where they are")
    parser.add_argument(
        "--min-gain", type=number(-1, 1), default=0.0, metavar="X",
        help="write it only if it saves more than this share of a step's embedding work (default 0)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compares, and writes the new plan if asked to."""
    from jrec.access.profile import AccessProfile
    from jrec.outputs import check_output
    from jrec.sharding.drift import measure_drift, report
    from jrec.sharding.plan_file import load_plan, save_plan

    if args.out:
        check_output(args.out, inputs=[args.plan, args.profile, args.before or ""])
    plan = load_plan(args.plan)
    before = AccessProfile.load(args.before) if args.before else None
    drift = measure_drift(plan, AccessProfile.load(args.profile), before=before, anew=args.anew)
    print(report(drift))
    if not args.out:
        return 0
    if drift.relative_gain <= args.min_gain:
        print(f"not written: {args.plan} is good enough, a new plan would gain {100 * drift.relative_gain:.2f} %")
        return 0
    save_plan(drift.plan, args.out)
    print(f"{args.out}: {len(drift.plan.start):,} ranges")
    return 0
