"""Where inputs are: files and folders of this machine, or of a store that Arrow's file systems know (s3://, gs://)."""

from __future__ import annotations

import contextlib
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from jrec.data.schema import DatasetError

if TYPE_CHECKING:
    from pyarrow import fs

_HIDDEN = (".", "_")  # what the names of files begin with that are none of a folder's data: _SUCCESS, .crc, …


def is_remote(path: str) -> bool:
    """Whether a path is a URI."""
    return re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def absolute(path: str, folder: pathlib.Path = pathlib.Path()) -> str:
    """The same place from any working folder; a relative path is one from ``folder``."""
    return path if is_remote(path) else str((folder / path).absolute())


def natural_order(path: str) -> list[tuple[int, str]]:
    """Sorts names by the numbers in them: part-2 before part-10."""
    # Pairs of one form, so that a number is never compared with a text.
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", path)]


def check_exists(path: str) -> None:
    """Checks that a URI names a file.

    Raises:
      DatasetError: If it does not, or its store cannot be asked.
    """
    if _info(path).type.name != "File":
        raise DatasetError(f"input {path} does not exist")


def path_of(path: str) -> str:
    """The path of a file inside its store."""
    return _system(path)[1] if is_remote(path) else path


def size_of(path: str) -> int:
    """The bytes of a file."""
    return _info(path).size if is_remote(path) else pathlib.Path(path).stat().st_size


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading, from its beginning.

    Raises:
      OSError: If it cannot be opened.
      DatasetError: If its store cannot be reached.
    """
    if not is_remote(path):
        return pathlib.Path(path).open("rb")
    system, inside = _system(path)
    return system.open_input_file(inside)


def begins_with(path: str, length: int) -> bytes:
    """The first bytes of a file; none of one that cannot be read, or only once."""
    if not is_remote(path) and not pathlib.Path(path).is_file():
        return b""
    try:
        with contextlib.closing(open_file(path)) as file:
            return file.read(length)
    except OSError:
        return b""


def expand(path: str) -> list[str]:
    """The files of a folder and its subfolders, or of a pattern, in the order of their numbers; else the path itself.

    In a pattern ``*`` stands for any characters of a name, ``**/`` for any folders, and on this machine ``?`` for one
    character. A path that is there is no pattern.

    Raises:
      DatasetError: If a folder has no files, or a pattern names none.
    """
    if _is_pattern(path):
        return _matching(path)
    if not _is_folder(path):
        return [path]
    files = sorted(_files_in(path), key=natural_order)
    if not files:
        raise DatasetError(f"input {path} is a folder without files; give files, or the folder that they are in")
    return files


def _is_pattern(path: str) -> bool:
    if is_remote(path):
        return "*" in path.partition("?")[0]  # behind a question mark are a store's options
    return any(c in path for c in "*?") and not pathlib.Path(path).exists()


def _matching(pattern: str) -> list[str]:
    path, options = pattern, ""
    if is_remote(pattern):
        path, mark, behind = pattern.partition("?")
        options = mark + behind
    folder = re.split(r"[*?]", path)[0].rpartition("/")[0] or ("/" if path.startswith("/") else ".")
    names = path.removeprefix(folder).removeprefix("/")
    meant = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(meant.get(piece) or re.escape(piece) for piece in re.split(r"(\*\*/|\*|\?)", names))
    inside = f"{path_of(folder + options).rstrip('/')}/"
    files = _files_in(folder + options) if _is_folder(folder + options) else ()
    chosen = [file for file in files if re.fullmatch(expression, path_of(file).removeprefix(inside))]
    if not chosen:
        raise DatasetError(f"input {pattern} names no file: there is none of this pattern in {folder}")
    return sorted(chosen, key=natural_order)


def _is_folder(path: str) -> bool:
    return _info(path).type.name == "Directory" if is_remote(path) else pathlib.Path(path).is_dir()


def _files_in(folder: str) -> Iterator[str]:
    import pyarrow.fs

    system, inside = _system(folder) if is_remote(folder) else (pyarrow.fs.LocalFileSystem(), folder)
    for info in system.get_file_info(pyarrow.fs.FileSelector(inside, recursive=True)):
        # Hidden parts count below the folder only: the user may keep it in one.
        own = pathlib.PurePosixPath(info.path).relative_to(inside.rstrip("/") or "/")
        if info.is_file and not any(part.startswith(_HIDDEN) for part in own.parts):
            yield _uri(folder, info.path) if is_remote(folder) else info.path


def _uri(folder: str, inside: str) -> str:
    """The URI of a file in a folder of the same store, with the folder's user and options."""
    parts = urllib.parse.urlsplit(folder)
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    options = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{user}{urllib.parse.quote(inside)}{options}"


def _info(path: str) -> fs.FileInfo:
    system, inside = _system(path)
    try:
        return system.get_file_info(inside)
    except OSError as error:
        raise DatasetError(f"input {path} cannot be looked for: {error}") from error


def _system(path: str) -> tuple[fs.FileSystem, str]:
    import pyarrow as pa
    import pyarrow.fs

    user, _, place = urllib.parse.urlsplit(path).netloc.rpartition("@")
    if ":" in user:  # never shown
        raise DatasetError(
            f"the URI of an input at {place} holds a password, which messages and the dataset's record of its inputs"
            " would show; leave it to the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    try:
        return pyarrow.fs.FileSystem.from_uri(path)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"input {path} cannot be reached: {error}; give files, s3://, gs:// or what else pyarrow.fs knows"
        ) from error
