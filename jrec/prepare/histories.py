"""Histories: for each example the items of the examples of the same user before it, by external sorts.

With U[i] the user of example i and t[i] its moment, its history is the items of the last ``length`` examples j with
U[j] = U[i] and t[j] < t[i], in order of time, ties in the order of the log. Examples of one moment are not in each
other's histories, so that none has its own item. Histories in step leave out the same examples: those that lack a value
for each of them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from jrec.data.columns import ListColumn, lists_at
from jrec.data.keys import MISSING
from jrec.data.schema import DatasetError
from jrec.prepare.spill import BUCKET_ROWS, PlainColumn, Spill, SpilledLists, mapped
from jrec.prepare.splits import NO_SPLIT, SPLITS

_USER, _ITEM, _AT, _MOMENT, _START, _LENGTH, _SPLIT = "user", "item", "at", "moment", "start", "length", "split"
_STEP = "step"  # whether an example is a step of later histories
_TRAIN, _CHOSEN = SPLITS.index("train"), len(SPLITS)  # the last lines of a user, one a split
_INT64 = np.dtype(np.int64)
_VALUES = 1 << 22  # of histories, at most about so many in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histories:
    """The histories of examples.

    Attributes:
      items: Lists of uint64 keys.
      ages: Lists of float32, how many seconds before the example each item was; None where they were not wanted.
    """

    items: SpilledLists
    ages: SpilledLists | None


def write_histories(
    users: PlainColumn,
    items: PlainColumn,
    moments: PlainColumn | None,
    folder: pathlib.Path,
    *,
    rows: int,
    length: int,
    in_step: Sequence[PlainColumn] = (),
    lines: PlainColumn | None = None,
    ticks: int | None = None,
    bucket_rows: int = BUCKET_ROWS,
) -> Histories:
    """The history of every example, or of some.

    Takes the memory of two external sorts, ``bucket_rows`` examples of one column each; disk takes 8 bytes for each
    value of a history, 4 for its age, and about 70 for each example while the work goes on. A missing user has an empty
    history, and a missing item is in none, unless the example has a value of another history that is in step.

    Args:
      users: (rows,) uint64 keys.
      items: (rows,) uint64 keys.
      moments: (rows,) int64, ascending; None where every example is later than the one before it.
      folder: For files; it must not exist.
      rows: How many examples there are.
      length: The most items of a history, the latest.
      in_step: (rows,) uint64 keys each, of which the other histories in step are made.
      lines: (n,) int64, the numbers of the examples whose histories are wanted, in this order; None for all.
      ticks: How many of the moments' units a second has, for the items' ages; None without ages.
      bucket_rows: Examples that are sorted at a time.
    """
    folder.mkdir()
    by_user = _by_user(users, items, moments, folder, rows, bucket_rows, in_step)
    timed = {} if ticks is None else {_MOMENT: _INT64}
    kept = Spill(folder / "kept", {_ITEM: np.dtype(np.uint64), **timed}, {})
    places = _places(by_user, kept, folder, length, bucket_rows)
    histories = SpilledLists(folder / "histories", np.dtype(np.uint64))
    ages = SpilledLists(folder / "ages", np.dtype(np.float32))
    # Users' items lie together; the system keeps as much of them in memory as there is room for.
    values = mapped(kept.plain(_ITEM))
    step = max(_VALUES // length, 1)
    starts, lengths = (mapped(places.plain(name)) for name in (_START, _LENGTH))
    then, now = (mapped(spill.plain(_MOMENT)) if timed else np.empty(0, np.int64) for spill in (kept, places))
    for start in range(0, rows if lines is None else lines.rows, step):
        chosen = slice(start, start + step) if lines is None else lines.read(start, start + step)
        histories.append(lists_at(values, starts[chosen], lengths[chosen]))
        if ticks is not None:
            moments_of = lists_at(then, starts[chosen], lengths[chosen])
            # In int64, and only then in float32: moments since 1970 have more digits than it.
            passed = np.repeat(now[chosen], lengths[chosen]) - moments_of.values
            ages.append(ListColumn(moments_of.offsets, (passed / ticks).astype(np.float32)))
    for column in (histories, ages):
        column.finish()
    for column in (*places.columns.values(), *kept.columns.values()):
        column.remove()
    return Histories(items=histories, ages=ages if timed else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastLines:
    """Which examples are the last ones of their users.

    Attributes:
      splits: (rows,) uint8, each example's place in ``SPLITS``, or ``NO_SPLIT``.
      users: How many users have an example.
      without_history: How many of the chosen examples were left out because nothing is in their history.
    """

    splits: PlainColumn
    users: int
    without_history: int


def last_lines(
    users: PlainColumn,
    items: PlainColumn,
    moments: PlainColumn | None,
    folder: pathlib.Path,
    *,
    rows: int,
    bucket_rows: int = BUCKET_ROWS,
) -> LastLines:
    """The last example of each user for the test, the one before for validation, the one before that for training.

    All others are in no split: a training example's history holds them. A user of one or two examples is only trained
    on, by the last of them. Examples without a user or an item do not count, and those with an empty history are left
    out. Takes the memory and disk of two external sorts. The arguments are those that ``write_histories`` takes.
    """
    folder.mkdir()
    by_user = _by_user(users, items, moments, folder, rows, bucket_rows)
    marked = Spill(folder / "marked", {_AT: _INT64, _SPLIT: np.dtype(np.uint8)}, {})
    total = without = 0
    held = {name: np.empty(0, by_user.plain(name).dtype) for name in by_user.columns}  # of a user who may go on
    held_first = np.empty(0, np.int64)
    for start in range(0, max(by_user.rows, 1), bucket_rows):
        read = {name: by_user.plain(name).read(start, start + bucket_rows) for name in held}
        unknown = (read[_ITEM] == MISSING) | (read[_USER] == MISSING.astype(np.int64))
        marks = [(read[_AT][unknown], np.full(unknown.sum(), NO_SPLIT))]
        lines = {name: np.concatenate([held[name], column[~unknown]]) for name, column in read.items()}
        user, count, last = lines[_USER], len(lines[_USER]), start + bucket_rows >= by_user.rows
        new = np.append(True, user[1:] != user[:-1])[:count]
        begins = np.flatnonzero(new)
        sizes, number = np.diff(np.append(begins, count)), np.cumsum(new) - 1
        first = lines[_MOMENT][begins]  # each user's first moment
        # The user that was held comes first, and began in an earlier piece.
        first[: len(held_first)] = held_first
        from_end = (begins + sizes)[number] - 1 - np.arange(count)
        # The last user of a piece may go on: its last lines wait, and the others of it are decided, since three or more
        # follow.
        keep = np.zeros(count, bool) if last else (number == len(begins) - 1) & (from_end < _CHOSEN)
        split = np.where(from_end < _CHOSEN, NO_SPLIT - 1 - from_end, NO_SPLIT)
        split[(sizes[number] < _CHOSEN) & (from_end == 0)] = _TRAIN
        split[(sizes[number] < _CHOSEN) & (from_end > 0)] = NO_SPLIT
        empty = (split != NO_SPLIT) & (lines[_MOMENT] <= first[number]) & ~keep
        split[empty] = NO_SPLIT
        marks.append((lines[_AT][~keep], split[~keep]))
        at, splits = (np.concatenate(column) for column in zip(*marks, strict=True))
        order = np.argsort(at)
        marked.append({_AT: at[order], _SPLIT: splits[order]})
        total += len(begins) if last else len(begins) - bool(keep.any())
        without += int(empty.sum())
        held = {name: column[keep] for name, column in lines.items()}
        held_first = first[-1:] if keep.any() else first[:0]
    marked.finish()
    for column in by_user.columns.values():
        column.remove()
    marked = marked.sorted_by_time(folder / "in_order", _AT, bucket_rows)
    return LastLines(splits=marked.plain(_SPLIT), users=total, without_history=without)


def check_ascending(moments: PlainColumn, rows: int) -> None:
    """Refuses files of splits whose times overlap, since histories would hold what is later, or of other splits.

    Args:
      moments: (rows,) int64, of training, validation and test examples.
      rows: How many examples there are.

    Raises:
      DatasetError: If a split has an example that is earlier than one of the split before it.
    """
    for start in range(0, rows, BUCKET_ROWS):
        if (np.diff(moments.read(start, start + BUCKET_ROWS + 1)) < 0).any():
            raise DatasetError(
                "the files of a later split have lines that are earlier than some of the split before; histories need"
                " splits that follow one another in time: give the whole log as --input"
            )


def _by_user(
    users: PlainColumn,
    items: PlainColumn,
    moments: PlainColumn | None,
    folder: pathlib.Path,
    rows: int,
    step: int,
    in_step: Sequence[PlainColumn] = (),
) -> Spill:
    """The examples user by user, each user's in their order."""
    columns = {_USER: _INT64, _ITEM: np.dtype(np.uint64), _AT: _INT64, _MOMENT: _INT64, _STEP: np.dtype(np.bool_)}
    spill = Spill(folder / "events", columns, {})
    for start in range(0, rows, step):
        at = np.arange(start, min(start + step, rows))
        keys = users.read(start, start + step).view(np.int64)
        order = np.argsort(keys, kind="stable")
        moment = at if moments is None else moments.read(start, start + step)
        own = items.read(start, start + step)
        values = [own, *(column.read(start, start + step) for column in in_step)]
        is_step = (keys != MISSING.astype(np.int64)) & np.any([v != MISSING for v in values], axis=0)
        read = {_USER: keys, _ITEM: own, _AT: at, _MOMENT: moment, _STEP: is_step}
        spill.append({name: column[order] for name, column in read.items()})
    spill.finish()
    return spill.sorted_by_time(folder / "by_user", _USER, step)


def _places(by_user: Spill, kept: Spill, folder: pathlib.Path, length: int, step: int) -> Spill:
    """Where each example's history lies in ``kept``, which gets the items: examples in their first order.

    If ``kept`` has a column for the items' moments, it gets them, and the examples have theirs.
    """
    columns = (_AT, _START, _LENGTH, *(name for name in kept.columns if name == _MOMENT))
    spill = Spill(folder / "places", dict.fromkeys(columns, _INT64), {})
    last_user, last_moment, user_start, moment_start = None, None, 0, 0
    for start in range(0, by_user.rows, step):
        # What is in nobody's history takes no place in the file; its line still gets a history.
        users, items, at, moments, keep = (
            by_user.plain(name).read(start, start + step) for name in (_USER, _ITEM, _AT, _MOMENT, _STEP)
        )
        before = kept.rows + np.cumsum(keep) - keep  # kept items of examples before each one
        new_user = np.append(True if last_user is None else users[0] != last_user, users[1:] != users[:-1])
        # A history ends where the line's own moment begins, so that no line sees itself or what came with it.
        new_moment = new_user | np.append(moments[0] != last_moment, moments[1:] != moments[:-1])
        # Kept items never become fewer, so that the latest beginning is the greatest.
        first = np.maximum.accumulate(np.where(new_user, before, user_start))
        stop = np.maximum.accumulate(np.where(new_moment, before, moment_start))
        lengths = np.minimum(stop - first, length)
        order = np.argsort(at)
        starts = (stop - lengths)[order]
        spill.append({_AT: at[order], _START: starts, _LENGTH: lengths[order], _MOMENT: moments[order]})
        kept.append({_ITEM: items[keep], _MOMENT: moments[keep]})
        last_user, last_moment, user_start, moment_start = users[-1], moments[-1], first[-1], stop[-1]
    spill.finish()
    kept.finish()
    for column in by_user.columns.values():
        column.remove()
    return spill.sorted_by_time(folder / "in_order", _AT, step)
