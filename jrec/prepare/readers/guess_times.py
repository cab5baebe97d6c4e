"""In which format the sampled values of a column are times, if they are. For ``jrec.prepare.readers.guess``."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

from jrec.prepare.readers.guess_columns import Column, words

_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_DATE = re.compile(
    r"(?P<date>\d{1,4}[-/.](\d{1,2}|[A-Za-z]{3})[-/.]\d{2,4})"
    r"((?P<joint>[T ])(?P<time>\d{1,2}:\d\d(:\d\d)?)( (?P<half>[AaPp][Mm]))?)?"
)
_YEARS = range(1900, 2051)
_UNITS = {"seconds": 1, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
_COMPACT = {6: ("%y%m%d",), 8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 12: ("%Y%m%d%H%M",), 14: ("%Y%m%d%H%M%S",)}
_WORDS = {*words("time timestamp date datetime ts at day dt hour unix epoch created updated")}
_BIRTHS = {*words("birth born dob birthday birthdate")}


def time_format(column: Column) -> str:
    """The format of [time] that reads a column's values; "" if they do not look like times.

    "integer" is guessed by the column's name only.
    """
    if len(column.distinct) < 2 or column.lists or _BIRTHS.intersection(column.words):
        return ""
    if all(map(_ISO.fullmatch, column.distinct)):
        return "iso"
    if not column.numeric:
        return next((form for form in date_patterns(column.values[0]) if _reads(form, column.distinct)), "")
    if column.comma or column.few or min(column.numbers) < 0:
        return ""
    named = bool(_WORDS.intersection(column.words)) or column.words[-1:] == ["time"]
    digits = {len(v) for v in column.distinct}
    if named and column.whole and len(digits) == 1:
        for form in _COMPACT.get(digits.pop(), ()):
            if _reads(form, column.distinct):
                return form
    spread = len(column.distinct) >= 0.5 * len(column.values)
    for unit, scale in _UNITS.items():
        low, high = (datetime.datetime(y, 1, 1, tzinfo=datetime.UTC).timestamp() * scale for y in (1990, 2051))
        if (named or (spread and not column.words)) and low <= min(column.numbers) and max(column.numbers) < high:
            return unit
    alone = column.words in (["time"], ["timestamp"], ["ts"], ["datetime"], ["event", "time"])
    return "integer" if alone and column.whole else ""


def could_swap(column: Column, form: str) -> bool:
    """Whether the dates of a format could have day and month the other way round."""
    swapped = {"%d": "%m", "%m": "%d"}
    return form[:2] in swapped and _reads(
        re.sub("%[dm]", lambda directive: swapped[directive[0]], form), column.distinct
    )


def date_patterns(value: str) -> list[str]:
    """The formats, "iso" or patterns of strptime, that may read a text; none where it is no date."""
    if _ISO.fullmatch(value):
        return ["iso"]
    match = _DATE.fullmatch(value)
    if match is None:
        return []
    marks = [c for c in match["date"] if not c.isalnum()]
    pieces = match["date"].split(marks[0])
    if len(pieces) != 3:
        return []
    day, month = "%d", "%b" if pieces[1].isalpha() else "%m"
    if len(pieces[0]) == 4:
        orders = [("%Y", month, day)]
    else:
        year = "%Y" if len(pieces[2]) == 4 else "%y"
        orders = [(day, month, year)] if month == "%b" else [(month, day, year), (day, month, year)]
        orders = orders[::-1] if marks[0] == "." else orders
    time = ""
    if match["time"]:
        time = match["joint"] + ("%I:%M" if match["half"] else "%H:%M")
        time += (":%S" if match["time"].count(":") == 2 else "") + (" %p" if match["half"] else "")
    return [marks[0].join(order) + time for order in orders]


def _reads(form: str, values: Sequence[str] | set[str]) -> bool:
    """Whether a pattern of strptime reads all values as times of the last hundred years."""
    try:
        return all(datetime.datetime.strptime(value, form).year in _YEARS for value in values)
    except ValueError:
        return False
