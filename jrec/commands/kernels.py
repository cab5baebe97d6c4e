"""``jrec kernels``: check the GPU kernels on this machine, and show or forget what was found."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from jrec.commands.arguments import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jrec.ops.verdicts import KernelClass, Verdict
    from jrec.selfcheck.runner import How

DESCRIPTION = """\
Check jrec's GPU kernels on this machine, and show or remove the verdicts.

A kernel is used on a GPU only where a check on this very machine found it correct and faster than XLA. Verdicts are
kept in the user's cache folder ($JREC_CACHE, else $XDG_CACHE_HOME/jrec, else ~/.cache/jrec) and holds for this GPU,
driver, jax, jaxlib and jrec; `jrec train` checks by itself what its model needs. JREC_KERNELS=xla or pallas in the
environment overrides all verdicts."""
EPILOG = """examples:
  jrec kernels check
  jrec kernels check --only "gather_reduce float32" --only "casted_update 64 RowWiseAdagrad"
  jrec kernels check --only "casted_update float32 48 Adam"
  jrec kernels check --again --json > verdicts.jsonl
  jrec kernels show
  jrec kernels forget --only bfloat16
"""
CHECK = """\
Run every kernel class in processes of their own, twice, on small skewed cases, compare with float64 and with XLA, time
both, and keep the verdicts. Classes that have one are left out. Another program may use the GPU meanwhile, but then
times mean little. Without --only these are the classes of usual models, about a hundred. Exits with 1 where a kernel is
wrong, crashes, hangs or does not compile, with 2 without a GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    raw = argparse.RawDescriptionHelpFormatter
    check = actions.add_parser(
        "check",
        help="check the classes that have no verdict yet",
        description=CHECK,
        epilog=EPILOG,
        formatter_class=raw,
    )
    _add_only(check, "check only these classes")
    check.add_argument("--again", action="store_true", help="check also the classes that have one")
    check.add_argument(
        "--timeout", type=number(0, 1e6, above=True), metavar="SECONDS", help="seconds for each class (default: 60)"
    )
    check.add_argument("--json", action="store_true", help="print a line of JSON for each verdict, and no table")
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    check.add_argument(
        "--interpret",
        action="store_true",
        help="a trial without a GPU: tiny cases in Pallas' interpreter on the CPU, nothing timed, nothing kept",
    )
    show = actions.add_parser("show", help="print the verdicts that are kept", formatter_class=raw)
    show.add_argument("--json", action="store_true", help="as lines of JSON, with the machine that each holds for")
    forget = actions.add_parser("forget", help="remove verdicts", formatter_class=raw)
    _add_only(forget, "remove only these classes")


def _add_only(parser: argparse.ArgumentParser, purpose: str) -> None:
    words = "words of a class, such as 'gather_reduce 64', or a whole one; may be given several times"
    parser.add_argument("--only", metavar="CLASS", action="append", help=f"{purpose}: {words}")


def run(args: argparse.Namespace) -> int:
    """Does what was asked for."""
    return {"check": _check, "show": _show, "forget": _forget}[args.action](args)


def _check(args: argparse.Namespace) -> int:
    from jrec.errors import ConfigError
    from jrec.ops.local_gpu import local_gpu
    from jrec.ops.verdicts import verdict_file
    from jrec.selfcheck.classes import all_classes, select
    from jrec.selfcheck.ensure import ensure
    from jrec.selfcheck.report import BROKEN, shown, summary, table
    from jrec.selfcheck.runner import CLASS_SECONDS, How

    if args.timeout is not None and args.timeout <= 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; give the seconds that one class may take")
    classes = all_classes()
    if args.only:
        classes = select(classes, args.only)
    options = How(timeout=args.timeout or CLASS_SECONDS)
    if args.interpret:
        verdicts = _interpreted(classes, options, quiet=args.quiet)
    else:
        gpu = local_gpu()
        if gpu is None:
            raise ConfigError(
                "there is no NVIDIA GPU that JAX can use here, so there are no GPU kernels to check; --interpret tries"
                " them on the CPU"
            )
        with shown(show=False if args.quiet else None) as progress:
            checked = ensure(classes, gpu, options, progress=progress, again=args.again)
        verdicts = list(checked.verdicts.values())
        print(f"{checked.machine.gpu}, driver {checked.machine.driver}: {summary(checked.verdicts)}", file=sys.stderr)
        print(f"{checked.new} checked now; verdicts: {verdict_file()}", file=sys.stderr)
    if args.json:
        for verdict in verdicts:
            print(json.dumps(verdict.to_dict()))
    else:
        print(table(verdicts))
    return int(any(verdict.reason in BROKEN for verdict in verdicts))


def _interpreted(classes: Sequence[KernelClass], options: How, *, quiet: bool) -> list[Verdict]:
    import dataclasses

    from jrec.ops.verdicts import Verdict
    from jrec.selfcheck.report import shown
    from jrec.selfcheck.runner import run_checks

    verdicts = []
    with shown(show=False if quiet else None) as progress:
        for event in run_checks(classes, dataclasses.replace(options, platform="cpu", interpret=True)):
            verdicts += [event] if isinstance(event, Verdict) else []
            progress(event, len(verdicts), len(classes))
    return verdicts


def _show(args: argparse.Namespace) -> int:
    import dataclasses

    from jrec.ops.local_gpu import local_gpu
    from jrec.ops.verdicts import Machine, kernels_mode, read_all, verdict_file
    from jrec.selfcheck.report import table

    path, mode = verdict_file(), kernels_mode()
    everything = read_all(path)
    if args.json:
        for machine, verdicts in everything.items():
            for verdict in verdicts.values():
                print(json.dumps({"machine": dataclasses.asdict(machine), **verdict.to_dict()}))
        return 0
    gpu = local_gpu()
    here = None if gpu is None else Machine.of(gpu)
    if mode != "auto":
        print(f"JREC_KERNELS={mode} overrides all of these")
    if not everything:
        print(f"no verdicts in {path}; `jrec kernels check` finds them")
    for machine, verdicts in everything.items():
        holds = "holds here" if machine == here else "does not hold here"
        print(
            f"{machine.gpu}, driver {machine.driver}, jax {machine.jax}, jaxlib {machine.jaxlib}, jrec {machine.jrec}"
            f" ({machine.sources}): {holds}"
        )
        print(table(verdicts.values()))
    return 0


def _forget(args: argparse.Namespace) -> int:
    from jrec.ops.verdicts import read_all, verdict_file
    from jrec.selfcheck.classes import select
    from jrec.selfcheck.store import forget

    path = verdict_file()
    chosen = None
    if args.only:
        known = dict.fromkeys(kernel_class for verdicts in read_all(path).values() for kernel_class in verdicts)
        chosen = select(tuple(known), args.only)
    print(f"{forget(path, chosen)} verdicts removed from {path}")
    return 0
