"""Runs commands with a fault at every point, and says what became of them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # as pytest does

from .cases import CASES
from .harness import MODES, trials

DESCRIPTION = """\
Run commands of jrec again and again, each time with a fault at another of their calls on files: no room from there on,
a failing write, rename or read, half of a write, a signal, two. Afterwards there has to be the old state, the new state
or a clear error that names a file; the command, given once more, has to reach the new state. Hangs, third states and
tracebacks are listed, and make the exit code 1. Before that each command's calls are listed: where one gives a name to
what it has not synced, or does not sync the folder afterwards, the case ends with an AssertionError."""
EPILOG = """examples:
  python -m tests.faults --list
  python -m tests.faults prepare predict
  python -m tests.faults train --mode SIGTERM --mode "full disk" --every 7
  python -m tests.faults train --mode SIGINT --at 41 --verbose
  python -m tests.faults --out points.jsonl          (all of them: hours)
  python -m tests.faults --table points.jsonl        (what was tried, for tests/faults/README.md)
"""


def main() -> int:
    """Tries what the arguments say; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases by name (default: all)")
    parser.add_argument("--mode", action="append", choices=tuple(MODES), help="faults (repeatable; default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="try each K-th point (default 1)")
    parser.add_argument("--at", type=int, metavar="N", help="try only this point")
    parser.add_argument("--out", metavar="FILE", help="append every point that was tried to this file, as JSON lines")
    parser.add_argument("--verbose", action="store_true", help="show every point")
    parser.add_argument("--table", metavar="FILE", help="print a table of the points in a file that --out wrote")
    parser.add_argument("--list", action="store_true", help="list cases and modes")
    args = parser.parse_args()
    if args.list:
        for name, case in CASES.items():
            print(f"{name:<24}{case.command}")
        print(f"modes: {', '.join(MODES)}")
        return 0
    if args.table:
        print(_table([json.loads(line) for line in pathlib.Path(args.table).read_text().splitlines()]))
        return 0
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; --list has their names")
    bad = 0
    for name in args.cases or CASES:
        with trials(CASES[name]) as made:
            for mode in args.mode or CASES[name].modes:
                begin, points = time.monotonic(), made.points(mode)
                counts: collections.Counter[str] = collections.Counter()
                for at in [args.at] if args.at else range(1 + (points - 1) % args.every, points + 1, args.every):
                    tried = made.attempt(mode, at)
                    counts[tried.outcome] += 1
                    bad += not tried.good
                    if args.verbose or not tried.good:
                        print(f"  {name}, {mode} at {at} ({tried.met}): {tried.outcome}\n    {tried.said[-2000:]}")
                    if args.out:
                        with pathlib.Path(args.out).open("a") as file:
                            file.write(json.dumps({"case": name, "points": points, **dataclasses.asdict(tried)}) + "\n")
                shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
                seconds = time.monotonic() - begin
                print(f"{name}, {mode}: {counts.total()} of {points} points in {seconds:.0f} s: {shown}", flush=True)
    print(f"{bad} points ended badly" if bad else "all points ended well")
    return 1 if bad else 0


def _table(tried: list[dict]) -> str:
    """A line for each case: how many of its points were tried, in the modes that were, and how they ended."""
    lines = ["| case | modes | points | tried | ended as |", "| --- | --- | --- | --- | --- |"]
    for case in CASES:
        own = [one for one in tried if one["case"] == case]
        points = {one["mode"]: one["points"] for one in own}
        distinct = {(one["mode"], one["at"]): one["outcome"] for one in own}
        counts = sorted(collections.Counter(distinct.values()).items())
        ends = ", ".join(f"{count} {outcome}" for outcome, count in counts)
        lines += [f"| {case} | {len(points)} | {sum(points.values())} | {len(distinct)} | {ends} |"] if own else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
