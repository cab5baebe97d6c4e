"""The numba kernel that parses delimited text straight into columns: every field is checked, every bad line is found.

A line that cannot be used leaves no trace in the columns; it is listed with the field and the reason. So the fast path
and the careful one are the same code, and the error that a user sees names the exact line.
"""

from __future__ import annotations

import numpy as np

from jrec.data.canonical import canonical_end
from jrec.data.escapes import is_null, skip_spaces, unescape
from jrec.data.keys import MISSING, hash_text, hex8_key, short_key
from jrec.kernel_cache import compiled

# What a field is.
# SPAN only notes where the field is, for `spans`.
SKIP, NUMBER, INTEGER, HEX, TEXT, MULTI, WEIGHTS, SPAN = range(8)

# Why a line is bad.
OK, WRONG_COUNT, BAD_QUOTE, NOT_NUMBER, NOT_FINITE, NOT_INTEGER, NOT_HEX, NOT_UTF8, HAS_NUL, BLANK, NOT_LIST = range(11)

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_ONE = np.uint64(1)
_SLOW = -1  # a number that needs more than one correctly rounded operation
_EXACT_MANTISSA = 1 << 53
_POWERS = 10.0 ** np.arange(23)  # exact in float64
_INT_LIMIT = (1 << 62) // 10


@compiled
def _word_is_not_finite(buffer, start, end):
    """Whether the text is nan, inf or infinity in any case, with a sign or without."""
    if start < end and (buffer[start] == 43 or buffer[start] == 45):
        start += 1
    length = end - start
    if length != 3 and length != 8:
        return False
    a, b, c = buffer[start] | 32, buffer[start + 1] | 32, buffer[start + 2] | 32
    if length == 3 and a == 110 and b == 97 and c == 110:
        return True
    return a == 105 and b == 110 and c == 102 and (length == 3 or (buffer[start + 7] | 32) == 121)


@compiled
def parse_number(buffer, start, end, point_mark=46):
    """(code, value) of a decimal number: OK, NOT_NUMBER, NOT_FINITE, or -1 where the caller has to convert it exactly.

    A value is given only where one correctly rounded float64 operation makes it (Clinger's fast path).
    """
    at = start
    negative = False
    if at < end and (buffer[at] == 45 or buffer[at] == 43):
        negative = buffer[at] == 45
        at += 1
    mantissa, digits, exponent, point = 0, 0, 0, False
    while at < end:
        c = buffer[at]
        if 48 <= c <= 57:
            digits += 1
            if mantissa < _EXACT_MANTISSA:
                mantissa = mantissa * 10 + (c - 48)
                exponent -= 1 if point else 0
            else:
                exponent = 1000  # too many digits for the fast path
        elif c == point_mark and not point:
            point = True
        else:
            break
        at += 1
    if digits == 0:
        return (NOT_FINITE if _word_is_not_finite(buffer, start, end) else NOT_NUMBER), 0.0
    if at < end:
        if (buffer[at] | 32) != 101:
            return NOT_NUMBER, 0.0
        at += 1
        sign = 1
        if at < end and (buffer[at] == 45 or buffer[at] == 43):
            sign = -1 if buffer[at] == 45 else 1
            at += 1
        if at == end:
            return NOT_NUMBER, 0.0
        written = 0
        while at < end:
            if buffer[at] < 48 or buffer[at] > 57:
                return NOT_NUMBER, 0.0
            written = min(written * 10 + (buffer[at] - 48), 100000)
            at += 1
        exponent += sign * written
    if mantissa >= _EXACT_MANTISSA or exponent > 22 or exponent < -22:
        return _SLOW, 0.0
    value = float(mantissa)
    value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    return OK, (-value if negative else value)


@compiled
def parse_integer(buffer, start, end):
    """(code, value) of a decimal integer below 2^62 in magnitude."""
    at = start
    negative = at < end and buffer[at] == 45
    if negative or (at < end and buffer[at] == 43):
        at += 1
    if at == end:
        return NOT_INTEGER, 0
    value = 0
    while at < end:
        if buffer[at] < 48 or buffer[at] > 57 or value >= _INT_LIMIT:
            return NOT_INTEGER, 0
        value = value * 10 + (buffer[at] - 48)
        at += 1
    return OK, (-value if negative else value)


@compiled
def check_text(buffer, start, end):
    """OK, HAS_NUL or NOT_UTF8 (overlong forms, surrogates and values past U+10FFFF included)."""
    at = start
    while at < end:
        c = buffer[at]
        if c < 128:
            if c == 0:
                return HAS_NUL
            at += 1
            continue
        if 0xC2 <= c <= 0xDF:
            more, low, high = 1, 0x80, 0xBF
        elif 0xE0 <= c <= 0xEF:
            more, low, high = 2, (0xA0 if c == 0xE0 else 0x80), (0x9F if c == 0xED else 0xBF)
        elif 0xF0 <= c <= 0xF4:
            more, low, high = 3, (0x90 if c == 0xF0 else 0x80), (0x8F if c == 0xF4 else 0xBF)
        else:
            return NOT_UTF8
        if at + more >= end or buffer[at + 1] < low or buffer[at + 1] > high:
            return NOT_UTF8
        for i in range(at + 2, at + more + 1):
            if buffer[i] < 0x80 or buffer[i] > 0xBF:
                return NOT_UTF8
        at += more + 1
    return OK


@compiled
def _is_at(buffer, at, mark):
    for i in range(mark.shape[0]):  # noqa: SIM110 (numba takes no generator)
        if buffer[at + i] != mark[i]:
            return False
    return True


@compiled
def _unquote(buffer, at, limit, tail):
    """Reads a quoted field that opens at ``at``.

    Returns:
      (is it closed, start and end of its text, the position after the closing quote, the new end of the tail). A text
      with doubled quotes is copied to the tail of the buffer without the doubling.
    """
    at += 1
    start = at
    doubled = False
    while at < limit and buffer[at] != _NEWLINE:
        if buffer[at] == _QUOTE:
            if buffer[at + 1] != _QUOTE:
                break
            doubled = True
            at += 1
        at += 1
    if at >= limit or buffer[at] != _QUOTE:
        return False, start, at, at, tail
    if not doubled:
        return True, start, at, at + 1, tail
    tail_start = tail
    i = start
    while i < at:
        buffer[tail] = buffer[i]
        tail += 1
        i += 2 if buffer[i] == _QUOTE else 1
    return True, tail_start, tail, at + 1, tail


@compiled
def _parse_number_field(buffer, start, end, row, slot, numbers, slow, counts):
    code, value = parse_number(buffer, start, end)
    if code == _SLOW:
        at = counts[1]
        slow[at, 0], slow[at, 1], slow[at, 2], slow[at, 3] = row, slot, start, end
        counts[1] += 1
        return OK
    numbers[slot, row] = value
    return code


@compiled
def _parse_text(buffer, start, end, feature, canonical, seed, long, long_keys, counts):
    """(code, key) of a text; one without an exact key is listed among the long ones."""
    code = check_text(buffer, start, end)
    if code != OK:
        return code, MISSING
    if canonical:
        end = canonical_end(buffer, start, end)
    short, key = short_key(buffer, start, end)
    if not short:
        key, fingerprint = hash_text(buffer, start, end, seed)
        at = counts[2]
        long[at, 0], long[at, 1], long[at, 2] = feature, start, end
        long_keys[at, 0], long_keys[at, 1] = key, fingerprint
        counts[2] += 1
    return OK, key


@compiled
def _parse_printed_list(buffer, start, end, kind, row, slot, feature, canonical, seed, lists, pool, weights, slow, long,
                        long_keys, counts):  # fmt: skip
    """Appends the elements of a list as JSON or Python prints it: texts in quotes, bare words and numbers, null.

    A blank field and null are empty lists; lists in lists are none.
    """
    lists[slot, row, 0] = counts[3]
    at = skip_spaces(buffer, start, end)
    while end > at and (buffer[end - 1] == 32 or buffer[end - 1] == 9):
        end -= 1
    if at < end and not is_null(buffer, at, end):
        if buffer[at] != 91 or buffer[end - 1] != 93 or end - at < 2:
            return NOT_LIST
        at, end = skip_spaces(buffer, at + 1, end), end - 1
    else:
        at = end
    more = at < end
    while more:
        at = skip_spaces(buffer, at, end)
        if at < end and (buffer[at] == 34 or buffer[at] == 39):
            first = at + 1
            last, at = unescape(buffer, at, end)
            if last < 0:
                return NOT_LIST
        else:
            first = at
            while at < end and buffer[at] != 44:
                if buffer[at] == 91 or buffer[at] == 123:
                    return NOT_LIST
                at += 1
            last = at
            while last > first and buffer[last - 1] == 32:
                last -= 1
            if first == last:
                return NOT_LIST
            if is_null(buffer, first, last):
                last = first
        at = skip_spaces(buffer, at, end)
        more = at < end
        if more and buffer[at] != 44:
            return NOT_LIST
        at += 1
        # As in _parse_list: a function that both call makes lists take 1.8 times as long to prepare, since Numba would
        # pass its arrays field by field for every element.
        if kind == MULTI:
            code, pool[counts[3]] = _parse_text(buffer, first, last, feature, canonical, seed, long, long_keys, counts)
        else:
            code, weights[counts[3]] = parse_number(buffer, first, last)
            if code == _SLOW:
                code, s = OK, counts[1]
                slow[s, 0], slow[s, 1], slow[s, 2], slow[s, 3] = counts[3], -1, first, last
                counts[1] += 1
        if code != OK:
            return code
        counts[3] += 1
    lists[slot, row, 1] = counts[3]
    return OK


@compiled
def _parse_list(buffer, start, end, separator, kind, row, slot, feature, canonical, seed, lists, pool, weights, slow,
                long, long_keys, counts):  # fmt: skip
    """Appends the elements of a list field to the pool; a blank field is an empty list."""
    lists[slot, row, 0] = counts[3]
    at = start
    while at < end or (start < end and at == end):
        stop = at
        while stop < end and not (stop + separator.shape[0] <= end and _is_at(buffer, stop, separator)):
            stop += 1
        if kind == MULTI:
            code, pool[counts[3]] = _parse_text(buffer, at, stop, feature, canonical, seed, long, long_keys, counts)
        else:
            code, weights[counts[3]] = parse_number(buffer, at, stop)
            if code == _SLOW:
                code = OK
                s = counts[1]
                slow[s, 0], slow[s, 1], slow[s, 2], slow[s, 3] = counts[3], -1, at, stop
                counts[1] += 1
        if code != OK:
            return code
        counts[3] += 1
        if stop >= end:
            break
        at = stop + separator.shape[0]
    lists[slot, row, 1] = counts[3]
    return OK


@compiled
def parse_lines(buffer, length, delimiter, quoting, kinds, slots, blanks, canonical, separators, separator_ends, seed,
                numbers, integers, keys, lists, pool, weights, slow, long, long_keys, row_places, bad):  # fmt: skip
    """Parses whole lines.

    Args:
      buffer: uint8; the lines, each ended by a newline, then room for unquoted texts.
      length: bytes of the lines.
      delimiter: uint8 bytes between fields.
      quoting: Whether a field may be quoted.
      kinds, slots, blanks, canonical: (fields,) int64 kind, int64 row of the output array of that kind, bool whether
        it may be blank, bool whether its texts are brought into one form.
      separators, separator_ends: The separators of the list fields, one after the other, and (fields,) int64 ends;
        an empty separator stands for lists as JSON or Python prints them.
      seed: uint64 of the hash of long texts.
      numbers: (slots, lines) float64 out; a blank is NaN.
      integers: (slots, lines) int64 out.
      keys: (slots, lines) uint64 out.
      lists: (slots, lines, 2) int64 out, where a list begins and ends in ``pool`` (uint64) or ``weights`` (float64).
      slow: (any, 4) int64 out, (row, slot, start, end) of numbers to convert exactly; slot -1 means ``weights[row]``.
      long: (any, 3) int64 out, (field, start, end) of long texts, with their (key, fingerprint) in ``long_keys``.
      row_places: (lines, 3) int64 out, (line, start, end) of every row.
      bad: (lines, 7) int64 out, (line, start, end, code, field, start, end) of every bad line.

    Returns:
      (5,) int64: rows, slow numbers, long texts, pool elements, bad lines.
    """
    num_fields = kinds.shape[0]
    counts = np.zeros(5, np.int64)
    saved = np.zeros(5, np.int64)
    first_mark, one_mark = delimiter[0], delimiter.shape[0] == 1
    at, line, tail = 0, 0, length
    while at < length:
        line_start, field, code = at, 0, OK
        bad_field, bad_start, bad_end = 0, at, at
        saved[:] = counts
        row = counts[0]
        while True:
            if quoting and buffer[at] == _QUOTE:
                closed, start, end, at, tail = _unquote(buffer, at, length, tail)
                if closed and buffer[at] == _RETURN and buffer[at + 1] == _NEWLINE:
                    at += 1
                if not closed or (buffer[at] != _NEWLINE and not _is_at(buffer, at, delimiter)):
                    code, bad_field, bad_start, bad_end = BAD_QUOTE, field, start, end
                    while buffer[at] != _NEWLINE:
                        at += 1
                    break
                at_end = buffer[at] == _NEWLINE
            else:
                start = at
                place = np.uint64(at)  # unsigned: numba checks signed indices for being negative
                while True:
                    c = buffer[place]
                    if c == _NEWLINE or (c == first_mark and (one_mark or _is_at(buffer, np.int64(place), delimiter))):
                        break
                    place += _ONE
                at = np.int64(place)
                end = at
                at_end = buffer[at] == _NEWLINE
                if at_end and end > start and buffer[end - 1] == _RETURN:
                    end -= 1
            if field < num_fields and code == OK:
                kind, slot = kinds[field], slots[field]
                if kind == SKIP:
                    pass
                elif start == end and not blanks[field]:
                    code = BLANK
                elif kind == HEX:
                    valid, key = (True, MISSING) if start == end else hex8_key(buffer, start, end)
                    keys[slot, row] = key
                    code = OK if valid else NOT_HEX
                elif kind == NUMBER:
                    if start == end:
                        numbers[slot, row] = np.nan
                    else:
                        code = _parse_number_field(buffer, start, end, row, slot, numbers, slow, counts)
                elif kind == INTEGER:
                    code, integers[slot, row] = parse_integer(buffer, start, end)
                elif kind == TEXT:
                    code, keys[slot, row] = _parse_text(
                        buffer, start, end, field, canonical[field], seed, long, long_keys, counts
                    )
                elif kind == SPAN:
                    lists[slot, row, 0], lists[slot, row, 1] = start, end
                else:
                    separator = separators[(separator_ends[field - 1] if field else 0) : separator_ends[field]]
                    if separator.shape[0]:
                        code = _parse_list(buffer, start, end, separator, kind, row, slot, field, canonical[field],
                                           seed, lists, pool, weights, slow, long, long_keys, counts)  # fmt: skip
                    else:
                        code = _parse_printed_list(buffer, start, end, kind, row, slot, field, canonical[field], seed,
                                                   lists, pool, weights, slow, long, long_keys, counts)  # fmt: skip
                if code != OK:
                    bad_field, bad_start, bad_end = field, start, end
            field += 1
            if at_end:
                break
            at += delimiter.shape[0]
        if code != BAD_QUOTE and field != num_fields:
            code, bad_field = WRONG_COUNT, field
        if code == OK:
            row_places[row, 0], row_places[row, 1], row_places[row, 2] = line, line_start, at
            counts[0] += 1
        else:
            num_bad = saved[4]
            counts[:] = saved
            bad[num_bad, 0], bad[num_bad, 1], bad[num_bad, 2], bad[num_bad, 3] = line, line_start, at, code
            bad[num_bad, 4], bad[num_bad, 5], bad[num_bad, 6] = bad_field, bad_start, bad_end
            counts[4] += 1
        at += 1
        line += 1
    return counts


@compiled
def parse_printed_lists(buffer, bounds, kind, canonical, seed, lists, pool, weights, slow, long, long_keys):
    """Parses texts that are lists as JSON or Python prints them, each by itself.

    Args:
      buffer: uint8, the texts, whose escapes are taken out in place.
      bounds: (texts + 1,) int64, between which each text lies.
      kind: MULTI or WEIGHTS.
      canonical: Whether texts are brought into one form.
      seed: uint64 of the hash of long texts.
      lists, pool, weights, slow, long, long_keys: The outputs of ``parse_lines``, for one field.

    Returns:
      (texts,) int64 codes, and (5,) int64: nothing, slow numbers, long texts, pool elements, nothing.
    """
    codes = np.zeros(bounds.shape[0] - 1, np.int64)
    counts = np.zeros(5, np.int64)
    saved = np.zeros(5, np.int64)
    for row in range(codes.shape[0]):
        saved[:] = counts
        codes[row] = _parse_printed_list(buffer, bounds[row], bounds[row + 1], kind, row, 0, 0, canonical, seed, lists,
                                         pool, weights, slow, long, long_keys, counts)  # fmt: skip
        if codes[row] != OK:
            counts[:] = saved
            lists[0, row, 0], lists[0, row, 1] = counts[3], counts[3]
    return codes, counts
