"""Cases that go on where an earlier run of theirs was cut off.

Each case prints a line when it begins and one when it ends, among the lines of what it measured:

    {"begin": "kaggle"}
    {"case": "kaggle", "metric": "forward", …}
    {"end": "kaggle", "seconds": 4.1}                       or   {"end": "kaggle", "error": "RuntimeError: …"}

A later run reads them. What ended is skipped, be it with an error; what began and never ended took its process with it,
or ran out of time: it is tried once more, after all others. Where the whole call was killed, which is not the case's
fault, the next one adds a line, {"cut": "kaggle"}, and the case is tried again, however often.
"""

from __future__ import annotations

import collections
import gc
import json
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

ATTEMPTS = 2
Line = Mapping[str, Any]
Emit = Callable[[Line], None]


def read_lines(path: pathlib.Path | None) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, line by line; none of an absent file. Torn and foreign lines are skipped."""
    if path is None or not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def figures(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """The lines that hold a figure, each figure once: of a case that was cut off and began anew, what came last."""
    found, begun = {}, None
    for line in lines:
        begun = line.get("begin", begun)
        if "metric" in line and "value" in line:
            found[begun, line["case"], line["metric"]] = dict(line)
    return list(found.values())


def cut_off(lines: Iterable[Line]) -> str | None:
    """The case that was under way when a call was killed; None where its process, or the call, came to an end."""
    under_way = None
    for line in lines:
        if "begin" in line:
            under_way = line["begin"]
        elif line.keys() & {"end", "cut", "status"}:
            under_way = None
    return under_way


def describe(error: BaseException) -> str:
    """One line for an exception: its type, the start of its message, and where it was raised."""
    where = ""
    if frames := traceback.extract_tb(error.__traceback__):
        where = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:600]}{where}"


class Cases:
    """Runs named cases, each until it has ended once.

    Args:
      emit: Takes each line, and writes it at once.
      earlier: Lines of earlier runs of the same cases, or None.
    """

    def __init__(self, emit: Emit, earlier: Iterable[Line] | None = None) -> None:
        self._emit = emit
        self._begun: collections.Counter[str] = collections.Counter()
        self._cut: collections.Counter[str] = collections.Counter()
        self._ended: set[str] = set()
        self.failed = 0
        for line in earlier or ():
            if isinstance(begun := line.get("begin"), str):
                self._begun[begun] += 1
            if isinstance(cut := line.get("cut"), str):
                self._cut[cut] += 1
            if isinstance(ended := line.get("end"), str):
                self._ended.add(ended)

    def pending(self, keys: Iterable[str]) -> list[str]:
        """Those that have not ended, the ones that began before last; those that began too often end here."""
        left = []
        for key in keys:
            if key in self._ended:
                continue
            if self._begun[key] - self._cut[key] >= ATTEMPTS:
                self._end(key, error=f"did not end in {ATTEMPTS} attempts: it hangs, crashes, or needs more time")
                continue
            left.append(key)
        return sorted(left, key=lambda key: self._begun[key])

    def run(self, cases: Mapping[str, Callable[[], None]]) -> None:
        """Runs the pending ones. A case that raises is a line, and the next goes on."""
        for key in self.pending(cases):
            self._emit({"begin": key})
            self._begun[key] += 1
            start = time.perf_counter()
            try:
                cases[key]()
            except (Exception, SystemExit) as error:  # a SystemExit is how a comparison says that sides differ
                self._end(key, error=describe(error), seconds=round(time.perf_counter() - start, 3))
            else:
                self._end(key, seconds=round(time.perf_counter() - start, 3))
            gc.collect()  # arrays in cycles would take the next case's memory

    def _end(self, key: str, **fields: Any) -> None:
        self.failed += "error" in fields
        self._ended.add(key)
        self._emit({"end": key, **fields})
