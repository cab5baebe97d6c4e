"""Types of arguments that several commands take: numbers within a range, sizes, fractions.

A number outside of its range is refused while arguments are parsed, with its option, value and range in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jrec.progress import Progress

_SHOWN = 24  # characters of a refused value


def integer(low: int, high: int) -> Callable[[str], int]:
    """A type of arguments: integers from ``low`` to ``high``, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also of more digits than Python converts
            raise argparse.ArgumentTypeError(f"{_shown(text)} is no integer from {low:,} to {high:,}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} is out of range; give an integer from {low:,} to {high:,}"
            )
        return value

    return parse


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """A type of arguments: finite numbers from ``low`` to ``high``, without either end where ``above`` or ``below``."""
    bounds = f"{'above' if above else 'from'} {low:g} {'and below' if below else 'to'} {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is no number {bounds}") from None
        outside = value < low or value > high or (above and value == low) or (below and value == high)
        if outside or math.isnan(value):
            raise argparse.ArgumentTypeError(f"{_shown(text)} is out of range; give a number {bounds}")
        return value

    return parse


def size(low: int) -> Callable[[str], int]:
    """A type of arguments: bytes such as 300MB or 40GiB, at least ``low`` of them and at most 2^60."""

    def parse(text: str) -> int:
        from jrec.errors import ConfigError
        from jrec.sharding.hardware import parse_bytes

        try:
            value = int(parse_bytes(text))
        except ConfigError:
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} is no size up to 2^60 bytes; give bytes as a number or like 300MB, 40GiB"
            ) from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is out of range; give at least {low:,} bytes")
        return value

    return parse


def fractions(text: str) -> tuple[float, ...]:
    """``0.8,0.1,0.1``."""
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3 or not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not three fractions like 0.8,0.1,0.1")
    return values


def ratio(text: str) -> float:
    """``1/64`` or ``0.25``: above 0 and up to 1."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no fraction above 0 and up to 1, such as 1/64")
    return value


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet, which ``progress_of`` reads."""
    parser.add_argument("--quiet", action="store_true", help="no progress")


def progress_of(args: argparse.Namespace) -> Progress:
    """The progress bars of a command, on a terminal and without --quiet."""
    from jrec.progress import Progress

    return Progress(show=False if args.quiet else None)


def options_of[Options](kind: type[Options], args: argparse.Namespace, **values: object) -> Options:
    """The dataclass ``kind`` with every argument that is given and has the name of a field, and with ``values``."""
    names = (field.name for field in dataclasses.fields(kind))  # pyright: ignore[reportArgumentType]
    from_args = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    return kind(**{**from_args, **values})


def add_join(parser: argparse.ArgumentParser) -> None:
    """Adds --join, which ``by_name`` reads."""
    parser.add_argument(
        "--join", action="append", default=[], metavar="NAME=FILE",
        help="read the file that a csv schema joins to the log under this name (its own, or name of the [[join]]) from"
        " another place (repeatable)",
    )  # fmt: skip


def by_name(texts: Sequence[str]) -> dict[str, str]:
    """The files of --join by name.

    Raises:
      ConfigError: If one is not NAME=FILE, or a name is given twice.
    """
    from jrec.errors import ConfigError

    files: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"--join is {_shown(text)}, not NAME=FILE such as users=users.csv")
        if name in files:
            raise ConfigError(f"--join names {name!r} more than once; give one file a name")
        files[name] = path
    return files


def _shown(text: str) -> str:
    """A value in a message, which stays one line however long the value is."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text):,} characters)"


COUNT = integer(1, 2**31 - 1)
MINUTES = number(0, 1e5, above=True)
COUNT_OR_ZERO = integer(0, 2**31 - 1)
LARGE_COUNT = integer(1, 2**48)  # of examples or of edges: below what a float64 counts exactly
SEED = integer(0, 2**63 - 1)
THREADS = integer(1, 4096)
DEVICES = integer(1, 2**16)
DIM = integer(1, 2**16)
SLOT_BYTES = integer(0, 2**20)
