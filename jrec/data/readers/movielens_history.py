"""Users' histories: the time of interactions without timestamps, and negatives for interactions without ratings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jrec.data.schema import DatasetError

_UNIT = 1 << 32  # a history's length as an integer time
_CHUNK = 1 << 16  # examples, at least, that go on together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interactions:
    """(n,) int64 users and movies, float32 labels if rated, int64 times if known, int64 lines of file ``path``."""

    users: np.ndarray
    movies: np.ndarray
    labels: np.ndarray | None
    times: np.ndarray | None
    lines: np.ndarray
    path: str

    def rows(self, which: np.ndarray | slice) -> Interactions:
        """Some of them."""
        return dataclasses.replace(
            self,
            users=self.users[which],
            movies=self.movies[which],
            labels=None if self.labels is None else self.labels[which],
            times=None if self.times is None else self.times[which],
            lines=self.lines[which],
        )


class History:
    """How many interactions every user has and which movies there are: memory grows with users and movies only."""

    def __init__(self, catalogue: np.ndarray | None):
        self.users = np.empty(0, np.int64)
        self.counts = np.empty(0, np.int64)
        self.catalogue = np.empty(0, np.int64) if catalogue is None else catalogue
        self._given = catalogue is not None
        self._passed: np.ndarray | None = None

    def count(self, interactions: Interactions) -> None:
        """Takes more interactions into account."""
        users, counts = np.unique(interactions.users, return_counts=True)
        merged, inverse = np.unique(np.concatenate([self.users, users]), return_inverse=True)
        totals = np.zeros(len(merged), np.int64)
        np.add.at(totals, inverse, np.concatenate([self.counts, counts]))
        self.users, self.counts = merged, totals
        if not self._given:
            self.catalogue = np.union1d(self.catalogue, interactions.movies)

    def with_times(self, interactions: Interactions) -> Interactions:
        """Gives interactions without timestamps their relative position in their user's history as their time.

        Must see all interactions once, in order.
        """
        if interactions.times is not None or not len(interactions.users):
            return interactions
        if self._passed is None:
            self._passed = np.zeros(len(self.users), np.int64)
        at = np.searchsorted(self.users, interactions.users)
        order = np.argsort(at, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(at[order]) != 0])
        lengths = np.diff(np.r_[starts, len(at)])
        within = np.empty(len(at), np.int64)
        within[order] = np.arange(len(at)) - np.repeat(starts, lengths)
        position = self._passed[at] + within
        self._passed[at[order[starts]]] += lengths
        return dataclasses.replace(interactions, times=position * _UNIT // self.counts[at])


def with_negatives(
    interactions: Iterator[Interactions], history: History, negatives: int, seed: int
) -> Iterator[Interactions]:
    """Labels interactions 1, each followed by ``negatives`` unseen movies of its user, labelled 0, at the same time.

    A user's negatives depend only on ``seed``, the user and the user's own history. Users must come one after the
    other, so that one history at a time suffices.

    Raises:
      DatasetError: If a user's interactions are scattered over the log, or a user has touched every movie.
    """
    ready: list[Interactions] = []
    size = 0
    for expanded in _by_user(interactions, history, negatives, seed):
        ready.append(expanded)
        size += len(expanded.users)
        if size >= _CHUNK:
            yield _concatenate(ready)
            ready, size = [], 0
    if ready:
        yield _concatenate(ready)


def _by_user(
    interactions: Iterator[Interactions], history: History, negatives: int, seed: int
) -> Iterator[Interactions]:
    closed = np.zeros(len(history.users), np.bool_)
    waiting: list[Interactions] = []
    for more in interactions:
        if not len(more.users):
            continue
        starts = np.flatnonzero(np.r_[True, np.diff(more.users) != 0])
        ends = np.r_[starts[1:], len(more.users)]
        for start, end in zip(starts, ends, strict=True):
            own = more.rows(slice(start, end))
            if waiting and waiting[-1].users[0] != own.users[0]:
                yield _expand(waiting, history, negatives, seed, closed)
                waiting = []
            if closed[np.searchsorted(history.users, own.users[0])]:
                raise DatasetError(
                    f"{own.path}:{own.lines[0]}: user {own.users[0]} again, after other users. Negatives are drawn a"
                    " user at a time: sort the file by user, each user's lines in order of time (sort -s -t, -k1,1)"
                )
            waiting.append(own)
    if waiting:
        yield _expand(waiting, history, negatives, seed, closed)


def _expand(
    pieces: list[Interactions], history: History, negatives: int, seed: int, closed: np.ndarray
) -> Interactions:
    user = int(pieces[0].users[0])
    closed[np.searchsorted(history.users, user)] = True
    movies = np.concatenate([p.movies for p in pieces])
    fresh = np.ones(len(history.catalogue), np.bool_)
    fresh[np.searchsorted(history.catalogue, movies)] = False
    unseen = history.catalogue[fresh]
    if not len(unseen):
        raise DatasetError(
            f"user {user} has interacted with all {len(history.catalogue)} movies, so that no negative can be drawn;"
            " leave this user out, or name the whole catalogue with --movies"
        )
    drawn = np.random.default_rng((seed, user)).choice(unseen, size=(len(movies), negatives))
    labels = np.zeros((len(movies), 1 + negatives), np.float32)
    labels[:, 0] = 1
    each = 1 + negatives
    times = np.concatenate([p.times for p in pieces])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return Interactions(
        users=np.full(len(movies) * each, user, np.int64),
        movies=np.concatenate([movies[:, None], drawn], axis=1).reshape(-1),
        labels=labels.reshape(-1),
        times=np.repeat(times, each),
        lines=np.repeat(np.concatenate([p.lines for p in pieces]), each),
        path=pieces[0].path,
    )


def _concatenate(pieces: list[Interactions]) -> Interactions:
    return dataclasses.replace(
        pieces[0],
        users=np.concatenate([p.users for p in pieces]),
        movies=np.concatenate([p.movies for p in pieces]),
        labels=np.concatenate([p.labels for p in pieces]),  # pyright: ignore[reportArgumentType, reportCallIssue]
        times=np.concatenate([p.times for p in pieces]),  # pyright: ignore[reportArgumentType, reportCallIssue]
        lines=np.concatenate([p.lines for p in pieces]),
    )
