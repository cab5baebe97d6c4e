"""Which cases of the default run cover the most branches of jrec/ in a few minutes of CPU time?

``measure`` runs the default tests, and those that were left to ``-m full``, under coverage, each case a context of its
own, and takes down their CPU time. ``choose`` then covers lines and branches at the least time, greedily, until the
cases that are chosen have taken as many seconds as they may, or the next ones cost more than half a second a branch:
those that are left over, and that cost something, go to tests/full.txt. conftest.py marks those ``full``: the default
run leaves them out, CI runs them. A case that another stands for line by line may still compare other numbers, which is
why it is kept; whether a mutant is only noticed there is said by ``python -m tests.mutants``.

What was not measured stays where it is, so that the default run alone, which takes a third of the time, can be cut.

Examples:
  python -m tests.cover measure --out cover
  python -m tests.cover measure --out cover -m "not slow and not aot and not full"
  python -m tests.cover choose --out cover --write
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
from collections.abc import Collection, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FULL = pathlib.Path(__file__).with_name("full.txt")
FOLDER = "JREC_COVER"  # names the plugin's folder to the workers
CHEAP = 0.15  # CPU seconds: what costs less stays in the default run, whatever it adds
WORTH = 2  # branches a CPU second that a case of the default run adds at least
SECONDS = 500  # of CPU that the cases of the default run take as they are measured; without coverage they take half


def left_to_full() -> frozenset[str]:
    """The cases that the default run leaves out, by pytest's names from the root."""
    return frozenset(FULL.read_text(encoding="utf-8").splitlines())


class Recorder:
    """A pytest plugin of a worker: coverage by case, and CPU seconds, those of ended child processes among them."""

    def __init__(self, folder: pathlib.Path, worker: str):
        import coverage

        self._times = (folder / f"times.{worker}.jsonl").open("a", encoding="utf-8")
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"coverage.{worker}"), branch=True, source=[str(ROOT / "jrec")], config_file=False
        )
        # pytest would make errors of them. Modules that conftest.py imports are covered by nobody.
        quiet = ["already-imported", "module-not-measured", "no-data-collected", "trace-changed", "couldnt-parse"]
        self._coverage.set_option("run:disable_warnings", quiet)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Runs a case in a context of its own."""
        self._coverage.switch_context(item.nodeid)
        begin = os.times()
        try:
            return (yield)
        finally:
            end = os.times()
            self._coverage.switch_context("between cases")
            line = {"case": item.nodeid, "cpu": round(sum(end[:4]) - sum(begin[:4]), 3)}
            self._times.write(f"{json.dumps(line)}\n")

    def pytest_unconfigure(self) -> None:
        """Writes what was covered."""
        self._coverage.stop()
        self._coverage.save()
        self._times.close()


def pytest_configure(config: pytest.Config) -> None:
    """Records in workers, or where there are none in the only process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Recorder(pathlib.Path(os.environ[FOLDER]), worker or "main"))


def measure(folder: pathlib.Path, arguments: list[str]) -> int:
    """Runs the tests; pytest's exit status."""
    folder.mkdir(parents=True)
    options = ("-n", "2", "--dist", "worksteal", "-m", "not slow and not aot", "-p", "tests.cover")
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, FOLDER: str(folder.resolve())}, check=False).returncode


def times(folder: pathlib.Path) -> dict[str, float]:
    """CPU seconds of each case that was measured."""
    lines = (json.loads(line) for file in sorted(folder.glob("times.*.jsonl")) for line in file.open(encoding="utf-8"))
    return {line["case"]: line["cpu"] for line in lines}


def covered(folder: pathlib.Path) -> dict[str, int]:
    """The branches of jrec/ that each case ran, as the bits of a number."""
    number: dict[tuple[str, int, int], int] = collections.defaultdict(lambda: len(number))
    found: dict[str, int] = collections.defaultdict(int)
    query = """
        select context.context, file.path, arc.fromno, arc.tono from arc
        join context on context.id = arc.context_id join file on file.id = arc.file_id order by context.id
    """
    for path in sorted(folder.glob("coverage.*")):
        with contextlib.closing(sqlite3.connect(path)) as database:
            of_case: dict[str, set[int]] = collections.defaultdict(set)
            for case, file, begin, end in database.execute(query):
                of_case[case].add(number[file, begin, end])
            for case, arcs in of_case.items():
                bits = bytearray(len(number) // 8 + 1)
                for arc in arcs:
                    bits[arc // 8] |= 1 << arc % 8
                found[case] |= int.from_bytes(bits, "little")
    return dict(found)


def chosen(cost: dict[str, float], ran: dict[str, int], seconds: float) -> set[str]:
    """Those that cost nothing, one of each file, then the cheapest by branch, while there is time for cheap ones."""
    kept = {case for case, seconds in cost.items() if seconds < CHEAP}
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for case in cost:
        by_file[case.partition("::")[0]].append(case)
    kept |= {min(cases, key=cost.__getitem__) for cases in by_file.values() if not kept.intersection(cases)}
    done = 0
    for case in kept | (ran.keys() - cost.keys()):  # what runs between cases is nobody's
        done |= ran.get(case, 0)
    left = {case: ran.get(case, 0) & ~done for case in cost.keys() - kept}
    while left := {case: arcs for case, arcs in left.items() if arcs}:
        best = max(sorted(left), key=lambda case: left[case].bit_count() / cost[case])
        if left[best].bit_count() < WORTH * cost[best]:
            break
        if cost[best] > seconds - sum(cost[case] for case in kept):
            del left[best]
            continue
        kept.add(best)
        new = left.pop(best)
        left = {case: arcs & ~new for case, arcs in left.items()}
    return kept - _needless(kept, cost, ran, by_file)


def _needless(kept: set[str], cost: dict[str, float], ran: dict[str, int], by_file: dict[str, list[str]]) -> set[str]:
    """Cases that were chosen for branches that those chosen after them run, too, the dearest first."""
    outside, needless = ran.keys() - cost.keys(), set[str]()
    dear = sorted((case for case in kept if cost[case] >= CHEAP), key=lambda case: (-cost[case], case))
    cheap = functools.reduce(int.__or__, (ran.get(case, 0) for case in (kept - {*dear}) | outside), 0)
    for case in dear:
        others = functools.reduce(int.__or__, (ran.get(c, 0) for c in dear if c != case and c not in needless), cheap)
        alone = len(kept.intersection(by_file[case.partition("::")[0]]) - needless) == 1
        if not ran.get(case, 0) & ~others and not alone:
            needless.add(case)
    return needless


def choose(folder: pathlib.Path, seconds: float, *, write: bool) -> None:
    """Prints what the choice saves, by file, and writes it if told to."""
    cost, ran = times(folder), covered(folder)
    kept = chosen(cost, ran, seconds)
    rest = sorted(cost.keys() - kept)
    saved: collections.Counter[str] = collections.Counter()
    for case in rest:
        saved[case.partition("::")[0]] += cost[case]
    for file, seconds in saved.most_common():
        sys.stdout.write(f"{seconds:8.1f} s  {file}\n")
    total, left = sum(cost.values()), sum(cost[case] for case in kept)
    whole, covered_by = (_branches(ran, cases) for cases in (ran.keys(), kept | (ran.keys() - cost.keys())))
    sys.stdout.write(
        f"{len(kept):,} of {len(cost):,} cases stay, {left:,.0f} of {total:,.0f} CPU seconds; they run {covered_by:,}"
        f" of {whole:,} branches\n"
    )
    if write:
        names = {*rest} | (left_to_full() - cost.keys())
        FULL.write_text("".join(f"{case}\n" for case in sorted(names)), encoding="utf-8")


def _branches(ran: dict[str, int], cases: Collection[str]) -> int:
    """How many branches some cases run together."""
    return functools.reduce(int.__or__, (ran.get(case, 0) for case in cases), 0).bit_count()


def main() -> None:
    """Measures, or chooses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "choose"))
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of what is measured")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"CPU time of what stays (default: {SECONDS})")
    parser.add_argument("--write", action="store_true", help="write the choice to tests/full.txt")
    arguments, others = parser.parse_known_args()
    if arguments.what == "measure":
        sys.exit(measure(arguments.out, others))
    choose(arguments.out, arguments.seconds, write=arguments.write)


if __name__ == "__main__":
    main()
