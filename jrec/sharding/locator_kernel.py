"""The compiled part of ``jrec.sharding.locator``."""

from __future__ import annotations

from jrec.kernel_cache import compiled


@compiled
def locate_rows(rows, ends, direct, index, shift, tier, owner, shift_of, out_tier, out_owner, out_offset):
    """Fills in where rows live.

    Args:
      rows: (n,) int64.
      ends: (segments + 1,) int64, first rows of segments, then the table's rows.
      direct: (2 ** shift or fewer,) int32, the segment of each of the first rows.
      index: (buckets,) int32, the segment of the first row of each bucket of 2 ** shift rows.
      shift: How many bits a row number is shifted by to give its bucket.
      tier, owner: (segments,) uint8 and int16.
      shift_of: (segments,) int64, what turns a row into its offset.
      out_tier, out_owner, out_offset: (n,) uint8, int16 and int64, filled.

    Returns:
      The place of the first row outside of the table, -1 if there is none.
    """
    total = ends[ends.size - 1]
    for k in range(rows.size):
        row = rows[k]
        if row < 0 or row >= total:
            return k
        if row < direct.size:
            segment = direct[row]
        else:
            segment = index[row >> shift]
            while ends[segment + 1] <= row:
                segment += 1
        out_tier[k] = tier[segment]
        out_owner[k] = owner[segment]
        out_offset[k] = row + shift_of[segment]
    return -1
