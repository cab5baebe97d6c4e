"""Watching the accesses of a running training in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from jrec.access.profile import AccessProfile, ProfileError, TableProfile
from jrec.data.identity import Identity

DEFAULT_CAPACITY = 1 << 20


class AccessMonitor:
    """A uniform sample of the accesses since it was made or last reset, in bounded memory.

    It begins by keeping every access. Whenever more than ``capacity`` are kept, each stays with probability one half,
    and from then on half as many are taken, so that at any time every access seen had the same chance of being kept and
    stands for ``1 / rate`` accesses. Thread-safe; the same calls with the same seed keep the same sample.

    Args:
      rows: How many rows each table has.
      capacity: Accesses kept, over all tables; 16 bytes each.
      seed: The seed of the sample.

    Example:
      >>> monitor = AccessMonitor({"item": 1000})
      >>> monitor.observe({"item": np.array([3, 3, 7])}, examples=3)
      >>> monitor.profile(smooth=False).table("item").count_of(np.array([3, 7, 8])).tolist()
      [2.0, 1.0, 0.0]
    """

    def __init__(self, rows: Mapping[str, int], *, capacity: int = DEFAULT_CAPACITY, seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a monitor keeps at least one access")
        self.rows = dict(rows)
        self.capacity = capacity
        self._bases = dict(zip(rows, np.cumsum([0, *rows.values()]).tolist(), strict=False))
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets what it saw, for example when a new plan is in force."""
        with self._lock:
            # Twice the capacity: up to that many are kept, and a chunk of as many comes on top before it is halved.
            self._kept = np.empty(2 * self.capacity, np.int64)
            self._count = 0
            self._halvings = 0
            self.examples = 0

    @property
    def rate(self) -> float:
        """The share of accesses that is kept."""
        return 0.5**self._halvings

    def observe(self, ids: Mapping[str, np.ndarray], *, examples: int) -> None:
        """Takes in the accesses of a batch.

        Args:
          ids: The ids accessed, by table: integers of any shape, all in the table.
          examples: How many examples the batch has.

        Raises:
          ProfileError: On a table that is not known, or ids outside of it.
        """
        with self._lock:
            for name, values in ids.items():
                self._take(name, np.asarray(values).reshape(-1))
            self.examples += examples

    def profile(self, *, smooth: bool = True, dataset: Identity | None = None) -> AccessProfile:
        """The estimated accesses of all rows since the last reset.

        Args:
          smooth: Average the counts of rarely sampled rows, see ``TableProfile.smoothed``.
          dataset: The identity of the dataset that is trained on.

        Raises:
          ProfileError: If nothing has been seen.
        """
        with self._lock:
            if not self.examples:
                raise ProfileError("the monitor has seen no examples; observe some batches first")
            keys, hits = np.unique(self._kept[: self._count], return_counts=True)
            hit, examples = 1 / self.rate, self.examples
        tables = []
        for name, rows in self.rows.items():
            low, high = np.searchsorted(keys, [self._bases[name], self._bases[name] + rows])
            table = TableProfile.from_sparse(name, rows, keys[low:high] - self._bases[name], hits[low:high] * hit)
            tables.append(table.smoothed(hit=hit) if smooth else table)
        source = f"monitored, {examples:,} examples, one access in {round(hit):,} kept"
        return AccessProfile(tables=tuple(tables), examples=examples, source=source, dataset=dataset)

    def _take(self, name: str, ids: np.ndarray) -> None:
        if name not in self.rows:
            raise ProfileError(f"table {name!r} is not monitored; those that are: {', '.join(self.rows)}")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.rows[name]:
            raise ProfileError(
                f"table {name!r} of {self.rows[name]:,} rows was accessed at rows {int(ids.min())} to {int(ids.max())}"
            )
        for at in range(0, ids.size, self.capacity):
            chunk = ids[at : at + self.capacity]
            if self._halvings:
                chunk = chunk[self._positions(chunk.size)]
            self._kept[self._count : self._count + chunk.size] = chunk.astype(np.int64) + self._bases[name]
            self._count += chunk.size
            # One draw for each, as for those that come: after it all have had the same chance (Bernoulli sampling).
            while self._count > self.capacity:
                stay = self._kept[: self._count][self._rng.random(self._count) < 0.5]
                self._kept[: stay.size] = stay
                self._count = stay.size
                self._halvings += 1

    def _positions(self, size: int) -> np.ndarray:
        """Which of ``size`` accesses are taken, each with probability ``rate``: gaps are geometric."""
        mean = size * self.rate
        pieces, at = [], -1
        while at < size:
            # A number for each access that is taken, not for each that is seen: at a rate of 1/1024 a thousandth of the
            # draws.
            gaps = self._rng.geometric(self.rate, int(mean + 4 * np.sqrt(mean)) + 8)
            places = at + np.cumsum(gaps)
            pieces.append(places)
            at = int(places[-1])
        places = np.concatenate(pieces)
        return places[places < size]
