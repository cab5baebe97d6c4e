"""Taobao UserBehavior: ``user,item,category,behaviour,timestamp`` without a header, in any order.

As events, or as labelled sequences: which item does a user turn to next, after these?
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from jrec.data.keys import integer_keys, text_key
from jrec.data.schema import DatasetError
from jrec.json_values import JsonObject
from jrec.prepare.readers.log_format import CategoricalSpec, Chunk, LogFormat, calendar_keys, one_hot, reject_ids
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock
from jrec.prepare.readers.taobao_expand import Behaviours, Candidates, Catalogue, Drawing

if TYPE_CHECKING:
    from jrec.prepare.spill import PlainColumn, Spill

IDS = ("user_id", "item_id", "category_id")
VIEW = "pv"
INTENT = ("buy", "cart", "fav")
CHINA_SECONDS = 8 * 3600  # the log's users live in UTC+8, without daylight saving
Draw = Literal["popularity", "uniform"]
HISTORIES = {"item_history": "item_id", "category_history": "category_id"}
_READ_ROWS = 1 << 17
_NO_LIMIT = 1 << 62


class Taobao(LogFormat):
    """One example an event: the label is 1 for a purchase intent (buy, cart, fav) and 0 for a page view (pv).

    Features are user, item, category, and the hour of day and weekday in China. Events are sorted by time; within
    one second they keep the order of the files.
    """

    name = "taobao"
    categorical = one_hot(*IDS, "hour_of_day", "weekday")
    timed = True

    def dialect(self, path: str) -> Dialect:
        """The same for every file."""
        return Dialect(
            fields=(
                *(Field(name=n, kind="integer", blank=False) for n in IDS),
                Field(name="behaviour", kind="text", blank=False),
                Field(name="timestamp", kind="integer", blank=False),
            ),
            hint=" (user, item, category, behaviour, timestamp)",
        )

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, keys, and times in unix seconds."""
        self.check(parsed)
        times = parsed.numbers("timestamp")
        return Chunk(
            labels=(parsed.numbers("behaviour") != np.uint64(text_key(VIEW))).astype(np.float32),
            dense={},
            keys={**{n: integer_keys(parsed.numbers(n)) for n in IDS}, **calendar_keys(times + CHINA_SECONDS)},
            times=times,
        )

    @staticmethod
    def check(parsed: ParsedBlock) -> None:
        """Rejects rows with an unknown behaviour, a time before 1970, or ids that are none."""
        reject_ids(parsed, *IDS)
        known = np.isin(parsed.numbers("behaviour"), np.array([np.uint64(text_key(b)) for b in (VIEW, *INTENT)]))
        parsed.reject(~known, "behaviour", "is none of pv, buy, cart, fav")
        parsed.reject(parsed.numbers("timestamp") < 0, "timestamp", "is before 1970")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """What sequences are made of.

    Attributes:
      history: How many behaviours before the target an example keeps at most, the latest.
      negatives: Items that the user never touched, for each positive.
      draw: Negatives are the items of events of other users of about the same time ("popularity"), so that neither how
        popular nor how new an item is tells negatives from positives; or drawn from all items of the log alike
        ("uniform"), as TBSM's authors do.
      positives_per_user: How many behaviours of a user become targets at most, chosen at random; None for all.
      seed: The seed of negatives and of that choice.
    """

    history: int = 20
    negatives: int = 1
    draw: Draw = "popularity"
    positives_per_user: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("history", 1), ("negatives", 1), ("positives_per_user", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DatasetError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
        if self.draw not in get_args(Draw):
            raise DatasetError(f"--draw is {self.draw!r}; choose {' or '.join(get_args(Draw))}")


class TaobaoSequences(Taobao):
    """An example asks whether a user turns to an item after a history of up to 20 behaviours.

    A user's behaviours of any kind are put in order of time, and within one second in the order of the files. Each but
    the first is a positive: its item and category are the target, and the items and categories of the behaviours before
    it are the history, in order of time. A negative has the user, time and history of its positive, and an item that
    the user never touches anywhere in the log (``SequenceOptions.draw``), with the category of the event that it is
    drawn from. Examples are ordered by the target's time.

    The log is sorted by user, and by time, on disk. Memory holds some users' behaviours at a time, and for uniform
    draws the distinct items.
    """

    passes = 2

    def __init__(self, options: SequenceOptions | None = None):
        self._options = options or SequenceOptions()
        histories = (
            CategoricalSpec(name=name, table=table, many=True, max_length=self._options.history)
            for name, table in HISTORIES.items()
        )
        self.categorical = (*one_hot(*IDS), *histories)
        self._folder: pathlib.Path | None = None
        self._advance: Callable[[float], None] = lambda share: None

    def options(self) -> JsonObject:
        """How sequences were made."""
        return {"form": "sequence", **dataclasses.asdict(self._options)}

    def begin(self, folder: pathlib.Path, advance: Callable[[float], None]) -> None:
        """Takes the place for the log sorted by user."""
        self._folder, self._advance = folder, advance

    def convert(self, parsed: ParsedBlock) -> Behaviours:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Behaviours in the order of the file."""
        self.check(parsed)
        return Behaviours(
            users=parsed.numbers("user_id"),
            items=integer_keys(parsed.numbers("item_id")),
            categories=integer_keys(parsed.numbers("category_id")),
            times=parsed.numbers("timestamp"),
        )

    def assemble(self, converted: Iterator[Behaviours]) -> Iterator[Chunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sequences, user by user."""
        options = self._options
        by_user, candidates = self._sorted(converted)
        drawing = Drawing(
            history=options.history,
            negatives=options.negatives,
            positives=_NO_LIMIT if options.positives_per_user is None else options.positives_per_user,
            seed=options.seed,
            candidates=candidates,
        )
        made = 0
        for behaviours in self._whole_users(by_user):
            yield (chunk := drawing.expand(behaviours))
            made += len(chunk.labels)
        if by_user.rows and not made:
            raise DatasetError("no user of the log has two behaviours, so that there is no target with a history")
        assert self._folder is not None
        shutil.rmtree(self._folder)

    def _sorted(self, converted: Iterator[Behaviours]) -> tuple[Spill, Candidates]:
        """The log in order of user, on disk, and what negatives are drawn from."""
        from jrec.prepare.spill import Spill

        assert self._folder is not None
        self._folder.mkdir()
        catalogue = Catalogue()
        with contextlib.ExitStack() as stack:
            by_user = Spill(self._folder / "by_user", _columns("users", "items", "categories", "times"), {})
            by_time = Spill(self._folder / "by_time", _columns("items", "categories", "times"), {})
            for spill in (by_user, by_time):
                stack.callback(spill.close)
            for behaviours in converted:
                if not len(behaviours.users):
                    continue
                _append(by_user, behaviours, np.argsort(behaviours.users, kind="stable"))
                if self._options.draw == "uniform":
                    catalogue.add(behaviours.items, behaviours.categories)
                else:
                    _append(by_time, behaviours, np.argsort(behaviours.times, kind="stable"))
        if not by_user.rows:
            return by_user, Candidates(items=catalogue.items, categories=catalogue.categories)
        by_user = by_user.sorted_by_time(self._folder / "users_sorted", "users")
        if self._options.draw == "uniform":
            catalogue.settle()
            return by_user, Candidates(items=catalogue.items, categories=catalogue.categories)
        by_time = by_time.sorted_by_time(self._folder / "times_sorted", "times")
        mapped = {name: _mapped(by_time.plain(name)) for name in by_time.columns}
        return by_user, Candidates(**mapped)

    def _whole_users(self, spill: Spill) -> Iterator[Behaviours]:
        """Behaviours of one or more users, in order of user and time."""
        waiting: list[dict[str, np.ndarray]] = []
        for start in range(0, spill.rows, _READ_ROWS):
            stop = min(start + _READ_ROWS, spill.rows)
            waiting.append({name: spill.plain(name).read(start, stop) for name in spill.columns})
            users = waiting[-1]["users"]
            # The last user of a piece may go on in the next one.
            whole = int(np.searchsorted(users, users[-1])) if stop < spill.rows else len(users)
            if not whole and waiting[0]["users"][0] == users[-1]:
                continue  # one user's behaviours so far
            yield _in_order(waiting[:-1], {name: column[:whole] for name, column in waiting[-1].items()})
            waiting = [{name: column[whole:] for name, column in waiting[-1].items()}]
            self._advance(stop / spill.rows)


def _columns(*names: str) -> dict[str, np.dtype]:
    return {name: np.dtype(np.uint64 if name in ("items", "categories") else np.int64) for name in names}


def _append(spill: Spill, behaviours: Behaviours, order: np.ndarray) -> None:
    spill.append({name: getattr(behaviours, name)[order] for name in spill.columns})


def _mapped(column: PlainColumn) -> np.ndarray:
    """The values, without reading them."""
    return np.asarray(np.memmap(column.path, column.dtype, "r"))


def _in_order(pieces: list[dict[str, np.ndarray]], last: dict[str, np.ndarray]) -> Behaviours:
    columns = {name: np.concatenate([piece[name] for piece in (*pieces, last)]) for name in last}
    # Stable: within one second the order of the files stays.
    order = np.lexsort((columns["times"], columns["users"]))
    return Behaviours(**{name: column[order] for name, column in columns.items()})
