"""MovieLens: ratings.dat (``user::movie::rating::timestamp``), ratings.csv, or plain (user, movie) interactions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, override

import numpy as np

from jrec.data.columns import gather
from jrec.data.keys import integer_keys
from jrec.data.schema import DatasetError
from jrec.json_values import JsonObject
from jrec.prepare.readers.lines import first_line
from jrec.prepare.readers.log_format import CategoricalSpec, Chunk, LogFormat, one_hot, reject_ids
from jrec.prepare.readers.movielens_side import USER_FEATURES, Movies, Users, positions
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock

if TYPE_CHECKING:
    from jrec.data.columns import Column
    from jrec.data.long_texts import LongTexts

LIKED = 4.0
_UNIT = 1 << 32  # a history's length as an integer time
_CHUNK = 1 << 16  # examples, at least, that go on together
_COLUMNS = {
    "user": ("user_id", "userId", "user"),
    "movie": ("movie_id", "movieId", "item_id", "itemId", "movie", "item"),
    "rating": ("rating",),
    "timestamp": ("timestamp",),
}
_KINDS = {"user": "integer", "movie": "integer", "rating": "number", "timestamp": "integer"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovieLensOptions:
    """``negatives`` a positive for logs without ratings, drawn with ``seed``; the files to join."""

    users: str | None = None
    movies: str | None = None
    negatives: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise DatasetError(f"--negatives is {self.negatives}; a click model needs at least one negative a positive")


class MovieLens(LogFormat):
    """The label is 1 for a rating of 4 or more.

    Without ratings every interaction is a positive, followed by ``negatives`` movies that its user never touched, drawn
    uniformly and reproducibly. Examples are ordered by timestamp; without timestamps by relative position in their
    user's history, so that everybody's last tenth is tested.
    """

    name = "movielens"
    timed = True

    def __init__(self, options: MovieLensOptions, key_seed: int = 0):
        self._options = options
        self.key_seed = key_seed
        self._users = Users(options.users, key_seed) if options.users else None
        self._movies = Movies(options.movies, key_seed) if options.movies else None
        self.categorical = one_hot("user_id", "movie_id", *(USER_FEATURES if self._users else ()))
        if self._movies:
            self.categorical += (CategoricalSpec(name="genres", table="genres", many=True), *one_hot("year"))
        self._present: tuple[str, ...] | None = None
        self._history: History | None = None

    def options(self) -> JsonObject:
        """The joined files and how negatives were drawn."""
        drawn = {} if self._rated else {"negatives": self._options.negatives, "seed": self._options.seed}
        return {"users": self._options.users, "movies": self._options.movies, **drawn}

    @property
    def _rated(self) -> bool:
        return "rating" in (self._present or ())

    def dialect(self, path: str) -> Dialect:
        """Tells ratings.dat from a CSV file with a header by the first line."""
        line = first_line(path).decode("utf-8", errors="replace")
        if "::" in line:
            roles, delimiter, header = ["user", "movie", "rating", "timestamp"], "::", 0
        else:
            columns = line.split(",")
            role_of = {alias: role for role, aliases in _COLUMNS.items() for alias in aliases}
            roles, delimiter, header = [role_of.get(c, f"({c})") for c in columns], ",", 1
            if "user" not in roles or "movie" not in roles:
                raise DatasetError(
                    f"{path}:1: found neither user::movie::rating::timestamp nor a header with a user column"
                    f" ({', '.join(_COLUMNS['user'])}) and a movie column ({', '.join(_COLUMNS['movie'])}):"
                    f" {line[:80]!r}"
                )
        present = tuple(r for r in _KINDS if r in roles)
        if self._present not in (None, present):
            raise DatasetError(
                f"{path} has {', '.join(present)}, but the file before it {', '.join(self._present or ())}"
            )
        self._present = present
        fields = (Field(name=r, kind=_KINDS.get(r, "skip"), blank=r not in _KINDS) for r in roles)  # pyright: ignore[reportArgumentType]
        return Dialect(delimiter=delimiter, fields=tuple(fields), skip_lines=header)

    def convert(self, parsed: ParsedBlock) -> Interactions:
        """Interactions whose user and movie are known."""
        reject_ids(parsed, "user", "movie")
        for name, side, path in (
            ("user", self._users, self._options.users),
            ("movie", self._movies, self._options.movies),
        ):
            if side is not None:
                parsed.reject(positions(side.ids, parsed.numbers(name))[1], name, f"is not in {path}")
        if "timestamp" in parsed.columns:
            parsed.reject(parsed.numbers("timestamp") < 0, "timestamp", "is before 1970")
        first = parsed.block.line
        return Interactions(
            users=parsed.numbers("user"),
            movies=parsed.numbers("movie"),
            labels=(parsed.numbers("rating") >= LIKED).astype(np.float32) if "rating" in parsed.columns else None,
            times=parsed.numbers("timestamp") if "timestamp" in parsed.columns else None,
            lines=parsed.lines + first,
            path=parsed.block.path,
        )

    @property
    @override
    def dated(self) -> bool:
        return "timestamp" in (self._present or ())

    def survey(self, converted: Callable[[], Iterator[Interactions]]) -> None:
        """Counts every user's interactions and lists the movies, where order or negatives need them."""
        if self._present is not None and {"rating", "timestamp"} <= set(self._present):
            return
        self._history = History(catalogue=self._movies.ids if self._movies else None)
        for interactions in converted():
            self._history.count(interactions)

    def assemble(self, converted: Iterator[Interactions]) -> Iterator[Chunk]:
        """Adds times and negatives, and joins users and movies."""
        if self._history is not None:
            converted = (self._history.with_times(i) for i in converted)
            if not self._rated:
                converted = with_negatives(converted, self._history, self._options.negatives, self._options.seed)
        texts = {}
        if self._users:
            texts |= self._users.texts
        if self._movies:
            texts |= {"genres": self._movies.texts}
        for interactions in converted:
            yield self._join(interactions, texts)
            texts = {}

    def _join(self, interactions: Interactions, texts: dict[str, LongTexts]) -> Chunk:
        assert interactions.labels is not None
        keys: dict[str, Column] = {
            "user_id": integer_keys(interactions.users),
            "movie_id": integer_keys(interactions.movies),
        }
        if self._users:
            at, _ = positions(self._users.ids, interactions.users)
            keys |= {name: column[at] for name, column in self._users.keys.items()}
        if self._movies:
            at, _ = positions(self._movies.ids, interactions.movies)
            keys |= {"genres": gather(self._movies.genres, at), "year": self._movies.years[at]}
        return Chunk(labels=interactions.labels, dense={}, keys=keys, times=interactions.times, texts=texts)


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
        return dataclasses.replace(self, **{name: column[which] for name, column in self.columns.items()})

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays that are known, by name."""
        named = {name: getattr(self, name) for name in ("users", "movies", "labels", "times", "lines")}
        return {name: column for name, column in named.items() if column is not None}


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
        # The share of the history that lies before, as a whole number: everybody's last tenth is last, however long the
        # history.
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
    own = _concatenate(pieces)
    user, movies = int(own.users[0]), own.movies
    closed[np.searchsorted(history.users, user)] = True
    fresh = np.ones(len(history.catalogue), np.bool_)
    fresh[np.searchsorted(history.catalogue, movies)] = False
    unseen = history.catalogue[fresh]
    if not len(unseen):
        raise DatasetError(
            f"user {user} has interacted with all {len(history.catalogue)} movies, so that no negative can be drawn;"
            " leave this user out, or name the whole catalogue with --movies"
        )
    # A generator of the user's own, so that others' lines, and threads, do not change what is drawn.
    drawn = np.random.default_rng((seed, user)).choice(unseen, size=(len(movies), negatives))
    labels = np.zeros((len(movies), 1 + negatives), np.float32)
    labels[:, 0] = 1
    each = 1 + negatives
    each_again = own.rows(np.repeat(np.arange(len(movies)), each))
    movies = np.concatenate([movies[:, None], drawn], axis=1).reshape(-1)
    return dataclasses.replace(each_again, movies=movies, labels=labels.reshape(-1))


def _concatenate(pieces: list[Interactions]) -> Interactions:
    columns = {name: np.concatenate([piece.columns[name] for piece in pieces]) for name in pieces[0].columns}
    return dataclasses.replace(pieces[0], **columns)
