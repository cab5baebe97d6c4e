"""Text files, plain or compressed, in blocks of whole lines."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from jrec.data.schema import DatasetError
from jrec.prepare.readers import places
from jrec.prepare.readers.streams import InMemory, is_stream

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What files of these kinds begin with.
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
ARROW_FILE, ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
ARROW = ARROW_FILE, ARROW_STREAM
TABLES = PARQUET, *ARROW
_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}  # by Arrow's codecs
_UTF16 = "UTF-16 text"
_UNSUPPORTED = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ": "xz-compressed",
    b"7z\xbc\xaf": "a 7z archive",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Whole lines of a file.

    Attributes:
      path: The file.
      line: The number of the first line, counted from 1.
      text: The lines, each ended by a newline.
      bytes_read: How far into the file on disk (compressed, if it is) reading has come.
    """

    path: str
    line: int
    text: bytes
    bytes_read: int

    def line_texts(self, lines: Sequence[int]) -> list[bytes]:
        """Some lines, counted from 0, without their newlines."""
        split = self.text.split(b"\n")
        return [split[line] for line in lines]


def check_inputs(paths: list[str], *, keep_order: bool) -> None:
    """Checks that every input can be read, is given once, and that numbered files come in numeric order.

    Pipes may be inputs too. Shells number them as they like, so their order is taken as given.

    Raises:
      DatasetError: otherwise.
    """
    paths = [path for path in paths if not isinstance(path, InMemory)]
    for path in paths:
        if places.is_remote(path):
            places.check_exists(path)
            continue
        if not pathlib.Path(path).exists():
            raise DatasetError(f"input {path} does not exist")
        if pathlib.Path(path).is_dir():
            raise DatasetError(f"input {path} is a folder; name the files in it")
        if not (pathlib.Path(path).is_file() or is_stream(path)):
            raise DatasetError(f"input {path} is a terminal or another device; give files, or pipe the log into it")
        if not os.access(path, os.R_OK):
            raise DatasetError(f"input {path} cannot be read: permission denied")
    # Links are not followed: whoever makes some wants the file more than once.
    if repeated := repeated_places(paths, os.path.abspath):
        raise DatasetError(f"input(s) {', '.join(repeated)} given more than once")
    paths = [path for path in paths if not is_stream(path)]
    numeric = sorted(paths, key=places.natural_order)
    same_but_numbers = len({re.sub(r"\d+", "#", p) for p in paths}) == 1
    if same_but_numbers and numeric != paths and not keep_order:
        raise DatasetError(
            "the inputs are read as one log in the order given, but that is not the order of the numbers in their names"
            f" ({', '.join(paths[:3])}{', …' if len(paths) > 3 else ''}); a time-ordered split would be wrong. Give"
            " them in order ($(ls -v …)), or pass --keep-order if the order is right as it is"
        )


def repeated_places(paths: Sequence[str], resolved: Callable[[str], str]) -> list[str]:
    """The names, sorted, of inputs that are there more than once, under one name or several.

    Args:
      paths: Paths, URIs, and tables in memory.
      resolved: What says of a path which file it is.
    """
    named = [isinstance(path, InMemory) or places.is_remote(path) for path in paths]
    keys = [path if as_named else resolved(path) for path, as_named in zip(paths, named, strict=True)]
    times = collections.Counter(keys)
    return sorted({path for path, key in zip(paths, keys, strict=True) if times[key] > 1})


def count_lines(text: bytes) -> int:
    """The newlines of a text, by NumPy in a quarter of the time that bytes.count takes."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))


def is_compressed(path: str) -> bool:
    """Whether a file of text is compressed, by its first bytes."""
    return places.begins_with(path, 8).startswith((GZIP, *_COMPRESSED))


def first_line(path: str) -> bytes:
    """The first line of a file without its line end; empty if there is none."""
    for block in read_blocks(path, block_bytes=1 << 16):
        return block.text.split(b"\n", 1)[0].removesuffix(b"\r")
    return b""


def transcoded(block: Block, encoding: str) -> Block:
    """A block whose text is in UTF-8, of one in another encoding that has ASCII's line ends.

    Raises:
      DatasetError: If the text is not of that encoding, or is UTF-8 already.
    """
    text = block.text
    if encoding == "utf-8" or text.isascii():
        return block
    with contextlib.suppress(UnicodeDecodeError):
        text.decode("utf-8")
        raise DatasetError(
            f"{block.path}:{block.line}: the text is UTF-8, but encoding is {encoding!r}; give files of one encoding,"
            " and leave encoding out where it is UTF-8"
        )
    try:
        # A block ends at a line end, so that no character is cut in two; a file without one at its end gets it in
        # ``_cut``.
        text = text.decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{block.path}:{block.line + text.count(10, 0, error.start)}: byte {text[error.start]:#04x} is no character"
            f" of {encoding}; set another encoding, such as latin-1, which has all bytes"
        ) from error
    return dataclasses.replace(block, text=text)


def refuse_json(path: str) -> None:
    """Refuses a file whose first line is JSON that is no object a line (``json_lines``), and would make odd columns.

    Raises:
      DatasetError: With the command that converts the file.
    """
    line = first_line(path).decode("utf-8", errors="replace").strip()
    if not line.startswith(("{", "[")):
        return
    try:
        whole = json.loads(line)
    except (ValueError, RecursionError):
        if line not in ("{", "[", "[{"):
            return
        whole = None
    table = repr(re.sub(r"\.\w+(\.(gz|bz2|zst))?$", "", path) + ".parquet")
    if isinstance(whole, list) and not any(isinstance(one, dict) for one in whole):
        raise DatasetError(
            f"{path} holds a JSON array a line, which jrec does not read; give an object a line, with keys"
        )
    command = f"import pandas; pandas.read_json({path!r}).to_parquet({table})"
    raise DatasetError(
        f"{path} holds one JSON value, which jrec does not read; give an object a line (JSON lines), or convert it to"
        f' Parquet: python -c "{command}"'
    )


def read_blocks(
    path: str, *, skip_lines: int = 0, block_bytes: int | None = None, start: int = 0, stop: int | None = None
) -> Iterator[Block]:
    """Reads a file, or the lines of a plain one that begin in a range of bytes.

    Args:
      path: Plain, gzip, zstd or bzip2, told apart by content, not name.
      skip_lines: Header lines to leave out; they count in the line numbers.
      block_bytes: About how much text a block holds, ``BLOCK_BYTES`` if None. A block grows where one line is longer.
      start, stop: The range. Line numbers count from its first line, and header lines are left out only at byte 0.

    Raises:
      DatasetError: If the file cannot be read, a compressed one is truncated or damaged, or a line is absurdly long.
    """
    block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
    try:
        with contextlib.closing(places.open_file(path)) as raw:
            # By content, not by name: files are called .csv that are gzip, and the other way round.
            beginning = raw.read(8)
            raw.seek(0)
            for magic, kind in _UNSUPPORTED.items():
                if beginning.startswith(magic):
                    remedy = "unpack it first (plain, gzip, zstd and bzip2 are read)"
                    if kind == _UTF16:
                        remedy = "convert it first: iconv -f UTF-16 -t UTF-8"
                    raise DatasetError(f"{path} is {kind}; {remedy}")
            if beginning.startswith(TABLES):
                kind = "a Parquet" if beginning.startswith(PARQUET) else "an Arrow"
                raise DatasetError(f"{path} is {kind} file, which only the format csv reads; describe it by a schema")
            for magic, codec in _COMPRESSED.items():
                if beginning.startswith(magic):
                    yield from _cut(path, _Unpacked(raw, codec), raw.tell, skip_lines, block_bytes, True)
                    return
            if not beginning.startswith(GZIP):
                lines = raw if start == 0 and stop is None else _Range(raw, start, stop)
                yield from _cut(path, lines, raw.tell, 0 if start else skip_lines, block_bytes, start == 0)
                return
            # Several gzip members in one file, as ``cat a.gz b.gz`` makes, are one text.
            with gzip.open(raw, "rb") as unpacked:
                yield from _cut(path, unpacked, raw.tell, skip_lines, block_bytes, True)  # pyright: ignore[reportArgumentType]
    except EOFError as error:
        raise DatasetError(f"{path} is truncated: its gzip stream ends too early; download or copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DatasetError(f"{path} is damaged: {error}; download or copy it again") from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


class _Unpacked:
    """A file that one of Arrow's codecs unpacks."""

    def __init__(self, file: BinaryIO, codec: str):
        import pyarrow as pa

        self._stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:  # what Arrow finds in the file has no number, unlike what the system says of it
            raise error if error.errno else zlib.error(str(error)) from error


class _Range:
    """The lines of a file that begin at bytes ``start`` to ``stop``, as a file."""

    def __init__(self, file: BinaryIO, start: int, stop: int | None):
        self._file, self._stop = file, math.inf if stop is None else stop
        if start:
            # One byte before: where a line begins at ``start`` exactly, only its predecessor's line end is skipped.
            file.seek(start - 1)
            file.readline()  # the rest of the line before, or the end of it

    def read(self, size: int) -> bytes:
        room = self._stop - self._file.tell()
        if room <= 0:
            return b""
        data = self._file.read(int(min(size, room)))
        # A line belongs to the range in which it begins: the last one is read to its end, and the next range skips that
        # rest.
        if len(data) == room and not data.endswith(b"\n"):
            data += self._file.readline()
        return data


def _cut(
    path: str,
    file: BinaryIO | _Range | _Unpacked,
    tell: Callable[[], int],
    skip_lines: int,
    block_bytes: int,
    beginning: bool,
) -> Iterator[Block]:
    line, rest = 1, b""
    while True:
        data = file.read(block_bytes)
        ended = not data
        if beginning:
            data, beginning = data.removeprefix(_BYTE_ORDER_MARK), False
        end = data.rfind(b"\n") + 1
        # A line longer than the block: wait for its end.
        if not (end or ended):
            rest += data
            if len(rest) > MAX_LINE_BYTES:
                raise DatasetError(
                    f"{path}:{line}: a line of more than {MAX_LINE_BYTES >> 20} MiB; is this a text file with one"
                    " example a line?"
                )
            continue
        text = b"".join((rest, memoryview(data)[:end]))  # the one copy
        rest = data[end:]
        # The last line may lack its line end, which whoever splits relies on.
        if ended and text:
            text += b"\n"
        while skip_lines and text:
            skip_lines -= 1
            line += 1
            text = text[text.index(b"\n") + 1 :]
        if text:
            yield Block(path=path, line=line, text=text, bytes_read=tell())
            line += count_lines(text)
        if ended:
            return
