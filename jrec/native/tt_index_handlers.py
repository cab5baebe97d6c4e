"""The XLA custom calls of a tensor-train lookup's index work, each one pass over lists that are sorted already."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel
from jrec.native.ffi import (
    FAILED_PRECONDITION,
    answered_metadata,
    argument,
    bad_layout,
    data,
    dim,
    error,
    integer_attribute,
    known_layout,
    result,
)
from jrec.native.memory import get_i32, put_i32


@inlined
def count_of(buffer, capacity):
    """A () int32 operand, at least 0 and at most ``capacity``."""
    return min(max(np.int64(get_i32(data(buffer), 0)), 0), capacity)


@kernel(types.int64(types.int64))
def tt_level_handler(frame):
    """(entries, count) -> (parents, digits, prefixes, how many), of a core of ``factor`` slices.

    Without room for prefixes, those are the parents themselves, below ``padding``.
    """
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    capacity, room = dim(argument(frame, 0), 0), dim(result(frame, 2), 0)
    factor, padding = integer_attribute(frame, 0), integer_attribute(frame, 1)
    entries, count = data(argument(frame, 0)), count_of(argument(frame, 1), capacity)
    parents, digits, prefixes = data(result(frame, 0)), data(result(frame, 1)), data(result(frame, 2))
    found, before = np.int64(0), np.int64(-1)
    for u in range(count):
        entry = np.int64(get_i32(entries, u))
        prefix = entry // factor
        put_i32(digits, u, np.int32(entry - prefix * factor))
        if room == 0:
            put_i32(parents, u, np.int32(prefix))
            continue
        if prefix != before:
            put_i32(prefixes, found, np.int32(prefix))
            found, before = found + 1, prefix
        put_i32(parents, u, np.int32(found - 1))
    for u in range(count, capacity):
        put_i32(parents, u, np.int32(padding))
        put_i32(digits, u, np.int32(factor))
    for p in range(found, room):
        put_i32(prefixes, p, np.int32(0))
    put_i32(data(result(frame, 3)), 0, np.int32(found))
    return np.int64(0)


@kernel(types.int64(types.int64))
def tt_digit_order_handler(frame):
    """(digits, count) -> (offsets, entries), a stable counting sort; entries from ``count`` on are undefined."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    count = count_of(argument(frame, 1), dim(argument(frame, 0), 0))
    digits, offsets, entries = data(argument(frame, 0)), data(result(frame, 0)), data(result(frame, 1))
    slices = dim(result(frame, 0), 0) - 1
    for digit in range(slices + 1):
        put_i32(offsets, digit, np.int32(0))
    for u in range(count):
        digit = np.int64(get_i32(digits, u))
        put_i32(offsets, digit, get_i32(offsets, digit) + np.int32(1))
    total = np.int32(0)
    for digit in range(slices + 1):
        total += get_i32(offsets, digit)
        put_i32(offsets, digit, total)
    # From the last entry on, each goes before those of its digit that went before: ends become beginnings.
    for u in range(count - 1, -1, -1):
        digit = np.int64(get_i32(digits, u))
        place = get_i32(offsets, digit) - np.int32(1)
        put_i32(offsets, digit, place)
        put_i32(entries, np.int64(place), np.int32(u))
    return np.int64(0)


@kernel(types.int64(types.int64))
def tt_sources_handler(frame):
    """(positions, offsets of the unique rows, ids) -> (the place of every lookup's row among them,)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    positions, offsets, ids = data(argument(frame, 0)), data(argument(frame, 1)), data(argument(frame, 2))
    sources, lookups, rows = data(result(frame, 0)), dim(argument(frame, 2), 0), dim(argument(frame, 1), 0) - 1
    for i in range(lookups):
        put_i32(sources, i, np.int32(-1) if get_i32(ids, i) < 0 else np.int32(rows))
    for row in range(rows):
        for j in range(get_i32(offsets, row), get_i32(offsets, row + 1)):
            put_i32(sources, np.int64(get_i32(positions, j)), np.int32(row))
    return np.int64(0)
