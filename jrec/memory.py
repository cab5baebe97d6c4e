"""Memory of this process: what it frees is kept for the next step, and garbage is not looked for while it starts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pathlib
from collections.abc import Iterator

KEEP_VARIABLE = "JREC_KEEP_MEMORY"
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
_NVIDIA = pathlib.Path("/proc/driver/nvidia")


def keep_freed_memory() -> bool:
    """Has glibc keep what this process frees, for what it allocates next.

    On CPUs ``jrec train`` and the import of jrec's models do so, unless the environment variable ``JREC_KEEP_MEMORY``
    is 0. Otherwise every large array that is freed goes back to the system, and the next one's pages are zeroed and
    mapped anew: half of a step where its temporaries are large. A program that makes arrays before it first names
    something of ``jrec.nn``, or uses ``jrec.ops`` only, calls it at its start, before JAX's threads run. The process
    then holds as much memory as it has ever used at once.

    Returns:
      Whether this system's C library could; False on macOS, Windows and musl.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # No array is mapped by itself, the heap never shrinks, and there is one heap: others are of 64 MB at most.
    return all(mallopt(*setting) for setting in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)))


def keep_by_default() -> None:
    """Keeps freed memory where JAX computes on CPUs, unless the environment says otherwise."""
    if expects_cpu() and os.environ.get(KEEP_VARIABLE, "1") != "0":
        keep_freed_memory()


def expects_cpu() -> bool:
    """Whether JAX will compute on CPUs here, as far as can be told without loading it."""
    return os.environ.get("JAX_PLATFORMS", "") == "cpu" or not _NVIDIA.exists()


_starting = False


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Until ``started`` or the end, Python looks for no garbage: what modules make while they are imported stays."""
    global _starting
    _starting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        started()


def started() -> None:
    """Looks for garbage again, but never among what there is now: modules, programs, the model. Needs ``starting``."""
    global _starting
    if _starting:
        _starting = False
        gc.freeze()
        gc.enable()
