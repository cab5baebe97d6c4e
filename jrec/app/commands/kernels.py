"""``jrec kernels``: show what was found of the GPU kernels on this machine; ``jrec kernels check`` finds it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from jrec.app.commands.arguments import integer

DESCRIPTION = """\
Show the verdicts on jrec's GPU kernels that hold on this machine, or check kernels.

A kernel is used on a GPU only where a check on this very machine found it correct and faster than XLA. Verdicts are
kept in the user's cache folder ($JREC_CACHE, else $XDG_CACHE_HOME/jrec, else ~/.cache/jrec) and hold for this GPU,
driver, jax, jaxlib and jrec; `jrec train` checks by itself what its model needs. JREC_KERNELS=xla or pallas in the
environment overrides all verdicts."""
EPILOG = """examples:
  jrec kernels
  jrec kernels check
  jrec kernels check --only "gather_reduce float32 48" --only "casted_update float32 48 Adam"
  jrec kernels check --again --json > verdicts.jsonl
"""
CHECK = """\
Run kernels in a process of their own, twice, on small skewed cases and one of usual size, compare with XLA, time both,
and keep the verdicts. Classes that have one are left out. If the process crashes or hangs, XLA computes all classes of
this check; --only finds out which one it was. Another program may use the GPU meanwhile, but then times mean little.
Without --only these are the classes of usual models, about sixty. Exits with 1 where a kernel is not right, with 2
without a GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="check")
    summary = "check the classes that have no verdict yet"
    check = actions.add_parser("check", help=summary, description=CHECK, epilog=EPILOG, formatter_class=raw)
    only = "check only this class, such as 'gather_reduce float32 64'; may be given several times"
    check.add_argument("--only", metavar="CLASS", action="append", help=only)
    check.add_argument("--again", action="store_true", help="check also the classes that have a verdict")
    whole = "seconds for the whole check (default: 60, and 30 a class)"
    check.add_argument("--timeout", type=integer(1, 1_000_000), metavar="SECONDS", help=whole)
    check.add_argument("--json", action="store_true", help="print verdicts as lines of JSON")
    trial = "a trial without a GPU: tiny cases in Pallas' interpreter on the CPU, nothing timed, nothing kept"
    check.add_argument("--interpret", action="store_true", help=trial)


def run(args: argparse.Namespace) -> int:
    """Does what was asked for."""
    import dataclasses

    from jrec.errors import ConfigError
    from jrec.ops.verdicts import KERNELS_VARIABLE, kernels_mode, local_machine, read_verdicts, verdict_file
    from jrec.selfcheck.check import parse_classes, prove, run_child, usual_classes

    wanted = parse_classes(args.only) if args.action and args.only else usual_classes()
    if args.action and args.interpret:
        _, verdicts = run_child(dict.fromkeys(wanted), seconds=args.timeout, interpret=True)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU is the check's
        import jax

        jax.devices()
        machine = local_machine()
        if machine is None:
            raise ConfigError(
                "there is no NVIDIA GPU that JAX can use here, or its driver tells no version, so no GPU kernels are"
                " used; `jrec kernels check --interpret` tries them on the CPU"
            )
        if args.action:
            verdicts = prove(wanted, machine, again=args.again, seconds=args.timeout)
        else:
            verdicts = read_verdicts(machine)
            if (mode := kernels_mode()) != "auto":
                print(f"{KERNELS_VARIABLE}={mode} overrides all verdicts", file=sys.stderr)
        print(f"{machine}; verdicts: {verdict_file(machine)}", file=sys.stderr)
    for kernel_class, verdict in verdicts.items():
        if args.action and args.json:
            print(json.dumps({"kernel_class": str(kernel_class), **dataclasses.asdict(verdict)}))
        else:
            print(f"{kernel_class}: {verdict.choice}, {verdict}")
    return int(args.action == "check" and not all(verdict.right for verdict in verdicts.values()))
