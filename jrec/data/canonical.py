"""One form of a value, whatever door it comes through: text, Parquet, a DataFrame, JSON, a request.

A log's text has no types, so programs write one value in several ways: pandas prints ``True`` where JSON prints
``true``, and ``7.0`` for the id 7 as soon as one line has none. A model that learnt one of them would take the other
for a value that it never saw. So texts of categories are rewritten before they become keys:

    true, false             of True, TRUE, False, FALSE
    7, 7.5, 0               of 7.0, 7.50, -0.0: no zeros behind the decimal point, and no point without digits behind it
    1e-5, 1.5e-7            of 0.00001, 1.5e-07 and 1.50E-07: below 0.0001 an exponent, without zeros in front of it
    2024-05-06              of 2024-05-06 00:00:00, and of 2024-05-06T00:00
    2024-05-06 07:08:09Z    of 2024-05-06T07:08:09.000+00:00: a space, no zeros of the fraction, Z for UTC, +0130 for
                            +01:30
    07:08:09                of 07:08:09.000000

Everything else stays as it is: ``007``, ``1e3``, ``+7``, ``v1.0``. The rewritten text is never longer.
"""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled

_ZERO, _NINE, _MINUS, _PLUS, _POINT, _COLON, _SPACE, _E = 48, 57, 45, 43, 46, 58, 32, 101
_TRUE, _FALSE = (np.frombuffer(text, np.uint8) for text in (b"true", b"false"))


@compiled
def _is_word(buffer, start, word):
    """Whether a word stands there in small letters, in capitals, or with one capital."""
    capitals = 0
    for i in range(word.shape[0]):
        c = buffer[start + i]
        # Words are of letters only, and this bit is all that their two cases differ by.
        if c | 32 != word[i]:
            return False
        capitals += c != word[i]
    return capitals == 0 or capitals == word.shape[0] or (capitals == 1 and buffer[start] != word[0])


@compiled
def _digits_end(buffer, at, end):
    while at < end and _ZERO <= buffer[at] <= _NINE:
        at += 1
    return at


@compiled
def _without_zeros(buffer, point, end):
    """Where a number ends without the zeros behind its point, and without the point if nothing else is behind it."""
    while buffer[end - 1] == _ZERO:
        end -= 1
    return point if end == point + 1 else end


@compiled
def _time_end(buffer, start, end):
    """Rewrites a date with a time; other texts stay."""
    # 16 bytes, 2024-05-06 07:08, are the shortest; what follows reads so many without looking where the text ends.
    if end - start < 16 or buffer[start + 4] != _MINUS or buffer[start + 7] != _MINUS or buffer[start + 13] != _COLON:
        return end
    for i in (0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15):
        if not _ZERO <= buffer[start + i] <= _NINE:
            return end
    if buffer[start + 10] != _SPACE and buffer[start + 10] != 84:
        return end
    at = start + 16
    clock = at  # where hours, minutes, seconds and their fraction end
    seconds = at + 2 < end and buffer[at] == _COLON and _digits_end(buffer, at + 1, end) == at + 3
    if seconds:
        at = clock = at + 3
        if at < end and buffer[at] == _POINT:
            at = _digits_end(buffer, at + 1, end)
            if at == clock + 1:
                return end
            # Of a fraction of zeros the point goes, too: 09.000 is 09.
            clock = _without_zeros(buffer, clock, at)
    # Behind it nothing, or a zone.
    sign = hours = minutes = 0
    if at < end and (buffer[at] == 90 or buffer[at] == 122) and at + 1 == end:
        sign = _PLUS
    elif at < end:
        sign, digits = buffer[at], end - at - 1
        colon = digits == 5 and buffer[at + 3] == _COLON
        if (sign != _PLUS and sign != _MINUS) or not (digits == 4 or colon):
            return end
        # From the end, so that +0130 and +01:30 are read alike.
        last = end - 2
        if _digits_end(buffer, at + 1, at + 3) != at + 3 or _digits_end(buffer, last, end) != end:
            return end
        hours = (buffer[at + 1] - _ZERO) * 10 + buffer[at + 2] - _ZERO
        minutes = (buffer[last] - _ZERO) * 10 + buffer[last + 1] - _ZERO
    # Written only now, when nothing can be found wrong any more: a text that is not one stays byte for byte.
    buffer[start + 10] = _SPACE
    if not seconds:
        midnight = True
        for i in (11, 12, 14, 15):
            midnight = midnight and buffer[start + i] == _ZERO
        # Without seconds none are added, which would make the text longer, except for midnight, where all goes.
        return start + 10 if midnight and sign == 0 else end
    # Midnight with a zone keeps its time: the date alone would be of another zone's day.
    if sign == 0:
        for i in range(start + 11, clock):
            if buffer[i] != _ZERO and buffer[i] != _COLON:
                return clock
        return start + 10
    if hours == 0 and minutes == 0:
        buffer[clock] = 90
        return clock + 1
    # Hours and minutes were read above, since the zone may be written over its own digits.
    buffer[clock] = sign
    buffer[clock + 1], buffer[clock + 2] = _ZERO + hours // 10, _ZERO + hours % 10
    buffer[clock + 3], buffer[clock + 4] = _ZERO + minutes // 10, _ZERO + minutes % 10
    return clock + 5


@compiled
def _small_end(buffer, at, point, end):
    """Rewrites a number below 0.0001, 0.00001 as 1e-5; others stay. ``at`` is where it begins behind its sign."""
    first = point + 1
    while first < end and buffer[first] == _ZERO:
        first += 1
    exponent = first - point
    # Python prints 0.0001 so, and 0.00001 as 1e-05: the border is where it changes.
    if point != at + 1 or buffer[at] != _ZERO or exponent < 5 or first == end:
        return end
    buffer[at] = buffer[first]
    at += 1
    if first + 1 < end:
        buffer[at] = _POINT
        at += 1
        for i in range(first + 1, end):
            buffer[at] = buffer[i]
            at += 1
    buffer[at], buffer[at + 1] = _E, _MINUS
    at += 2
    scale = 1
    while scale * 10 <= exponent:
        scale *= 10
    while scale:
        buffer[at] = _ZERO + exponent // scale % 10
        at += 1
        scale //= 10
    return at


@compiled
def _exponent_end(buffer, point, mark, end):
    """Rewrites a number with an exponent: its point and "e" (or what stands there) are at ``point`` and ``mark``."""
    at = _without_zeros(buffer, point, mark) if point < mark else mark
    fraction, first = max(at - point - 1, 0), mark + 2
    while first + 1 < end and buffer[first] == _ZERO:
        first += 1
    exponent = 0
    for i in range(first, min(end, first + 4)):
        exponent = exponent * 10 + buffer[i] - _ZERO
    # 1.25e+1 is 12.5, as others print it. More digits than there are would make the text longer.
    if buffer[mark + 1] == _PLUS and 0 < exponent <= fraction:  # all digits are there: the point moves
        for i in range(point, point + exponent):
            buffer[i] = buffer[i + 1]
        buffer[point + exponent] = _POINT
        return at - 1 if exponent == fraction else at
    sign = buffer[mark + 1]
    buffer[at], buffer[at + 1] = _E, sign
    at += 2
    for i in range(first, end):
        buffer[at] = buffer[i]
        at += 1
    return at


@compiled
def _number_end(buffer, start, at, digits, end):
    """Rewrites a number with a point or an exponent, whose digits begin at ``at`` and first end at ``digits``."""
    mark = digits
    if buffer[digits] == _POINT:
        mark = _digits_end(buffer, digits + 1, end)
        if mark == digits + 1:
            return end
    # No exponent. A number of only zeros loses its sign: programs print -0.0 of sums and differences.
    if mark == end:
        stop = _without_zeros(buffer, digits, end)
        if at > start and stop == at + 1 and buffer[at] == _ZERO:
            buffer[start] = _ZERO
            return at
        return _small_end(buffer, at, digits, stop)
    signed = mark + 2 < end and (buffer[mark + 1] == _PLUS or buffer[mark + 1] == _MINUS)
    if buffer[mark] | 32 == _E and signed and _digits_end(buffer, mark + 2, end) == end:
        return _exponent_end(buffer, digits, mark, end)
    return end


@compiled
def _clock_end(buffer, start, end):
    """Rewrites a time of day, 01:02:03.500000; other texts stay."""
    if end - start < 10 or buffer[start + 5] != _COLON or buffer[start + 8] != _POINT:
        return end
    for i in (3, 4, 6, 7):
        if not _ZERO <= buffer[start + i] <= _NINE:
            return end
    return _without_zeros(buffer, start + 8, end) if _digits_end(buffer, start + 9, end) == end else end


@compiled
def canonical_end(buffer, start, end):
    """Rewrites ``buffer[start:end]``, a text of UTF-8, where it is not in the one form; returns where it ends then."""
    length = end - start
    # Nothing shorter has another form: 1., .5 and -0 are left as they are, too.
    if length < 3:
        return end
    first = buffer[start]
    if _ZERO <= first <= _NINE or first == _MINUS:
        at = start + 1 if first == _MINUS else start
        digits = _digits_end(buffer, at, end)
        if digits in (end, at):
            return end
        behind = buffer[digits]
        if behind == _POINT or behind | 32 == _E:
            return _number_end(buffer, start, at, digits, end)
        if behind == _MINUS and digits == start + 4:
            return _time_end(buffer, start, end)
        if behind == _COLON and digits == start + 2:
            return _clock_end(buffer, start, end)
        return end
    if length == 4 and _is_word(buffer, start, _TRUE):
        buffer[start : start + 4] = _TRUE
    elif length == 5 and _is_word(buffer, start, _FALSE):
        buffer[start : start + 5] = _FALSE
    return end


@compiled
def canonical_ends(buffer, starts, ends):
    """Rewrites texts in place; returns the (n,) int64 places where they end then."""
    rewritten = np.empty_like(ends)
    for i in range(starts.shape[0]):
        rewritten[i] = canonical_end(buffer, starts[i], ends[i])
    return rewritten


def canonical_text(text: str) -> str:
    """One text in the one form."""
    buffer = np.frombuffer(text.encode() or b"\0", np.uint8).copy()
    end = canonical_end(buffer, 0, len(text.encode()))
    return buffer[:end].tobytes().decode()
