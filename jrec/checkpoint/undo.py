"""Rows as they were at a checkpoint's step, kept where a later step changes them before they are written."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import jax
import numpy as np

from jrec.kernel_cache import compiled

DIRTY, PENDING = np.uint8(1), np.uint8(2)
"""Bits of a row: changed since the last checkpoint; belongs to the one under way and is not read yet."""


class Undo:
    """Old values of some rows of a stack. Filled by the thread that takes steps, read by the one that writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self.bytes = 0

    def add(self, addresses: np.ndarray, arrays: Mapping[str, jax.Array | np.ndarray], size: int) -> None:
        """Keeps rows.

        Args:
          addresses: (n,) ascending.
          arrays: The rows by array name, n rows or more, NumPy or JAX arrays.
          size: Their bytes.
        """
        with self._lock:
            self._entries.append(_Entry(addresses, arrays, size))
            self.bytes += size

    def overlay(self, addresses: np.ndarray | tuple[int, int], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Puts kept rows over those that were read; each row is asked for once.

        Args:
          addresses: The rows' addresses, ascending; or the first of a range and the one past its last.
          arrays: What was read, by name; copied if they cannot be written to.

        Returns:
          The arrays.
        """
        with self._lock:
            # What the other thread adds from now on is of rows that are still pending, and so not of these.
            entries = list(self._entries)
        for entry in entries:
            # Here, and not when it was added: it waits for the device, which the thread that takes steps must not.
            entry.trim()
            low, high = addresses if isinstance(addresses, tuple) else (int(addresses[0]), int(addresses[-1]) + 1)
            begin, stop = (int(i) for i in np.searchsorted(entry.addresses, (low, high)))
            if begin == stop:
                continue
            kept = entry.addresses[begin:stop]
            at = kept - low if isinstance(addresses, tuple) else np.searchsorted(addresses, kept)
            for name, rows in entry.arrays.items():
                if not arrays[name].flags.writeable:
                    arrays[name] = arrays[name].copy()
                arrays[name][at] = rows[begin:stop, : arrays[name].shape[1]] if rows.ndim == 2 else rows[begin:stop]
            entry.left -= stop - begin
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.left > 0]
            self.bytes = sum(entry.size for entry in self._entries)
        return arrays

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries, self.bytes = [], 0


class _Entry:
    """Some rows: at first as they arrive, perhaps on a device or with other rows after them; then only these rows."""

    def __init__(self, addresses: np.ndarray, arrays: Mapping[str, jax.Array | np.ndarray], size: int):
        self.addresses, self.arrays, self.size, self.left = addresses, arrays, size, addresses.size
        self._trimmed = False

    def trim(self) -> None:
        """Takes the rows to host memory and forgets what came with them. In the thread that writes."""
        if not self._trimmed:
            count = self.addresses.size
            self.arrays = {name: np.array(np.asarray(array)[:count]) for name, array in self.arrays.items()}
            self.size, self._trimmed = sum(array.nbytes for array in self.arrays.values()), True


@compiled
def mark(flags: np.ndarray, rows: np.ndarray, pending: np.ndarray) -> int:
    """Marks rows as changed, and lists those whose old values a checkpoint still wants.

    Args:
      flags: (rows of the stack,) uint8.
      rows: (n,) addresses, repeated or not; negative ones, and those past the stack, are none.
      pending: (n,) of the same type, written to.

    Returns:
      How many are listed; none twice.
    """
    count = 0
    for i in range(rows.size):
        row = rows[i]
        if 0 <= row < flags.size:
            if flags[row] & PENDING:
                pending[count] = row
                count += 1
            # This clears ``PENDING``: a row is kept once, as it was before its first change.
            flags[row] = DIRTY
    return count
