"""Inputs that can be read only once: pipes, FIFOs and standard input, spooled to a file before anything else.

Preparation reads a log more than once (its first line, a survey, every pass), and a pipe gives its bytes once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import stat
from collections.abc import Iterator
from typing import BinaryIO

from jrec.data.schema import DatasetError

STANDARD_INPUT = "/dev/stdin"
_BLOCK = 1 << 20


def named(path: str) -> str:
    """The path of an input as it was given; "-" stands for standard input."""
    return STANDARD_INPUT if path == "-" else path


def is_stream(path: str) -> bool:
    """Whether the input is a pipe or FIFO, which cannot be read again. It must exist."""
    mode = pathlib.Path(path).stat().st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a preparation.

    Attributes:
      name: As it was given, for messages.
      file: What is read: the input itself, or the file that a stream was spooled to.
      sha256: Of a stream's bytes, since its name says nothing about them; None for files.
      start, stop: Only the lines that begin at one of these bytes of a plain text file; by default all.
    """

    name: str
    file: str
    sha256: str | None = None
    start: int = 0
    stop: int | None = None

    @property
    def bytes(self) -> int:
        """The file's size."""
        return pathlib.Path(self.file).stat().st_size

    def describe(self) -> dict[str, object]:
        """For the dataset's provenance."""
        described: dict[str, object] = {"file": self.name, "bytes": self.bytes}
        return described if self.sha256 is None else {**described, "stream": True, "sha256": self.sha256}

    @contextlib.contextmanager
    def errors_by_name(self) -> Iterator[None]:
        """Lets errors about the file speak of the input."""
        try:
            yield
        except DatasetError as error:
            raise DatasetError(str(error).replace(self.file, self.name)) from error


def spool(name: str, target: pathlib.Path) -> Input:
    """Copies a stream to a file.

    Args:
      name: The stream's path.
      target: The file to make.

    Raises:
      DatasetError: If the stream cannot be read or gives no byte.
    """
    digest, size = hashlib.sha256(), 0
    with _opened(name) as stream, target.open("xb") as file:
        while block := _read(stream, name):
            digest.update(block)
            file.write(block)
            size += len(block)
    if not size:
        raise DatasetError(f"the pipe {name} ended without a byte; see what the program that writes to it says")
    return Input(name=name, file=str(target), sha256=digest.hexdigest())


def _opened(name: str) -> BinaryIO:
    try:
        return pathlib.Path(name).open("rb", buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise DatasetError(f"the pipe {name} cannot be read: {error.strerror or error}") from error


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(_BLOCK)
    except OSError as error:
        raise DatasetError(f"the pipe {name} cannot be read: {error.strerror or error}") from error
