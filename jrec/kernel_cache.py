"""numba's cache of compiled kernels, shared by processes that start together: one compiles a kernel, the others wait.

numba alone lets each of them compile, since all find nothing: every worker of a fresh clone's tests, every process of a
run.
"""

from __future__ import annotations

import fcntl
import pathlib
import time
from collections.abc import Callable
from typing import IO, Any

import numba
from numba.core.caching import FunctionCache

WAIT_SECONDS = 120.0  # several times what the slowest kernel takes on a busy machine; then a process compiles itself
_POLL_SECONDS = 0.02


class SharedCache(FunctionCache):
    """The cache of a function, locked against other processes from a miss until what was compiled is saved.

    Raises:
      RuntimeError: If neither the function's folder nor the user's cache folder can be written.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._lock: IO[bytes] | None = None
        self._lock_path = pathlib.Path(self.cache_path) / f"{self._impl.filename_base}.lock"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature, maybe just now by another process; None if this one is to compile it."""
        found = super().load_overload(sig, target_context)
        if found is None:
            self._acquire()
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves what was compiled, and lets the others have it."""
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _acquire(self) -> None:
        self._release()  # of a compilation that failed
        end = time.monotonic() + WAIT_SECONDS
        try:
            self._impl.locator.ensure_cache_path()
            self._lock = lock = self._lock_path.open("ab")
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() < end:
                        time.sleep(_POLL_SECONDS)
                        continue
                break
        except OSError:  # a file system without locks: as numba does it without this class
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def compiled(function: Callable[..., Any]) -> Any:
    """``numba.njit`` that releases the GIL, with a shared cache unless no folder for one can be written."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    if (cache := cache_of(function)) is not None:
        dispatcher._cache = cache
    return dispatcher


def cache_of(function: Callable[..., Any]) -> SharedCache | None:
    """The cache of a function; None if neither its folder nor the user's cache folder can be written."""
    try:
        return SharedCache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return None
