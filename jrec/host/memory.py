"""Zeroed arrays of any size, made without a pass over them: pages take memory when they are first written."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import pathlib
import tempfile

import numpy as np

from jrec.errors import ConfigError
from jrec.outputs import check_local

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python 3.12 does not name: the pages may outnumber the memory


def allocate(
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    name: str,
    folder: str | os.PathLike[str] | None = None,
    huge_pages: bool = False,
    written: np.ndarray | None = None,
    descriptors: list[int] | None = None,
) -> np.ndarray:
    """An array of zeros, in anonymous memory or in its own file.

    The file has no name once it is mapped: its space returns to the disk when the array is dropped or the process dies,
    however it dies. The space is reserved beforehand, since a mapped write to a full disk kills the process.

    Args:
      shape: The array's shape.
      dtype: The array's dtype.
      name: The array's name in errors.
      folder: The file's folder, made if absent; None for anonymous memory.
      huge_pages: Whether to ask for pages of 2 MiB: random gathers of rows are faster, but touching one row takes a
        whole page of memory. Anonymous memory only.
      written: (n, 2) int64, begin and end of the lines that may be written, for which space is reserved in a file; None
        for all.
      descriptors: Gets a descriptor of the file, for the caller to close.

    Raises:
      ConfigError: If memory or disk cannot hold it.
    """
    line = math.prod(shape[1:]) * dtype.itemsize
    size = shape[0] * line
    if folder is None:
        mapping = _anonymous(size, name)
        with contextlib.suppress(OSError):  # advice: kernels without huge pages refuse it
            mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    else:
        whole = np.array([[0, shape[0]]])
        ranges = (whole if written is None else written) * line
        mapping = _file(size, ranges, name, pathlib.Path(folder), descriptors)
    return np.frombuffer(mapping, dtype).reshape(shape)


def _anonymous(size: int, name: str) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        return mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise ConfigError(
            f"{name} needs {_gib(size)} of address space, which the system refuses ({error}); raise `ulimit -v`, or"
            " give the host tier a folder"
        ) from error


def _file(size: int, written: np.ndarray, name: str, folder: pathlib.Path, descriptors: list[int] | None) -> mmap.mmap:
    check_local(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=f"{name.replace('/', '_')[:100]}.", dir=folder)
    except OSError as error:
        raise ConfigError(f"{name} cannot have a file in {folder}: {error}; choose another folder") from error
    try:
        # Without a name from here on: the space goes back however the process ends.
        pathlib.Path(path).unlink()
        os.truncate(descriptor, size)
        for begin, stop in written:
            # A hole would be filled by a mapped write, whose failure on a full disk is a SIGBUS, not an error.
            os.posix_fallocate(descriptor, int(begin), int(stop - begin))
        # Shared, as mmap's default is: what is written goes to the file, and pages may leave memory.
        mapping = mmap.mmap(descriptor, size)
        with contextlib.suppress(OSError):
            # Rows are read in no order. A fault would bring 128 KiB around its page into memory, as a zeroed page each:
            # the first writes of rows spread over 8 GB took more than ten times as long.
            mapping.madvise(mmap.MADV_RANDOM)
        if descriptors is not None:
            descriptors.append(os.dup(descriptor))
        return mapping
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        status = os.statvfs(folder)
        raise ConfigError(
            f"{name} needs {_gib(int(np.diff(written).sum()))} in {folder}, where"
            f" {_gib(status.f_bavail * status.f_frsize)} are free ({error.strerror}); free some, or choose another"
            " folder"
        ) from error
    finally:
        os.close(descriptor)


def physical_memory() -> int:
    """The machine's physical memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
