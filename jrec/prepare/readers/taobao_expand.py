"""From a user's behaviours in order of time to labelled sequences: histories, targets, and sampled negatives."""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.data.columns import lists_at
from jrec.data.keys import integer_keys, mix64
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled
from jrec.prepare.readers.log_format import Chunk

_MERGE = 1 << 20  # distinct items of blocks, at least, that wait to be merged into the catalogue
_ATTEMPTS = 100  # draws of one negative, before the next candidate that the user never touched is taken
_WINDOW = 100  # negatives are drawn from a hundredth of the log on either side of their positive …
_LEAST_WINDOW = 256  # … and from at least this many events


class Catalogue:
    """The items of a log, each with the category of its first event.

    Memory grows with the number of distinct items only.
    """

    def __init__(self) -> None:
        self.items = np.empty(0, np.uint64)
        self.categories = np.empty(0, np.uint64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._size = 0

    def add(self, items: np.ndarray, categories: np.ndarray) -> None:
        """Takes in events, (n,) uint64 keys, in the order of the log."""
        distinct, first = np.unique(items, return_index=True)
        self._waiting.append((distinct, categories[first]))
        self._size += len(distinct)
        if self._size >= max(_MERGE, len(self.items)):
            self.settle()

    def settle(self) -> None:
        """Merges what waits, after which the arrays are whole: items ascending, (items,) of each."""
        pieces = [(self.items, self.categories), *self._waiting]
        items, categories = (np.concatenate(column) for column in zip(*pieces, strict=True))
        self.items, first = np.unique(items, return_index=True)
        self.categories = categories[first]
        self._waiting, self._size = [], 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behaviours:
    """(n,) int64 users and times, uint64 keys of items and categories; user by user, each in order of time."""

    users: np.ndarray
    items: np.ndarray
    categories: np.ndarray
    times: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """The items that negatives are drawn from, each with the same probability.

    Attributes:
      items, categories: (candidates,) uint64 keys: the distinct items, or every event's in order of time.
      times: (candidates,) int64 times of the events, so that a draw takes one from around the time of its positive;
        None to draw from all.
    """

    items: np.ndarray
    categories: np.ndarray
    times: np.ndarray | None = None

    def around(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first candidate for positives at (n,) int64 times, and one past the last."""
        size = len(self.items)
        if self.times is None:
            return np.zeros(len(times), np.int64), np.full(len(times), size, np.int64)
        reach = max(size // _WINDOW, _LEAST_WINDOW)
        place = np.searchsorted(self.times, times)
        return np.maximum(place - reach, 0), np.minimum(place + reach, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """What decides which examples are made.

    Attributes:
      history: Behaviours before the target that an example keeps, the latest.
      negatives: How many negatives each positive gets.
      positives: How many positives a user gets at most.
      seed: The seed of negatives and of the choice of positives.
      candidates: The items that negatives are drawn from.
    """

    history: int
    negatives: int
    positives: int
    seed: int
    candidates: Candidates

    def expand(self, behaviours: Behaviours) -> Chunk:
        """The examples of some users, whose behaviours are complete.

        What a user gets depends only on the seed, the user, the user's own behaviours and the candidates.

        Raises:
          DatasetError: If one of them has touched every item of the log.
        """
        users = behaviours.users
        starts = np.flatnonzero(np.r_[True, np.diff(users) != 0]) if len(users) else np.empty(0, np.int64)
        starts = np.append(starts, len(users))
        chosen = np.zeros(len(users), np.bool_)
        _choose(starts, users, self.positives, np.uint64(self.seed), chosen)
        at = np.flatnonzero(chosen)
        first = np.repeat(starts[:-1], np.diff(starts))[at]  # of the user's behaviours
        source = np.repeat(at, 1 + self.negatives)
        items, categories = behaviours.items[source], behaviours.categories[source]
        without = _draw_negatives(
            starts, users, behaviours.items, at, self.negatives, np.uint64(self.seed),
            *self.candidates.around(behaviours.times[at]), self.candidates.items, self.candidates.categories,
            items, categories,
        )  # fmt: skip
        labels = np.zeros((len(at), 1 + self.negatives), np.float32)
        labels[:, 0] = 1
        lengths = np.repeat(np.minimum(at - first, self.history), 1 + self.negatives)
        if without >= 0:
            raise DatasetError(
                f"user {users[without]} has touched every item of the log, so that no negative can be drawn; leave this"
                " user out, or give more of the log"
            )
        keys = {
            "user_id": integer_keys(users[source]),
            "item_id": items,
            "category_id": categories,
            "item_history": lists_at(behaviours.items, source - lengths, lengths),
            "category_history": lists_at(behaviours.categories, source - lengths, lengths),
        }
        return Chunk(labels=labels.reshape(-1), dense={}, keys=keys, times=behaviours.times[source])


@compiled
def _user_key(seed, user, purpose):
    return mix64(mix64(seed + np.uint64(purpose)) ^ mix64(np.uint64(user)))


@compiled
def _choose(starts, users, positives, seed, chosen):
    """Marks up to ``positives`` behaviours of every user, never the first: the ones with the least hashes."""
    for u in range(starts.size - 1):
        begin, stop = starts[u], starts[u + 1]
        if stop - begin - 1 <= positives:
            chosen[begin + 1 : stop] = True
            continue
        key = _user_key(seed, users[begin], 1)
        hashes = np.empty(stop - begin - 1, np.uint64)
        for k in range(hashes.size):
            hashes[k] = mix64(key + np.uint64(k))
        for k in np.argsort(hashes)[:positives]:
            chosen[begin + 1 + k] = True


@compiled
def _draw_negatives(
    starts, users, items, at, negatives, seed, low, high, candidates, categories, out_items, out_categories
):
    """Fills in negatives behind every positive.

    Args:
      starts: (users + 1,) where behaviours of the users begin.
      users, items: The behaviours' users and items.
      at: (positives,) places of the positives among the behaviours, ascending.
      negatives: How many negatives each positive gets.
      seed: uint64.
      low, high: (positives,) the first candidate, and one past the last.
      candidates, categories: (candidates,) keys of items, and of their categories.
      out_items, out_categories: (positives * (1 + negatives),), of which the positives are filled in.

    Returns:
      A place among the behaviours of a user who has touched every candidate there is, or -1.
    """
    u, key, history = -1, np.uint64(0), items[:0]
    for p in range(at.size):
        if u < 0 or at[p] >= starts[u + 1]:
            while u < 0 or at[p] >= starts[u + 1]:
                u += 1
            key = _user_key(seed, users[at[p]], 2)
            history = np.sort(items[starts[u] : starts[u + 1]])
        own = mix64(key + np.uint64(at[p] - starts[u]))
        for j in range(1, negatives + 1):
            bits = own
            attempt, place = 0, 0
            while attempt < _ATTEMPTS:
                bits = mix64(bits + np.uint64(j))
                u01 = np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)
                place = low[p] + np.int64(u01 * (high[p] - low[p]))
                if not _holds(history, candidates[place]):
                    break
                attempt += 1
            if attempt == _ATTEMPTS:
                tried = 0
                while tried < candidates.size and _holds(history, candidates[place]):
                    place = (place + 1) % candidates.size
                    tried += 1
                if tried == candidates.size:
                    return at[p]
            out_items[p * (1 + negatives) + j] = candidates[place]
            out_categories[p * (1 + negatives) + j] = categories[place]
    return -1


@compiled
def _holds(ascending, value):
    place = np.searchsorted(ascending, value)
    return place < ascending.size and ascending[place] == value
