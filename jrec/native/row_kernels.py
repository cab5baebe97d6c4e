"""Rows and optimizer slots in host memory: read out, written back, and made when they are first wanted.

A bitmap says which rows memory holds (*made*); what another row is follows from its number (``threefry``). A second one
marks rows that were written since they were last saved (*dirty*). Bits are set atomically, so that calls on disjoint
rows may run at the same time though their bits share words.
"""

from __future__ import annotations

import enum

import numpy as np
from numba import types

from jrec.native.accumulate import BF16, F32
from jrec.native.compile import inlined, kernel
from jrec.native.memory import (
    fetch_or,
    get_f32,
    get_i16,
    get_i32,
    get_i64,
    prefetch,
    put_bf16,
    put_f16,
    put_f32,
    put_i16,
    put_i32,
    put_i64,
)
from jrec.native.threefry import initial_value

ROWS_PER_CHUNK = 512
LOOKUPS_PER_CHUNK = 16384
FETCH, STORE, MAKE = range(3)
_AHEAD = 8  # rows: the distance of prefetches


class Job(enum.IntEnum):
    """Words of the int64 job array. Names of arrays hold addresses; absent ones are 0."""

    ACTION = 0  # FETCH, STORE or MAKE
    ROWS = 1  # int64 addresses
    COUNT = 2  # of them
    TABLE = 3
    DTYPE = 4
    DIM = 5
    VALUES = 6  # (count, dim) of the table's dtype: what is fetched or stored
    MADE = 7  # bitmaps
    DIRTY = 8
    MARK = 9  # 1 for MAKE to mark rows dirty
    TABLES = 10  # records of Table
    NUM_TABLES = 11
    SLOT0 = 12  # the table's, float32
    SLOT0_WIDTH = 13
    SLOT0_INITIAL = 14  # the bits of a float32
    SLOT0_VALUES = 15  # what is fetched or stored; 0 to leave this slot out of a fetch
    SLOT1 = 16
    SLOT1_WIDTH = 17
    SLOT1_INITIAL = 18
    SLOT1_VALUES = 19
    SLOT2 = 20
    SLOT2_WIDTH = 21
    SLOT2_INITIAL = 22
    SLOT2_VALUES = 23
    ABSENT = 24  # set to 1 if a row is not made


class Table(enum.IntEnum):
    """Words of the int64 record of one table of a stack."""

    BASE = 0
    KEY0 = 1
    KEY1 = 2
    SCALE = 3  # the bits of a float32


JOB_WORDS, TABLE_WORDS = len(Job), len(Table)
(
    ACTION, ROWS, COUNT, TABLE, DTYPE, DIM, VALUES, MADE, DIRTY, MARK, TABLES, NUM_TABLES,
    SLOT0, SLOT0_WIDTH, SLOT0_INITIAL, SLOT0_VALUES, SLOT1, SLOT1_WIDTH, SLOT1_INITIAL, SLOT1_VALUES,
    SLOT2, SLOT2_WIDTH, SLOT2_INITIAL, SLOT2_VALUES, ABSENT,
) = (int(word) for word in Job)  # fmt: skip
BASE, KEY0, KEY1, SCALE = (int(word) for word in Table)


@inlined
def _has(bitmap, row):
    # A plain load, though others may be setting bits of the word: this row's bit is nobody else's, by the callers'
    # contract.
    return (get_i64(bitmap, row >> 6) >> (row & 63)) & 1 != 0


@inlined
def _set(bitmap, row):
    # Most bits are set already, and reading a line is cheaper than owning it, which the atomic needs.
    if not _has(bitmap, row):
        fetch_or(bitmap + 8 * (row >> 6), np.int64(1) << (row & 63))


@inlined
def _table_of(job, row):
    """The address of the record of the last table whose base is not past the row."""
    low, high = np.int64(0), get_i64(job, NUM_TABLES)
    while high - low > 1:
        middle = (low + high) // 2
        if get_i64(get_i64(job, TABLES), middle * TABLE_WORDS + BASE) <= row:
            low = middle
        else:
            high = middle
    return get_i64(job, TABLES) + 8 * TABLE_WORDS * low


@inlined
def _initial_row(job, row, out):
    """Writes the first values of a row, of the table's dtype, to ``out``."""
    table, dim, dtype = _table_of(job, row), get_i64(job, DIM), get_i64(job, DTYPE)
    key0, key1 = get_i32(table, 2 * KEY0), get_i32(table, 2 * KEY1)
    scale = get_f32(table, 2 * SCALE)
    # Counted within its table, so that a table has the same first values in whatever stack it lies.
    first = (row - get_i64(table, BASE)) * dim
    for d in range(dim):
        value = initial_value(key0, key1, first + d, scale)
        if dtype == F32:
            put_f32(out, d, value)
        elif dtype == BF16:
            put_bf16(out, d, value)
        else:
            put_f16(out, d, value)


@inlined
def _copy(out, source, dim, dtype):
    if dtype == F32:
        for d in range(dim):
            put_i32(out, d, get_i32(source, d))
    else:
        for d in range(dim):
            put_i16(out, d, get_i16(source, d))


@inlined
def _fill(out, width, bits):
    for d in range(width):
        put_i32(out, d, np.int32(bits))


@inlined
def _prefetch(job, i):
    if i < get_i64(job, COUNT):
        row, dim = get_i64(get_i64(job, ROWS), i), get_i64(job, DIM)
        size = dim * (4 if get_i64(job, DTYPE) == F32 else 2)
        for byte in range(0, size, 64):
            prefetch(get_i64(job, TABLE) + row * size + byte)
        for word in (SLOT0, SLOT1, SLOT2):
            if get_i64(job, word) != 0:
                width = 4 * get_i64(job, word + 1)
                for byte in range(0, width, 64):
                    prefetch(get_i64(job, word) + row * width + byte)


@inlined
def _fetch(job, i, row, size):
    dtype, out = get_i64(job, DTYPE), get_i64(job, VALUES) + i * size
    made = _has(get_i64(job, MADE), row)
    if made:
        _copy(out, get_i64(job, TABLE) + row * size, get_i64(job, DIM), dtype)
    else:
        _initial_row(job, row, out)
    for slot in (SLOT0, SLOT1, SLOT2):
        if get_i64(job, slot + 3) != 0:
            width = get_i64(job, slot + 1)
            out = get_i64(job, slot + 3) + 4 * width * i
            if made:
                _copy(out, get_i64(job, slot) + 4 * width * row, width, F32)
            else:
                _fill(out, width, get_i64(job, slot + 2))


@inlined
def _store(job, i, row, size):
    _copy(get_i64(job, TABLE) + row * size, get_i64(job, VALUES) + i * size, get_i64(job, DIM), get_i64(job, DTYPE))
    for slot in (SLOT0, SLOT1, SLOT2):
        if get_i64(job, slot) != 0:
            width = get_i64(job, slot + 1)
            _copy(get_i64(job, slot) + 4 * width * row, get_i64(job, slot + 3) + 4 * width * i, width, F32)
    _set(get_i64(job, MADE), row)
    _set(get_i64(job, DIRTY), row)


@inlined
def _make(job, row, size):
    if not _has(get_i64(job, MADE), row):
        _initial_row(job, row, get_i64(job, TABLE) + row * size)
        for slot in (SLOT0, SLOT1, SLOT2):
            if get_i64(job, slot) != 0:
                width = get_i64(job, slot + 1)
                _fill(get_i64(job, slot) + 4 * width * row, width, get_i64(job, slot + 2))
        _set(get_i64(job, MADE), row)
    if get_i64(job, MARK) != 0:
        _set(get_i64(job, DIRTY), row)


@kernel(types.void(types.int64, types.int64, types.int64))
def row_chunks(job, begin, end):
    """Does the job's action on the rows of chunks [begin, end)."""
    action, size = get_i64(job, ACTION), get_i64(job, DIM) * (4 if get_i64(job, DTYPE) == F32 else 2)
    # Rows are unique, so each has one thread; neighbours share only words of the bitmaps.
    for i in range(begin * ROWS_PER_CHUNK, min(end * ROWS_PER_CHUNK, get_i64(job, COUNT))):
        row = get_i64(get_i64(job, ROWS), i)
        if action == MAKE:
            _make(job, row, size)
            continue
        # Rows ascend, but lie far apart: no hardware prefetcher follows.
        _prefetch(job, i + _AHEAD)
        if action == FETCH:
            _fetch(job, i, row, size)
        else:
            _store(job, i, row, size)


@kernel(types.void(types.int64, types.int64, types.int64))
def absent_chunks(job, begin, end):
    """Sets ABSENT if one of the lookups of chunks [begin, end), negative ones aside, wants a row that is not made."""
    rows, made = get_i64(job, ROWS), get_i64(job, MADE)
    for i in range(begin * LOOKUPS_PER_CHUNK, min(end * LOOKUPS_PER_CHUNK, get_i64(job, COUNT))):
        row = get_i64(rows, i)
        if row < 0:
            continue
        if not _has(made, row):
            # Several threads may write it, all the same value; it is read when all are done.
            put_i64(job, ABSENT, 1)
            return
