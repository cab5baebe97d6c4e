"""numba's cache of compiled kernels, sealed, and shared by processes that start together: one compiles, others wait.

numba alone lets each of them compile, since all find nothing: every worker of a fresh clone's tests, every process of a
run. And it runs what it finds: a flipped byte of machine code, another kernel's file, or the code of an older source
whose index a killed process had written anew. A file whose seal does not fit is none here, and is written anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import IO, Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from jrec.outputs import open_lock

WAIT_SECONDS = 120.0  # several times what the slowest kernel takes on a busy machine; then a process compiles itself
_POLL_SECONDS = 0.02
_SEAL_BYTES = hashlib.sha256().digest_size


class _SealedFiles(IndexDataCacheFile):
    """The index and the code of a function, each followed by a digest of what it is for and what it holds."""

    def _load_index(self) -> dict[Any, str]:
        try:
            return self._read(self._index_path)
        except OSError:
            return {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        self._write(self._index_path, overloads)

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name))

    def _save_data(self, name: str, data: object) -> None:
        self._write(self._data_path(name), data)

    def _read(self, path: str) -> Any:
        """What was written for this source; if it is anything else an OSError, which ``load`` takes for a miss."""
        content = pathlib.Path(path).read_bytes()
        payload, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if seal != self._seal(path, payload):
            raise OSError(f"{path} is damaged")
        return pickle.loads(payload)

    def _write(self, path: str, value: object) -> None:
        payload = self._dump(value)
        with self._open_for_write(path) as file:
            file.write(payload + self._seal(path, payload))

    def _seal(self, path: str, payload: bytes) -> bytes:
        about = repr((numba.__version__, self._source_stamp, pathlib.Path(path).name))
        return hashlib.sha256(about.encode() + payload).digest()


class SharedCache(FunctionCache):
    """The cache of a function, locked against other processes from a miss until what was compiled is saved.

    Raises:
      RuntimeError: If neither the function's folder nor the user's cache folder can be written.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file = _SealedFiles(
            cache_path=self.cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
        self._lock: IO[bytes] | None = None
        self._lock_path = pathlib.Path(self.cache_path) / f"{self._impl.filename_base}.lock"

    def load_overload(self, sig: object, target_context: object) -> Any:
        """What was compiled for a signature, maybe just now by another process; None if this one is to compile it."""
        found = super().load_overload(sig, target_context)
        if found is None:
            self._acquire()
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig: object, data: object) -> None:
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
            self._lock = lock = open_lock(self._lock_path)
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
