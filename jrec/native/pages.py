"""Pages of mapped files: which pages rows lie in, and the kernel's advice on many scattered pages by one call."""

from __future__ import annotations

import mmap

import numpy as np
from numba import types

from jrec.native.compile import inlined, kernel
from jrec.native.memory import get_i64, put_i64

READ, AWAIT, UNMAP, WRITE, DROP, LOOK = range(6)
"""What ``advise_pages`` asks the kernel to do with pages."""

_PAGE = mmap.PAGESIZE
# The kernel reads at most its read-ahead of one MADV_WILLNEED, which is 128 KiB unless a disk is set otherwise.
_MOST_READ = 131072 // _PAGE
# Linux's numbers: this module's kernels are called only there.
_MADV_WILLNEED, _MADV_DONTNEED, _FADV_DONTNEED, _SYNC_WRITE = 3, 4, 4, 2

_madvise = types.ExternalFunction("madvise", types.int32(types.int64, types.int64, types.int32))
_mincore = types.ExternalFunction("mincore", types.int32(types.int64, types.int64, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_sync = types.ExternalFunction("sync_file_range", types.int32(types.int32, types.int64, types.int64, types.uint32))


@inlined
def _has(bitmap, row):
    return (get_i64(bitmap, row >> 6) >> (row & 63)) & 1 != 0


@kernel(types.int64(*[types.int64] * 8))
def mark_pages(rows, count, line, made, used, pins, now, out):
    """Marks the pages of rows as used ``now`` and pins each once more.

    Args:
      rows: (count,) int64 rows of ``line`` bytes; negative ones are none.
      count, line: See ``rows``.
      made: int64 bitmap of the rows that count; 0 for all.
      used: (pages,) int64, when each page was last used, 0 for one that is not in memory.
      pins: (pages,) int64.
      now: A number greater than all in ``used``.
      out: (2, room) int64 with room for every row's pages: the distinct ones, and what ``used`` said of them before.

    Returns:
      The number of distinct pages.
    """
    room = count * ((line + _PAGE - 2) // _PAGE + 1)
    pages = np.int64(0)
    for i in range(count):
        row = get_i64(rows, i)
        # A row that was never made is read as its first values, from no page.
        if row < 0 or (made != 0 and not _has(made, row)):
            continue
        for page in range(row * line // _PAGE, (row * line + line - 1) // _PAGE + 1):
            # Rows share pages: within one call a page is pinned and listed once.
            before = get_i64(used, page)
            if before == now:
                continue
            put_i64(used, page, now)
            put_i64(pins, page, get_i64(pins, page) + 1)
            put_i64(out, pages, page)
            put_i64(out, room + pages, before)
            pages += 1
    return pages


@kernel(types.int64(*[types.int64] * 6))
def advise_pages(action, address, descriptor, pages, count, out):
    """READ begins to read pages, without waiting, and AWAIT waits for them; UNMAP takes them out of the process; WRITE
    begins to write those that changed; DROP takes those that are written out of memory; LOOK says which are there.

    Args:
      action: One of these.
      address: Where the file is mapped.
      descriptor: The file.
      pages: (count,) int64; runs of neighbours take one call.
      count: See ``pages``.
      out: (count,) uint8, for LOOK, whose lowest bits say which pages are in memory.

    Returns:
      How many calls failed; of AWAIT nothing that means anything.
    """
    failed, i = np.int64(0), 0
    if action == AWAIT:
        for i in range(count):
            # A page fault waits for the disk. The result is returned only so that LLVM may not leave the loads out.
            failed ^= get_i64(address + get_i64(pages, i) * _PAGE, 0)
        return failed
    while i < count:
        first, run = get_i64(pages, i), 1
        most = _MOST_READ if action == READ else count
        while run < most and i + run < count and get_i64(pages, i + run) == first + run:
            run += 1
        begin, size = first * _PAGE, run * _PAGE
        if action == READ:
            status = _madvise(address + begin, size, _MADV_WILLNEED)
        elif action == UNMAP:
            status = _madvise(address + begin, size, _MADV_DONTNEED)
        elif action == WRITE:
            status = _sync(descriptor, begin, size, _SYNC_WRITE)
        elif action == DROP:
            status = _fadvise(descriptor, begin, size, _FADV_DONTNEED)
        else:
            status = _mincore(address + begin, size, out + i)
        failed += status != 0
        i += run
    return failed


@kernel(types.int64(types.int64))
def written(descriptor):
    """Waits until all writes of a file that have begun are done; 0 unless one failed."""
    return np.int64(_sync(descriptor, 0, 0, 1))
