"""Tensor Casting's sort (Algorithm 2) as a stable radix sort on the bits a row number can have.

Each lookup becomes one 64-bit word, row above position, so that a pass moves one array. A cast is a series of phases,
each over independent chunks: ``cast_advance`` does the serial work between phases and says how many chunks the next
has, ``cast_chunks`` runs some of them. Where tables own ascending ranges of entries and rows, each is sorted by itself,
by fewer bits and within the cache; otherwise all chunks share each pass. Either way the result is the one stable order.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_i32, get_i64, get_u64, put_i32, put_i64, put_u64

MAX_DIGIT_BITS = 11  # 2,048 buckets: the counters and one open cache line of each still fit the level-2 cache
SMALL_DIGIT_BITS = 8  # for few entries, where clearing and summing 2,048 counters would dominate
SMALL = 8192  # entries


class Job(enum.IntEnum):
    """Words of the int64 job array. Names of arrays hold addresses; int32 unless said otherwise."""

    IDS = 0  # uint32 where UNSIGNED is set
    OFFSETS = 1  # 0 for padded bags
    LENGTH = 2  # ids per padded bag
    NUM_BAGS = 3
    CAPACITY = 4
    NUM_ROWS = 5
    UNIQUE_CAPACITY = 6
    PAIRS = 7  # scratch, 2 * capacity uint64
    BAG_OF = 8  # scratch, capacity; used with offsets only
    COUNTERS = 9  # scratch, max(chunks, tables) << MAX_DIGIT_BITS
    TABLES = 10  # int64, Table records
    NUM_TABLES = 11
    CHUNKS = 12  # for passes shared by several threads; 1 sorts table by table
    ROWS_OUT = 13  # as IDS
    OFFSETS_OUT = 14
    SOURCES_OUT = 15
    POSITIONS_OUT = 16
    NUM_UNIQUE_OUT = 17
    LIMIT = 18  # entries from here on are padding
    PHASE = 19
    SHIFT = 20
    IN_SECOND = 21  # whether the pairs lie in the second half of PAIRS
    TOTAL = 22
    ERROR = 23  # 1: malformed offsets, until the lookups are padding; 2 + position: an id outside its table
    UNSIGNED = 24  # 1 for ids from 0 to 2^32 - 1, of a table of up to 2^32 - 1 rows


class Table(enum.IntEnum):
    """Words of a table's int64 record. A cast without known tables has one, of all entries and rows."""

    BEGIN = 0  # entries
    END = 1
    BASE = 2  # first row
    ROWS = 3
    REAL = 4  # lookups that are not padding
    UNIQUE = 5
    FIRST_REAL = 6  # where its sorted lookups go
    FIRST_PADDING = 7
    FIRST_UNIQUE = 8
    IN_SECOND = 9


JOB_WORDS, TABLE_WORDS = len(Job), len(Table)

(START, BAGS, SORT_TABLES, WRITE_TABLES, COUNT, SCATTER, UNIQUE, WRITE, DONE) = range(9)
(
    IDS, OFFSETS, LENGTH, NUM_BAGS, CAPACITY, NUM_ROWS, UNIQUE_CAPACITY, PAIRS, BAG_OF, COUNTERS, TABLES, NUM_TABLES,
    CHUNKS, ROWS_OUT, OFFSETS_OUT, SOURCES_OUT, POSITIONS_OUT, NUM_UNIQUE_OUT, LIMIT, PHASE, SHIFT, IN_SECOND, TOTAL,
    ERROR, UNSIGNED,
) = (int(word) for word in Job)  # fmt: skip
T_BEGIN, T_END, T_BASE, T_ROWS, T_REAL, T_UNIQUE, T_FIRST_REAL, T_FIRST_PADDING, T_FIRST_UNIQUE, T_IN_SECOND = (
    int(word) for word in Table
)


@inlined
def _digit_bits(entries, rows):
    """Bits per pass: as few passes as the widest digit allows, then digits of equal width."""
    bits = np.int64(1)
    # ``rows`` itself must fit: it is the key of padding.
    while (rows >> bits) != 0:
        bits += 1
    # The number of passes decides, since each moves every word; equal digits then keep the counters few.
    widest = SMALL_DIGIT_BITS if entries < SMALL else MAX_DIGIT_BITS
    passes = (bits + widest - 1) // widest
    return (bits + passes - 1) // passes, bits


@inlined
def _pairs(job, second):
    return get_i64(job, PAIRS) + (8 * get_i64(job, CAPACITY) if second != 0 else 0)


@inlined
def _table(job, t):
    return get_i64(job, TABLES) + 8 * TABLE_WORDS * t


@inlined
def _part(job, chunk):
    """Entries of a chunk."""
    # Multiplied before divided, in 64 bits: parts differ by at most one entry and leave none out.
    capacity, chunks = get_i64(job, CAPACITY), get_i64(job, CHUNKS)
    return capacity * chunk // chunks, capacity * (chunk + 1) // chunks


@inlined
def _id_bits(job):
    """Which bits of a sign-extended id count: a mask, so that loops over ids need no branch for the two kinds."""
    return np.int64(0xFFFFFFFF) if get_i64(job, UNSIGNED) != 0 else np.int64(-1)


@inlined
def _key(ids, i, id_bits, limit, base, rows):
    """The row within its table, or ``rows`` for padding."""
    row = (np.int64(get_i32(ids, i)) & id_bits) - base
    # Three comparisons and a select: no branch on ids, which no processor predicts.
    return row if (i < limit) & (row >= 0) & (row < rows) else rows


@inlined
def _count(job, table, begin, end, shift, bits, second, counters):
    mask = (np.int64(1) << bits) - 1
    for bucket in range(mask + 1):
        put_i32(counters, bucket, np.int32(0))
    base, rows = get_i64(table, T_BASE), get_i64(table, T_ROWS)
    if shift == 0:
        ids, limit, num_rows = get_i64(job, IDS), get_i64(job, LIMIT), get_i64(job, NUM_ROWS)
        foreign, id_bits = np.int64(-1), _id_bits(job)
        for i in range(begin, end):
            key = _key(ids, i, id_bits, limit, base, rows)
            row = np.int64(get_i32(ids, i)) & id_bits
            # An id that is a row, but of another table: remembered, not branched on, since hardly any cast has one.
            if (key == rows) & (i < limit) & (row >= 0) & (row < num_rows):
                foreign = i
            bucket = key & mask
            put_i32(counters, bucket, get_i32(counters, bucket) + np.int32(1))
        if foreign >= 0:
            put_i64(job, ERROR, 2 + foreign)
    else:
        pairs, places = _pairs(job, second), np.uint64(shift + 32)
        for i in range(begin, end):
            bucket = np.int64(get_u64(pairs, i) >> places) & mask
            put_i32(counters, bucket, get_i32(counters, bucket) + np.int32(1))


@inlined
def _scan(counters, chunks, buckets, begin):
    """Turns counts (chunks, buckets) into the place where each chunk's first entry of each bucket goes."""
    # Bucket by bucket, and within one chunk by chunk: entries of
    # an earlier chunk come first, which keeps the sort stable.
    place = np.int64(begin)
    for bucket in range(buckets):
        for chunk in range(chunks):
            at = chunk * buckets + bucket
            count = np.int64(get_i32(counters, at))
            # Fits: there are fewer than 2^31 entries (``checked_ids``).
            put_i32(counters, at, np.int32(place))
            place += count


@inlined
def _scatter(job, table, begin, end, shift, bits, second, counters):
    mask = (np.int64(1) << bits) - 1
    base, rows = get_i64(table, T_BASE), get_i64(table, T_ROWS)
    if shift == 0:
        ids, limit, out, id_bits = get_i64(job, IDS), get_i64(job, LIMIT), _pairs(job, 0), _id_bits(job)
        for i in range(begin, end):
            key = _key(ids, i, id_bits, limit, base, rows)
            bucket = key & mask
            place = get_i32(counters, bucket)
            put_i32(counters, bucket, place + np.int32(1))
            # The first pass reads ids and makes the words: row above position, so later passes move one array.
            put_u64(out, place, np.uint64((key << 32) | i))
    else:
        pairs, out, places = _pairs(job, second), _pairs(job, 1 - second), np.uint64(shift + 32)
        for i in range(begin, end):
            pair = get_u64(pairs, i)
            bucket = np.int64(pair >> places) & mask
            place = get_i32(counters, bucket)
            put_i32(counters, bucket, place + np.int32(1))
            put_u64(out, place, pair)


@inlined
def _count_unique(pairs, first, begin, end, rows):
    """Unique rows that begin, and lookups that are not padding, among sorted pairs of a table that starts at first."""
    unique, real = np.int64(0), np.int64(0)
    # A chunk may begin within a row: the pair before it tells whether its first row is new.
    last = np.int64(-1) if begin == first else np.int64(get_u64(pairs, begin - 1) >> np.uint64(32))
    for i in range(begin, end):
        key = np.int64(get_u64(pairs, i) >> np.uint64(32))
        real += np.int64(key < rows)
        unique += np.int64((key != last) & (key < rows))
        last = key
    return unique, real


@inlined
def _write(job, table, second, begin, end, segment):
    """Writes the cast of sorted pairs [begin, end), whose first new row is unique row number ``segment``."""
    pairs, first, base = _pairs(job, second), get_i64(table, T_BEGIN), get_i64(table, T_BASE)
    real = get_i64(table, T_REAL)
    # What is added to a sorted entry's number to get its place in the whole
    # cast. Tables' padding goes behind all real lookups of all tables.
    to_real = get_i64(table, T_FIRST_REAL) - first
    to_padding = get_i64(table, T_FIRST_PADDING) - first - real
    sources, positions = get_i64(job, SOURCES_OUT), get_i64(job, POSITIONS_OUT)
    rows_out, offsets_out, capacity = get_i64(job, ROWS_OUT), get_i64(job, OFFSETS_OUT), get_i64(job, UNIQUE_CAPACITY)
    bag_of, num_bags, offsets = get_i64(job, BAG_OF), get_i64(job, NUM_BAGS), get_i64(job, OFFSETS)
    # Half an entry keeps the quotient further from an integer than a double's rounding for any two int32.
    per_entry = 1.0 / np.float64(max(1, get_i64(job, LENGTH)))
    real_end = min(end, first + real)
    last = np.int64(-1)
    if (begin > first) & (begin < real_end):
        last = np.int64(get_u64(pairs, begin - 1) >> np.uint64(32))
    for i in range(begin, real_end):
        pair = get_u64(pairs, i)
        key, position = np.int64(pair >> np.uint64(32)), np.int64(pair & np.uint64(0xFFFFFFFF))
        if key != last:
            # Rows that do not fit are left out, but counted: ``num_unique``
            # tells that they were there. Offsets have one more place.
            if segment < capacity:
                put_i32(rows_out, segment, np.int32(base + key))
            if segment <= capacity:
                put_i32(offsets_out, segment, np.int32(to_real + i))
            segment += 1
            last = key
        put_i32(positions, to_real + i, np.int32(position))
        if offsets != 0:
            put_i32(sources, to_real + i, get_i32(bag_of, position))
        else:
            put_i32(sources, to_real + i, np.int32((np.float64(position) + 0.5) * per_entry))
    for i in range(max(begin, first + real), end):
        put_i32(positions, to_padding + i, np.int32(get_u64(pairs, i) & np.uint64(0xFFFFFFFF)))
        put_i32(sources, to_padding + i, np.int32(num_bags))


@inlined
def _sort_table(job, t):
    table = _table(job, t)
    begin, end, rows = get_i64(table, T_BEGIN), get_i64(table, T_END), get_i64(table, T_ROWS)
    width, bits = _digit_bits(end - begin, rows)
    counters = get_i64(job, COUNTERS) + 4 * (t << MAX_DIGIT_BITS)
    # The first pass reads ids, so it may be said to come from the second half; every pass writes to the other one.
    second, shift = np.int64(1), np.int64(0)
    while shift < bits:
        _count(job, table, begin, end, shift, width, second, counters)
        _scan(counters, 1, np.int64(1) << width, begin)
        _scatter(job, table, begin, end, shift, width, second, counters)
        second = 1 - second
        shift += width
    unique, real = _count_unique(_pairs(job, second), begin, begin, end, rows)
    put_i64(table, T_IN_SECOND, second)
    put_i64(table, T_UNIQUE, unique)
    put_i64(table, T_REAL, real)


@inlined
def _fill_bags(job, begin, end):
    """Writes the bag of each entry for bags [begin, end)."""
    offsets, bag_of, capacity = get_i64(job, OFFSETS), get_i64(job, BAG_OF), get_i64(job, CAPACITY)
    for bag in range(begin, end):
        first, last = np.int64(get_i32(offsets, bag)), np.int64(get_i32(offsets, bag + 1))
        if (first < 0) | (first > last) | (last > capacity) | ((bag == 0) & (first != 0)):
            put_i64(job, ERROR, 1)
            continue
        # Within ``bag_of`` even where offsets overlap; what is written then is not read, since the error makes all
        # padding.
        for i in range(first, last):
            put_i32(bag_of, i, np.int32(bag))


@kernel(types.void(types.int64, types.int64, types.int64))
def cast_chunks(job, begin, end):
    """Runs chunks [begin, end) of the present phase."""
    phase, bits, shift = get_i64(job, PHASE), np.int64(0), get_i64(job, SHIFT)
    if (phase == COUNT) | (phase == SCATTER):
        bits, _ = _digit_bits(get_i64(job, CAPACITY), get_i64(job, NUM_ROWS))
    second, table = get_i64(job, IN_SECOND), _table(job, 0)
    for chunk in range(begin, end):
        # Counters of its own for each chunk: counting takes no atomics, and ``_scan`` makes them the chunk's own
        # cursors, so that no two chunks ever write one entry.
        counters = get_i64(job, COUNTERS) + 4 * (chunk << bits)
        first, last = _part(job, chunk)
        if phase == BAGS:
            bags, chunks = get_i64(job, NUM_BAGS), get_i64(job, CHUNKS)
            _fill_bags(job, bags * chunk // chunks, bags * (chunk + 1) // chunks)
        elif phase == SORT_TABLES:
            _sort_table(job, chunk)
        elif phase == WRITE_TABLES:
            t = _table(job, chunk)
            _write(job, t, get_i64(t, T_IN_SECOND), get_i64(t, T_BEGIN), get_i64(t, T_END), get_i64(t, T_FIRST_UNIQUE))
        elif phase == COUNT:
            _count(job, table, first, last, shift, bits, second, counters)
        elif phase == SCATTER:
            _scatter(job, table, first, last, shift, bits, second, counters)
        elif phase == UNIQUE:
            unique, real = _count_unique(_pairs(job, second), 0, first, last, get_i64(job, NUM_ROWS))
            # The counters are free after the last pass: their memory holds two int64 for each chunk now.
            put_i64(get_i64(job, COUNTERS), 2 * chunk, unique)
            put_i64(get_i64(job, COUNTERS), 2 * chunk + 1, real)
        elif phase == WRITE:
            _write(job, table, second, first, last, get_i64(get_i64(job, COUNTERS), 2 * chunk))


@inlined
def _place_tables(job):
    """Where the sorted lookups, unique rows and padding of each table go."""
    tables, total, unique, padding = get_i64(job, NUM_TABLES), np.int64(0), np.int64(0), np.int64(0)
    # All real lookups first, then all padding, each by table: as one sort of everything has it, where the key of
    # padding is past every row.
    for t in range(tables):
        table = _table(job, t)
        put_i64(table, T_FIRST_REAL, total)
        put_i64(table, T_FIRST_UNIQUE, unique)
        total += get_i64(table, T_REAL)
        unique += get_i64(table, T_UNIQUE)
    for t in range(tables):
        table = _table(job, t)
        put_i64(table, T_FIRST_PADDING, total + padding)
        padding += get_i64(table, T_END) - get_i64(table, T_BEGIN) - get_i64(table, T_REAL)
    put_i64(job, TOTAL, total)
    put_i32(get_i64(job, NUM_UNIQUE_OUT), 0, np.int32(unique))


@inlined
def _place_chunks(job):
    """As ``_place_tables``, for the chunks of one table."""
    counts, chunks, table = get_i64(job, COUNTERS), get_i64(job, CHUNKS), _table(job, 0)
    total, unique = np.int64(0), np.int64(0)
    for chunk in range(chunks):
        here = get_i64(counts, 2 * chunk)
        put_i64(counts, 2 * chunk, unique)
        unique += here
        total += get_i64(counts, 2 * chunk + 1)
    put_i64(table, T_REAL, total)
    put_i64(table, T_UNIQUE, unique)
    _place_tables(job)


@inlined
def _fill_tail(job):
    """Pads rows and offsets past the last unique row."""
    capacity, total = get_i64(job, UNIQUE_CAPACITY), np.int32(get_i64(job, TOTAL))
    unique, rows, offsets = get_i32(get_i64(job, NUM_UNIQUE_OUT), 0), get_i64(job, ROWS_OUT), get_i64(job, OFFSETS_OUT)
    num_rows = np.int32(get_i64(job, NUM_ROWS))
    # Nothing where more rows were found than there is room for: only the count tells of those.
    for i in range(unique, capacity):
        put_i32(rows, i, num_rows)
    for i in range(unique, capacity + 1):
        put_i32(offsets, i, total)


@inlined
def _begin(job):
    offsets, capacity, bags = get_i64(job, OFFSETS), get_i64(job, CAPACITY), get_i64(job, NUM_BAGS)
    put_i64(job, ERROR, 0)
    # Clamped, since nobody has checked the offsets yet.
    put_i64(job, LIMIT, min(capacity, max(0, np.int64(get_i32(offsets, bags)))) if offsets != 0 else capacity)


@inlined
def _begin_sort(job):
    put_i64(job, SHIFT, 0)
    put_i64(job, IN_SECOND, 1)
    # A table sorted by itself stays in its thread's cache for all passes. One table on several threads has to share
    # each pass instead, with a barrier between counting and scattering.
    if (get_i64(job, NUM_TABLES) > 1) | (get_i64(job, CHUNKS) == 1):
        put_i64(job, PHASE, SORT_TABLES)
        return get_i64(job, NUM_TABLES)
    put_i64(job, PHASE, COUNT)
    return get_i64(job, CHUNKS)


@kernel(types.int64(types.int64))
def cast_advance(job):
    """Finishes the present phase and begins the next: its number of chunks, 0 when the cast is done or in error."""
    phase, chunks = get_i64(job, PHASE), get_i64(job, CHUNKS)
    if phase == START:
        _begin(job)
        if get_i64(job, OFFSETS) == 0:
            return _begin_sort(job)
        put_i64(job, PHASE, BAGS)
        return chunks
    if phase == BAGS:
        if get_i64(job, ERROR) != 0:  # malformed offsets: nobody knows whose the lookups are, so all are padding
            put_i64(job, ERROR, 0)
            put_i64(job, LIMIT, 0)
        return _begin_sort(job)
    # An id of another table, of which the host's cast says whose it is. One table owns every row, so inside jit there
    # is none.
    if get_i64(job, ERROR) != 0:
        return 0
    if phase == SORT_TABLES:
        _place_tables(job)
        put_i64(job, PHASE, WRITE_TABLES)
        return get_i64(job, NUM_TABLES)
    if phase == COUNT:
        bits, _ = _digit_bits(get_i64(job, CAPACITY), get_i64(job, NUM_ROWS))
        # Serial, over chunks times buckets: why more chunks do not pay, however many threads there are.
        _scan(get_i64(job, COUNTERS), chunks, np.int64(1) << bits, 0)
        put_i64(job, PHASE, SCATTER)
        return chunks
    if phase == SCATTER:
        width, bits = _digit_bits(get_i64(job, CAPACITY), get_i64(job, NUM_ROWS))
        put_i64(job, SHIFT, get_i64(job, SHIFT) + width)
        put_i64(job, IN_SECOND, 1 - get_i64(job, IN_SECOND))
        put_i64(job, PHASE, COUNT if get_i64(job, SHIFT) < bits else UNIQUE)
        return chunks
    if phase == UNIQUE:
        _place_chunks(job)
        put_i64(job, PHASE, WRITE)
        return chunks
    _fill_tail(job)
    put_i64(job, PHASE, DONE)
    return 0
