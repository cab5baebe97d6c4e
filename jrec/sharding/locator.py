"""Rows to addresses at the loader's speed: ``Plan.locate`` compiled, without the GIL."""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled
from jrec.sharding.errors import PlanError
from jrec.sharding.plans import Located, Plan

_BUCKETS = 16  # bits: a table's rows fall into at most 2**_BUCKETS equal buckets


class Locator:
    """Finds rows' tiers, owners and offsets by an index of equal buckets of rows, which leaves few ranges to try.

    Thread-safe. The index takes up to 256 kB a table.

    Args:
      plan: The plan whose rows are to be found.

    Example:
      >>> locator = Locator(plan)
      >>> tier, owner, offset = locator.locate("user", ids)
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._tables = {}
        for t, table in enumerate(plan.tables):
            segments = slice(int(plan.first[t]), int(plan.first[t + 1]))
            ends = np.append(plan.start[segments], table.rows)
            # A power of two for each bucket's rows, so that its number is a shift, not a division.
            shift = max(0, int(table.rows).bit_length() - _BUCKETS)
            bucket = np.arange(((table.rows - 1) >> shift) + 1, dtype=np.int64) << shift
            index = (np.searchsorted(ends, bucket, side="right") - 1).astype(np.int32)
            # The hottest rows, all in the first bucket, have the shortest ranges: they are looked up one by one.
            head = np.arange(min(table.rows, 1 << shift), dtype=np.int64)
            direct = (np.searchsorted(ends, head, side="right") - 1).astype(np.int32)
            shared = (
                plan.tier[segments].copy(),
                plan.owner[segments].copy(),
                plan.offset[segments] - plan.start[segments],
            )
            self._tables[table.name] = (ends, direct, index, shift, *shared)

    def locate(self, table: str, rows: np.ndarray) -> Located:
        """Where (n,) rows of a table live; equal to ``Plan.locate``.

        Raises:
          PlanError: On an unknown table or rows outside of it.
        """
        index = self._tables.get(table)
        if index is None:
            self.plan.number(table)  # raises, naming the tables
            raise AssertionError
        rows = np.ascontiguousarray(rows, np.int64)
        out = Located(np.empty(rows.size, np.uint8), np.empty(rows.size, np.int16), np.empty(rows.size, np.int64))
        bad = int(_locate_rows(*(rows, *index, *out)))  # pyright: ignore[reportCallIssue]
        if bad >= 0:
            size = int(index[0][-1])
            raise PlanError(f"row {int(rows[bad]):,}, at place {bad:,}, is not in table {table!r} of {size:,} rows")
        return out


@compiled
def _locate_rows(rows, ends, direct, index, shift, tier, owner, shift_of, out_tier, out_owner, out_offset):
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
            # Ends at the table's rows at the latest, which the row is below.
            while ends[segment + 1] <= row:
                segment += 1
        out_tier[k] = tier[segment]
        out_owner[k] = owner[segment]
        out_offset[k] = row + shift_of[segment]
    return -1
