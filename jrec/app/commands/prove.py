"""``jrec prove``: the same steps wherever rows may lie, compared to the last bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING

from jrec.app.commands.arguments import COUNT, DEVICES, add_quiet, progress_of
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.prove import Result

DESCRIPTION = """\
Train the first steps of CONFIG on one device, with rows in host memory, on several virtual devices of this machine's
CPU, and by a plan; kill some of these runs and resume them; and compare losses, rows and dense parameters.

Two of these have to be equal to the bit: rows in host memory and on the device, and a run that was killed and resumed
and one that was not. Several devices add float32 numbers in another order than one: their losses are close. The command
prints a digest of each, and the greatest differences; it ends with code 2 where something is not as it has to be.

CONFIG is a TOML file, one that comes with jrec, or a run's folder."""
EPILOG = """examples:
  jrec prove quickstart
  jrec prove clicks.toml --steps 50 --devices 1 2
  jrec prove configs/criteo_kaggle.toml data.path=data/kaggle --out proof.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="a configuration, or a run's folder")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="what to change in it")
    parser.add_argument("--steps", type=COUNT, default=200, metavar="N", help="how many steps (default 200)")
    parser.add_argument(
        "--devices", type=DEVICES, nargs="+", default=[1, 2, 4], metavar="N", help="how many devices (default 1 2 4)"
    )
    parser.add_argument("--out", metavar="FILE", help="write what is printed as JSON, too")
    parser.add_argument("--keep", metavar="DIR", help="keep the runs in this new folder")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Trains in every way and prints what each came to; returns 0, or 2 where one is not as it has to be."""
    from jrec.app.config import load_config
    from jrec.app.prove import holds, pairs, prove
    from jrec.app.run_record import CONFIG_FILE
    from jrec.errors import OutputError
    from jrec.outputs import check_output, write_file

    path = pathlib.Path(args.config)
    path = path / CONFIG_FILE if (path / CONFIG_FILE).is_file() else path
    config = load_config(path, args.overrides)
    if args.out:
        check_output(args.out)
    with contextlib.ExitStack() as stack:
        if args.keep:
            check_output(args.keep)
            folder = pathlib.Path(args.keep)
            if folder.exists():
                raise OutputError(f"--keep {folder} is there already; choose another folder")
            folder.mkdir(parents=True)
        else:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jrec-prove-")))
        results = prove(
            config, path, args.overrides, folder, steps=args.steps, devices=args.devices, progress=progress_of(args)
        )
        said, wrong = [], []
        for number, (result, verdict) in enumerate(pairs(results)):
            if number == 0:
                print(_HEAD)
            print(_line(result, verdict), flush=True)
            said.append(_content(result, verdict))
            if not holds(verdict):
                wrong.append(result.way.name)
    if args.out:
        write_file(args.out, json.dumps({"steps": args.steps, "ways": said}, indent=1, allow_nan=False) + "\n")
    if wrong:
        which = "; ".join(wrong)
        print(f"jrec: {len(wrong)} of {len(said)} ways did not come to what they have to: {which}", file=sys.stderr)
        return 2
    print(f"all {len(said)} ways came to what they have to")
    return 0


_HEAD = f"{'':<36} {'losses':<12} {'rows':<12} {'dense':<12} {'loss differs':>12} {'rows differ':>12}  seconds  verdict"


def _line(result: Result, verdict: str) -> str:
    digests = " ".join(f"{result.digests[part]:<12}" for part in ("losses", "rows", "dense"))
    differences = f"{result.loss_difference:>12.1e} {result.row_difference:>12.1e}"
    return f"{result.way.name:<36} {digests} {differences} {result.seconds:>8.1f}  {verdict}"


def _content(result: Result, verdict: str) -> JsonObject:
    return {
        "way": result.way.name,
        "devices": result.way.devices,
        "digests": result.digests,
        "loss_difference": result.loss_difference,
        "row_difference": result.row_difference,
        "seconds": result.seconds,
        "verdict": verdict,
    }
