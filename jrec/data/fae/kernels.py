"""Numba kernels that tell hot examples from cold ones, renumber hot ids, and sum up the content of examples.

A set of a table's rows is a bitmap, ``words``, (ceil(rows / 64),) uint64, with ``ranks``, uint32, the rows of the set
before each word; both of size 0 mean all rows. ``order`` is the row in place of every stored id, (rows,) uint32 (see
``jrec.data.reorder.file``), of size 0 where ids are rows. The kernels release the GIL.
"""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled

NO_FAULT = -1


@compiled
def _popcount(x):
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (x * np.uint64(0x0101010101010101)) >> np.uint64(56)


@compiled
def fill_set(rows, words, ranks):
    """Makes a bitmap, zeros before, and its ranks of ascending rows."""
    for row in rows:
        words[row >> 6] |= np.uint64(1) << np.uint64(row & 63)
    rank = np.uint64(0)
    for k in range(words.size):
        ranks[k] = np.uint32(rank)
        rank += _popcount(words[k])


@compiled
def _absent(row, words):
    return (words[row >> 6] >> np.uint64(row & 63)) & np.uint64(1) == 0


@compiled
def _is_cold(row, rows, order, words):
    """Whether an id is not in the set; -1 where it is past the table."""
    if row >= rows:
        return -1
    if words.size == 0:
        return 0
    return 1 if _absent(np.int64(order[row]) if order.size else row, words) else 0


@compiled
def mark_ids(values, rows, order, words, hot, fault):
    """Takes ``hot[i]`` from examples whose id is not in the set.

    ``fault`` gets the first example with an id past the table, and the id.
    """
    for i in range(values.size):
        cold = _is_cold(np.int64(values[i]), rows, order, words)
        if cold < 0:
            fault[0] = i
            fault[1] = values[i]
            return
        if cold:
            hot[i] = False


@compiled
def mark_lists(offsets, values, rows, order, words, hot, fault):
    """As ``mark_ids`` for lists of ids; an example with an empty list stays hot."""
    for i in range(offsets.size - 1):
        for j in range(offsets[i], offsets[i + 1]):
            cold = _is_cold(np.int64(values[j]), rows, order, words)
            if cold < 0:
                fault[0] = i
                fault[1] = values[j]
                return
            if cold:
                hot[i] = False


@compiled
def take(values, positions, out):
    """``out[k] = values[positions[k]]``."""
    for k in range(positions.size):
        out[k] = values[positions[k]]


@compiled
def take_hot(values, positions, order, words, ranks, out):
    """``out[k]``: the place in the set of the row of id ``values[positions[k]]``, which is in the set."""
    for k in range(positions.size):
        row = np.int64(values[positions[k]])
        if order.size:
            row = np.int64(order[row])
        if words.size:
            below = words[row >> 6] & ((np.uint64(1) << np.uint64(row & 63)) - np.uint64(1))
            row = np.int64(ranks[row >> 6]) + np.int64(_popcount(below))
        out[k] = row


@compiled
def list_positions(offsets, positions, out_offsets, out):
    """Where the values of the examples at ``positions`` lie, one list after the other, and the ends of the lists."""
    at = 0
    out_offsets[0] = 0
    for k in range(positions.size):
        for j in range(offsets[positions[k]], offsets[positions[k] + 1]):
            out[at] = j
            at += 1
        out_offsets[k + 1] = at


@compiled
def _step(state, value):
    state = (state ^ value) * np.uint64(0x9E3779B97F4A7C15)
    return state ^ (state >> np.uint64(29))


@compiled
def absorb_bits(values, state):
    """Lets the hash of every example depend on a column of float32, given as the uint32 of their bits."""
    for i in range(values.size):
        state[i] = _step(state[i], np.uint64(values[i]))


@compiled
def absorb_ids(values, rows, state, fault):
    """As ``absorb_bits`` for ids; ``rows[id]`` counts in place of the id, unless ``rows`` has size 0."""
    for i in range(values.size):
        row = np.int64(values[i])
        if rows.size:
            if row >= rows.size:
                fault[0] = i
                fault[1] = row
                return
            row = np.int64(rows[row])
        state[i] = _step(state[i], np.uint64(row))


@compiled
def absorb_lists(offsets, values, rows, state, fault):
    """As ``absorb_ids`` for lists of ids, or of bits, whose lengths count too."""
    for i in range(offsets.size - 1):
        mixed = _step(state[i], np.uint64(offsets[i + 1] - offsets[i]))
        for j in range(offsets[i], offsets[i + 1]):
            row = np.int64(values[j])
            if rows.size:
                if row >= rows.size:
                    fault[0] = i
                    fault[1] = row
                    return
                row = np.int64(rows[row])
            mixed = _step(mixed, np.uint64(row))
        state[i] = mixed


@compiled
def summed(state):
    """The sum of all examples' hashes, modulo 2^64: the same in every order of the examples."""
    total = np.uint64(0)
    for h in state:
        z = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(31))
    return total
