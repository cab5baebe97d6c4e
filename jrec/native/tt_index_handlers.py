"""The XLA custom calls of a tensor-train lookup's index work, passes over lists that are sorted already."""

from __future__ import annotations

import numpy as np
from numba import types

from jrec.native.compile import address_of, inlined, kernel
from jrec.native.ffi import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    answered_metadata,
    argument,
    bad_layout,
    data,
    dim,
    error,
    free,
    integer_attribute,
    known_layout,
    malloc,
    message,
    new_job,
    no_memory,
    num_results,
    parallel,
    pool_size,
    pool_task,
    result,
)
from jrec.native.memory import get_i32, get_i64, put_i32, put_i64
from jrec.native.tt_kernels import lower_bound


@inlined
def count_of(buffer, capacity):
    """A () int32 operand, at least 0 and at most ``capacity``."""
    return min(max(np.int64(get_i32(data(buffer), 0)), 0), capacity)


_FRAME, _FAILURE = range(2)  # words of the job of an index
_LEVEL_RESULTS = 4  # of every level; the sources come last
_PART = 4096  # lookups of a chunk
_MALFORMED, _NO_MEMORY = 1, 2


@kernel(types.void(types.int64, types.int64, types.int64))
def tt_index_chunks(job, begin, end):
    """Chunk 0 makes the levels, one from the other; the others make the sources of a part of the lookups each."""
    for chunk in range(begin, end):
        if chunk == 0:
            _make_levels(get_i64(job, _FRAME))
        else:
            _make_sources(job, get_i64(job, _FRAME), (chunk - 1) * _PART)


@inlined
def _make_levels(frame):
    factors, paddings = data(argument(frame, 5)), data(argument(frame, 6))
    entries, count = data(argument(frame, 0)), data(argument(frame, 1))
    for level in range(dim(argument(frame, 5), 0)):
        first = _LEVEL_RESULTS * level
        _make_level(frame, first, entries, count, np.int64(get_i32(factors, level)), np.int64(get_i32(paddings, level)))
        entries, count = data(result(frame, first + 2)), data(result(frame, first + 3))


@inlined
def _make_level(frame, first, entries, counted, factor, padding):
    """Parents, digits, prefixes and how many of these, from result ``first`` on, of a core of ``factor`` slices.

    Without room for prefixes, those are the parents themselves, below ``padding``.
    """
    capacity, room = dim(result(frame, first), 0), dim(result(frame, first + 2), 0)
    count = min(max(np.int64(get_i32(counted, 0)), 0), capacity)
    parents, digits, prefixes = (
        data(result(frame, first)),
        data(result(frame, first + 1)),
        data(result(frame, first + 2)),
    )
    inverse = 1.0 / np.float64(factor)
    for u in range(count):
        entry = np.int64(get_i32(entries, u))
        # A product in place of a division: a double holds any int32 exactly, so it is off by one at most.
        prefix = np.int64(np.float64(entry) * inverse)  # one too few where the product is rounded down
        digit = entry - prefix * factor
        short = np.int64(digit >= factor)
        put_i32(parents, u, np.int32(prefix + short))
        put_i32(digits, u, np.int32(digit - short * factor))
    num_prefixes, before = np.int64(0), np.int64(-1)
    for u in range(count if room > 0 else np.int64(0)):
        prefix = np.int64(get_i32(parents, u))
        # No branch on where the next prefix begins, which nobody can predict.
        num_prefixes += min(prefix - before, np.int64(1))
        before = prefix
        put_i32(prefixes, num_prefixes - 1, np.int32(prefix))
        put_i32(parents, u, np.int32(num_prefixes - 1))
    for u in range(count, capacity):
        put_i32(parents, u, np.int32(padding))
        put_i32(digits, u, np.int32(factor))
    for p in range(num_prefixes, room):
        put_i32(prefixes, p, np.int32(0))
    put_i32(data(result(frame, first + 3)), 0, np.int32(num_prefixes))


@inlined
def _make_sources(job, frame, first):
    """The places among the unique rows of the lookups that come ``first`` by row, and of those that follow."""
    positions, offsets, ids = data(argument(frame, 2)), data(argument(frame, 3)), data(argument(frame, 4))
    lookups, rows = dim(argument(frame, 2), 0), dim(argument(frame, 3), 0) - 1
    sources, last = data(result(frame, num_results(frame) - 1)), min(first + _PART, lookups)
    real = min(max(np.int64(get_i32(offsets, rows)), first), last)
    # A row's number is how many rows begin up to its lookups, so that no branch asks where each ends.
    begun = malloc(4 * _PART)
    if begun == 0:
        put_i64(job, _FAILURE, _NO_MEMORY)
        return
    for i in range(last - first):
        put_i32(begun, i, np.int32(0))
    row = lower_bound(offsets, rows + 1, np.int32(first + 1)) - 1
    coming = row + 1
    while coming < rows:
        place = np.int64(get_i32(offsets, coming)) - first
        if (place < 0) | (place >= last - first):
            break
        put_i32(begun, place, get_i32(begun, place) + np.int32(1))
        coming += 1
    strange = False
    for j in range(first, real):
        row += np.int64(get_i32(begun, j - first))
        position = np.int64(get_i32(positions, j))
        within = (position >= 0) & (position < lookups)
        # Nobody vouches for the positions of a cast that was given: one outside
        # of the lookups is written to place 0, and refused when all is done.
        strange |= not within
        put_i32(sources, position if within else np.int64(0), np.int32(row))
    for j in range(real, last):
        position = np.int64(get_i32(positions, j))
        within = (position >= 0) & (position < lookups)
        strange |= not within
        position = position if within else np.int64(0)
        put_i32(sources, position, np.int32(-1) if get_i32(ids, position) < 0 else np.int32(rows))
    free(begun)
    if strange:
        put_i64(job, _FAILURE, _MALFORMED)


_index_chunks = address_of(tt_index_chunks.symbol)
_bad_positions = message("jrec: a cast's positions must be those of its lookups; use tensor_cast's")


@kernel(types.int64(types.int64), requires=(pool_task, tt_index_chunks))
def tt_index_handler(frame):
    """(rows, count, positions, offsets, ids, factors, paddings) -> (parents, digits, prefixes and how many, of every
    level from the last core's on; sources).
    """
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    job, lookups = new_job(2), dim(argument(frame, 2), 0)
    if job == 0:
        return error(frame, no_memory(), RESOURCE_EXHAUSTED)
    put_i64(job, _FRAME, frame)
    # The levels depend on each other and make one chunk; it comes
    # first, so that the parts of the sources run beside it.
    chunks = 1 + (lookups + _PART - 1) // _PART
    threads = min(integer_attribute(frame, 0), pool_size(frame)) if chunks > 2 else np.int64(1)
    parallel(frame, _index_chunks(), job, chunks, threads)
    failure = get_i64(job, _FAILURE)
    free(job)
    if failure == _MALFORMED:
        return error(frame, _bad_positions(), INVALID_ARGUMENT)
    return error(frame, no_memory(), RESOURCE_EXHAUSTED) if failure != 0 else np.int64(0)


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
    # From the last entry on, each goes before its digit's later entries: ends become beginnings.
    for u in range(count - 1, -1, -1):
        digit = np.int64(get_i32(digits, u))
        place = get_i32(offsets, digit) - np.int32(1)
        put_i32(offsets, digit, place)
        put_i32(entries, np.int64(place), np.int32(u))
    return np.int64(0)


@kernel(types.int64(types.int64))
def tt_touched_handler(frame):
    """(slices, count) -> (1 for every slice that is among them, else 0,)."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    chosen, touched, size = data(argument(frame, 0)), data(result(frame, 0)), dim(result(frame, 0), 0)
    for i in range(size):
        put_i32(touched, i, np.int32(0))
    for u in range(count_of(argument(frame, 1), dim(argument(frame, 0), 0))):
        one = np.int64(get_i32(chosen, u))
        if 0 <= one < size:
            put_i32(touched, one, np.int32(1))
    return np.int64(0)


_bad_cast = message("jrec: a cast's offsets and positions must be those of its lookups; use tensor_cast's")


@kernel(types.int64(types.int64))
def tt_split_handler(frame):
    """(a cast, cached rows, ids) -> (the cast of hits, the cast of misses, places, missed ids); see ``split_cast``."""
    if answered_metadata(frame):
        return np.int64(0)
    if not known_layout(frame):
        return error(frame, bad_layout(), FAILED_PRECONDITION)
    if not _is_partition(frame):
        return error(frame, _bad_cast(), INVALID_ARGUMENT)
    num_bags, table_rows = np.int32(integer_attribute(frame, 0)), np.int32(integer_attribute(frame, 1))
    capacity, count = dim(argument(frame, 0), 0), count_of(argument(frame, 4), dim(argument(frame, 0), 0))
    rows, offsets, sources = data(argument(frame, 0)), data(argument(frame, 1)), data(argument(frame, 2))
    positions, cached, size = data(argument(frame, 3)), data(argument(frame, 5)), dim(argument(frame, 5), 0)
    ids, lookups = data(argument(frame, 6)), dim(argument(frame, 6), 0)
    hit, missed = _cast_arrays(frame, 0), _cast_arrays(frame, 5)
    places, missed_ids = data(result(frame, 10)), data(result(frame, 11))
    for i in range(lookups):
        put_i32(places, i, np.int32(-1))
        put_i32(missed_ids, i, get_i32(ids, i))
    hits, misses, place = np.int64(0), np.int64(0), np.int64(0)
    hit_lookups, missed_lookups = np.int64(0), np.int64(0)
    for u in range(count):
        row = get_i32(rows, u)
        while place < size and get_i32(cached, place) < row:
            place += 1
        first, last = np.int64(get_i32(offsets, u)), np.int64(get_i32(offsets, u + 1))
        if place < size and get_i32(cached, place) == row:
            _append(hit, hits, np.int32(place), hit_lookups, first, last, sources, positions)
            for j in range(first, last):
                position = np.int64(get_i32(positions, j))
                put_i32(places, position, np.int32(place))
                put_i32(missed_ids, position, np.int32(-1))
            hits, hit_lookups = hits + 1, hit_lookups + last - first
        else:
            _append(missed, misses, row, missed_lookups, first, last, sources, positions)
            misses, missed_lookups = misses + 1, missed_lookups + last - first
    _pad(hit, hits, np.int32(size), hit_lookups, capacity, lookups, num_bags)
    _pad(missed, misses, table_rows, missed_lookups, capacity, lookups, num_bags)
    hit_positions, missed_positions = hit[3], missed[3]
    # Positions stay a permutation of all lookups: the other side's come next, then those that neither has.
    for j in range(missed_lookups):
        put_i32(hit_positions, hit_lookups + j, get_i32(missed_positions, j))
    for j in range(hit_lookups):
        put_i32(missed_positions, missed_lookups + j, get_i32(hit_positions, j))
    for j in range(hit_lookups + missed_lookups, lookups):
        put_i32(hit_positions, j, get_i32(positions, j))
        put_i32(missed_positions, j, get_i32(positions, j))
    return np.int64(0)


@inlined
def _is_partition(frame):
    """Whether a cast's segments follow each other among the lookups, and have positions of lookups.

    Nobody vouches for a cast that was given; what is written goes by these numbers.
    """
    count, lookups = count_of(argument(frame, 4), dim(argument(frame, 0), 0)), dim(argument(frame, 6), 0)
    offsets, positions = data(argument(frame, 1)), data(argument(frame, 3))
    before, ordered = np.int64(get_i32(offsets, 0)), True
    begin = before
    for u in range(1, count + 1):
        offset = np.int64(get_i32(offsets, u))
        ordered &= before <= offset
        before = offset
    if not ordered or begin < 0 or before > lookups:
        return False
    for j in range(begin, before):
        position = np.int64(get_i32(positions, j))
        ordered &= (position >= 0) & (position < lookups)
    return ordered


@inlined
def _cast_arrays(frame, first_result):
    """Rows, offsets, sources, positions and count of the cast whose arrays begin at ``first_result``."""
    rows, offsets = data(result(frame, first_result)), data(result(frame, first_result + 1))
    sources, positions = data(result(frame, first_result + 2)), data(result(frame, first_result + 3))
    return rows, offsets, sources, positions, data(result(frame, first_result + 4))


@inlined
def _append(cast, segments, row, lookups, first, last, from_sources, from_positions):
    """Adds to a cast the segment [first, last) of other sources and positions as ``row``."""
    rows, offsets, sources, positions, _ = cast
    put_i32(rows, segments, row)
    put_i32(offsets, segments, np.int32(lookups))
    for j in range(last - first):
        put_i32(sources, lookups + j, get_i32(from_sources, first + j))
        put_i32(positions, lookups + j, get_i32(from_positions, first + j))


@inlined
def _pad(cast, segments, padding, lookups, capacity, all_lookups, num_bags):
    """Ends a cast, positions aside."""
    rows, offsets, sources, _, count = cast
    put_i32(count, 0, np.int32(segments))
    for u in range(segments, capacity):
        put_i32(rows, u, padding)
    for u in range(segments, capacity + 1):
        put_i32(offsets, u, np.int32(lookups))
    for j in range(lookups, all_lookups):
        put_i32(sources, j, num_bags)
