"""Histories: for each example the items of the examples of the same user before it, by external sorts.

With U[i] the user of example i and t[i] its moment, its history is the items of the last ``length`` examples j with
U[j] = U[i] and t[j] < t[i], in order of time, ties in the order of the log. Examples of one moment are not in each
other's histories, so that none has its own item.
"""

from __future__ import annotations

import pathlib

import numpy as np

from jrec.data.columns import lists_at
from jrec.data.readers.keys import MISSING
from jrec.data.schema import DatasetError
from jrec.data.spill import BUCKET_ROWS, PlainColumn, Spill, SpilledLists

_USER, _ITEM, _AT, _MOMENT, _START, _LENGTH = "user", "item", "at", "moment", "start", "length"
_INT64 = np.dtype(np.int64)
_VALUES = 1 << 22  # of histories, at most about so many in memory


def write_histories(
    users: PlainColumn,
    items: PlainColumn,
    moments: PlainColumn | None,
    folder: pathlib.Path,
    *,
    rows: int,
    length: int,
    bucket_rows: int = BUCKET_ROWS,
) -> SpilledLists:
    """The history of every example.

    Memory is that of two external sorts, ``bucket_rows`` examples of one column each; disk takes 8 bytes for each
    value of a history, and about 60 for each example while the work goes on. A missing user has an empty history, and a
    missing item is in none.

    Args:
      users: (rows,) uint64 keys.
      items: (rows,) uint64 keys.
      moments: (rows,) int64, ascending; None where every example is later than the one before it.
      folder: For files; it must not exist.
      rows: How many examples there are.
      length: The most items of a history, the latest.
      bucket_rows: Examples that are sorted at a time.

    Returns:
      (rows,) lists of uint64 keys.
    """
    folder.mkdir()
    by_user = _by_user(users, items, moments, folder, rows, bucket_rows)
    kept = PlainColumn(folder / "kept", np.dtype(np.uint64))
    places = _places(by_user, kept, folder, length, bucket_rows)
    histories = SpilledLists(folder / "histories", np.dtype(np.uint64))
    # Users' items lie together; the system keeps as much of them in memory as there is room for.
    values = np.memmap(kept.path, np.uint64, mode="r") if kept.rows else np.empty(0, np.uint64)
    step = max(_VALUES // length, 1)
    for start in range(0, rows, step):
        starts, lengths = (places.plain(name).read(start, start + step) for name in (_START, _LENGTH))
        histories.append(lists_at(values, starts, lengths))
    histories.finish()
    for column in (*places.columns.values(), kept):
        column.remove()
    return histories


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
    users: PlainColumn, items: PlainColumn, moments: PlainColumn | None, folder: pathlib.Path, rows: int, step: int
) -> Spill:
    """The examples user by user, each user's in their order."""
    columns = {_USER: _INT64, _ITEM: np.dtype(np.uint64), _AT: _INT64, _MOMENT: _INT64}
    spill = Spill(folder / "events", columns, {})
    for start in range(0, rows, step):
        at = np.arange(start, min(start + step, rows))
        keys = users.read(start, start + step).view(np.int64)
        order = np.argsort(keys, kind="stable")
        moment = at if moments is None else moments.read(start, start + step)
        read = {_USER: keys, _ITEM: items.read(start, start + step), _AT: at, _MOMENT: moment}
        spill.append({name: column[order] for name, column in read.items()})
    spill.finish()
    return spill.sorted_by_time(folder / "by_user", _USER, step)


def _places(by_user: Spill, kept: PlainColumn, folder: pathlib.Path, length: int, step: int) -> Spill:
    """Where each example's history lies in ``kept``, which gets the items: examples in their first order."""
    spill = Spill(folder / "places", {_AT: _INT64, _START: _INT64, _LENGTH: _INT64}, {})
    last_user, last_moment, user_start, moment_start = None, None, 0, 0
    for start in range(0, by_user.rows, step):
        users, items, at, moments = (
            by_user.plain(name).read(start, start + step) for name in (_USER, _ITEM, _AT, _MOMENT)
        )
        keep = (items != MISSING) & (users != MISSING.astype(np.int64))
        before = kept.rows + np.cumsum(keep) - keep  # kept items of examples before each one
        new_user = np.append(True if last_user is None else users[0] != last_user, users[1:] != users[:-1])
        new_moment = new_user | np.append(moments[0] != last_moment, moments[1:] != moments[:-1])
        # Kept items never become fewer, so that the latest beginning is the greatest.
        first = np.maximum.accumulate(np.where(new_user, before, user_start))
        stop = np.maximum.accumulate(np.where(new_moment, before, moment_start))
        lengths = np.minimum(stop - first, length)
        order = np.argsort(at)
        spill.append({_AT: at[order], _START: (stop - lengths)[order], _LENGTH: lengths[order]})
        kept.append(items[keep])
        last_user, last_moment, user_start, moment_start = users[-1], moments[-1], first[-1], stop[-1]
    spill.finish()
    kept.finish()
    for column in by_user.columns.values():
        column.remove()
    return spill.sorted_by_time(folder / "in_order", _AT, step)
