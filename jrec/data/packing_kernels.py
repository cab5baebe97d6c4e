"""Numba kernels that pack columns into batches: one pass checks ids and adds their table's address.

Every kernel reports its first fault in ``fault``, (3,) int64: position in the batch, kind, offending value. The kernels
release the GIL, so that the loader's threads run them side by side. ``order`` is the row that takes the place of every
row, (rows,) uint32 (see ``jrec.data.bijection``), or of size 0 where rows keep their places.
"""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled

RAISE, CLIP, OOV = 0, 1, 2  # what to do with an id outside of its table
SUM, MEAN, SQRTN = 0, 1, 2  # how weights are scaled by the bag's length
BAD_ID, BAD_LENGTH, BAD_NUMBER = 0, 1, 2  # kinds of fault


@compiled
def _report(fault, position, kind, value):
    fault[0] = position
    fault[1] = kind
    fault[2] = value


@compiled
def address_ids(values, length, base, rows, policy, oov_row, order, out, fault):
    """``out[k] = base + order[values[k]]`` for features of ``length`` ids in every example."""
    bad = order.size > 0
    for k in range(values.size):  # without a branch, so that it is vectorized: 0.1 ns an id
        # A negative id is a huge number without a sign, so one comparison finds ids on both sides of the table.
        bad |= np.uint64(values[k]) >= np.uint64(rows)
        out[k] = base + np.int64(values[k])
    # Ids are good and rows keep their places: ``out`` is complete. Otherwise the slow loop writes all of it anew.
    if not bad:
        return
    for k in range(values.size):
        raw = np.int64(values[k])
        if raw < 0 or raw >= rows:
            if policy == RAISE:
                _report(fault, k // length, BAD_ID, raw)
                return
            raw = oov_row if policy == OOV else (0 if raw < 0 else rows - 1)
        out[k] = base + (np.int64(order[raw]) if order.size else raw)


@compiled
def address_padded(offsets, values, weights, base, rows, policy, oov_row, order, exact, scale, out, out_weights, fault):
    """Fills ``out``, (examples, max_length), with addresses, -1 behind an example's last id; and the weights.

    ``weights`` of size 0 means ones; ``out_weights`` of size 0 means that the stack has none. ``exact`` demands
    max_length ids of every example.
    """
    max_length = out.shape[1]
    for k in range(offsets.size - 1):
        start = offsets[k]
        length = offsets[k + 1] - start
        if length > max_length or (exact and length != max_length):
            _report(fault, k, BAD_LENGTH, length)
            return
        factor = weight_factor(scale, length)
        for j in range(max_length):
            if j >= length:
                out[k, j] = -1
                if out_weights.size:
                    out_weights[k, j] = 0.0
                continue
            raw = np.int64(values[start + j])
            if raw < 0 or raw >= rows:
                if policy == RAISE:
                    _report(fault, k, BAD_ID, raw)
                    return
                raw = oov_row if policy == OOV else (0 if raw < 0 else rows - 1)
            out[k, j] = base + (np.int64(order[raw]) if order.size else raw)
            if out_weights.size:
                weight = factor * weights[start + j] if weights.size else factor
                if not np.isfinite(weight):
                    _report(fault, k, BAD_NUMBER, 0)
                    return
                out_weights[k, j] = weight


@compiled
def address_ragged(
    offsets,
    values,
    weights,
    base,
    rows,
    policy,
    oov_row,
    order,
    max_length,
    exact,
    scale,
    unpooled,
    position,
    out,
    out_weights,
    out_offsets,
    fault,
):
    """Appends addresses to ``out`` from ``position`` and bag ends to ``out_offsets``; returns the new position.

    ``out_offsets`` has one entry a bag of this feature: one bag an example, or max_length where ``unpooled``. Bags
    behind the last example's are empty.
    """
    bag = 0
    for k in range(offsets.size - 1):
        start = offsets[k]
        length = offsets[k + 1] - start
        if length > max_length or (exact and length != max_length):
            _report(fault, k, BAD_LENGTH, length)
            return position
        factor = weight_factor(scale, length)
        for j in range(length):
            raw = np.int64(values[start + j])
            if raw < 0 or raw >= rows:
                if policy == RAISE:
                    _report(fault, k, BAD_ID, raw)
                    return position
                raw = oov_row if policy == OOV else (0 if raw < 0 else rows - 1)
            out[position] = base + (np.int64(order[raw]) if order.size else raw)
            if out_weights.size:
                weight = factor * weights[start + j] if weights.size else factor
                if not np.isfinite(weight):
                    _report(fault, k, BAD_NUMBER, 0)
                    return position
                out_weights[position] = weight
            position += 1
            if unpooled:
                out_offsets[bag] = position
                bag += 1
        # Unpooled, an example has max_length bags of one id each, of which those behind its ids are empty; else its one
        # bag ends.
        for _ in range(max_length - length if unpooled else 1):
            out_offsets[bag] = position
            bag += 1
    out_offsets[bag:] = position
    return position


@compiled
def keep_part_padded(first, rows, base, table_ids, ids, weights):
    """Keeps of ``table_ids``, rows of a whole table and -1, the ``rows`` from ``first`` on, as addresses.

    ``ids``, which may be the same array, gets the addresses, -1 for all others. All arrays are flat; weights of what
    is not kept become 0, ``weights`` of size 0 means none.
    """
    for k in range(ids.size):
        row = np.int64(table_ids[k]) - first
        ids[k] = base + row if row >= 0 and row < rows else -1
    for k in range(weights.size):
        weights[k] = weights[k] if ids[k] >= 0 else np.float32(0.0)


@compiled
def keep_part_ragged(first, rows, base, begin, table_ids, ids, weights, offsets):
    """As ``keep_part_padded``, of the bags that end at ``offsets`` and begin at ``begin``; what is kept moves together.

    Returns:
      where the last bag ends now.
    """
    position = begin
    for bag in range(offsets.size):
        end = np.int64(offsets[bag])
        for k in range(begin, end):
            row = np.int64(table_ids[k]) - first
            # Frequent and other rows alternate without a pattern: no branch, which would be mispredicted.
            # Written before it is known whether the row is kept: ``position`` never passes ``k``, so nothing unread is
            # lost, even where ``ids`` is ``table_ids``.
            ids[position] = base + row
            if weights.size:
                weights[position] = weights[k]
            position += (row >= 0) & (row < rows)
        # The old end, before it is overwritten, is where the next bag begins.
        begin = end
        offsets[bag] = position
    weights[position:begin] = 0.0
    return position


@compiled
def copy_lists(values, starts, offsets, out):
    """``out[offsets[i]:offsets[i + 1]]`` becomes as many of ``values`` from ``starts[i]`` on."""
    for i in range(starts.size):
        start = starts[i] - offsets[i]
        for k in range(offsets[i], offsets[i + 1]):
            out[k] = values[start + k]


@compiled
def cut_examples(source, widths, begin, stop, room, place, out):
    """Copies the examples from ``begin`` to ``stop`` of a ``PackedWindow``'s addresses to those from ``place`` on.

    ``widths`` are the ids of an example by feature; ``out`` has ``room`` examples of each feature.
    """
    examples, count = source.size // widths.sum(), stop - begin
    there = here = 0
    for width in widths:
        first, to = there + begin * width, here + place * width
        for k in range(count * width):
            out[to + k] = source[first + k]
        there += examples * width
        here += room * width


@compiled
def pad_examples(widths, place, room, out):
    """Makes padding of the examples from ``place`` on, of ``room`` of each feature."""
    here = 0
    for width in widths:
        out[here + place * width : here + room * width] = -1
        here += room * width


@compiled
def weight_factor(scale, length):
    """What the weights of a bag of ``length`` ids are multiplied by."""
    # An empty bag has no weights to scale: 1 only keeps clear of the division.
    if scale == SUM or length == 0:
        return np.float32(1.0)
    if scale == MEAN:
        return np.float32(1.0 / length)
    return np.float32(1.0 / np.sqrt(length))


@compiled
def _next(state):
    """SplitMix64: the next state and a random 64-bit number."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    z = state
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state, z ^ (z >> np.uint64(31))


@compiled
def _permute(key, out):
    """Fisher-Yates; written out because NumPy's own may change from version to version, and a resumed run may not."""
    state = np.uint64(0)
    for word in key:
        # Word by word through the generator, so that the same words in another order give another permutation.
        state, mixed = _next(state ^ word)
        state = mixed
    for i in range(out.size):
        out[i] = i
    for i in range(out.size - 1, 0, -1):
        state, number = _next(state)
        # The upper 32 bits scaled to 0 to i by a product, which 64 bits hold since sizes are below 2^31.
        j = np.int64(((number >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        out[i], out[j] = out[j], out[i]


def permutation(size: int, *key: int) -> np.ndarray:
    """A random order of ``range(size)``, (size,) int32: a pure function of its arguments, in every version of jrec.

    Args:
      size: Below 2^31.
      key: Whole numbers from 0 to 2^64 - 1, such as (seed, epoch, window).
    """
    out = np.empty(size, np.int32)
    _permute(np.array(key, np.uint64), out)
    return out
