"""A folder that appears whole or not at all: work happens in a sibling ``OUT.partial``, a rename ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jrec.data.schema import FORMAT, SCHEMA_FILE, DatasetError
from jrec.files import sync

MANIFEST = "unfinished.json"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def workspace(
    out: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    *,
    overwrite: bool = False,
    resume: bool = False,
    ours: Callable[[pathlib.Path], bool] | None = None,
    kind: str = "dataset",
    report: Callable[[str], None] = lambda message: None,
) -> Iterator[pathlib.Path]:
    """A fresh folder beside ``out`` that becomes ``out`` when the block ends without an exception.

    What an interrupted run left is discarded with a word about it, and an exception removes the folder again; with
    ``resume`` what is left stays, and the next run with the same manifest gets it. Nothing else that existed is touched
    until the very end.

    Args:
      out: Where the dataset shall be.
      manifest: What is being made, written into the folder for people who find it unfinished; JSON types.
      overwrite: Whether a finished dataset at ``out`` may be replaced.
      resume: Whether to go on with the work that an interrupted run left.
      ours: Whether a folder is finished work of this kind; by default whether it is a dataset.
      kind: What it is, for messages.
      report: Takes messages for the user.

    Raises:
      DatasetError: If ``out`` exists and must not be replaced, another run works on it, there is no room, or, with
        ``resume``, what an interrupted run left has another manifest.
    """
    ours = ours or _is_dataset
    out = pathlib.Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that is to be replaced)
    partial, replaced = (out.with_name(f"{out.name}.{suffix}") for suffix in ("partial", "replaced"))
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _recover(out, replaced, report)
        _check_out(out, overwrite, ours, kind)
        text = json.dumps(manifest, indent=1)
        resumed = resume and _resumes(partial, text, report)
        if not resumed:
            _discard(partial, ours, report)
        try:
            with disk_errors(partial):
                if not resumed:
                    partial.mkdir()
                    (partial / MANIFEST).write_text(text, encoding="utf-8")
                yield partial
                _sync_tree(partial)
                (partial / MANIFEST).unlink()
                _exchange(partial, out, replaced)
        except BaseException:
            if not resume:
                _remove(partial, ignore_errors=True)
            raise


def link(source: str | pathlib.Path, target: str | pathlib.Path) -> str:
    """A hard link, or a copy where links cannot be; files of a dataset are replaced, never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


@contextlib.contextmanager
def disk_errors(place: pathlib.Path) -> Iterator[None]:
    """Turns operating system errors of writing into a DatasetError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DatasetError(
                f"no room left to write {place} ({error.strerror}); free some, or choose another --out. Preparing needs"
                " about twice the size of the unpacked log"
            ) from error
        where = f" {error.filename}" if error.filename else ""
        raise DatasetError(f"cannot write {place}: {error.strerror or error}{where}") from error


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Holds a lock that the operating system drops with the process, however it ends."""
    path = out.with_name(f".{out.name}.lock")
    with disk_errors(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock until now has removed the file: a lock on it would keep nobody out.
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError
        except OSError as error:
            raise DatasetError(f"another run is preparing {out}; wait for it, or choose another --out") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _recover(out: pathlib.Path, replaced: pathlib.Path, report: Callable[[str], None]) -> None:
    """Undoes or completes a replacement that was interrupted between its renames."""
    if not replaced.exists():
        return
    if out.exists():
        shutil.rmtree(replaced)
    else:
        report(f"an interrupted run had set {out} aside; it is back")
        replaced.rename(out)


def _check_out(out: pathlib.Path, overwrite: bool, ours: Callable[[pathlib.Path], bool], kind: str) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DatasetError(f"{out} exists and is not a folder; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    if not ours(out):
        raise DatasetError(f"{out} exists and holds something else than a jrec {kind}; choose another --out")
    if not overwrite:
        raise DatasetError(f"{out} is a finished {kind}; pass --overwrite to replace it, or choose another --out")


def _is_dataset(folder: pathlib.Path) -> bool:
    try:
        return json.loads((folder / SCHEMA_FILE).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _resumes(partial: pathlib.Path, manifest: str, report: Callable[[str], None]) -> bool:
    """Whether an interrupted run left work towards the same end; without a whole manifest it left none."""
    try:
        stored = json.loads((partial / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if stored != json.loads(manifest):
        raise DatasetError(
            f"{partial} is an interrupted run that was to make something else; give that run's options again to finish"
            " it, or remove the folder to start anew"
        )
    report(f"going on with what an interrupted run left in {partial}")
    return True


def _discard(partial: pathlib.Path, ours: Callable[[pathlib.Path], bool], report: Callable[[str], None]) -> None:
    if not partial.exists():
        return
    # A run killed at its last step leaves a whole dataset without the manifest, at its first an empty folder.
    if not ((partial / MANIFEST).is_file() or ours(partial) or not any(partial.iterdir())):
        raise DatasetError(
            f"{partial} is needed as a workplace, but holds something that jrec did not make; move it away"
        )
    report(f"starting anew: discarding what an interrupted run left in {partial}")
    _remove(partial)


def _remove(partial: pathlib.Path, *, ignore_errors: bool = False) -> None:
    """Removes the folder, the manifest last: what a kill leaves of it can still be told to be ours."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(partial.iterdir()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=ignore_errors)
            elif path.name != MANIFEST:
                path.unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=ignore_errors)


def _sync_tree(folder: pathlib.Path) -> None:
    for root, _, files in os.walk(folder):
        for name in [*files, "."]:
            sync(os.path.join(root, name))  # noqa: PTH118


def _exchange(partial: pathlib.Path, out: pathlib.Path, replaced: pathlib.Path) -> None:
    if out.exists():
        if any(out.iterdir()):
            out.rename(replaced)
        else:
            out.rmdir()
    partial.rename(out)
    sync(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)
