"""The compiled part of ``jrec.sharding.sent``."""

from __future__ import annotations

from jrec.kernel_cache import compiled


@compiled
def sort_by_owner(
    bags, owners, offsets, weights, addresses, starts, rows, of_rows, at_rows, sent_bags, firsts, bag_starts
):
    """Sorts lookups by owner, stably, and finds the bags of every owner's.

    Args:
      bags: (n,) int32, ascending.
      owners: (n,) int32.
      offsets: (n,) int32.
      weights: (n,) float32, or empty.
      addresses: (n,) int32, or empty.
      starts: (devices + 1,) int64, filled: where the lookups of each owner begin.
      rows, of_rows, at_rows: Filled with offsets, weights and addresses, owner by owner.
      sent_bags: (n,) int32, filled in its first places: the bags of every owner's lookups, owner by owner.
      firsts: (n,) int32, filled alike: the first lookup of each, counted from its owner's first.
      bag_starts: (devices + 1,) int64, filled: where the bags of each owner begin.

    Returns:
      The first lookup whose bag is before its predecessor's or whose owner is no device, -1 if there is none.
    """
    devices = starts.size - 1
    starts[:] = 0
    for k in range(bags.size):
        if owners[k] < 0 or owners[k] >= devices or (k > 0 and bags[k] < bags[k - 1]):
            return k
        starts[owners[k] + 1] += 1
    for d in range(devices):
        starts[d + 1] += starts[d]
    place_of = starts.copy()
    for k in range(bags.size):
        place = place_of[owners[k]]
        place_of[owners[k]] = place + 1
        rows[place] = offsets[k]
        sent_bags[place] = bags[k]
        if weights.size:
            of_rows[place] = weights[k]
        if addresses.size:
            at_rows[place] = addresses[k]
    count = 0
    for d in range(devices):
        bag_starts[d] = count
        for j in range(starts[d], starts[d + 1]):
            bag = sent_bags[j]
            if j == starts[d] or bag != sent_bags[count - 1]:
                sent_bags[count] = bag  # in place: no bag is moved behind its lookup
                firsts[count] = j - starts[d]
                count += 1
    bag_starts[devices] = count
    return -1


@compiled
def take_sent(
    rows,
    offsets,
    sources,
    positions,
    unique,
    owner,
    offset,
    sends,
    weights,
    kept_rows,
    kept_offsets,
    kept_sources,
    kept_positions,
    number,
    local,
    bags,
    owners,
    shard_rows,
    addresses,
    of_lookups,
):
    """Splits a cast into lookups that are sent, in the order of their positions, and the cast of the others.

    Args:
      rows, offsets, sources, positions: The cast's arrays.
      unique: How many unique rows it has.
      owner: (unique,) int32, the other device that keeps each; -1 where none does.
      offset: (unique,) int32, the row in that device's shard.
      sends: (num_bags,) bool.
      weights: (n,) float32 of the lookups, or empty.
      kept_rows, kept_offsets, kept_sources, kept_positions: As the cast's, filled; ``kept_rows`` only in its
        first places.
      number: (unique,) int32, filled: which kept row each is, -1 for none.
      local: (n,) int32, -1 all of it, filled: the kept row of each lookup that is not sent.
      bags, owners, shard_rows, addresses: (n,) int32, filled in their first places: the sent lookups.
      of_lookups: (n,) float32 or empty, filled alike.

    Returns:
      How many lookups are sent, and how many rows are kept.
    """
    n = positions.size
    left, kept = 0, 0
    for u in range(unique):
        begin = kept
        away = owner[u] >= 0
        for k in range(offsets[u], offsets[u + 1]):
            p, bag = positions[k], sources[k]
            if away and sends[bag]:
                local[p] = -2 - u
                bags[p] = bag
            else:
                local[p] = left
                kept_sources[kept] = bag
                kept_positions[kept] = p
                kept += 1
        number[u] = -1
        if kept > begin:
            kept_rows[left] = rows[u]
            kept_offsets[left] = begin
            number[u] = left
            left += 1
    kept_offsets[left:] = kept
    sent = 0
    for p in range(n):
        if local[p] >= 0:
            continue
        kept_sources[kept] = sends.size
        kept_positions[kept] = p
        kept += 1
        if local[p] == -1:
            continue
        u = -2 - local[p]
        local[p] = -1
        bags[sent] = bags[p]  # in place: no lookup is moved behind itself
        owners[sent] = owner[u]
        shard_rows[sent] = offset[u]
        addresses[sent] = rows[u]
        if weights.size:
            of_lookups[sent] = weights[p]
        sent += 1
    return sent, left


@compiled
def filter_routed(rows, at, starts, number, kept_rows, kept_at, kept_starts):
    """The rows of a route that are kept, under their new numbers.

    Args:
      rows, at, starts: The route's arrays.
      number: (unique,) int32, -1 for rows that are not kept; ascending otherwise.
      kept_rows, kept_at, kept_starts: filled.
    """
    count = 0
    for g in range(starts.size - 1):
        kept_starts[g] = count
        for k in range(starts[g], starts[g + 1]):
            if number[at[k]] >= 0:
                kept_rows[count] = rows[k]
                kept_at[count] = number[at[k]]
                count += 1
    kept_starts[starts.size - 1] = count
