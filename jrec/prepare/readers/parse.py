"""What a log's lines are made of: fields and dialects, the blocks that were parsed, and why a line is bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from jrec.data import scan, spans
from jrec.data.canonical import canonical_ends, canonical_text
from jrec.data.columns import Column, ListColumn
from jrec.data.keys import MISSING, Spans, text_key
from jrec.data.long_texts import LongTexts
from jrec.prepare.readers.lines import Block

Kind = Literal["skip", "number", "integer", "hex", "text", "texts", "weights", "label", "time"]
_BAD_QUOTE = (
    "opens a quote that is not closed before the next delimiter or the line's end; line ends inside quotes are not"
    " read: convert a file that has them to Parquet by"
)
# Texts that often stand for missing values; an error about one of them says how to name it.
_OFTEN_MISSING = {"nan", "na", "n/a", "null", "none", "\\n", "-", "?", "nil", "#n/a", "<na>", "missing"}
_REASONS = {
    scan.NOT_NUMBER: "is not a number",
    scan.NOT_FINITE: "is not a finite number",
    scan.NOT_INTEGER: "is not an integer",
    scan.NOT_HEX: "is not 8 hexadecimal digits",
    scan.NOT_UTF8: "is not UTF-8 text",
    scan.HAS_NUL: "holds a NUL byte",
    scan.BLANK: "is blank",
    scan.NOT_LIST: 'is no list such as ["a", "b"]; of lists such as a|b the schema names the separator',
    spans.NOT_LABEL: (
        "is neither 0 nor 1 (nor -1, true, false, yes, no, t, f, y, n); set positive_values or positive_at_least in"
        " [label]"
    ),
    spans.MISSING_VALUE: "is a missing value; set missing for it",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a line.

    Attributes:
      name: The field's name, for messages and for the column that it becomes.
      kind: "number" (float64; a blank is NaN), "integer" (int64), "hex" (8 digits) and "text" (uint64 keys), "texts"
        and "weights" (lists of keys and of float64), "label" (float64 in {-1, 0, 1}; a blank is NaN), "time" (int64
        microseconds since 1970), "skip".
      blank: Whether the field may be blank.
      separator: What separates the elements of a list; "" for lists as JSON or Python prints them.
      missing: Texts that stand for a missing value as a blank does, of numbers, labels and texts.
      positive: The texts of a label that are 1, all others being 0; without them 0, 1, -1 and words are read.
      unit: A time's unit: "iso", "seconds", "milliseconds", "microseconds", "nanoseconds", or a pattern of strptime.
      decimal: The decimal mark of a number, "." or ",".
      canonical: Whether texts are brought into one form (``canonical``) before they become keys, or are compared with
        ``positive``.
    """

    name: str
    kind: Kind
    blank: bool = True
    separator: str = "|"
    missing: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    unit: str = ""
    decimal: str = "."
    canonical: bool = False

    def in_form(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Texts in the form that a log's texts have when the two are compared."""
        return tuple(map(canonical_text, texts)) if self.canonical else texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """How lines split into fields.

    Each hint ends a message: ``hint`` about a wrong number of fields, ``missing_hint`` about a number that may stand
    for a missing value, ``integer_hint`` about what is no integer, ``text_hint`` about what is no UTF-8.

    Lines of ``libsvm`` are rewritten as tab-separated ones (``jrec.prepare.readers.libsvm``).
    ``encoding`` is the file's; blocks are given in UTF-8 (``jrec.prepare.readers.lines.transcoded``).
    A ``table`` has rows instead of lines (``jrec.prepare.readers.tables``); only fields and hints matter to it.
    """

    fields: tuple[Field, ...]
    delimiter: str = ","
    quoting: bool = False
    skip_lines: int = 0
    hint: str = ""
    missing_hint: str = ""
    integer_hint: str = ""
    text_hint: str = ""
    table: bool = False
    libsvm: bool = False
    encoding: str = "utf-8"


class BadLine(NamedTuple):
    """A line that cannot be used: where it stands, why, and its text."""

    path: str
    line: int
    reason: str
    text: bytes


@dataclasses.dataclass
class ParsedBlock:
    """The good rows of a block by field name, and its bad lines.

    Attributes:
      dialect: How the lines were read.
      columns: Arrays of ``rows`` elements, and lists.
      lines: (rows,) int64, the line of every row, counted in the block from 0.
      bad: The lines left out, in any order.
      long_texts: Texts to store with their keys.
      block: Where the rows came from; its text is the file's own.
    """

    dialect: Dialect
    columns: dict[str, Column]
    lines: np.ndarray
    bad: list[BadLine]
    long_texts: LongTexts | None
    block: Block

    @property
    def rows(self) -> int:
        """How many lines are good."""
        return len(self.lines)

    def numbers(self, name: str) -> np.ndarray:
        """The plain column of that name."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray)
        return column

    def lists(self, name: str) -> ListColumn:
        """The list column of that name."""
        column = self.columns[name]
        assert isinstance(column, ListColumn)
        return column

    def field_texts(self, rows: np.ndarray, name: str) -> list[str]:
        """The values of a field in (n,) rows, for messages."""
        raise NotImplementedError

    def reject(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Leaves out the rows where ``wrong`` is true, or raises: "field NAME holds VALUE, which REASON"."""
        raise NotImplementedError


def bad_quote(dialect: Dialect, number: int) -> str:
    """Why a line is bad whose field of that number, counted from 0, opens a quote and does not end with one."""
    field = repr(dialect.fields[number].name) if number < len(dialect.fields) else f"number {number + 1}"
    options = {
        "sep": None if dialect.delimiter == "," else dialect.delimiter,
        "encoding": None if dialect.encoding == "utf-8" else dialect.encoding,
        "names": None if dialect.skip_lines else [field.name for field in dialect.fields],
    }
    read_csv_options = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    read = f"pandas.read_csv('FILE'{read_csv_options}, dtype=str, keep_default_na=False)"
    return f"field {field} {_BAD_QUOTE} python -c \"import pandas; {read}.to_parquet('FILE.parquet')\""


def reason_of(dialect: Dialect, field: Field, code: int, value: bytes) -> str:
    """Why a line is bad.

    Args:
      dialect: The line's.
      field: The field that is to blame.
      code: What is wrong with it: a code of ``scan`` or ``spans``.
      value: The field's text.
    """
    if code == scan.BLANK:
        return f"field {field.name!r} is blank"
    hint = ""
    if code == scan.NOT_INTEGER:
        hint = dialect.integer_hint
    elif code == scan.NOT_UTF8:
        hint = dialect.text_hint
    elif code in (scan.NOT_NUMBER, scan.NOT_FINITE) and value.decode(errors="replace").lower() in _OFTEN_MISSING:
        hint = dialect.missing_hint
    why = spans.time_reason(field.unit) if code == spans.NOT_TIME else _REASONS[code]
    value_text = shown(value)
    return f"field {field.name!r} holds {value_text}, which {why}{hint or header_hint(dialect, field.name, value_text)}"


def header_hint(dialect: Dialect, name: str, value: str) -> str:
    """A hint for a bad field that holds its own name, as ``shown`` gives it, in a file with a header; else ""."""
    repeated = dialect.skip_lines and value == shown(name.encode())
    return "; the line repeats the header, so take it out" if repeated else ""


def read_labels(field: Field, texts: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of labels, as ``labels_of_texts``; may rewrite the texts."""
    if field.canonical and field.positive:
        texts = texts._replace(ends=canonical_ends(*texts))
    missing = field.in_form(field.missing) if field.blank else None
    return spans.labels_of_texts(*texts, field.in_form(field.positive), missing)


def without_missing(column: Column, field: Field, seed: int) -> Column:
    """Keys of a field, in which the texts that stand for missing values are missing; a list of only one is empty."""
    marks = np.array([text_key(text, seed) for text in field.in_form(field.missing)], np.uint64)
    if isinstance(column, np.ndarray):
        return np.where(np.isin(column, marks), MISSING, column)
    absent = np.isin(column.values, marks)
    if not absent.any():
        return column
    lengths = np.diff(column.offsets)
    # Bounded for empty lists at the end, whose offset is behind the last value; their length is not 1.
    empty = (lengths == 1) & absent[np.minimum(column.offsets[:-1], len(absent) - 1)]
    values = np.where(absent, MISSING, column.values)
    offsets = np.concatenate([[0], np.cumsum(np.where(empty, 0, lengths))])
    return ListColumn(offsets, values[~np.repeat(empty, lengths)])


def shown(text: bytes) -> str:
    """A text for a message, cut short."""
    quoted = repr(text.decode("utf-8", errors="backslashreplace"))
    return quoted if len(quoted) <= 60 else f"{quoted[:56]}…'"


def any_of_list(offsets: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Which lists have an element where ``wrong`` is true: (rows,) bool."""
    running = np.concatenate([[0], np.cumsum(wrong)])
    return running[offsets[1:]] > running[offsets[:-1]]


def sort_bad_lines(lines: Iterable[BadLine]) -> list[BadLine]:
    """In the order of one file."""
    return sorted(lines, key=lambda bad: bad.line)
