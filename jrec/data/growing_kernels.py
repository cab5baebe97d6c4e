"""Numba kernels of vocabularies that grow (``jrec.data.growing``); they release the GIL.

An entry is a row's 64-bit key and a word, its clock of last use (upper 32 bits) and its number of uses (lower 32), in
one (rows, 2) uint64 array, so that a lookup that counts touches one cache line of it. ``index``, (a power of two,)
int32, holds row numbers, -1 where empty, by linear probing from the mixed key; at most half of it is taken.
"""

from __future__ import annotations

import numpy as np

from jrec.data.keys import mix64
from jrec.kernel_cache import compiled

DEPTH = 4
"""Hash functions of the sketch of counts."""
MOST_COUNT = 255
"""Where the counts of the sketch stop."""
_MOST_USES = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_CLOCK = np.uint64(32)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


@compiled
def _find(key, entries, index):
    """The place of a key in the index: of its row, or the empty one where it would stand."""
    mask = np.uint64(index.shape[0] - 1)
    place = mix64(key) & mask
    while index[place] >= 0 and entries[index[place], 0] != key:
        place = (place + _ONE) & mask
    return place


@compiled
def look_up(keys, entries, index, rows):
    """``rows[i]`` becomes the row of ``keys[i]``, 0 where it has none."""
    for i in range(keys.shape[0]):
        row = index[_find(keys[i], entries, index)]
        rows[i] = max(row, 0)


@compiled
def use(keys, clock, entries, index, rows, unknown, touched, words):
    """Looks keys up and counts their uses.

    Args:
      keys: (n,) uint64.
      clock: The number of this batch, uint64.
      entries, index: The table.
      rows: (n,) int32, becomes the rows; 0 for unknown keys.
      unknown: (n,) int32, becomes the places of unknown keys.
      touched, words: (n,) int32 and uint64, become the known rows and the words that they had before.

    Returns:
      How many places are unknown, and how many rows are touched.
    """
    missing = used = 0
    for i in range(keys.shape[0]):
        row = index[_find(keys[i], entries, index)]
        rows[i] = max(row, 0)
        if row < 0:
            unknown[missing] = i
            missing += 1
            continue
        word = entries[row, 1]
        # Once a batch: what a second use of it would note is no state before the batch.
        if word >> _CLOCK != clock:
            touched[used], words[used] = row, word
            used += 1
        uses = min((word & _MOST_USES) + _ONE, _MOST_USES)
        entries[row, 1] = (clock << _CLOCK) | uses
    return missing, used


@compiled
def unique_counts(keys, places):
    """The different keys at some places.

    Returns:
      (n,) uint64 keys, ascending, (n,) int64, how often each occurs, and (places,) int64, which of them each place has.
    """
    order = np.argsort(keys[places])
    unique, counts = np.empty(places.shape[0], np.uint64), np.empty(places.shape[0], np.int64)
    inverse = np.empty(places.shape[0], np.int64)
    last = -1
    for place in order:
        key = keys[places[place]]
        if last < 0 or unique[last] != key:
            last += 1
            unique[last], counts[last] = key, 0
        counts[last] += 1
        inverse[place] = last
    return unique[: last + 1], counts[: last + 1], inverse


@compiled
def count_in_sketch(keys, counts, sketch, cells, before):
    """Adds counts of unique keys to a count-min sketch; they stop at ``MOST_COUNT``.

    Args:
      keys: (n,) uint64.
      counts: (n,) int64.
      sketch: (DEPTH, width) uint8, width a power of two.
      cells, before: (n * DEPTH,) int64 and uint8, become the cells that changed and what they held, in order.

    Returns:
      (n,) int64, how often each key has occurred at most, once all are counted.
    """
    mask = np.uint64(sketch.shape[1] - 1)
    flat = sketch.reshape(-1)
    at = 0
    for i in range(keys.shape[0]):
        for d in range(DEPTH):
            cell = d * sketch.shape[1] + np.int64(mix64(keys[i] + np.uint64(d + 1) * _STRIDE) & mask)
            cells[at], before[at] = cell, flat[cell]
            # Saturates, since a count that wrapped round would forget the most frequent keys.
            flat[cell] = min(np.int64(flat[cell]) + counts[i], MOST_COUNT)
            at += 1
    estimates = np.empty(keys.shape[0], np.int64)
    for i in range(keys.shape[0]):
        least = np.int64(MOST_COUNT)
        for d in range(DEPTH):
            least = min(least, np.int64(flat[cells[i * DEPTH + d]]))
        estimates[i] = least
    return estimates


@compiled
def next_victims(queue, begin, scanned, entries, victims, frequency, guarded):
    """Takes rows from a queue that were not used since it was made.

    Args:
      queue: (n,) int32 rows.
      begin: Where the queue stands.
      scanned: The clock when the queue was made, uint64.
      entries: The table.
      victims: (wanted,) int32, becomes the rows.
      frequency: (wanted,) int64, descending: how often each key has occurred that wants a row.
      guarded: Whether a key gets only a row that was used less often, unless it has occurred as often as is counted.

    Returns:
      How many there are, where the queue stands then, and whether its next row was used too often.
    """
    count = 0
    while count < victims.shape[0] and begin < queue.shape[0]:
        row = queue[begin]
        if entries[row, 1] >> _CLOCK <= scanned:
            uses = np.int64(entries[row, 1] & _MOST_USES)
            # Keys come by descending frequency: where this one is refused, so are all behind it.
            if guarded and frequency[count] <= uses and frequency[count] < MOST_COUNT:
                return count, begin, True
            victims[count] = row
            count += 1
        begin += 1
    return count, begin, False


@compiled
def give(rows, keys, counts, clock, entries, index, taken):
    """Gives rows to other keys.

    Args:
      rows: (n,) int32.
      keys: (n,) uint64, unknown to the table.
      counts: (n,) int64, how often each has been used.
      clock: The number of this batch, uint64.
      entries, index: The table.
      taken: (n,) bool, whether the row has had a key.
    """
    mask = np.uint64(index.shape[0] - 1)
    for i in range(rows.shape[0]):
        row = rows[i]
        if taken[i]:
            # What stands behind the hole moves up where its probing has come past it.
            hole = _find(entries[row, 0], entries, index)
            place = hole
            while True:
                place = (place + _ONE) & mask
                if index[place] < 0:
                    break
                # Knuth, The Art of Computer Programming 3, 6.4, Algorithm R: deletion without tombstones.
                home = mix64(entries[index[place], 0]) & mask
                if ((place - home) & mask) >= ((place - hole) & mask):
                    index[hole] = index[place]
                    hole = place
            index[hole] = -1
        index[_find(keys[i], entries, index)] = row
        entries[row, 0] = keys[i]
        entries[row, 1] = (clock << _CLOCK) | np.uint64(min(counts[i], np.int64(_MOST_USES)))


@compiled
def fill_index(entries, stop, index):
    """Puts the rows from 1 to ``stop`` into an empty index."""
    for row in range(1, stop):
        index[_find(entries[row, 0], entries, index)] = row
