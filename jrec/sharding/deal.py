"""Dealing equal rows to the least loaded device, compiled."""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled


@compiled
def deal_rows(length, fetched, per_byte, one_by_one, load, taken):
    """Deals runs of equally accessed rows, each row to the device with the least load so far, the first of equals.

    Args:
      length: (runs,) int64, rows of each.
      fetched: (runs,) float64, bytes accessed of each row.
      per_byte: (devices,) float64, load of an accessed byte.
      one_by_one: Runs of at most this many rows are dealt row by row; longer ones at once, up to the load that this
        leads to, and only their last rows one by one.
      load: (devices,) float64, raised.
      taken: (runs, devices) int64, zeros; filled with how many rows of each run every device got.
    """
    devices = load.size
    for run in range(length.size):
        left = length[run]
        if fetched[run] == 0.0:
            taken[run, np.argmin(load)] = left  # nobody accesses them: the least loaded device stays that
            continue
        if left > one_by_one:
            reached, inverse = np.float64(left), 0.0
            for j in range(devices):
                reached += load[j] / (fetched[run] * per_byte[j])
                inverse += 1.0 / (fetched[run] * per_byte[j])
            # The load at which the rows of the run would fill all devices up to one line, as water does.
            level = reached / inverse
            # Else some device is above the line already, and rows are dealt one by one, which leaves it out.
            if level >= load.max():
                for j in range(devices):
                    each = fetched[run] * per_byte[j]
                    # A hair fewer than rounding could make too many; the last rows follow one by one.
                    rows = min(left, np.int64((level - load[j]) / each * (1.0 - 1e-12)))
                    taken[run, j] = rows
                    left -= rows
                    load[j] += rows * each
        for _ in range(left):
            j = np.argmin(load)
            taken[run, j] += 1
            load[j] += fetched[run] * per_byte[j]
