"""numba's cache of compiled kernels, sealed, and shared by processes that start together: one compiles, others wait.

By itself numba lets each of them compile, since all find nothing: every worker of a fresh clone's tests, every process
of a run. It looks for kernels by the path and time of the function's own file, though helpers of other files are
compiled into it. jrec's kernels are found in the user's cache folder by the content of their file and of all of jrec
that it imports: clones and environments of one version share them, and none runs the code of an older helper. And numba
runs what it finds: a flipped byte of machine code, another kernel's file, or the code of an older source whose index a
killed process had written anew. A file whose seal does not fit is none here, and is written anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import pickle
import re
import shutil
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import IO, Any

import numba
from numba.core import config as numba_config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator

from jrec import environment
from jrec.outputs import open_lock

_config: ModuleType = numba_config  # whose names exist at run time only

FOLDER_VARIABLE = "JREC_KERNEL_CACHE"
WAIT_SECONDS = 120.0  # several times what the slowest kernel takes on a busy machine; then a process compiles itself
_POLL_SECONDS = 0.02
_PACKAGE = pathlib.Path(__file__).resolve().parent
_FORGET_SECONDS = 90 * 86_400
_IMPORTS = re.compile(r"^from (jrec[\w.]*) import (?:\(([^)]*)\)|([^\n#(]*))", re.MULTILINE)
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

    def _load_data(self, name: str) -> object:
        return self._read(self._data_path(name))

    def _save_data(self, name: str, data: object) -> None:
        self._write(self._data_path(name), data)

    def _read(self, path: str) -> Any:
        """What was written for this source; if it is anything else an OSError, which ``load`` takes for a miss."""
        content = pathlib.Path(path).read_bytes()
        payload, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        # Before unpickling, which runs what it is given.
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


class _ByContent(_CacheLocator):
    """A folder in the user's cache for each content of a source file of jrec and of those that it imports."""

    def __init__(self, folder: pathlib.Path, stamp: str, line: int):
        self._folder, self._stamp, self._line = folder, stamp, line

    def get_cache_path(self) -> str:
        """The folder."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """The digest of the content."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """The function's line."""
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: FunctionType, py_file: str) -> _ByContent | None:
        """None of functions elsewhere, where the user chose a folder, and where none can be written."""
        if _config.CACHE_DIR or (stamp := content_stamp(py_file)) is None:
            return None
        folder = kernels_folder() / stamp[:16]
        locator = cls(folder, stamp, py_func.__code__.co_firstlineno)
        try:
            if not folder.exists():
                _forget_old(folder.parent)
            locator.ensure_cache_path()
            # Its age says when a process last asked for it, which is what ``_forget_old`` goes by.
            os.utime(folder)
        except OSError:
            return None
        return locator


def kernels_folder() -> pathlib.Path:
    """$JREC_KERNEL_CACHE, else ``kernels`` in the user's cache folder (``environment.cache_folder``)."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return pathlib.Path(chosen) if chosen else environment.cache_folder() / "kernels"


def content_stamp(file: str) -> str | None:
    """The digest of a source file of jrec and of all of jrec that it imports, directly or not; None of other files."""
    path = pathlib.Path(file).resolve()
    if not path.is_relative_to(_PACKAGE):
        return None
    return _digest_of(path)


@functools.cache
def _digest_of(path: pathlib.Path) -> str:
    files, waiting = set[pathlib.Path](), [path]
    while waiting:
        if (file := waiting.pop()) not in files:
            files.add(file)
            waiting += _imported(file)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _imported(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The files of jrec that a file imports at its beginning; of this one none, since nothing of them is compiled."""
    imported = list[pathlib.Path]()
    if path == _PACKAGE / "kernel_cache.py":
        return ()
    for module, several, names in _IMPORTS.findall(path.read_text(encoding="utf-8")):
        place = _PACKAGE.joinpath(*module.split(".")[1:])
        if (file := place.with_suffix(".py")).is_file():
            imported.append(file)
            continue
        for name in (several or names).replace(",", " ").split():
            file = place / f"{name}.py"
            imported.append(file if file.is_file() else place / "__init__.py")
    return tuple(file for file in imported if file.is_file())


def _forget_old(kernels: pathlib.Path) -> None:
    """Deletes what no process has asked for in a long time."""
    for folder in kernels.iterdir() if kernels.is_dir() else ():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _FORGET_SECONDS:
                shutil.rmtree(folder)


class _Impl(CompileResultCacheImpl):
    _locator_classes = (_ByContent, *CompileResultCacheImpl._locator_classes)


class SharedCache(FunctionCache):
    """The cache of a function, locked against other processes from a miss until what was compiled is saved.

    Raises:
      RuntimeError: If neither the function's folder nor the user's cache folder can be written.
    """

    _impl_class = _Impl

    def __init__(self, function: FunctionType):
        super().__init__(function)
        self._cache_file = _SealedFiles(
            cache_path=self.cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=content_stamp(function.__code__.co_filename) or self._impl.locator.get_source_stamp(),
        )
        self._lock: IO[bytes] | None = None
        self._lock_path = pathlib.Path(self.cache_path) / f"{self._impl.filename_base}.lock"

    def load_overload(self, sig: object, target_context: object) -> object:
        """What was compiled for a signature, maybe just now by another process; None if this one is to compile it."""
        kernel = super().load_overload(sig, target_context)
        if kernel is None:
            self._acquire()
            # Once more: while this process waited for the lock, another may have compiled the kernel and saved it.
            kernel = super().load_overload(sig, target_context)
            if kernel is not None:
                self._release()
        return kernel

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


def compiled[F: Callable](function: F) -> F:
    """``numba.njit`` that releases the GIL, with a shared cache unless no folder for one can be written."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    if (cache := cache_of(function)) is not None:
        dispatcher._cache = cache
    return dispatcher


def cache_of(function: FunctionType) -> SharedCache | None:
    """The cache of a function; None if neither its folder nor the user's cache folder can be written."""
    try:
        return SharedCache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return None
