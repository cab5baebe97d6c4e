"""The compiled part of ``jrec.sharding.router``."""

from __future__ import annotations

from jrec.kernel_cache import compiled


@compiled
def route_rows(addresses, ends, group, shift, segments, starts, rows, at):
    """Locates ascending rows and sorts them by group, stably.

    Args:
      addresses: (n,) int32 or int64, ascending.
      ends: (segments + 1,) int64, first addresses of segments, then the stack's rows.
      group: (segments,) int16, of each segment.
      shift: (segments,) int64, what turns an address into an offset.
      segments: (n,) int32, filled: the segment of each row.
      starts: (groups + 1,) int64, filled: where each group begins.
      rows: (n,) int32, filled: offsets by group.
      at: (n,) int32, filled: which of the addresses each is.

    Returns:
      The place of the first address that is not in the stack or does not ascend, -1 if there is none.
    """
    groups = starts.size - 1
    starts[:] = 0
    segment, last, previous = 0, ends.size - 2, -1
    for k in range(addresses.size):
        row = addresses[k]
        if row <= previous or row >= ends[last + 1]:
            return k
        previous = row
        # Rows ascend: the segment is near the one before, so search in doubling steps from there.
        step = 1
        low = segment
        while low + step <= last and ends[low + step] <= row:
            low += step
            step *= 2
        high = min(low + step, last + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if ends[middle] <= row:
                low = middle
            else:
                high = middle
        segment = low
        segments[k] = segment
        starts[group[segment] + 1] += 1
    for g in range(groups):
        starts[g + 1] += starts[g]
    for k in range(addresses.size):
        segment = segments[k]
        place = starts[group[segment]]
        starts[group[segment]] += 1
        rows[place] = addresses[k] + shift[segment]
        at[place] = k
    for g in range(groups, 0, -1):
        starts[g] = starts[g - 1]
    starts[0] = 0
    return -1
