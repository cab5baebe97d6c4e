"""Texts in quotes with escapes, as JSON and Python print them: kernels for ``jrec.data.scan``."""

from __future__ import annotations

from jrec.kernel_cache import compiled


@compiled
def _hex_digits(buffer, at, end, count):
    """The number of ``count`` hexadecimal digits, or -1."""
    if at + count > end:
        return -1
    value = 0
    for i in range(at, at + count):
        c = buffer[i]
        if 48 <= c <= 57:
            value = 16 * value + (c - 48)
        elif 97 <= (c | 32) <= 102:
            value = 16 * value + ((c | 32) - 87)
        else:
            return -1
    return value


@compiled
def _put_utf8(buffer, at, point):
    """Writes a character; returns where it ends. It takes no more bytes than its escape."""
    if point < 0x80:
        buffer[at] = point
        return at + 1
    if point < 0x800:
        buffer[at], buffer[at + 1] = 0xC0 | (point >> 6), 0x80 | (point & 63)
        return at + 2
    if point < 0x10000:
        buffer[at], buffer[at + 1] = 0xE0 | (point >> 12), 0x80 | ((point >> 6) & 63)
        buffer[at + 2] = 0x80 | (point & 63)
        return at + 3
    buffer[at], buffer[at + 1] = 0xF0 | (point >> 18), 0x80 | ((point >> 12) & 63)
    buffer[at + 2], buffer[at + 3] = 0x80 | ((point >> 6) & 63), 0x80 | (point & 63)
    return at + 4


@compiled
def unescape(buffer, at, end):
    """Reads a text that opens with a quote at ``at``, and takes its escapes out in place.

    Returns:
      (its end, the position behind the closing quote), or -1s where it is not closed or has an unknown escape.
    """
    quote, written = buffer[at], at + 1
    at += 1
    while at < end and buffer[at] != quote:
        if buffer[at] != 92:
            buffer[written] = buffer[at]
            written, at = written + 1, at + 1
            continue
        if at + 1 >= end:
            return -1, -1
        c = buffer[at + 1]
        at += 2
        if c == 117 or c == 120:  # u, x
            digits = 4 if c == 117 else 2
            point = _hex_digits(buffer, at, end, digits)
            at += digits
            # Characters past U+FFFF are two escapes in JSON. Half of one is written as it is, and refused as no UTF-8
            # later.
            if 0xD800 <= point < 0xDC00 and at + 1 < end and buffer[at] == 92 and buffer[at + 1] == 117:
                low = _hex_digits(buffer, at + 2, end, 4)
                if 0xDC00 <= low < 0xE000:
                    point, at = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00), at + 6
            if point < 0:
                return -1, -1
            written = _put_utf8(buffer, written, point)
            continue
        if c == 110:
            c = 10
        elif c == 116:
            c = 9
        elif c == 114:
            c = 13
        elif c == 98:
            c = 8
        elif c == 102:
            c = 12
        elif c != 34 and c != 39 and c != 92 and c != 47:
            return -1, -1
        buffer[written] = c
        written += 1
    return (written, at + 1) if at < end else (-1, -1)


@compiled
def skip_spaces(buffer, at, end):
    """The first place from ``at`` on that holds no space or tab, ``end`` if there is none."""
    while at < end and (buffer[at] == 32 or buffer[at] == 9):
        at += 1
    return at


@compiled
def is_null(buffer, start, end):
    """Whether a text is null or None."""
    if end - start != 4:
        return False
    a, b, c, d = buffer[start], buffer[start + 1], buffer[start + 2], buffer[start + 3]
    return (a == 110 and b == 117 and c == 108 and d == 108) or (a == 78 and b == 111 and c == 110 and d == 101)
