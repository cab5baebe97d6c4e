"""Parsed examples on disk, a file a column, between the passes of preparation: memory stays small however long the log.

Examples are appended in *runs*, each sorted by time. ``sorted_by_time`` merges the runs where they overlap.
"""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from jrec.data.columns import Column, ListColumn, concatenate, count_examples, gather

BUCKET_ROWS = 1 << 19


class PlainColumn:
    """(rows,) values of one dtype in one file."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._file: BinaryIO | None = None

    def append(self, values: np.ndarray) -> None:
        """Adds values at the end."""
        if self._file is None:
            self._file = self.path.open("wb")
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.rows += len(values)

    def finish(self) -> None:
        """Makes what was appended readable, from any thread."""
        if self._file is None:
            self.path.touch()
        else:
            self._file.close()
            self._file = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of these rows."""
        # Opened anew for each read: columns are read by several threads, and sent to workers.
        count = max(min(stop, self.rows) - start, 0)
        return np.fromfile(self.path, self.dtype, count=count, offset=start * self.dtype.itemsize)

    def remove(self) -> None:
        """Deletes the file."""
        self.finish()
        self.path.unlink()


def mapped(column: PlainColumn) -> np.ndarray:
    """The values of a finished column, read as they are needed."""
    return np.memmap(column.path, column.dtype, mode="r") if column.rows else np.empty(0, column.dtype)


class JoinedColumn(PlainColumn):
    """Finished columns, one after another, read as one without being copied.

    Args:
      columns: One or more, of one dtype.
      skip: How many of the first values of every column but the first are left out.
      bases: What is added to each column's values; nothing by default.
    """

    def __init__(self, columns: Sequence[PlainColumn], *, skip: int = 0, bases: Sequence[int] | None = None):
        super().__init__(columns[0].path, columns[0].dtype)
        self._columns = list(columns)
        self._skips = [0] + [skip] * (len(columns) - 1)
        self._bases = bases
        lengths = [c.rows - skipped for c, skipped in zip(columns, self._skips, strict=True)]
        self._ends = np.cumsum(lengths)
        self.rows = int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of these rows."""
        read = [np.empty(0, self.dtype)]
        # To the right, past empty columns, and to the column that begins there.
        i = int(np.searchsorted(self._ends, start, "right"))
        while start < min(stop, self.rows):
            end = min(stop, int(self._ends[i]))
            shift = self._columns[i].rows - int(self._ends[i])  # from rows of all to this column's
            values = self._columns[i].read(start + shift, end + shift)
            read.append(values if self._bases is None else values + self._bases[i])
            start, i = end, i + 1
        return np.concatenate(read)

    def remove(self) -> None:
        """Deletes all files."""
        for column in self._columns:
            column.remove()


class SpilledLists:
    """Lists: their values in one file, where each begins and ends in another, (rows + 1,) int64."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype):
        self.values = PlainColumn(path.with_name(f"{path.name}.values"), dtype)
        self.ends = PlainColumn(path.with_name(f"{path.name}.ends"), np.dtype(np.int64))
        self.longest = 0
        self.ends.append(np.zeros(1, np.int64))

    @property
    def rows(self) -> int:
        """How many lists there are."""
        return self.ends.rows - 1

    @classmethod
    def joined(cls, columns: Sequence[SpilledLists]) -> SpilledLists:
        """Finished columns, one after another."""
        all_lists = copy.copy(columns[0])
        bases = np.cumsum([0, *(c.values.rows for c in columns[:-1])]).tolist()
        all_lists.values = JoinedColumn([c.values for c in columns])
        all_lists.ends = JoinedColumn([c.ends for c in columns], skip=1, bases=bases)
        all_lists.longest = max(c.longest for c in columns)
        return all_lists

    def append(self, lists: ListColumn) -> None:
        """Adds lists at the end."""
        self.ends.append(lists.offsets[1:] + self.values.rows)
        self.values.append(lists.values)
        self.longest = max(self.longest, int(np.diff(lists.offsets).max(initial=0)))

    def finish(self) -> None:
        """Makes what was appended readable, from any thread."""
        self.ends.finish()
        self.values.finish()

    def read(self, start: int, stop: int) -> ListColumn:
        """The lists of these rows."""
        ends = self.ends.read(start, stop + 1)
        return ListColumn(ends - ends[0], self.values.read(int(ends[0]), int(ends[-1])))

    def remove(self) -> None:
        """Deletes the files."""
        self.ends.remove()
        self.values.remove()


SpilledColumn = PlainColumn | SpilledLists


class Spill:
    """The columns of all examples. ``close`` may be called at any time; files are deleted with their folder."""

    def __init__(self, folder: pathlib.Path, plain: Mapping[str, np.dtype], lists: Mapping[str, np.dtype]):
        folder.mkdir()
        self.folder = folder
        self._plain, self._lists = dict(plain), dict(lists)
        names = [*plain, *lists]
        self.columns: dict[str, SpilledColumn] = {}
        for name in names:
            path = folder / f"{names.index(name):04d}"
            self.columns[name] = PlainColumn(path, plain[name]) if name in plain else SpilledLists(path, lists[name])
        self.rows = 0
        self.runs: list[int] = [0]

    @classmethod
    def joined(cls, spills: Sequence[Spill]) -> Spill:
        """The examples of finished spills, one after another; their files stay where they are."""
        whole = copy.copy(spills[0])
        whole.columns = {}
        for name, first in spills[0].columns.items():
            columns: list[Any] = [spill.columns[name] for spill in spills]
            whole.columns[name] = (
                SpilledLists.joined(columns) if isinstance(first, SpilledLists) else JoinedColumn(columns)
            )
        starts = np.cumsum([0, *(spill.rows for spill in spills)]).tolist()
        whole.rows = starts[-1]
        whole.runs = [0, *(at + run for at, spill in zip(starts, spills, strict=False) for run in spill.runs[1:])]
        return whole

    def append(self, columns: Mapping[str, Column]) -> None:
        """Adds a run of examples, given by all columns."""
        rows = set(map(count_examples, columns.values()))
        assert len(rows) == 1
        for name, column in self.columns.items():
            column.append(columns[name])  # pyright: ignore[reportArgumentType]
        self.rows += rows.pop()
        self.runs.append(self.rows)

    def finish(self) -> None:
        """Makes what was appended readable."""
        for column in self.columns.values():
            column.finish()

    def close(self) -> None:
        """Closes files without caring for their content."""
        for column in self.columns.values():
            with contextlib.suppress(OSError):
                column.finish()

    def plain(self, name: str) -> PlainColumn:
        """The plain column of that name."""
        column = self.columns[name]
        assert isinstance(column, PlainColumn)
        return column

    def sorted_by_time(self, folder: pathlib.Path, time: str, bucket_rows: int = BUCKET_ROWS) -> Spill:
        """The same examples in order of the int64 column ``time``, ties in their present order, in a new folder.

        Every run has to be sorted already. Holds about ``bucket_rows`` examples of one column in memory. Deletes this
        spill's files as it goes.
        """
        merged = Spill(folder, self._plain, self._lists)
        # An external merge without a heap: the same spans of time are cut out of all runs, and each bucket of pieces is
        # sorted in memory. Column by column, so that memory holds one column of a bucket, and disk two copies of one.
        buckets = list(self._time_buckets(self.plain(time), bucket_rows))
        # Of one bucket the order is kept; of many each column sorts the times anew, which costs less than room for all
        # orders.
        orders = [self._order(time, bucket) for bucket in buckets] if len(buckets) == 1 else None
        for name in self.columns:
            if name != time:
                self._merge_column(name, time, buckets, orders, merged.columns[name])
        # The times last: all others' orders are read from them, and merging a column deletes it.
        self._merge_column(time, time, buckets, orders, merged.columns[time])
        merged.rows = self.rows
        merged.runs = [0, self.rows]
        merged.finish()
        return merged

    def _merge_column(
        self,
        name: str,
        time: str,
        buckets: list[list[tuple[int, int]]],
        orders: list[np.ndarray | None] | None,
        into: SpilledColumn,
    ) -> None:
        for i, bucket in enumerate(buckets):
            order = self._order(time, bucket) if orders is None else orders[i]
            if order is None:  # one moment only: the runs' order is the files' order
                for start, stop in bucket:
                    into.append(self.columns[name].read(start, stop))  # pyright: ignore[reportArgumentType]
                continue
            pieces = [self.columns[name].read(start, stop) for start, stop in bucket]
            into.append(gather(concatenate(pieces), order))  # pyright: ignore[reportArgumentType]
        self.columns[name].remove()

    def _order(self, time: str, bucket: list[tuple[int, int]]) -> np.ndarray | None:
        times = self.plain(time)
        ends = [times.read(at, at + 1)[0] for start, stop in bucket for at in (start, stop - 1)]
        if min(ends) == max(ends):
            return None
        # Pieces come in the order of the runs, so that a stable sort keeps the log's order within a moment.
        return np.argsort(np.concatenate([times.read(start, stop) for start, stop in bucket]), kind="stable")

    def _time_buckets(self, times: PlainColumn, bucket_rows: int) -> Iterator[list[tuple[int, int]]]:
        """Row ranges of every run, together one span of time; about ``bucket_rows`` rows unless of a single moment."""
        bounds = _time_bounds(self._sample(times), self.rows, bucket_rows)
        runs = [(a, b) for a, b in zip(self.runs, self.runs[1:], strict=False) if b > a]
        cuts = np.array([a + np.searchsorted(times.read(a, b), bounds) for a, b in runs]).reshape(
            len(runs), len(bounds)
        )
        starts = np.array([a for a, _ in runs])[:, None]
        stops = np.array([b for _, b in runs])[:, None]
        cuts = np.concatenate([starts, cuts, stops], axis=1)
        for left, right in zip(cuts.T[:-1], cuts.T[1:], strict=True):
            if ranges := [(int(a), int(b)) for a, b in zip(left, right, strict=True) if b > a]:
                yield ranges

    def _sample(self, times: PlainColumn) -> np.ndarray:
        # About a million times: bounds need not be exact, only no bucket much too large.
        step = max(1, self.rows >> 20)
        sampled = [times.read(at, at + BUCKET_ROWS)[::step] for at in range(0, self.rows, BUCKET_ROWS)]
        return np.sort(np.concatenate(sampled))


def _time_bounds(sample: np.ndarray, rows: int, bucket_rows: int) -> np.ndarray:
    """Times that cut the log into buckets; one moment with many examples gets a bucket of its own."""
    per_bucket = max(1, len(sample) * bucket_rows // max(rows, 1))
    bounds = np.unique(sample[per_bucket::per_bucket])
    # No bound can divide a moment: a log whose times are dates, say, has buckets of a day, which need no sorting
    # (``_order``).
    heavy = np.searchsorted(sample, bounds, "right") - np.searchsorted(sample, bounds, "left") >= per_bucket // 2
    return np.unique(np.concatenate([bounds, bounds[heavy] + 1]))
