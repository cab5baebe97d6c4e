"""Blocks of lines into named columns: the typed face of ``jrec.data.scan``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from jrec.data import scan, spans
from jrec.data.canonical import canonical_spans, canonical_text
from jrec.data.columns import Column, ListColumn, gather_all, lists_at
from jrec.data.keys import MISSING, text_key
from jrec.data.long_texts import LongTexts
from jrec.prepare.readers import libsvm
from jrec.prepare.readers.lines import Block

Kind = Literal["skip", "number", "integer", "hex", "text", "texts", "weights", "label", "time"]
_KINDS: dict[Kind, int] = {
    "skip": scan.SKIP,
    "number": scan.NUMBER,
    "integer": scan.INTEGER,
    "hex": scan.HEX,
    "text": scan.TEXT,
    "texts": scan.MULTI,
    "weights": scan.WEIGHTS,
    "label": scan.SPAN,
    "time": scan.SPAN,
}
_QUOTED = re.compile(rb'"((?:[^"]|"")*)"')
_BAD_QUOTE = (
    "opens a quote that is not closed before the next delimiter or the line's end; line ends inside quotes are not"
    ' read: convert a file that has them to Parquet by python -c "import pandas;'
    " pandas.read_csv('FILE', dtype=str, keep_default_na=False).to_parquet('FILE.parquet')\""
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
      places: (rows, 3) int64, the line (in the block), start and end of every row's text.
      bad: The lines left out, in any order.
      long_texts: Texts to store with their keys.
      block: Where the rows came from; its text is the file's own.
    """

    dialect: Dialect
    columns: dict[str, Column]
    places: np.ndarray
    bad: list[BadLine]
    long_texts: LongTexts | None
    block: Block

    @property
    def rows(self) -> int:
        """How many lines are good."""
        return len(self.places)

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

    def line_texts(self, rows: np.ndarray) -> list[bytes]:
        """The lines of (n,) rows as they stand in the file."""
        return [self.block.text[start:end].tobytes() for _, start, end in self.places[rows].tolist()]

    def field_texts(self, rows: np.ndarray, name: str) -> list[str]:
        """A field of (n,) rows, for messages."""
        index = [f.name for f in self.dialect.fields].index(name)
        split = [_split(line, self.dialect) for line in self.line_texts(rows)]
        return [shown(f[index]) if len(f) == len(self.dialect.fields) else "its value" for f in split]

    def reject(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Moves the rows where ``wrong`` is true to the bad lines: "field NAME holds VALUE, which REASON"."""
        if not wrong.any():
            return
        rows = np.flatnonzero(wrong)
        places, texts = self.places[rows, 0].tolist(), self.line_texts(rows)
        for place, value, text in zip(places, self.field_texts(rows, name), texts, strict=True):
            why = f"field {name!r} holds {value}, which {reason}{_header_hint(self.dialect, name, value)}"
            self.bad.append(BadLine(self.block.path, self.block.line + place, why, text))
        kept = np.flatnonzero(~wrong)
        self.columns = gather_all(self.columns, kept)
        self.places = self.places[kept]


class Parser:
    """Parses blocks of one dialect; safe to call from several threads."""

    def __init__(self, dialect: Dialect, seed: int = 0):
        self.dialect = dialect
        self._seed = np.uint64(seed)
        self._kinds = np.array([_kind(f) for f in dialect.fields], np.int64)
        self._blanks = np.array([f.blank for f in dialect.fields], np.bool_)
        self._canonical = np.array([f.canonical for f in dialect.fields], np.bool_)
        self._delimiter = np.frombuffer(dialect.delimiter.encode(), np.uint8).copy()
        marks = [f.separator.encode() if f.kind in ("texts", "weights") else b"" for f in dialect.fields]
        self._separators = np.frombuffer(b"".join(marks) or b"|", np.uint8).copy()
        self._separator_ends = np.cumsum([len(m) for m in marks], dtype=np.int64)
        lists = [f.kind in ("texts", "weights") for f in dialect.fields]
        self._first_marks = sorted({m[0] if m else ord(",") for m, many in zip(marks, lists, strict=True) if many})
        self._names: dict[str, list[str]] = {"number": [], "integer": [], "key": [], "list": []}
        slots = []
        for field in dialect.fields:
            names = self._names[_group(field)] if field.kind != "skip" else []
            slots.append(len(names))
            names.append(field.name)
        self._slots = np.array(slots, np.int64)
        self._has_texts = any(f.kind in ("text", "texts") for f in dialect.fields)
        self._quote = dialect.quoting

    def __call__(self, block: Block) -> ParsedBlock:
        """Parses a block; whatever is wrong with a line is in ``bad``."""
        text = libsvm.rewritten(block.text) if self.dialect.libsvm else block.text
        length = len(text)
        lines = int(np.count_nonzero(text == ord("\n")))
        quoting = self._quote and bool((text == ord('"')).any())
        buffer = np.empty(2 * length if quoting else length, np.uint8)
        buffer[:length] = text
        num_lists = len(self._names["list"])
        elements = lines * num_lists + sum(int(np.count_nonzero(text == m)) for m in self._first_marks)
        numbers = np.empty((len(self._names["number"]), lines), np.float64)
        integers = np.empty((len(self._names["integer"]), lines), np.int64)
        keys = np.empty((len(self._names["key"]), lines), np.uint64)
        lists = np.empty((num_lists, lines, 2), np.int64)
        pool, weights = np.empty(elements, np.uint64), np.empty(elements, np.float64)
        # A slow number has 3 characters or more ("1e9" is quick, "1e99" is not), a long text 8, and each its delimiter.
        slow = np.empty((length // 4 + 1, 4), np.int64)
        num_long = length // 8 + 1 if self._has_texts else 1
        long, long_keys = np.empty((num_long, 3), np.int64), np.empty((num_long, 2), np.uint64)
        places, bad = np.empty((lines, 3), np.int64), np.empty((lines, 7), np.int64)
        rows, num_slow, num_long, _, num_bad = scan.parse_lines(
            buffer, length, self._delimiter, quoting, self._kinds, self._slots, self._blanks, self._canonical,
            self._separators, self._separator_ends, self._seed, numbers, integers, keys, lists, pool, weights, slow,
            long, long_keys, places, bad,
        )  # fmt: skip
        if self.dialect.libsvm:  # places are those in the file's own text
            bounds = np.flatnonzero(np.concatenate([[True], block.text == ord("\n")]))
            for where in (places[:rows], bad[:num_bad]):
                where[:, 1], where[:, 2] = bounds[where[:, 0]], bounds[where[:, 0] + 1] - 1
        columns: dict[str, Column] = {}
        for group, arrays in (("number", numbers), ("integer", integers), ("key", keys)):
            columns |= {name: arrays[i, :rows] for i, name in enumerate(self._names[group])}
        resolve_slow(slow[:num_slow], buffer, numbers, weights)
        for field in self.dialect.fields:
            if _group(field) == "list":
                entries = lists[self._names["list"].index(field.name), :rows]
                if _kind(field) == scan.SPAN:
                    columns[field.name] = entries
                else:
                    begins, ends = entries[:, 0], entries[:, 1]
                    columns[field.name] = lists_at(pool if field.kind == "texts" else weights, begins, ends - begins)
        texts = None
        if num_long:
            long, long_keys = long[:num_long].copy(), long_keys[:num_long].copy()
            texts = LongTexts(long[:, 0], long_keys[:, 0], long_keys[:, 1], long[:, 1], long[:, 2], buffer)
        parsed = ParsedBlock(
            dialect=self.dialect,
            columns=columns,
            places=places[:rows],
            bad=[self._bad_line(block, buffer, b) for b in bad[:num_bad]],
            long_texts=texts,
            block=block,
        )
        for field in self.dialect.fields:
            if _kind(field) == scan.SPAN:
                _read_spans(parsed, field, buffer)
            elif field.missing:
                parsed.columns[field.name] = without_missing(parsed.columns[field.name], field, int(self._seed))
        if self.dialect.skip_lines:
            _reject_headers(parsed, int(self._seed))
        for name in self._names["number"] if num_slow else ():
            parsed.reject(np.isinf(parsed.numbers(name)), name, "is not a finite number")
        for field in self.dialect.fields if num_slow else ():
            if field.kind == "weights":
                weight_list = parsed.lists(field.name)
                parsed.reject(
                    any_of_list(weight_list.offsets, np.isinf(weight_list.values)), field.name, "is not finite"
                )
        return parsed

    def _bad_line(self, block: Block, buffer: np.ndarray, where: np.ndarray) -> BadLine:
        line, start, end, code, field, field_start, field_end = (int(w) for w in where)
        text = block.text[start:end].tobytes()
        if code == scan.WRONG_COUNT:
            expected = len(self.dialect.fields)
            reason = f"the line has {field} field(s) where {expected} are expected"
            reason = "the line is empty" if not text.strip(b"\r") else reason + self.dialect.hint
        else:
            named = self.dialect.fields[field] if field < len(self.dialect.fields) else _nameless(field)
            reason = reason_of(self.dialect, named, code, buffer[field_start:field_end].tobytes())
        return BadLine(block.path, block.line + line, reason, text)


def _split(line: bytes, dialect: Dialect) -> list[bytes]:
    """The fields of a good line, without their quotes."""
    line, mark, at = line.removesuffix(b"\r"), dialect.delimiter.encode(), 0
    fields = []
    while at <= len(line):
        quoted = _QUOTED.match(line, at) if dialect.quoting else None
        end = quoted.end() if quoted else line.find(mark, at)
        end = len(line) if end < 0 else end
        fields.append(quoted[1].replace(b'""', b'"') if quoted else line[at:end])
        at = end + len(mark)
    return fields


def _nameless(index: int) -> Field:
    return Field(name=f"number {index + 1}", kind="skip")


def reason_of(dialect: Dialect, field: Field, code: int, value: bytes) -> str:
    """Why a line is bad.

    Args:
      dialect: The line's.
      field: The field that is to blame.
      code: What is wrong with it: a code of ``scan`` or ``spans``.
      value: The field's text.
    """
    if code == scan.BAD_QUOTE:
        return f"field {field.name!r} {_BAD_QUOTE}"
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
    return (
        f"field {field.name!r} holds {value_text}, which {why}{hint or _header_hint(dialect, field.name, value_text)}"
    )


def _header_hint(dialect: Dialect, name: str, value: str) -> str:
    """A hint for a bad field that holds its own name, as ``shown`` gives it, in a file with a header; else ""."""
    repeated = dialect.skip_lines and value == shown(name.encode())
    return "; the line repeats the header, so take it out" if repeated else ""


def _kind(field: Field) -> int:
    return scan.SPAN if field.kind == "number" and (field.missing or field.decimal != ".") else _KINDS[field.kind]


def _group(field: Field) -> str:
    if _kind(field) == scan.SPAN:
        return "list"
    groups = {"skip": "", "number": "number", "integer": "integer", "hex": "key", "text": "key"}
    return groups.get(field.kind, "list")


def _reject_headers(parsed: ParsedBlock, seed: int) -> None:
    """Rejects lines that repeat the header, as where files were put together: where all is text, nothing else would."""
    fields = parsed.dialect.fields
    if (name := next((f.name for f in fields if f.kind == "text"), None)) is None:
        return
    wrong = parsed.numbers(name) == text_key(name, seed)
    rows = np.flatnonzero(wrong)
    names = [f.name.encode() for f in fields]
    wrong[rows] = [_split(line, parsed.dialect) == names for line in parsed.line_texts(rows)]
    parsed.reject(wrong, name, "is the column's own name, as the others are")


def _read_spans(parsed: ParsedBlock, field: Field, buffer: np.ndarray) -> None:
    """Turns the places of a field into its values, and rejects rows of which it makes no sense."""
    where = parsed.numbers(field.name)
    reasons = _REASONS
    if field.kind == "label":
        codes, values = read_labels(field, buffer, where)
    elif field.kind == "time":
        codes, values = spans.times_of(buffer, where, field.unit, field.missing if field.blank else None)
        reasons = {spans.NOT_TIME: spans.time_reason(field.unit)}
    else:
        codes, values = spans.numbers_of(buffer, where, field.missing, field.decimal)
    parsed.columns[field.name] = values
    for code in np.unique(codes[codes != scan.OK]).tolist() if codes.any() else ():
        wrong = codes == code
        parsed.reject(wrong, field.name, reasons[code])
        codes = codes[~wrong]
    if field.kind == "number" and not field.blank:
        parsed.reject(np.isnan(parsed.numbers(field.name)), field.name, _REASONS[spans.MISSING_VALUE])


def read_labels(field: Field, buffer: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of labels between the (n, 2) bounds ``where``, as ``labels_of_texts``; may rewrite the texts."""
    if field.canonical and field.positive:
        where = canonical_spans(buffer, where)
    missing = field.in_form(field.missing) if field.blank else None
    return spans.labels_of_texts(buffer, where, field.in_form(field.positive), missing)


def without_missing(column: Column, field: Field, seed: int) -> Column:
    """Keys of a field, in which the texts that stand for missing values are missing; a list of only one is empty."""
    marks = np.array([text_key(text, seed) for text in field.in_form(field.missing)], np.uint64)
    if isinstance(column, np.ndarray):
        return np.where(np.isin(column, marks), MISSING, column)
    absent = np.isin(column.values, marks)
    if not absent.any():
        return column
    lengths = np.diff(column.offsets)
    empty = (lengths == 1) & absent[np.minimum(column.offsets[:-1], len(absent) - 1)]
    values = np.where(absent, MISSING, column.values)
    offsets = np.concatenate([[0], np.cumsum(np.where(empty, 0, lengths))])
    return ListColumn(offsets, values[~np.repeat(empty, lengths)])


def shown(text: bytes) -> str:
    """A text for a message, cut short."""
    quoted = repr(text.decode("utf-8", errors="backslashreplace"))
    return quoted if len(quoted) <= 60 else f"{quoted[:56]}…'"


def resolve_slow(slow: np.ndarray, buffer: np.ndarray, numbers: np.ndarray, weights: np.ndarray) -> None:
    """Converts the numbers that a kernel of ``scan`` has listed as slow, into (slots, lines) numbers or weights."""
    for row, slot, start, end in slow.tolist():
        value = float(buffer[start:end].tobytes())
        if slot < 0:
            weights[row] = value
        else:
            numbers[slot, row] = value


def any_of_list(offsets: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Which lists have an element where ``wrong`` is true: (rows,) bool."""
    running = np.concatenate([[0], np.cumsum(wrong)])
    return running[offsets[1:]] > running[offsets[:-1]]


def sort_bad_lines(lines: Iterable[BadLine]) -> list[BadLine]:
    """In the order of one file."""
    return sorted(lines, key=lambda bad: bad.line)
