"""JSON lines: an object a line, read as a table, whose rows are lines and whose columns are the objects' keys.

A key that an object lacks is null there. Which columns there are is told by the first lines: a key that none of them
has is no column. A column's values may be of unlike types, such as 7 and "7", which are then texts, as in a CSV file.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jrec.data.schema import DatasetError
from jrec.json_values import JsonObject
from jrec.prepare.readers import places
from jrec.prepare.readers.lines import Block, first_line, is_compressed, read_blocks

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN_BYTES = 8 << 20  # of text, whose lines tell which columns there are
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs begin a file with
_DEEP = 64  # brackets of a value, of which the decoder would take many more
Bad = Mapping[int, tuple[str, bytes]]
"""By row of a batch that is no object: why, and its text; its values are null."""


def is_json_lines(path: str) -> bool:
    """Whether a file's first line is a JSON object, whole in its line; False for what can be read only once."""
    beginning = places.begins_with(path, 8).removeprefix(_MARK).lstrip()
    if not beginning.startswith(b"{") and not is_compressed(path):
        return False  # of most logs, without reading more
    line = first_line(path).removeprefix(_MARK).strip()
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class JsonLines:
    """A file of JSON lines, plain or compressed.

    Args:
      path: The file.

    Attributes:
      schema: Its columns, with the types that they have in the first lines.
    """

    def __init__(self, path: str):
        self._path = path
        # A log is opened several times, to be checked, counted and read; its first lines tell the same each time.
        stamp = None if places.is_remote(path) else _stamp(path)
        self.schema = _columns(path) if stamp is None else _columns_at(path, stamp)

    def batches(
        self, names: list[str], rows: int, categories: Sequence[str]
    ) -> Iterator[tuple[float, pa.RecordBatch, Bad]]:
        """Batches of up to ``rows`` lines, each with the share of the file read so far, and lines that are no objects.

        Args:
          names: The columns, in order.
          rows: The most rows of a batch.
          categories: Does not matter: columns come without dictionaries.
        """
        import pyarrow as pa

        del categories
        size = max(places.size_of(self._path), 1)
        for block in read_blocks(self._path):
            objects, bad = _objects(block)
            for start in range(0, len(objects), rows):
                lines = objects[start : start + rows]
                columns = [_array([line.get(name) for line in lines], self._path, name) for name in names]
                # Bad lines keep a row of nulls, so that rows and line numbers stay in step.
                own = {row - start: said for row, said in bad.items() if start <= row < start + rows}
                yield block.bytes_read / size, pa.RecordBatch.from_arrays(columns, names), own


def _columns(path: str) -> pa.Schema:
    """The columns that the first lines of a file have, and their types."""
    import pyarrow as pa

    names: dict[str, list[object]] = {}
    shown = 0
    for block in read_blocks(path):
        objects, _ = _objects(block)
        for line in objects:
            for name, value in line.items():
                names.setdefault(name, []).append(value)
        shown += len(block.text)
        if shown >= _SHOWN_BYTES:
            break
    return pa.schema([(name, _array(values, path, name).type) for name, values in names.items()])


@functools.lru_cache(maxsize=1024)
def _columns_at(path: str, stamp: tuple[int, ...]) -> pa.Schema:
    """``_columns`` of a file as it was at a ``_stamp``."""
    del stamp
    return _columns(path)


def _stamp(path: str) -> tuple[int, ...] | None:
    """Numbers of a file of this machine, some of which change when its content does; None where there is no file."""
    try:
        stat = pathlib.Path(path).stat()
    except OSError:  # whoever reads it says so
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _objects(block: Block) -> tuple[list[JsonObject], dict[int, tuple[str, bytes]]]:
    """The object of each line, an empty one for a line that is none, and why it is none by line."""
    decode, objects, bad = msgspec.json.Decoder().decode, list[JsonObject](), dict[int, tuple[str, bytes]]()
    for number, line in enumerate(block.text.removesuffix(b"\n").split(b"\n")):
        value, line = None, line.strip()
        if number == 0 and block.line == 1:
            line = line.removeprefix(_MARK)
        if not line:
            reason = "the line is blank"
        # Counted first, which is quick, since depth is told byte by byte in Python.
        elif line.count(b"[") + line.count(b"{") > _DEEP and _depth(line) > _DEEP:
            reason = f"the line has more than {_DEEP} brackets inside one another"
        else:
            try:
                value, reason = decode(line), "the line is no JSON object"
            except msgspec.DecodeError as error:
                reason = f"the line is no JSON ({error})"
        if not isinstance(value, dict):
            bad[number] = reason, line
        objects.append(value if isinstance(value, dict) else {})
    return objects, bad


def _depth(line: bytes) -> int:
    """Brackets inside one another, those within strings counted, too."""
    depth = deepest = 0
    for byte in line:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return deepest


def _array(values: list[Any], path: str, name: str) -> pa.Array:
    """A column's values; of unlike types, or past 64 bits, as texts."""
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {int, float} and len(kinds) == 2:  # JSON has one type of numbers
        # Beyond 2^53 a float would be another integer than the id that the line has; such columns become texts.
        kinds = {float} if all(value is None or abs(value) <= 2**53 for value in values) else {int, float}
        values = [None if value is None else float(value) for value in values] if kinds == {float} else values
    if list in kinds:
        if kinds != {list}:
            raise DatasetError(f"{path}: column {name!r} has lists and other values; make lists of all, or of none")
        return pa.array(_lists(values))
    if len(kinds) > 1:
        return pa.array([_text(value) for value in values], pa.string())
    try:
        return pa.array(values)
    except (OverflowError, pa.ArrowException):  # whole numbers past 64 bits
        return pa.array([_text(value) for value in values], pa.string())


def _lists(values: list[Any]) -> list[Any]:
    """Lists, whose elements are texts where they are of unlike types or past 64 bits."""
    elements = [element for value in values if value is not None for element in value if element is not None]
    kinds = {type(element) for element in elements}
    if kinds == {int} and all(-(2**63) <= element < 2**63 for element in elements):
        return values
    if len(kinds) <= 1 and int not in kinds:
        return values
    if kinds == {int, float} and all(abs(element) <= 2**53 for element in elements):
        return [None if v is None else [None if e is None else float(e) for e in v] for v in values]
    return [None if value is None else [_text(element) for element in value] for value in values]


def _text(value: object) -> str | None:
    """A value as JSON prints it, a text without quotes."""
    return value if value is None or isinstance(value, str) else json.dumps(value)
