"""How much of what each file of results measures has changed since it was measured, by the history of the repository.

results/modules.toml names the modules that a file measures. The lines of them that were added and removed since the
file's oldest commit, by the lines that they have now, are its age: above ``LIMIT`` a file is to be measured anew, or to
be kept with a written reason. Whole training steps have two ages, that of their modules and that of ``TRAINS``, and the
greater one counts: kernels that stay as they are do not keep a step whose other half has changed.

Examples:
  python -m benchmarks.ages
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness import ROOT

LIMIT = 0.5
TRAINS = ("jrec/run", "jrec/nn", "jrec/app")
"""What whole training steps consist of, beside the modules that a file names."""
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Age:
    """A file's age.

    Attributes:
      commit: The oldest commit of its lines.
      commits: How many commits have changed its modules since; None where the history does not have ``commit``.
      changed: The share of the modules' lines that was added and removed since; infinite where the history does not
        have ``commit``.
      kept: Why the file stays although it is old; "" where nothing is said.
    """

    commit: str
    commits: int | None
    changed: float
    kept: str

    @property
    def old(self) -> bool:
        """Whether more has changed than a file may stay for without a reason."""
        return self.changed > LIMIT


def main() -> None:
    """Prints all ages, the greatest first."""
    for name, age in sorted(ages(ROOT).items(), key=lambda item: -item[1].changed):
        since = "its commit is not in the history" if age.commits is None else f"{age.commits} commits since"
        kept = f"; kept: {age.kept}" if age.kept else "; MEASURE ANEW" if age.old else ""
        print(f"{name:20} {100 * age.changed:4.0f} % changed, {since} {age.commit}{kept}")


def modules() -> dict[str, dict[str, Any]]:
    """What results/modules.toml says, by the results' names."""
    return tomllib.loads((RESULTS / "modules.toml").read_text(encoding="utf-8"))


def note(files: Iterable[str]) -> str:
    """A sentence for readers of these files' figures: which are old, and why they stay. "" where none is."""
    said = {name: reason for name in sorted(files) if (reason := modules().get(name, {}).get("kept"))}
    reasons = "; ".join(f"{name}, {reason}" for name, reason in said.items())
    return f" More than half of what they measure has changed since: {reasons}." if said else ""


def has_history(root: pathlib.Path) -> bool:
    """Whether ``root`` is a checkout with its whole history."""
    try:
        return _git(root, "rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def ages(root: pathlib.Path) -> dict[str, Age]:
    """The ages of all files of results, by their names."""
    said = modules()
    return {path.stem: age(root, _commits(path), **said[path.stem]) for path in sorted(RESULTS.glob("*/*.jsonl"))}


def age(
    root: pathlib.Path,
    measured: Sequence[str],
    modules: Sequence[str],
    kept: str = "",
    command: str = "",
    whole_steps: bool = False,
) -> Age:
    """The age of lines measured at some commits.

    Args:
      root: A checkout with its history.
      measured: The lines' commits.
      modules: Files and folders within ``root``.
      kept: Why the lines stay although they are old.
      command: What measures them; it does not count.
      whole_steps: Whether they are of whole training steps.
    """
    del command
    parts = [modules, TRAINS] if whole_steps else [modules]
    found: list[Age] = []
    for commit in measured:
        try:
            _git(root, "merge-base", "--is-ancestor", commit, "HEAD")
        except subprocess.CalledProcessError:
            return Age(commit=commit, commits=None, changed=float("inf"), kept=kept)
        for part in parts:
            commits = int(_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *part))
            changed = _changed(root, commit, _git(root, "rev-parse", "HEAD").strip())
            inside = [path for path in changed if any(path == of or path.startswith(f"{of}/") for of in part)]
            lines = sum(changed[path] for path in inside)
            found.append(Age(commit=commit, commits=commits, changed=lines / _lines(root, part), kept=kept))
    return max(found, key=lambda one: one.changed)


@functools.cache
def _changed(root: pathlib.Path, commit: str, head: str) -> dict[str, int]:
    """By path today, the lines that went or came since a commit; a file that only moved has none."""
    parts = iter(_git(root, "diff", "--numstat", "-M", "-l0", "-z", commit, head).split("\0"))
    found = {}
    for part in parts:
        if part:
            new, gone, path = part.split("\t")
            if not path:  # moved: the old path and the new one follow
                _, path = next(parts), next(parts)
            found[path] = 0 if new == "-" else int(new) + int(gone)
    return found


def _lines(root: pathlib.Path, modules: Sequence[str]) -> int:
    files = _git(root, "ls-files", "--", *modules).splitlines()
    return sum(len((root / file).read_bytes().splitlines()) for file in files)


def _commits(path: pathlib.Path) -> list[str]:
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line["commit"] for line in lines))


def _git(root: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
