"""Kernels that read one value of a text each: numbers, UTF-8, and lists as JSON and Python print them."""

from __future__ import annotations

import numpy as np

from jrec.data.canonical import canonical_end
from jrec.data.escapes import is_null, skip_spaces, unescape
from jrec.data.keys import MISSING, hash_text, short_key
from jrec.kernel_cache import compiled

# Why a value is bad.
OK, NOT_NUMBER, NOT_FINITE, NOT_INTEGER, NOT_HEX, NOT_UTF8, HAS_NUL, BLANK, NOT_LIST = range(9)
SLOW = -1  # a number that needs more than one correctly rounded operation

_EXACT_MANTISSA = 1 << 53
_POWERS = 10.0 ** np.arange(23)  # exact in float64
# Checked before a digit is added: the product stays below 2^62, and nothing wraps.
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
                # At most 10 * 2^53, which int64 holds; what passes 2^53 is SLOW below.
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
            # Bounded: an exponent of thousands of digits must not wrap round to a small one.
            written = min(written * 10 + (buffer[at] - 48), 100000)
            at += 1
        exponent += sign * written
    # Clinger, "How to Read Floating Point Numbers Accurately", 1990: both operands are exact, so that there is one
    # rounding.
    if mantissa >= _EXACT_MANTISSA or exponent > 22 or exponent < -22:
        return SLOW, 0.0
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
def _parse_text(buffer, start, end, canonical, seed, long, long_keys, counts):
    """(code, key) of a text; one without an exact key is listed among the long ones."""
    code = check_text(buffer, start, end)
    if code != OK:
        return code, MISSING
    if canonical:
        end = canonical_end(buffer, start, end)
    short, key = short_key(buffer, start, end)
    if not short:
        key, fingerprint = hash_text(buffer, start, end, seed)
        at = counts[1]
        long[at, 0], long[at, 1] = start, end
        long_keys[at, 0], long_keys[at, 1] = key, fingerprint
        counts[1] += 1
    return OK, key


@compiled
def _parse_printed_list(buffer, start, end, of_texts, canonical, seed, keys, weights, slow, long, long_keys, counts):
    """Appends the elements of a list as JSON or Python prints it: texts in quotes, bare words and numbers, null.

    A blank field and null are empty lists, and so is a list of one blank; lists in lists are none.
    """
    at, begun = skip_spaces(buffer, start, end), counts[2]
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
        if first == last and not more and counts[2] == begun:
            return OK
        if of_texts:
            code, keys[counts[2]] = _parse_text(buffer, first, last, canonical, seed, long, long_keys, counts)
        else:
            code, weights[counts[2]] = parse_number(buffer, first, last)
            if code == SLOW:
                code, s = OK, counts[0]
                slow[s, 0], slow[s, 1], slow[s, 2] = counts[2], first, last
                counts[0] += 1
        if code != OK:
            return code
        counts[2] += 1
    return OK


@compiled
def parse_printed_lists(buffer, starts, ends, of_texts, canonical, seed, keys, weights, slow, long, long_keys):
    """Parses texts that are lists as JSON or Python prints them.

    Args:
      buffer: uint8, the texts, whose escapes are taken out in place.
      starts, ends: (texts,) int64, where each begins and ends.
      of_texts: Whether elements are texts; else they are numbers.
      canonical: Whether texts are brought into one form.
      seed: uint64 of the hash of long texts.
      keys, weights: (any,) uint64 and float64 out, the elements of texts or of numbers.
      slow: (any, 3) int64 out, (element, start, end) of numbers to convert exactly.
      long: (any, 2) int64 out, (start, end) of long texts, with their (key, fingerprint) in ``long_keys``.

    Returns:
      (texts,) int64 codes, (texts + 1,) int64 offsets of the elements, and how many slow numbers and long texts there
      are.
    """
    codes = np.zeros(starts.shape[0], np.int64)
    offsets = np.zeros(starts.shape[0] + 1, np.int64)
    counts, before = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for row in range(codes.shape[0]):
        before[:] = counts
        start, end = starts[row], ends[row]
        codes[row] = _parse_printed_list(
            buffer, start, end, of_texts, canonical, seed, keys, weights, slow, long, long_keys, counts
        )
        if codes[row] != OK:
            counts[:] = before
        offsets[row + 1] = counts[2]
    return codes, offsets, counts[0], counts[1]
