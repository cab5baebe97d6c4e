"""Kernels for values that a schema reads in more ways than one: numbers with words for missing ones, labels, times."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Sequence

import numpy as np

from jrec.data.arrow_values import arrow_compute
from jrec.data.keys import Spans
from jrec.data.scan import NOT_FINITE, OK, SLOW, check_text, parse_integer, parse_number
from jrec.kernel_cache import compiled

NOT_LABEL, NOT_TIME, MISSING_VALUE = 20, 21, 22
NO_TIME = np.iinfo(np.int64).min  # a missing time
MICROSECONDS = {"seconds": 1_000_000, "milliseconds": 1000, "microseconds": 1, "nanoseconds": 0}
_WORDS = ("true", "t", "yes", "y", "false", "f", "no", "n")
_POSITIVE_WORDS = 4
_LIMIT = 1 << 62
_SHORT, _ZERO, _ONE, _NINE, _TEN = (np.uint64(number) for number in (15, 48, 1, 9, 10))


def joined(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as kernels take them: their bytes, and (texts + 1,) int64 bounds."""
    encoded = [text.encode() for text in texts]
    content = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
    return content, np.cumsum([0, *map(len, encoded)], dtype=np.int64)


@compiled
def match_texts(buffer, starts, ends, texts, limits, fold):
    """Which text a field is.

    Args:
      buffer: uint8.
      starts, ends: (n,) int64, where texts begin and end.
      texts, limits: The texts to look for, from ``joined``.
      fold: Whether A to Z match a to z; texts are in lower case.

    Returns:
      (n,) int64, -1 where it is none of them.
    """
    matches = np.full(starts.shape[0], -1, np.int64)
    for i in range(starts.shape[0]):
        start, length = starts[i], ends[i] - starts[i]
        for k in range(limits.shape[0] - 1):
            if limits[k + 1] - limits[k] != length:
                continue
            same = True
            for j in range(length):
                c = buffer[start + j]
                if fold and 65 <= c <= 90:
                    c |= 32
                if c != texts[limits[k] + j]:
                    same = False
                    break
            if same:
                matches[i] = k
                break
    return matches


@compiled
def parse_numbers(buffer, starts, ends, point):
    """(n,) int64 codes of ``scan`` or SLOW, and (n,) float64 values, NaN of blanks and of what is no number.

    ``point`` is the decimal mark's byte.
    """
    codes = np.zeros(starts.shape[0], np.int64)
    values = np.full(starts.shape[0], np.nan, np.float64)
    for i in range(starts.shape[0]):
        whole, at, end = np.uint64(0), np.uint64(starts[i]), np.uint64(ends[i])
        if at == end:
            continue
        if end - at <= _SHORT:  # most numbers are short and whole: a third of what parse_number takes
            while at < end and np.uint64(buffer[at]) - _ZERO <= _NINE:
                whole = whole * _TEN + (np.uint64(buffer[at]) - _ZERO)
                at += _ONE
            if at == end:
                values[i] = np.float64(whole)
                continue
        code, value = parse_number(buffer, starts[i], ends[i], point)
        codes[i] = code
        if code == OK:
            values[i] = value
    return codes, values


@compiled
def integers_of(buffer, starts, ends):
    """(n,) int64 codes of ``scan.parse_integer``, and (n,) int64 values."""
    codes = np.zeros(starts.shape[0], np.int64)
    values = np.zeros(starts.shape[0], np.int64)
    for i in range(starts.shape[0]):
        codes[i], values[i] = parse_integer(buffer, starts[i], ends[i])
    return codes, values


@compiled
def check_texts(buffer, starts, ends):
    """(n,) int64 codes of ``scan.check_text``."""
    codes = np.zeros(starts.shape[0], np.int64)
    for i in range(starts.shape[0]):
        codes[i] = check_text(buffer, starts[i], ends[i])
    return codes


@compiled
def _parse_labels(buffer, starts, ends):
    """(n,) int64 codes, OK or NOT_LABEL, and (n,) float64 values of labels that are numbers."""
    codes = np.zeros(starts.shape[0], np.int64)
    values = np.zeros(starts.shape[0], np.float64)
    for i in range(starts.shape[0]):
        start, end = starts[i], ends[i]
        if end - start == 1 and (buffer[start] == 48 or buffer[start] == 49):
            values[i] = buffer[start] - 48
            continue
        code, value = parse_number(buffer, start, end)
        if code == OK and (value == 0.0 or value == 1.0 or value == -1.0):
            values[i] = value
        else:
            codes[i] = NOT_LABEL
    return codes, values


def numbers_of(
    buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, missing: Sequence[str], decimal: str = "."
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of numbers; those that are one of the texts ``missing``, or blank, are NaN."""
    codes, values = parse_numbers(buffer, starts, ends, ord(decimal))
    for i in np.flatnonzero(codes == SLOW).tolist():
        values[i] = float(buffer[starts[i] : ends[i]].tobytes().replace(decimal.encode(), b"."))
        codes[i] = NOT_FINITE if np.isinf(values[i]) else OK
    if missing:
        absent = match_texts(buffer, starts, ends, *joined(missing), False) >= 0
        codes[absent], values[absent] = OK, np.nan
    return codes, values


def labels_of_texts(
    buffer: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    positive: Sequence[str],
    missing: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of labels.

    Args:
      buffer: uint8.
      starts, ends: (n,) int64, where texts begin and end.
      positive: The texts of labels that are 1, all others being 0. Without them labels are 0, 1, -1, or words.
      missing: Texts that stand for a missing label, as a blank does then; None where no label may be missing.

    Returns:
      (n,) int64 codes, OK or NOT_LABEL, and (n,) float64 in {-1, 0, 1}, or NaN where the label is missing.
    """
    codes, values = _labels_of_texts(buffer, starts, ends, positive)
    if missing is not None:
        absent = starts == ends
        if missing:
            absent |= match_texts(buffer, starts, ends, *joined(missing), False) >= 0
        codes, values = np.where(absent, OK, codes), np.where(absent, np.nan, values)
    return codes, values


def _labels_of_texts(
    buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, positive: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of labels, of which none is missing."""
    if positive:
        values = (match_texts(buffer, starts, ends, *joined(positive), False) >= 0).astype(np.float64)
        return check_texts(buffer, starts, ends), values
    codes, values = _parse_labels(buffer, starts, ends)
    if codes.any():
        exact, numbers = numbers_of(buffer, starts, ends, ())  # such as 1.000000000000000000
        number = (exact == OK) & ((numbers == 0) | (np.abs(numbers) == 1))
        codes[number], values = OK, np.where(number, numbers, values)
        word = match_texts(buffer, starts, ends, *joined(_WORDS), True)
        codes[word >= 0] = OK
        values = np.where(word >= 0, word < _POSITIVE_WORDS, values)
    return codes, values


@compiled
def _digits(buffer, at, end, count):
    """The number of ``count`` digits at a place, or -1."""
    if at + count > end:
        return -1
    value = 0
    for i in range(at, at + count):
        if buffer[i] < 48 or buffer[i] > 57:
            return -1
        value = value * 10 + (buffer[i] - 48)
    return value


@compiled
def _fraction(buffer, at, end, places):
    """(``places`` digits behind a point, as a number, where the digits end, whether others than 0 were cut)."""
    value, read, cut = 0, 0, False
    while at < end and 48 <= buffer[at] <= 57:
        if read < places:
            value = value * 10 + (buffer[at] - 48)
            read += 1
        else:
            cut |= buffer[at] != 48
        at += 1
    for _ in range(read, places):
        value *= 10
    return value, at, cut


@compiled
def _iso(buffer, start, end):
    """(OK or NOT_TIME, microseconds since 1970) of one ISO 8601 date or datetime; UTC where it names no zone."""
    year, month, day = _digits(buffer, start, end, 4), _digits(buffer, start + 5, end, 2), 0
    day = _digits(buffer, start + 8, end, 2)
    if year < 0 or month < 1 or month > 12 or day < 1 or buffer[start + 4] != 45 or buffer[start + 7] != 45:
        return NOT_TIME, 0
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    longest = 30 if month in (4, 6, 9, 11) else 31
    if month == 2:
        longest = 29 if leap else 28
    if day > longest:
        return NOT_TIME, 0
    # Days since 1970-01-01 of the proleptic Gregorian calendar, in years that begin in March.
    shifted = year - (1 if month <= 2 else 0)
    era, of_era = shifted // 400, shifted % 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
    at, seconds, micros = start + 10, 0, 0
    if at < end:
        if buffer[at] != 84 and buffer[at] != 116 and buffer[at] != 32:
            return NOT_TIME, 0
        hour, minute, second = _digits(buffer, at + 1, end, 2), _digits(buffer, at + 4, end, 2), 0
        if hour < 0 or hour > 23 or minute < 0 or minute > 59 or buffer[at + 3] != 58:
            return NOT_TIME, 0
        at += 6
        if at < end and buffer[at] == 58:
            second = _digits(buffer, at + 1, end, 2)
            if second < 0 or second > 60:
                return NOT_TIME, 0
            at += 3
            if at < end and (buffer[at] == 46 or buffer[at] == 44):
                if _digits(buffer, at + 1, end, 1) < 0:
                    return NOT_TIME, 0
                micros, at, _ = _fraction(buffer, at + 1, end, 6)
        seconds = hour * 3600 + minute * 60 + second
        if at < end and buffer[at] == 32:
            at += 1
            if at == end:
                return NOT_TIME, 0
        if at < end and (buffer[at] == 43 or buffer[at] == 45):
            sign = 1 if buffer[at] == 43 else -1
            hours, minutes = _digits(buffer, at + 1, end, 2), 0
            at += 3
            if at < end:
                at += 1 if buffer[at] == 58 else 0
                minutes = _digits(buffer, at, end, 2)
                at += 2
            if hours < 0 or hours > 23 or minutes < 0 or minutes > 59:
                return NOT_TIME, 0
            seconds -= sign * (hours * 3600 + minutes * 60)
        elif at + 1 == end and (buffer[at] == 90 or buffer[at] == 122):
            at += 1
        elif at + 3 == end and buffer[at] == 85 and buffer[at + 1] == 84 and buffer[at + 2] == 67:
            at += 3
        if at != end:
            return NOT_TIME, 0
    return OK, (days * 86400 + seconds) * 1_000_000 + micros


@compiled
def _decimal(buffer, start, end, micros):
    """(OK, NOT_TIME or SLOW, microseconds) of a decimal number of ``micros`` each; 0 stands for nanoseconds.

    What is below a microsecond is cut toward the past, before 1970, too.
    """
    at = start
    negative = buffer[at] == 45
    if negative or buffer[at] == 43:
        at += 1
    whole, first = 0, at
    limit = _LIMIT // max(micros, 1) // 10
    while at < end and 48 <= buffer[at] <= 57:
        if whole >= limit:
            return NOT_TIME, 0
        whole = whole * 10 + (buffer[at] - 48)
        at += 1
    if at == first:
        return NOT_TIME, 0
    cut = False
    part = 0
    if at < end and buffer[at] == 46:
        places = 6 if micros == 1_000_000 else (3 if micros == 1000 else 0)
        part, at, cut = _fraction(buffer, at + 1, end, places)
    if at < end:
        return (SLOW if buffer[at] | 32 == 101 else NOT_TIME), 0
    if micros == 0:
        cut |= whole % 1000 != 0
        value = whole // 1000
    else:
        value = whole * micros + part
    return OK, (-value - (1 if cut else 0) if negative else value)


@compiled
def _parse_times(buffer, starts, ends, iso, micros):
    codes = np.zeros(starts.shape[0], np.int64)
    values = np.zeros(starts.shape[0], np.int64)
    for i in range(starts.shape[0]):
        start, end = starts[i], ends[i]
        if start == end:
            codes[i] = NOT_TIME
        elif iso:
            codes[i], values[i] = _iso(buffer, start, end)
        else:
            codes[i], values[i] = _decimal(buffer, start, end, micros)
    return codes, values


def times_of(
    buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, unit: str, missing: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and microseconds since 1970 of times.

    Args:
      buffer: uint8.
      starts, ends: (n,) int64, where texts begin and end.
      unit: "iso", a pattern of strptime, or a key of ``MICROSECONDS``, of which there may be fractions; what is below
        a microsecond is cut.
      missing: Texts that stand for a missing time, as a blank does then; None where no time may be missing.

    Returns:
      (n,) int64 codes, OK or NOT_TIME, and (n,) int64 microseconds, ``NO_TIME`` of missing ones.
    """
    if missing is not None:
        codes, values = times_of(buffer, starts, ends, unit)
        absent = match_texts(buffer, starts, ends, *joined(["", *missing]), False) >= 0
        return np.where(absent, OK, codes), np.where(absent, NO_TIME, values)
    if "%" in unit:
        return _times_by_pattern(buffer, starts, ends, unit)
    codes, values = _parse_times(buffer, starts, ends, unit == "iso", MICROSECONDS.get(unit, 0))
    for i in np.flatnonzero(codes == SLOW).tolist():
        code, _ = parse_number(buffer, starts[i], ends[i])
        text = buffer[starts[i] : ends[i]].tobytes().decode() if code in (OK, SLOW) else "inf"
        codes[i] = OK if abs(float(text)) * (MICROSECONDS[unit] or 1e-3) < _LIMIT else NOT_TIME
        if codes[i] == OK:
            number = decimal.Decimal(text)  # of which float64 would round the last digits
            values[i] = math.floor(number * MICROSECONDS[unit] if MICROSECONDS[unit] else number / 1000)
    return codes, values


def _times_by_pattern(
    buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray, pattern: str
) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa

    compute = arrow_compute()
    texts = Spans(buffer, starts, ends).array()
    times = compute.strptime(texts, format=pattern, unit="us", error_is_null=True)
    # The C library's %Y takes the year 24 for one, which sorts before all others; Python's has four digits.
    no_time = compute.or_kleene(times.is_null(), compute.less(compute.year(times), 1000))
    codes = np.where(no_time.to_numpy(zero_copy_only=False), NOT_TIME, OK)
    # Arrow takes the 30th of February for the 1st of March. Most early days are printed as they were written.
    early = compute.less_equal(compute.day(times), 3).fill_null(False)
    written, days = texts.filter(early), times.filter(early).cast(pa.timestamp("s"))
    printed = compute.strftime(days, format=pattern).cast(pa.large_string())
    doubtful = written.filter(compute.not_equal(written, printed)).unique()
    if wrong := [text for text in doubtful.to_pylist() if not _has_day(text, pattern)]:
        codes[compute.is_in(texts, pa.array(wrong, pa.large_string())).to_numpy(zero_copy_only=False)] = NOT_TIME
    return codes, times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)


def _has_day(text: str, pattern: str) -> bool:
    """Whether a date's month has its day, as far as Python knows the pattern, too."""
    try:
        datetime.datetime.strptime(text, pattern)
    except ValueError as error:
        return "range" not in str(error)
    return True


def time_reason(unit: str) -> str:
    """Why a text is no time, for messages."""
    if unit == "iso":
        return 'is not an ISO date or datetime, such as 2024-05-01 or 2024-05-01T12:00:00Z (format = "iso" in [time])'
    if "%" in unit:
        return f'does not fit the pattern (format = "{unit}" in [time])'
    return f'is not a number of {unit} (format = "{unit}" in [time])'
