"""Deliberate one-line breaks of jrec: which of them do the nearest tests notice?

Each of tests/mutants.toml is applied to a copy of jrec/, and the default tests of the files that it names are run on
the copy until one fails; where none does, those that only CI runs (``-m full``). Results go to --out as they come; the
same command again goes on where it ended.

Examples:
  python -m tests.mutants --out mutants.json
  python -m tests.mutants --only "sgd steps uphill" --out one.json
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = pathlib.Path(__file__).with_suffix(".toml")
RUNS = {"default": "not slow and not aot and not full", "full": "full and not slow and not aot"}  # CI runs both
NO_TESTS = 5  # pytest's exit status
SECONDS = 600  # of one mutant's tests; a break may make a test wait forever, which is noticed too


def table() -> list[dict]:
    """The mutants: name, old and new line, tests, and where the line is in several places file, or all = true."""
    return tomllib.loads(TABLE.read_text())["mutant"]


def places(mutant: dict, root: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
    """The files of jrec/ and the lines' numbers where a mutant's line stands."""
    found = places_of_lines(root).get(mutant["old"], [])
    return [(file, number) for file, number in found if "file" not in mutant or file == root / mutant["file"]]


@functools.lru_cache(maxsize=1)
def places_of_lines(root: pathlib.Path) -> dict[str, list[tuple[pathlib.Path, int]]]:
    """Where each line of jrec/ stands, whatever its indentation."""
    found = collections.defaultdict[str, list[tuple[pathlib.Path, int]]](list)
    for file in sorted((root / "jrec").rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines()):
            found[line.strip()].append((file, number))
    return found


def fault(mutant: dict) -> str | None:
    """Why a mutant cannot be applied: its line went, or stands in several places."""
    found = places(mutant, ROOT)
    if not found:
        return f"{mutant['name']}: no file of jrec/ has the line {mutant['old']!r}; name the one that does its work now"
    if len(found) > 1 and not mutant.get("all"):
        where = ", ".join(f"{file.relative_to(ROOT)}:{number + 1}" for file, number in found)
        return f"{mutant['name']}: the line stands at {where}; give its file"
    missing = [name for name in mutant["tests"] if not (ROOT / "tests" / f"{name}.py").is_file()]
    return f"{mutant['name']}: tests/{missing[0]}.py is missing" if missing else None


def apply(mutant: dict, root: pathlib.Path) -> None:
    """Writes the new line over the old one."""
    for file, number in places(mutant, root):
        lines = file.read_text().splitlines(keepends=True)
        indentation = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines[number] = f"{indentation}{mutant['new']}\n"
        file.write_text("".join(lines))


def tried(mutant: dict) -> dict:
    """The outcome: caught with the test that failed, survived, or stale."""
    if (reason := fault(mutant)) is not None:
        return {"outcome": "stale", "why": reason}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jrec-mutant-") as folder:
        copy = pathlib.Path(folder) / ROOT.name
        copy.mkdir()
        for entry in ROOT.iterdir():
            if entry.name != "jrec" and not entry.name.startswith(".git"):
                (copy / entry.name).symlink_to(entry)
        (copy / "tests").unlink()  # a copy too: pytest follows links to where files really are
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
        shutil.copytree(ROOT / "jrec", copy / "jrec", ignore=shutil.ignore_patterns("*.pyc"))
        if (shared := ROOT.parent / "shared").is_dir():
            (pathlib.Path(folder) / "shared").symlink_to(shared)
        apply(mutant, copy)
        for run, marks in RUNS.items():
            by = noticed(mutant, copy, marks)
            seconds = round(time.monotonic() - start, 1)
            if by is not None:
                return {"outcome": "caught", "run": run, "by": by, "seconds": seconds}
    return {"outcome": "survived", "seconds": seconds}


def noticed(mutant: dict, copy: pathlib.Path, marks: str) -> str | None:
    """The test that fails in a copy with the mutant, of its files' tests with these marks; None where none does."""
    files = [f"tests/{name}.py" for name in mutant["tests"]]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    try:
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"a test that did not end within {SECONDS} s"
    if done.returncode in (0, NO_TESTS):
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise SystemExit(
            f"{mutant['name']}: pytest exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed[0].split(" - ")[0].split(" ", 1)[1]


def main() -> None:
    """Tries the mutants that have no outcome yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="the outcomes, as JSON")
    arguments = parser.parse_args()
    mutants = [one for one in table() if arguments.only is None or one["name"] in arguments.only]
    outcomes = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for number, mutant in enumerate(mutants, start=1):
        name = mutant["name"]
        if outcomes.get(name, {}).get("outcome") in ("caught", "survived"):
            continue
        outcomes[name] = tried(mutant)
        arguments.out.write_text(json.dumps(outcomes, indent=1) + "\n")
        shown = outcomes[name].get("by") or outcomes[name].get("why") or ""
        outcome, run = outcomes[name]["outcome"], outcomes[name].get("run", "")
        sys.stdout.write(f"{number}/{len(mutants)} {name}: {outcome} {run} {shown}\n")
        sys.stdout.flush()
    left = [name for name in (one["name"] for one in mutants) if outcomes[name]["outcome"] != "caught"]
    sys.stdout.write(f"{len(mutants) - len(left)} of {len(mutants)} caught\n")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
