"""Rows to addresses at the loader's speed: ``Plan.locate`` compiled, without the GIL."""

from __future__ import annotations

import numpy as np

from jrec.sharding.errors import PlanError
from jrec.sharding.locator_kernel import locate_rows
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
        bad = int(locate_rows(*(rows, *index, *out)))  # pyright: ignore[reportCallIssue]
        if bad >= 0:
            size = int(index[0][-1])
            raise PlanError(f"row {int(rows[bad]):,}, at place {bad:,}, is not in table {table!r} of {size:,} rows")
        return out
