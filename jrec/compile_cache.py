"""Compiled programs that outlive a process: JAX's persistent compilation cache, as the ``jrec`` command uses it.

JAX writes an entry in place, so that a process that is killed leaves half of one, on which every later process would
stumble. No process therefore writes into the lasting folder. Each has a folder of its own inside it, filled with hard
links; what it compiled is kept when it ends, or, where it was killed, when the next one begins: whole and checked.
JAX runs what it finds under a program's name, so a kept file has the checksum of name and content in its own name; one
that does not fit it, because it was damaged or swapped with another, is deleted and compiled anew.

XLA compiles for the processor and the number of cores that it finds, and JAX's keys name neither, so each kind of
machine has its own lasting folder. Calls of native kernels are stored by name, never by address, and ``jrec.native``
registers the names before a program is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

from jrec import environment
from jrec.errors import ConfigError

SIZE_VARIABLE = "JREC_COMPILE_CACHE_MIB"
DEFAULT_MIB = 1024

_JAX_FOLDER, _JAX_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_JAX_OTHERS = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
_ENTRIES, _RUN, _LOCK = "*-cache", "run-", "lock"
_KEPT = "*-cache.*"  # the entry's name and a checksum
_UNLOCKED_SECONDS = 3600  # a folder without a lock is one that is being made, unless it is this old
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Lets JAX, which must not be imported yet, keep what it compiles in the user's cache folder.

    ``JREC_COMPILE_CACHE_MIB`` limits the folder's size; 0 keeps nothing. Does nothing where the user chose a folder for
    JAX already (``JAX_COMPILATION_CACHE_DIR``), JAX is imported, or the folder cannot be written.

    Raises:
      ConfigError: If JREC_COMPILE_CACHE_MIB is no whole number of at least 0.
    """
    limit = _limit()
    if not limit or _JAX_FOLDER in os.environ or "jax" in sys.modules:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(run_folder(environment.cache_folder() / "jax" / machine_kind(), limit=limit))
        except OSError:
            own = None
        if own is not None:
            # Most programs of a start take less than a second, JAX's own bound. What XLA would tune into files of its
            # own is in the entries already.
            chosen = {_JAX_FOLDER: str(own), _JAX_SECONDS: "0", _JAX_OTHERS: "none"}
            stack.enter_context(_environment({k: v for k, v in chosen.items() if k not in os.environ}))
            stack.callback(_forget)
        yield


def _forget() -> None:
    """Has JAX, which may go on in this process, write nothing more to the folder, which is removed."""
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def _limit() -> int:
    """Bytes to keep."""
    text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_MIB)
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{SIZE_VARIABLE} is {text!r}, but must be the MiB of compiled programs to keep, a whole number; 0 for none"
        )
    return int(text) << 20


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def machine_kind(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """A name for machines that may share programs: processor, its instructions, how many cores this process may use."""
    lines: set[str] = set()
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "flags", "Features", "CPU implementer", "CPU part"):
                lines.add(f"{key.strip()}: {' '.join(sorted(value.split()))}")
    system = os.uname()
    parts = [system.sysname, system.machine, f"{environment.cores()} cores", *(sorted(lines) or [system.nodename])]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def run_folder(lasting: pathlib.Path, *, limit: int) -> Iterator[pathlib.Path]:
    """A folder for a process and its children, which holds the entries of ``lasting``; new ones are kept at the end.

    Args:
      lasting: Where entries are kept; made where it is absent.
      limit: Bytes of entries to keep; those that were not used for the longest time make room.

    Raises:
      OSError: If the folder cannot be made.
    """
    lasting.mkdir(parents=True, exist_ok=True)
    _collect_killed(lasting)
    own = pathlib.Path(tempfile.mkdtemp(prefix=_RUN, dir=lasting))
    with (own / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for kept in lasting.glob(_KEPT):
            with contextlib.suppress(OSError):  # another process made room meanwhile
                # Checked each time: JAX would run whatever lies under a program's name.
                if kept.name == _kept_name(kept.stem, _content(kept)):
                    os.link(kept, own / kept.stem)
                else:
                    kept.unlink()
        try:
            yield own
        finally:
            with contextlib.suppress(OSError):  # a full disk is no reason to fail
                _keep(own, lasting)
                _make_room(lasting, limit)
            shutil.rmtree(own, ignore_errors=True)


def _collect_killed(lasting: pathlib.Path) -> None:
    """Keeps what processes compiled that were killed."""
    for left in lasting.glob(f"{_RUN}*"):
        with contextlib.suppress(OSError):
            if not (left / _LOCK).exists():
                if time.time() - left.stat().st_mtime > _UNLOCKED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
                continue
            # A process that lives holds its lock: this raises, and the folder is left to it.
            with (left / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _keep(left, lasting)
                shutil.rmtree(left, ignore_errors=True)


def _keep(run: pathlib.Path, lasting: pathlib.Path) -> None:
    there = {kept.stem for kept in lasting.glob(_KEPT)}
    for entry in run.glob(_ENTRIES):
        if entry.name not in there and _whole(content := entry.read_bytes()):
            with contextlib.suppress(FileExistsError):  # another process kept the same one
                os.link(entry, lasting / _kept_name(entry.name, content))


def _kept_name(entry: str, content: bytes) -> str:
    return f"{entry}.{zlib.crc32(content, zlib.crc32(entry.encode())):08x}"


def _content(kept: pathlib.Path) -> bytes:
    """Reads a file without making it look used, which decides what makes room."""
    with os.fdopen(os.open(kept, os.O_RDONLY | getattr(os, "O_NOATIME", 0)), "rb") as file:
        return file.read()


def _whole(content: bytes) -> bool:
    """Whether an entry ends as it should."""
    try:
        _decompressor(content)(content)
    except Exception:  # each library has errors of its own
        return False
    return True


def _decompressor(content: bytes) -> Callable[[bytes], bytes]:
    """What JAX decompresses such an entry with."""
    if not content.startswith(_ZSTD_MAGIC):
        return zlib.decompress
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").decompress
    return importlib.import_module("zstandard").ZstdDecompressor().decompress


def _make_room(lasting: pathlib.Path, limit: int) -> None:
    """Deletes entries beyond the limit; file systems take down at least once a day when a file was last read."""
    entries = []
    for entry in [*lasting.glob(_KEPT), *lasting.glob(_ENTRIES)]:  # those of an earlier jrec, which nothing reads, too
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, entry))
    for _, size, entry in sorted(entries, reverse=True):
        limit -= size
        if limit < 0:
            entry.unlink(missing_ok=True)
