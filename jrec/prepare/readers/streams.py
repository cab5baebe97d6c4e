"""Inputs that are read only once, pipes, standard input and tables in memory: spooled to a file before anything else.

Preparation reads a log more than once (its first line, a survey, every pass), and a pipe gives its bytes once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Protocol

from jrec.data.schema import DatasetError
from jrec.prepare.readers import places

STANDARD_INPUT = "/dev/stdin"
_BLOCK = 1 << 20
_ROWS = 1 << 16  # of a batch in a file: what is read of it at a time


def named(path: str) -> str:
    """The path of an input as it was given; "-" stands for standard input."""
    return STANDARD_INPUT if path == "-" else path


class ArrowStream(Protocol):
    """A table, or whatever else gives record batches: of Arrow, polars, DuckDB, pandas."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The batches, by Arrow's C stream interface."""
        ...


InputLike = str | os.PathLike[str] | ArrowStream
"""A file, a pipe, a folder of files, a URI of them, or a table."""


class InMemory(str):
    """The name of a table in memory, which is spooled as a pipe is."""

    table: ArrowStream

    @classmethod
    def of(cls, table: ArrowStream, number: int, split: str = "") -> InMemory:
        """Names the table by its number among a log's, or among a split's, and by its type."""
        kind = f"{type(table).__module__.partition('.')[0]}.{type(table).__qualname__}"
        named = cls(f"table {number}{split and f' of {split}'} ({kind})")
        named.table = table
        return named


def read_names(inputs: InputLike | Sequence[InputLike], split: str = "") -> list[str]:
    """The names of inputs: standard input for "-", the files of a folder in its place, ``InMemory`` for tables.

    Args:
      inputs: One input, or several.
      split: Whose inputs they are, where each split has its own: tables of several splits need names of their own.

    Raises:
      DatasetError: If a folder has no files.
      TypeError: If an input is none.
    """
    if isinstance(inputs, str | os.PathLike) or hasattr(inputs, "__arrow_c_stream__"):
        inputs = [inputs]  # pyright: ignore[reportAssignmentType]
    names = list[str]()
    for number, one in enumerate(inputs, 1):  # pyright: ignore[reportArgumentType]
        if isinstance(one, str | os.PathLike):
            names += places.expand(named(os.fspath(one)))
        elif hasattr(one, "__arrow_c_stream__"):
            names.append(InMemory.of(one, number, split))
        else:
            raise TypeError(f"input {number} is a {type(one).__name__}; give paths, or tables with __arrow_c_stream__")
    return names


def is_stream(path: str) -> bool:
    """Whether the input is a pipe, FIFO or table in memory, which is read once. A path must exist."""
    if places.is_remote(path) or isinstance(path, InMemory):
        return isinstance(path, InMemory)
    mode = pathlib.Path(path).stat().st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a preparation.

    Attributes:
      name: The name that the user gave, for messages.
      file: What is read: the input itself, or the file that a stream was spooled to.
      sha256: The digest of a stream's bytes, since its name says nothing about them; None for files.
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
        return places.size_of(self.file)

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
    """Copies a stream to a file; a table as a stream of Arrow.

    Args:
      name: The stream's path, or ``InMemory``.
      target: The file to make.

    Raises:
      DatasetError: If the stream cannot be read or gives no byte.
    """
    if isinstance(name, InMemory):
        return _spool_table(name, target)
    digest, size = hashlib.sha256(), 0
    with _opened(name) as stream, target.open("xb") as file:
        while block := _read(stream, name):
            digest.update(block)
            file.write(block)
            size += len(block)
    if not size:
        raise DatasetError(f"the pipe {name} ended without a byte; see what the program that writes to it says")
    return Input(name=name, file=str(target), sha256=digest.hexdigest())


def _spool_table(name: InMemory, target: pathlib.Path) -> Input:
    import pyarrow as pa

    # A quick codec: each pass of preparation reads the file, and then it is removed.
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    try:
        reader = pa.RecordBatchReader.from_stream(name.table)
        with pa.ipc.new_stream(str(target), reader.schema, options=options) as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]), max_chunksize=_ROWS)
    except pa.ArrowException as error:
        raise DatasetError(f"{name} cannot be read: {error}") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Input(name=name, file=str(target), sha256=digest)


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
