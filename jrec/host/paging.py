"""A limit on the memory that tables in mapped files take, and reads of their pages ahead of use.

Linux keeps pages of mapped files in memory as long as it likes. Here every page is known that a table's methods
touch, since they say which rows they are about to use: pages that are not in memory are asked for together, so that the
disk reads many at a time, and the least recently used ones leave once the limit is reached: unmapped, written where
they changed, and dropped from the page cache. No byte is copied by hand: whatever the account says, a page that is
touched has its bits, from memory or from the file. Only speed and memory depend on it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from jrec.errors import ConfigError
from jrec.native import pages as kernels
from jrec.native.compile import pointer

_LOGGER = logging.getLogger(__name__)

PIECES = 8
"""Reads and writes of rows one by one go in pieces, each in pages of at most this fraction of the limit: of the few
threads that use rows at a time, no one can make the others' pages leave."""


class MappedFile:
    """An array in a mapped file, with an account of its pages.

    Args:
      array: The array, of pages that nothing touched yet.
      descriptor: The file; closed with this object.

    Attributes:
      used: (pages,) int64, when each page was last used, by ``MemoryLimit``'s clock; 0 for one that is not in memory.
      pins: (pages,) int64, how many uses are under way; such pages stay.
      count: Pages in memory.
    """

    def __init__(self, array: np.ndarray, descriptor: int):
        # The array, too: its addresses must stay ours for as long as somebody may give advice on them.
        self._array, self._descriptor = array, descriptor
        weakref.finalize(self, os.close, descriptor)
        self.line = array.itemsize * (array.shape[1] if array.ndim > 1 else 1)
        count = -(-array.nbytes // mmap.PAGESIZE)
        # NumPy's zeros take memory when they are written: 16 bytes for each page that was ever used.
        self.used, self.pins, self.count = np.zeros(count, np.int64), np.zeros(count, np.int64), 0

    @property
    def pages_of_row(self) -> int:
        """The most pages that a row can lie in."""
        return (self.line + mmap.PAGESIZE - 2) // mmap.PAGESIZE + 1

    def mark(self, rows: np.ndarray, made: np.ndarray | None, now: int) -> tuple[np.ndarray, np.ndarray]:
        """Marks and pins the pages of (n,) int64 rows; returns them, and what ``used`` said of them before."""
        out = np.empty((2, rows.size * self.pages_of_row), np.int64)
        bitmap = 0 if made is None else pointer(made)
        arrays = pointer(self.used), pointer(self.pins)
        count = kernels.mark_pages.call(pointer(rows), rows.size, self.line, bitmap, *arrays, now, pointer(out))
        pages, before = out[:, :count].copy()
        return pages, before

    def read(self, pages: np.ndarray) -> None:
        """Begins to read (n,) int64 pages from the disk, without waiting for them."""
        # For 20,000 cold pages on a virtual disk advice took 0.3 s, 32 threads that touch or pread them 0.4 to 0.6 s,
        # and one thread 1.8 s. A failure shows where the page is touched.
        self._advise(kernels.READ, pages)

    def drop(self, pages: np.ndarray) -> np.ndarray:
        """Takes (n,) int64 ascending pages out of memory, and writes what changed.

        Returns:
          Those that stayed: a fault nearby maps what is in memory around it, and a page that is mapped does not go.

        Raises:
          OSError: If the disk fails to write.
        """
        # A page that is still being read stays, whatever it is told, and nobody would know of it.
        self._advise(kernels.AWAIT, pages)
        # Unmapped first, so that what the processor marked as changed is known to the file before it is written.
        self._advise(kernels.UNMAP, pages)
        failed = self._advise(kernels.WRITE, pages)
        # All writes are under way before the first is waited for: a disk has many at a time.
        if kernels.written.call(self._descriptor) or failed:
            raise OSError("rows could not be written to the files in host.folder: the disk failed")
        self._advise(kernels.DROP, pages)
        return pages[self.resident(pages)]

    def resident(self, pages: np.ndarray | None = None) -> np.ndarray:
        """(n,) bool, which of (n,) int64 pages are in memory, as the system says; None for all."""
        pages = np.arange(self.used.size) if pages is None else pages
        there = np.zeros(pages.size, np.uint8)
        self._advise(kernels.LOOK, pages, there)
        return (there & 1).astype(bool)

    def _advise(self, action: int, pages: np.ndarray, out: np.ndarray | None = None) -> int:
        place = 0 if out is None else pointer(out)
        return kernels.advise_pages.call(
            action, pointer(self._array), self._descriptor, pointer(pages), pages.size, place
        )


class MemoryLimit:
    """The memory that the mapped files of some tables may take together, in this process. Any thread may use it.

    Args:
      size: Bytes.
      key: What the limit is called in messages.

    Attributes:
      read_pages: Pages that were not in memory when rows were used or asked for; new ones among them.
      dropped_pages: Pages that left.
      early_pages: Of them, pages that a batch under way was still to use.

    Raises:
      ConfigError: If the system is not Linux, or the limit is less than a few pages.
    """

    def __init__(self, size: int, *, key: str = "host.memory"):
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"{key} is {size:,} bytes, but only Linux can drop written pages of a file from memory; leave it out,"
                " and the system decides which pages it keeps"
            )
        self.size, self.key = size, key
        self.read_pages = self.dropped_pages = self.early_pages = 0
        self._lock, self._dropping, self._asking = threading.Lock(), threading.Lock(), threading.Lock()
        self._now, self._stuck = 1, False
        self._begun: collections.deque[int] = collections.deque()  # when the batches under way were asked for
        self._files: weakref.WeakSet[MappedFile] = weakref.WeakSet()

    @property
    def pages(self) -> int:
        """Pages in memory."""
        return sum(file.count for file in self._files)

    def add(self, array: np.ndarray, descriptor: int, folder: str) -> MappedFile:
        """Takes an array of ``allocate`` in a file, of which nothing was touched, into the account.

        Raises:
          ConfigError: If the file's disk is memory itself.
        """
        file = MappedFile(array, descriptor)
        if array.size:
            # Written and dropped once, to see whether it goes.
            first = np.zeros(1, np.int64)
            array.reshape(-1)[:1] = 0
            file.drop(first)
            if file.resident(first)[0]:
                raise ConfigError(
                    f"{self.key} is {_readable(self.size)}, but the files in {folder} stay in memory, as a tmpfs's do;"
                    " choose a folder on a disk, or leave the limit out"
                )
        self._files.add(file)
        return file

    def pieces(self, files: Sequence[MappedFile], rows: np.ndarray) -> Iterator[slice]:
        """Splits (n,) integer rows that are used one by one into pieces that a thread may use at a time."""
        cost = np.zeros(rows.size, np.int64)
        for file in files:
            first = rows.astype(np.int64) * file.line // mmap.PAGESIZE
            last = (rows.astype(np.int64) * file.line + file.line - 1) // mmap.PAGESIZE
            cost += last - first + 1
            cost[1:] -= first[1:] == last[:-1]  # neighbours share a page
        most = max(1, self.size // PIECES // mmap.PAGESIZE)
        number = np.cumsum(cost) // most
        ends = [*np.flatnonzero(number[1:] != number[:-1]) + 1, rows.size]
        yield from map(slice, [0, *ends[:-1]], ends)

    @contextlib.contextmanager
    def using(
        self, files: Sequence[MappedFile], rows: np.ndarray, *, made: np.ndarray | None = None, passing: bool = False
    ) -> Iterator[int]:
        """Keeps the pages of rows in memory for as long as the context lasts; those that are not are being read.

        Args:
          files: The table's files.
          rows: (n,) integers; negative ones are none.
          made: Bitmap of the rows that will be touched; None for all.
          passing: Whether the use leaves no trace in the order in which pages leave, and what it brought goes first: a
            checkpoint reads all rows, and each once.

        Yields:
          The number of pages.

        Raises:
          ConfigError: If the pages of what is under way exceed the limit.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        with self._lock:
            # Times, pins and counts change under one lock: ``_coldest`` sees a page before it is marked or once it is
            # pinned.
            self._now += 1
            now = self._now
            marked = [file.mark(rows, made, now) for file in files]
            for file, (_, before) in zip(files, marked, strict=True):
                fresh = int((before == 0).sum())
                file.count += fresh
                self.read_pages += fresh
        count = sum(pages.size for pages, _ in marked)
        try:
            # Twice, since the next batch's pages are being read while this one's are used.
            if (need := 2 * count * mmap.PAGESIZE) > self.size:
                raise self.too_small("the rows of two batches like this one", need)
            # Before the reads are asked for: pages that leave make room for those that come.
            self._make_room()
            for file, (pages, before) in zip(files, marked, strict=True):
                file.read(pages[before == 0])
            yield count
        finally:
            with self._lock:
                for file, (pages, before) in zip(files, marked, strict=True):
                    file.pins[pages] -= 1
                    if passing:
                        mine = file.used[pages] == now
                        file.used[pages[mine]] = np.maximum(before[mine], 1)

    def ask(self, files: Sequence[MappedFile], rows: np.ndarray) -> int:
        """Begins to read the pages of (n,) integer rows, of which none waits; returns the number of their pages."""
        count = 0
        with self._asking:  # several loader threads at a time would pin several pieces
            for piece in self.pieces(files, rows):
                with self.using(files, rows[piece]) as pages:
                    count += pages
        return count

    def begin_batch(self, batches: int) -> None:
        """Says that a run's next batch will be asked for, whose rows are needed until ``batches`` were, itself too."""
        with self._lock:
            self._begun = collections.deque([*self._begun, self._now + 1], batches)

    def too_small(self, name: str, size: int) -> ConfigError:
        """The error of a limit that cannot hold pages of this many bytes."""
        return ConfigError(
            f"{self.key} is {_readable(self.size)}, but {name} lie in {_readable(size)} of the files' pages of"
            f" {mmap.PAGESIZE:,} bytes; set it to at least that, or take smaller batches"
        )

    def _make_room(self) -> None:
        """Drops pages until the limit is kept, and some more, so that the next call has nothing to do."""
        while self.pages * mmap.PAGESIZE > self.size:
            # Those who are waiting here find room when the pages have left, not when they are chosen.
            with self._dropping:
                with self._lock:
                    if (count := self.pages) * mmap.PAGESIZE <= self.size:
                        return
                    # Chosen under the lock, dropped without it: writes to a disk take long, and only those who need
                    # room wait.
                    leaving = self._coldest(count - (self.size - self.size // 16) // mmap.PAGESIZE)
                stayed = [file.drop(pages) for file, pages in leaving]
                before = self.dropped_pages
                with self._lock:
                    for (file, pages), stays in zip(leaving, stayed, strict=True):
                        again = stays[file.used[stays] == 0]  # unless somebody has used and counted them since
                        file.used[again] = 1
                        # Each is taken off once: one that somebody marked meanwhile was counted a second time then.
                        file.count -= pages.size - again.size
                        self.dropped_pages += pages.size - again.size
                if self.dropped_pages == before:
                    # As where another process reads the files: to try at once again could go on for ever.
                    if not self._stuck:
                        _LOGGER.warning("%s is %s, but pages beyond it stay in memory", self.key, _readable(self.size))
                    self._stuck = True
                    return

    def _coldest(self, count: int) -> list[tuple[MappedFile, np.ndarray]]:
        """The least recently used pages that nobody uses, at most ``count``; they count as absent from here on."""
        files = list(self._files)
        free = [np.flatnonzero((file.used > 0) & (file.pins == 0)) for file in files]
        ages = np.concatenate([file.used[pages] for file, pages in zip(files, free, strict=True)])
        if not ages.size:
            raise self.too_small("rows that are read and written at a time", self.pages * mmap.PAGESIZE)
        leaves = np.zeros(ages.size, bool)
        leaves[np.argpartition(ages, min(count, ages.size) - 1)[:count]] = True
        ends = np.cumsum([pages.size for pages in free])[:-1]
        chosen = [pages[some] for pages, some in zip(free, np.split(leaves, ends), strict=True)]
        self._count_early(ages[leaves])
        for file, pages in zip(files, chosen, strict=True):
            file.used[pages] = 0
        return [(file, pages) for file, pages in zip(files, chosen, strict=True) if pages.size]

    def _count_early(self, ages: np.ndarray) -> None:
        """Counts pages, by the times of their last use, that leave before a batch under way has used them."""
        if len(self._begun) != self._begun.maxlen or not (early := int((ages >= self._begun[0]).sum())):
            return
        if not self.early_pages:
            _LOGGER.warning(
                "%s is %s, which does not hold the rows of the %d batches under way, so that some are read twice;"
                " raise it, or have fewer batches ahead (host.queue, or the loader's prefetch)",
                self.key, _readable(self.size), len(self._begun),
            )  # fmt: skip
        self.early_pages += early


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
