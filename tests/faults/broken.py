"""Commands that end as none may: they leave half of an output, say nothing, print a trace, or hang."""

from __future__ import annotations

import pathlib
import time


def _write() -> None:
    for number in range(3):
        pathlib.Path(f"data/{number}").write_text("half of a dataset")


def third() -> int:
    """Leaves half an output."""
    try:
        _write()
    except OSError as error:
        print(f"jrec: error: data: {error}")
    return 2


def silent() -> int:
    """Does not say which file it is about."""
    try:
        _write()
    except OSError:
        print("jrec: error: something went wrong")
    return 2


def trace() -> int:
    """Ends in a trace."""
    _write()
    return 0


def hang() -> int:
    """Never ends."""
    time.sleep(3600)
    return 0
