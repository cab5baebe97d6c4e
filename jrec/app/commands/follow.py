"""``jrec follow``: a trained model goes on learning from files as they appear, while `jrec serve` takes over deltas."""

from __future__ import annotations

import argparse
import pathlib
import sys

from jrec.app.commands.arguments import number

DESCRIPTION = """\
Go on learning from files as they appear in a folder.

RUN is a trained run, or one of its checkpoints; the run that goes on, with all that it learns, is --out, an ordinary
run folder for `jrec eval`, `predict` and `export`. With --resume RUN may be the one in --out itself, so that the first
need not be kept. Files are of the format of the log that RUN was trained on, and are
taken one by one, by the numbers in their names. Each is scored by the model as it is before the model learns from it:
metrics.jsonl has a record a file. New values get rows in tables that grow (`jrec prepare --growing`), and others read
the row for unknown values.

Move a file into the folder when it is whole (mv, from the same disk). Names that begin with "." or "_" or end in .tmp,
.part or .partial are left alone, and so is a file that changed within --settle seconds. Every file is learnt exactly
once: SIGTERM and Ctrl-C end the run after the current step with a checkpoint, and --resume goes on; killed anywhere, it
goes on from its last checkpoint with the same bits. Files must stay in the folder until a checkpoint has them.

With --export and --deltas every checkpoint is followed by a delta, which `jrec serve EXPORT --deltas DIR` takes over
while it answers. Learning rates are those of RUN's configuration without its schedule; section.key=value gives
others."""
EPILOG = """examples:
  jrec follow runs/shop --input incoming --out runs/shop_live --export exports/shop --deltas exports/shop_deltas
  jrec serve exports/shop --deltas exports/shop_deltas
  jrec follow runs/shop --input incoming --out runs/shop_live --resume --every 300
  jrec follow runs/shop --input last_week --out runs/shop_week --once optimizer.embedding.learning_rate=0.01
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    seconds = number(0, 1e6)
    parser.add_argument("run_folder", metavar="RUN", help="the run to go on from, or one of its checkpoints")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="what to change in its configuration")
    parser.add_argument("--input", required=True, metavar="DIR", help="the folder in which files appear")
    parser.add_argument("--out", required=True, metavar="RUN", help="the folder of the run that goes on")
    parser.add_argument("--export", metavar="DIR", help="the export that deltas follow; made where there is none")
    parser.add_argument("--deltas", metavar="DIR", help="write a delta here after each checkpoint")
    parser.add_argument(
        "--every", type=seconds, default=60.0, metavar="SECONDS",
        help="a checkpoint, and a delta, so often, at the end of a file (60); 0: after each file",
    )  # fmt: skip
    parser.add_argument(
        "--poll", type=seconds, default=1.0, metavar="SECONDS", help="look for files so often where there was none (1)"
    )
    parser.add_argument(
        "--settle", type=seconds, default=1.0, metavar="SECONDS", help="take files that are unchanged for so long (1)"
    )
    parser.add_argument("--once", action="store_true", help="end where there is no further file")
    parser.add_argument(
        "--on-bad-line", choices=("error", "skip"), default="error",
        help="end at a bad line (error, the default), or keep bad lines aside",
    )  # fmt: skip
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on where the run in --out stopped, if any")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in --out, if any")


def run(args: argparse.Namespace) -> int:
    """Follows; returns 0, also after a signal, which is how it ends, but with --once 130 where a signal came first."""
    from jrec.app.follow import FollowOptions, follow, follow_config
    from jrec.shown import counted

    options = FollowOptions(
        files=pathlib.Path(args.input),
        export=pathlib.Path(args.export) if args.export else None,
        deltas=pathlib.Path(args.deltas) if args.deltas else None,
        every=args.every,
        poll=args.poll,
        settle=args.settle,
        once=args.once,
        on_bad_line=args.on_bad_line,
    )
    outcome = follow(
        follow_config(args.run_folder, args.out, args.overrides, resume=args.resume),
        options,
        resume=args.resume,
        overwrite=args.overwrite,
        report=lambda message: print(f"jrec: {message}", file=sys.stderr),
    )
    print(
        f"{outcome.folder}: step {outcome.step:,}, {counted(outcome.files, 'file')} learnt,"
        f" {counted(outcome.examples, 'example')} of them this time; the same command with --resume goes on"
    )
    return 130 if args.once and outcome.stopped else 0
