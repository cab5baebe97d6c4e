"""A checkpoint that is read stays: a shared lock on its manifest, which a run that removes old checkpoints respects."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import weakref
from collections.abc import Iterator

from jrec.checkpoint.manifest import MANIFEST


def keep_while_read(folder: pathlib.Path, reader: object) -> None:
    """Keeps a checkpoint for as long as ``reader`` lives; its process may end in any way.

    Where it cannot be locked, as on some network file systems, it may be removed while it is read.
    """
    # A failure is that of whoever reads the manifest next, and says so better.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
        weakref.finalize(reader, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a rename at most


@contextlib.contextmanager
def unread(folder: pathlib.Path) -> Iterator[bool]:
    """Whether nobody reads a checkpoint; inside, nobody begins to."""
    # For writing, which network file systems need for an exclusive lock.
    descriptor = os.open(folder / MANIFEST, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)
