"""Compiled programs that outlive a run of the tests: each run has a folder of its own, filled from earlier ones.

JAX writes an entry in place, so that a process that is killed, as some tests kill theirs, leaves half of one. No run
therefore writes into the lasting folder: what it compiled goes there when it ends, whole and checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import zlib

KEEP_BYTES = 2 << 30


def lasting_folder() -> pathlib.Path:
    """Where entries of this kind of processor are kept: XLA compiles for the instructions that it finds."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                kind = hashlib.sha256(" ".join(sorted(line.split())).encode()).hexdigest()[:16]
                return _cache_home() / "jrec-tests" / kind
    return _cache_home() / "jrec-tests" / "any"


def _cache_home() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")


def open_run_folder(lasting: pathlib.Path) -> pathlib.Path:
    """A folder for one run, with the entries of ``lasting`` in it as hard links."""
    run = pathlib.Path(tempfile.mkdtemp(prefix="jrec-tests-"))
    for entry in lasting.glob("*-cache") if lasting.is_dir() else ():
        with contextlib.suppress(OSError):
            try:
                os.link(entry, run / entry.name)
            except OSError:  # another disk
                shutil.copyfile(entry, run / entry.name)
    return run


def close_run_folder(run: pathlib.Path, lasting: pathlib.Path) -> None:
    """Keeps what a run compiled, and deletes its folder; the oldest entries make room."""
    with contextlib.suppress(OSError):  # a home that cannot be written to
        lasting.mkdir(parents=True, exist_ok=True)
        for entry in run.glob("*-cache"):
            if not (lasting / entry.name).exists() and _whole(entry):
                partial = lasting / f"{entry.name}.{os.getpid()}"
                shutil.copyfile(entry, partial)
                partial.replace(lasting / entry.name)
        entries = sorted(lasting.glob("*-cache"), key=lambda e: e.stat().st_mtime, reverse=True)
        room = KEEP_BYTES
        for entry in entries:
            room -= entry.stat().st_size
            if room < 0:
                entry.unlink(missing_ok=True)
    shutil.rmtree(run, ignore_errors=True)


def _whole(entry: pathlib.Path) -> bool:
    """Whether an entry ends as it should; what is not compressed as here is not kept."""
    try:
        zlib.decompress(entry.read_bytes())
    except (zlib.error, OSError):
        return False
    return True
