"""What a list of calls says about a loss of power: no name stands for content that may not be on the disk."""

from __future__ import annotations

import fnmatch
import os
import pathlib
from collections.abc import Iterable

from .cases import UNFINISHED

_MAKE, _SYNC, _REMOVE = ("create", "mkdir", "symlink"), ("fsync", "fdatasync"), ("unlink", "unlinkat", "rmdir")
_DELETED = " (deleted)"  # what Linux adds to the path of an open file without a name


class _Disk:
    """Which files and folders may be on the disk otherwise than the process sees them.

    Attributes:
      unsynced: Files with content, and folders with names, that no fsync followed. A file that has two names, by a
        link, is in it by the name that it was written under.
      named: Folders in which a rename or link gave a name that no fsync followed, and that name.
    """

    def __init__(self) -> None:
        self.unsynced: set[str] = set()
        self.named: dict[str, str] = {}

    def wrote(self, path: str) -> None:
        self.unsynced.add(path)

    def made(self, path: str) -> None:
        self.unsynced |= {path, os.path.dirname(path)}  # noqa: PTH120

    def synced(self, path: str) -> None:
        self.unsynced.discard(path)
        self.named.pop(path, None)

    def removed(self, path: str) -> None:
        self.unsynced.discard(path)

    def below(self, path: str) -> set[str]:
        """What is unsynced of a file, or a folder and all in it."""
        return {one for one in self.unsynced if one == path or one.startswith(f"{path}/")}

    def renamed(self, path: str, source: str, *, exchange: bool) -> None:
        here, there = self.below(path), self.below(source)
        self.unsynced -= here | there
        self.unsynced |= {path + one.removeprefix(source) for one in there}
        if exchange:
            self.unsynced |= {source + one.removeprefix(path) for one in here}


def unsynced_names(work: pathlib.Path, calls: str) -> list[str]:
    """The names that a command gave, by rename or link, to what was not synced, or in a folder that was not, later.

    Args:
      work: The folder that the command ran in, as the command left it.
      calls: What ``layer.c`` lists: call, path and source, a line each.

    Returns:
      A sentence for each, in the order of the calls.
    """
    disk, wrong = _Disk(), []
    for call, path, source in _parsed(work, calls):
        if call in _MAKE:
            disk.made(path)
        elif call in _SYNC:
            disk.synced(path)
        elif call in _REMOVE:
            disk.removed(path)
        elif call in ("rename", "exchange", "link"):
            if _counts(path):
                wrong += [f"{path} is the name of {one}, which is not synced" for one in sorted(disk.below(source))]
                disk.named[os.path.dirname(path)] = path  # noqa: PTH120
            if call != "link":
                disk.renamed(path, source, exchange=call == "exchange")
            disk.unsynced.add(os.path.dirname(path))  # noqa: PTH120
        elif call != "open":
            disk.wrote(path)
    for folder, name in disk.named.items():
        if (work / folder).is_dir():
            wrong.append(f"{name} is a name in {folder or '.'}, which is not synced after it")
    return wrong


def _parsed(work: pathlib.Path, calls: str) -> Iterable[tuple[str, str, str]]:
    """Calls with paths relative to the folder, which is ""."""
    for line in calls.splitlines():
        call, *paths = line.split("\t")
        if not paths[0].endswith(_DELETED):
            path, source = ("" if (p := os.path.relpath(work / path, work)) == "." else p for path in paths)
            yield call, path, source


def _counts(path: str) -> bool:
    """Whether a name is one that others read: not a workplace, nor what is about to be removed."""
    return not any(fnmatch.fnmatch(path, pattern) for pattern in UNFINISHED)
