"""Everything that jrec writes: it appears whole or not at all, has one writer at a time, and never replaces its input.

``FILE`` is written as ``FILE.partial`` and ``FOLDER`` as ``FOLDER.partial``; when they are complete and on the disk, a
rename gives them their name. A lock file beside them, ``.NAME.lock``, keeps a second writer out; the operating system
drops the lock with its process, so that what a killed process left never blocks the next one, which reuses or removes
it. No link that stands in the place of one of these is followed. What is replaced keeps its mode, and until it is
complete only its owner can read it. Checkpoints have a protocol of their own (``jrec.checkpoint.save``), under the lock
of their run's folder.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

from jrec.errors import OutputError

CHECKPOINTS = "folder of checkpoints"
"""What ``Run.save`` writes: several works, so that ``kind_of`` knows none of them by it."""
MANIFEST = "unfinished.json"
"""In a folder that is being made: what it is to be. A folder without it, or its own mark, is not jrec's to remove."""

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_SYNCED_AT_ONCE = 8
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_KINDS = {  # file of a finished folder: its "format", and what such a folder is called
    "manifest.json": {"jrec-export": "export", "jrec-checkpoint": "checkpoint"},
    "fae.json": {"jrec-fae": "FAE folder"},
    "dataset.json": {"jrec-run-dataset": "run"},
    "schema.json": {"jrec-dataset": "dataset"},  # last: exports have one, too
}

Place = str | os.PathLike[str]


class NewFile:
    """A file that is being written, under the lock of its name until ``commit`` or ``abort``.

    Attributes:
      partial: Where to write it.

    Args:
      path: The file. Missing folders above it are made.
      overwrite: Whether a file there may be replaced.
      inputs: What it is made of, where the user names the file, see ``check_output``; None for a file of jrec's own
        folders, which is not checked.

    Raises:
      OutputError: If it may not be written, or another process is writing it.
    """

    def __init__(self, path: Place, *, overwrite: bool = True, inputs: Iterable[Place] | None = None):
        self.path = pathlib.Path(path)
        if inputs is not None:
            check_output(path, inputs=inputs)
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path))
            check_file(self.path, overwrite=overwrite)  # under the lock: nobody makes it between check and rename
            self._mode = _mode(self.path)
            with writing(self.path):
                self.partial.unlink(missing_ok=True)  # of a killed process
                stack.callback(self.partial.unlink, missing_ok=True)
                self.partial.touch(0o666 if self._mode is None else 0o600, exist_ok=False)  # O_EXCL follows no link
            self._held = stack.pop_all()

    def commit(self) -> None:
        """Gives the file its name, when it is on the disk; an error leaves what was there."""
        with self._held, writing(self.path):
            _set_mode(self.partial, self._mode)
            # Content, then name, then the folder's entry: after a power
            # cut the name is the old file's or the whole new one's.
            sync(self.partial)
            self.partial.replace(self.path)
            sync(self.path.parent)

    def abort(self) -> None:
        """Removes what was written; does nothing after ``commit``."""
        self._held.close()


@contextlib.contextmanager
def new_file(path: Place, *, overwrite: bool = True, inputs: Iterable[Place] | None = None) -> Iterator[pathlib.Path]:
    """A file that appears when the block ends without an exception; yields where to write it. See ``NewFile``.

    Raises:
      OutputError: As ``NewFile``; or for an ``OSError`` of the block about this file, which its message names.
    """
    file = NewFile(path, overwrite=overwrite, inputs=inputs)
    try:
        with writing(path):
            yield file.partial
        file.commit()
    finally:
        file.abort()


def write_file(path: Place, content: bytes | memoryview | str, *, inputs: Iterable[Place] | None = None) -> None:
    """Writes a file that appears whole or not at all, in place of one that is there; see ``new_file``."""
    with new_file(path, inputs=inputs) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_folder(
    out: Place,
    manifest: Mapping[str, object],
    *,
    kind: str,
    overwrite: bool = False,
    resume: bool = False,
    inputs: Iterable[Place] = (),
    room: str = "",
    report: Callable[[str], None] = lambda message: None,
) -> Iterator[pathlib.Path]:
    """A fresh folder beside ``out`` that becomes ``out`` when the block ends without an exception.

    What an interrupted run left is discarded with a word about it, and an exception removes the folder again; with
    ``resume`` what is left stays, and the next run with the same manifest gets it. Nothing else that existed is touched
    until the very end.

    Args:
      out: Where the folder shall be.
      manifest: What is being made, written into the folder for people who find it unfinished; JSON types.
      kind: What it is, as ``kind_of`` tells it when it is finished, or ``CHECKPOINTS``.
      overwrite: Whether a finished folder of this kind at ``out`` may be replaced.
      resume: Whether to go on with the work that an interrupted run left.
      inputs: What it is made of; see ``check_output``.
      room: How much room it takes, for the message where there is none left.
      report: Takes messages for the user.

    Raises:
      OutputError: If ``out`` may not be written, another process works on it, there is no room, or, with ``resume``,
        what an interrupted run left has another manifest; or for an ``OSError`` of the block about this folder.
    """
    check_local(out)
    out = pathlib.Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that is to be replaced)
    check_output(out, inputs=inputs)
    partial, replaced = (out.with_name(f"{out.name}.{suffix}") for suffix in ("partial", "replaced"))
    with locked(out), writing(out, room):
        for place in (partial, replaced):
            if place.is_symlink():
                raise OutputError(f"{place} is a link, which is not followed; remove it")
        _recover(out, replaced, kind, report)
        _check_folder(out, overwrite, kind)
        mode, text = _mode(out), json.dumps(manifest, indent=1)
        resumed = resume and _resumes(partial, text, report)
        if not resumed:
            _discard(partial, kind, report)
        try:
            if not resumed:
                partial.mkdir(0o777 if mode is None else 0o700)
                (partial / MANIFEST).write_text(text, encoding="utf-8")
            yield partial
            # The manifest says "unfinished", so it goes when everything else is on the disk.
            _sync_tree(partial)
            (partial / MANIFEST).unlink()
            _set_mode(partial, mode)
            _exchange(partial, out, replaced)
        except BaseException:
            if not resume:
                _remove(partial, ignore_errors=True)
            raise


def check_local(place: Place) -> None:
    """Refuses a URI where a file or folder is to be written: the file system would take ``s3:`` for a folder's name.

    Args:
      place: A path as the user gave it, or as ``pathlib`` shortened it: ``s3:/bucket/run``.

    Raises:
      OutputError: Naming the URI and what to do instead.
    """
    if (uri := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", os.fspath(place), re.DOTALL)) is None:
        return
    scheme, rest = uri.groups()
    if scheme.lower() == "file":
        raise OutputError(f"{scheme}:///{rest} is a URI; give the path, such as /{rest}")
    copies = {"s3": "aws s3 cp --recursive", "gs": "gsutil cp -r", "hdfs": "hdfs dfs -put"}
    copy = f", such as by `{copies[scheme.lower()]}`" if scheme.lower() in copies else ""
    raise OutputError(
        f"{scheme}://{rest} is a URI, but jrec writes to this machine's file systems only; give a path, and copy what"
        f" is written there{copy}"
    )


def check_output(out: Place, *, inputs: Iterable[Place] = ()) -> None:
    """Refuses an output that is no path, or that would replace or change what it is made of, or another work of jrec.

    Args:
      out: The file or folder to write.
      inputs: Files and folders that are read for it. Names of no file, such as "-" or "", do not count.

    Raises:
      OutputError: If ``out`` is a URI, is one of the inputs or holds one, or lies inside of a dataset, an FAE folder,
        a run, a checkpoint or an export.
    """
    check_local(out)
    target = pathlib.Path(out).resolve()
    for name in inputs:
        if not name or not pathlib.Path(name).exists():
            continue
        source = pathlib.Path(name).resolve()
        if source == target or (target.exists() and target.samefile(source)):
            raise OutputError(f"{out} is an input, which would be lost; choose another --out")
        if target in source.parents:
            raise OutputError(f"{out} holds {name}, an input, which would be lost; choose another --out")
    beside = target.parent.iterdir() if target.name.isdigit() and target.parent.is_dir() else ()
    # The first that is anything: a folder of checkpoints has nothing else, and there may be thousands of others.
    kinds = (kind_of(other) for other in beside if other.name.isdigit())
    if next(filter(None, kinds), None) == "checkpoint":
        raise OutputError(f"{out} would be taken for one of the checkpoints in {target.parent}; choose another --out")
    for folder in target.parents:
        if (kind := kind_of(folder)) is not None:
            raise OutputError(f"{out} lies inside the {kind} {folder}, which it would damage; choose another --out")


def check_file(path: Place, *, overwrite: bool) -> None:
    """Refuses to write where there is something else than a file, or, without ``overwrite``, anything.

    Raises:
      OutputError: Naming the path.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} exists and is not a file; choose another --out")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists; replace it with --overwrite, or choose another --out")


def kind_of(folder: Place) -> str | None:
    """What a finished folder of jrec is: "dataset", "FAE folder", "run", "checkpoint" or "export"; None for others."""
    for name, formats in _KINDS.items():
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            content = json.loads((pathlib.Path(folder) / name).read_text(encoding="utf-8"))
            if (kind := formats.get(content.get("format"))) is not None:
                return kind
    return None


def _is_finished(folder: pathlib.Path, kind: str) -> bool:
    """Whether a folder is of the kind; one of checkpoints has only these, locks, and a report."""
    if kind != CHECKPOINTS:
        return kind_of(folder) == kind
    inside = [path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "report"]
    return bool(inside) and all(path.name.isdigit() and kind_of(path) == "checkpoint" for path in inside)


@contextlib.contextmanager
def writing(place: Place, room: str = "") -> Iterator[None]:
    """Turns the operating system's errors of writing ``place`` into an ``OutputError`` that names it, and the remedy.

    Errors that name another file, such as an input that cannot be read, stay as they are.

    Raises:
      OutputError: For those errors; or if ``place`` is a URI.
    """
    check_local(place)
    try:
        yield
    except OSError as error:
        whole = pathlib.Path(os.path.abspath(place))  # noqa: PTH100
        named = "" if error.filename is None else os.path.abspath(os.fsdecode(error.filename))  # noqa: PTH100
        beginnings = (
            *(f"{whole}{mark}" for mark in (os.sep, ".partial", ".replaced")),
            f"{whole.parent}/.{whole.name}.",
        )
        ours = named in ("", str(whole), str(whole.parent)) or named.startswith(beginnings)
        if isinstance(error, BrokenPipeError) or not ours:
            raise
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno in _NO_ROOM:
            advice = "free some, or choose another --out"
            raise OutputError(f"no room left to write {place} ({reason}); {advice}{room and f'. {room}'}") from error
        raise OutputError(f"cannot write {place}: {reason}{named and f' ({named})'}") from error


@contextlib.contextmanager
def locked(out: Place) -> Iterator[None]:
    """Holds the lock of a file or folder that is being written, or changed in place.

    Raises:
      OutputError: If another process, or thread, holds it; or if ``out`` is a URI.
    """
    check_local(out)
    out = pathlib.Path(os.path.abspath(out))  # noqa: PTH100
    path = out.with_name(f".{out.name}.lock")
    with contextlib.ExitStack() as stack:
        with writing(out):
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                file = stack.enter_context(open_lock(path))
                try_lock(file, f"another process is writing {out}; wait for it, or choose another --out")
                # Whoever held the lock may have removed the file: a lock on it would keep nobody out.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        break
        # Called before the file is closed, and so while it is locked: whoever opened it meanwhile finds that its name
        # is gone.
        stack.callback(path.unlink, missing_ok=True)
        yield


def open_lock(path: pathlib.Path) -> IO[bytes]:
    """Opens a lock file, which is made where there is none; what is there stays as it is.

    Raises:
      OSError: If it cannot be opened, or is a link: who plants one would have another file made.
    """
    try:
        return open(path, "r+b", buffering=0, opener=_opened_lock)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "a lock file that is a link is not followed; remove it", os.fspath(path)) from error


def _opened_lock(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def try_lock(file: IO[bytes], busy: str) -> None:
    """Locks an open file until it is closed.

    Raises:
      OutputError: With the message ``busy``, if it is locked; or if its file system has no locks.
    """
    try:
        # flock, not lockf: it is the open file's, so that two threads of a process keep each other out, too.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(busy) from error
    except OSError as error:
        raise OutputError(
            f"{file.name} cannot be locked ({error.strerror}), and without locks two processes could write the same"
            " file; write to another file system, or mount this one with flock"
        ) from error


def sync(path: Place) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    # Also of a folder, which can only be opened for reading, and whose entries a rename changes.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Place]) -> None:
    """``sync`` of many small files and folders, several at once: a file system commits together what waits together."""
    with concurrent.futures.ThreadPoolExecutor(_SYNCED_AT_ONCE) as threads:
        collections.deque(threads.map(sync, paths), maxlen=0)  # the first error is raised


def link(source: Place, target: Place) -> str:
    """A hard link, or a copy where links cannot be; files of a dataset are replaced, never changed."""
    try:
        # No copy: files are never changed in place, so that two datasets may share one.
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def _mode(path: pathlib.Path) -> int | None:
    """The permissions of what is to be replaced; None where nothing is there."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _set_mode(path: pathlib.Path, mode: int | None) -> None:
    if mode not in (None, _mode(path)):  # a file system without modes refuses to change them
        path.chmod(mode)


def _recover(out: pathlib.Path, replaced: pathlib.Path, kind: str, report: Callable[[str], None]) -> None:
    """Undoes or completes a replacement that was interrupted between its renames."""
    if not replaced.exists():
        return
    if not _is_ours(replaced, kind) and kind_of(replaced) is None:
        raise OutputError(f"{replaced} is in the way, but holds something that jrec did not make; move it away")
    if out.exists():
        _remove(replaced)
    else:
        report(f"an interrupted run had set {out} aside; it is back")
        replaced.rename(out)


def _check_folder(out: pathlib.Path, overwrite: bool, kind: str) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} exists and is not a folder; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    if not _is_finished(out, kind):
        raise OutputError(f"{out} exists and holds something else than a jrec {kind}; choose another --out")
    if not overwrite:
        raise OutputError(f"{out} is a finished {kind}; pass --overwrite to replace it, or choose another --out")


def _resumes(partial: pathlib.Path, manifest: str, report: Callable[[str], None]) -> bool:
    """Whether an interrupted run left work towards the same end; without a whole manifest it left none."""
    try:
        stored = json.loads((partial / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if stored != json.loads(manifest):
        raise OutputError(
            f"{partial} is an interrupted run that was to make something else; give that run's options again to finish"
            " it, or remove the folder to start anew"
        )
    report(f"going on with what an interrupted run left in {partial}")
    return True


def _is_ours(folder: pathlib.Path, kind: str) -> bool:
    """Whether a run that was to make such a folder left this one."""
    # A run killed at its last step leaves a whole folder without the manifest, at its first an empty one.
    return folder.is_dir() and (
        (folder / MANIFEST).is_file() or _is_finished(folder, kind) or not any(folder.iterdir())
    )


def _discard(partial: pathlib.Path, kind: str, report: Callable[[str], None]) -> None:
    if not partial.exists():
        return
    if not _is_ours(partial, kind):
        raise OutputError(
            f"{partial} is needed as a workplace, but holds something that jrec did not make; move it away"
        )
    report(f"starting anew: discarding what an interrupted run left in {partial}")
    _remove(partial)


def _remove(partial: pathlib.Path, *, ignore_errors: bool = False) -> None:
    """Removes the folder, the manifest last: what a kill leaves of it can still be told to be ours."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(partial.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=ignore_errors)
            elif path.name != MANIFEST:
                with contextlib.suppress(OSError if ignore_errors else FileNotFoundError):
                    path.unlink()
        shutil.rmtree(partial, ignore_errors=ignore_errors)


def _sync_tree(folder: pathlib.Path) -> None:
    sync_all(path for root, _, files in folder.walk() for path in (*(root / name for name in files), root))


def _exchange(partial: pathlib.Path, out: pathlib.Path, replaced: pathlib.Path) -> None:
    # Swapped, ``out`` is the old folder or the new one at any time. In two renames there is a moment without one, which
    # ``_recover`` mends after a kill.
    if not out.exists() or not _swapped(partial, out):
        try:
            if out.exists() and any(out.iterdir()):
                out.rename(replaced)
            partial.rename(out)  # also over an empty folder
        except BaseException:  # an interrupt, too, which may come right behind the first rename
            if replaced.exists() and not out.exists():
                replaced.rename(out)
            raise
    sync(out.parent)
    for old in (partial, replaced):
        if old.exists():
            # Removing a large folder takes a while. What a kill leaves of it has lost its own mark, perhaps, and could
            # not be told from a user's folder: so it gets the one that goes last. Empty, since nobody resumes it.
            with contextlib.suppress(OSError):
                (old / MANIFEST).touch()
            _remove(old, ignore_errors=True)


def _swapped(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Gives two folders each other's name in one step; False where the system cannot, as outside Linux."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if not swap(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        return True
    if (number := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
