"""Record batches of Arrow as parsed rows, column by column: what a log's text says, without printing and parsing it.

A value is parsed as its printed form, bit for bit: float32 as the shortest decimal that is that number, whole floats as
integers where they are categories, null and NaN as blanks. So one schema holds for text and tables alike. Types
that are rare (decimals, times as categories) do go through their text, a column at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jrec.data import spans
from jrec.data.arrow_values import EXACT, PRINTED, arrow_compute, is_list, plain, plain_type, texts_of
from jrec.data.canonical import canonical_ends
from jrec.data.columns import Column, ListColumn, gather_all
from jrec.data.keys import MISSING, Spans, hex8_keys, integer_keys, text_key
from jrec.data.long_texts import LongTexts
from jrec.data.scan import BLANK, NOT_FINITE, NOT_HEX, NOT_NUMBER, OK, parse_printed_lists
from jrec.data.schema import DatasetError
from jrec.kernel_cache import compiled
from jrec.prepare.readers.lines import Block
from jrec.prepare.readers.parse import (
    BadLine,
    Dialect,
    Field,
    ParsedBlock,
    any_of_list,
    header_hint,
    read_labels,
    reason_of,
    shown,
    without_missing,
)
from jrec.prepare.readers.splitting import SplitLines, split

if TYPE_CHECKING:
    import pyarrow as pa

_POWERS = 10.0 ** np.arange(13)
_SHORTEST = np.float32(1 << 24)  # up to which the whole numbers of float32 are their own shortest decimals
_KEY_RANGE = -999_999, 2**56 - 1  # of ``integer_keys``
_LABELS = -1, 0, 1
_DICTIONARY = 2  # a dictionary of so many times a column's values is still quicker to read than they are to look up
_DELIMITER, _SEPARATOR = b"\x1f", b"\x1e"  # between the values and elements of a bad row, where it is kept aside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a table.

    Attributes:
      path: The file.
      line: The number of the first row, counted from 1.
      batch: The rows of a table, or a text's lines; it has the dialect's fields.
      bytes_read: How far into the file reading has come.
      bad: By row that could not be read at all, why, and its text; its values are null.
      block: The lines of a text that the rows are; None for rows of a table.
    """

    path: str
    line: int
    batch: pa.RecordBatch | SplitLines
    bytes_read: int
    bad: Mapping[int, tuple[str, bytes]] = dataclasses.field(default_factory=dict)
    block: Block | None = None


def rows_of_lines(block: Block, dialect: Dialect) -> Rows:
    """A row for each line of a block."""
    lines = split(block.text, dialect)
    texts = block.line_texts(list(lines.bad)) if lines.bad else []
    bad = {
        line: (reason if text.strip(b"\r") else "the line is empty", text)
        for (line, reason), text in zip(lines.bad.items(), texts, strict=True)
    }
    return Rows(path=block.path, line=block.line, batch=lines, bytes_read=block.bytes_read, bad=bad, block=block)


@dataclasses.dataclass
class ParsedRows(ParsedBlock):
    """The good rows of a record batch, or of lines."""

    batch: pa.RecordBatch | SplitLines

    def line_texts(self, rows: np.ndarray) -> list[bytes]:
        """The lines of (n,) rows as they stand in the file.

        Of a table the rows' values as texts, in which line ends are blanks.
        """
        if self.block.text:
            return self.block.line_texts(self.lines[rows].tolist())
        fields = [field for field in self.dialect.fields if field.kind != "skip"]
        columns = [_row_texts(self.batch, field, self.lines[rows]) for field in fields]
        return [_DELIMITER.join(one).replace(b"\n", b" ") for one in zip(*columns, strict=True)]

    def field_texts(self, rows: np.ndarray, name: str) -> list[str]:
        """The values of a field, for messages."""
        (field,) = (field for field in self.dialect.fields if field.name == name)
        return [shown(text) for text in _row_texts(self.batch, field, self.lines[rows])]

    def reject(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Moves the rows where ``wrong`` is true to the bad lines: "field NAME holds VALUE, which REASON"."""
        if not wrong.any():
            return
        rows = np.flatnonzero(wrong)
        numbers, texts = (self.block.line + self.lines[rows]).tolist(), self.line_texts(rows)
        for number, value, text in zip(numbers, self.field_texts(rows, name), texts, strict=True):
            why = f"field {name!r} holds {value}, which {reason}{header_hint(self.dialect, name, value)}"
            self.bad.append(BadLine(self.block.path, number, why, text))
        self.keep(np.flatnonzero(~wrong))

    def keep(self, rows: np.ndarray) -> None:
        """Leaves out all but (n,) rows."""
        self.columns, self.lines = gather_all(self.columns, rows), self.lines[rows]


class _Read(NamedTuple):
    """A column that was read: its values, what is wrong with each row (``scan``'s codes), and its long texts."""

    values: Column
    codes: np.ndarray
    texts: LongTexts | None = None


def parse_rows(rows: Rows, dialect: Dialect, seed: int) -> ParsedRows:
    """Reads rows as a dialect's fields.

    Args:
      rows: The rows.
      dialect: What ``table_dialect`` made for their columns' types.
      seed: The seed of the hash of long texts.

    Raises:
      DatasetError: If a column has values that its type should not have, such as times past what 64 bits hold.
    """
    import pyarrow as pa

    batch = rows.batch
    columns, texts = dict[str, Column](), list[LongTexts]()
    field_of, code_of = np.full(batch.num_rows, -1, np.int64), np.full(batch.num_rows, OK, np.int64)
    for index, field in enumerate(dialect.fields):
        if field.kind == "skip":
            continue
        column = batch.column(field.name)
        try:
            read = _read(field, column, seed)
        except pa.ArrowException as error:
            dtype = "texts" if isinstance(column, Spans) else column.type
            raise DatasetError(
                f"{rows.path}: column {field.name!r} of {dtype} cannot be read ({_first_line(error)}) in rows"
                f" {rows.line:,} to {rows.line + batch.num_rows - 1:,}; cast it to texts or integers"
            ) from error
        columns[field.name] = read.values
        if read.texts is not None and len(read.texts.keys):
            texts.append(read.texts._replace(field=np.full(len(read.texts.keys), index, np.int64)))
        if read.codes.any():
            # The leftmost field is named, whatever else is wrong with the row.
            wrong = (read.codes != OK) & (field_of < 0)
            field_of[wrong], code_of[wrong] = index, read.codes[wrong]
    parsed = ParsedRows(
        dialect=dialect,
        columns=columns,
        lines=np.arange(batch.num_rows, dtype=np.int64),
        bad=[],
        long_texts=LongTexts.joined(texts) if texts else None,
        block=rows.block or Block(path=rows.path, line=rows.line, text=b"", bytes_read=0),
        batch=batch,
    )
    _leave_out(parsed, field_of, code_of, rows.bad)
    if dialect.skip_lines:
        _reject_headers(parsed, seed)
    return parsed


def _reject_headers(parsed: ParsedRows, seed: int) -> None:
    """Rejects lines that repeat the header, as where files were put together: where all is text, nothing else would."""
    dialect = parsed.dialect
    if (name := next((field.name for field in dialect.fields if field.kind == "text"), None)) is None:
        return
    wrong = parsed.numbers(name) == text_key(name, seed)
    rows = np.flatnonzero(wrong)
    header = dialect.delimiter.join(field.name for field in dialect.fields).encode().replace(b'"', b"")
    wrong[rows] = [line.rstrip(b"\r").replace(b'"', b"") == header for line in parsed.line_texts(rows)]
    parsed.reject(wrong, name, "is the column's own name, as the others are")


def _leave_out(
    parsed: ParsedRows, field_of: np.ndarray, code_of: np.ndarray, unread: Mapping[int, tuple[str, bytes]]
) -> None:
    """Moves rows with a code to the bad ones, which say the first of their fields that is wrong, and unread ones."""
    block = parsed.block
    for row, (reason, text) in unread.items():
        field_of[row] = -1
        parsed.bad.append(BadLine(block.path, block.line + row, reason, text))
    bad = np.flatnonzero(field_of >= 0)
    if not len(bad) and not unread:
        return
    reasons = dict[int, str]()
    for index in np.unique(field_of[bad]).tolist():
        field = parsed.dialect.fields[index]
        rows = bad[field_of[bad] == index]
        codes = code_of[rows].tolist()
        texts = _row_texts(parsed.batch, field, rows)
        for row, code, text in zip(rows.tolist(), codes, texts, strict=True):
            reasons[row] = reason_of(parsed.dialect, field, code, text)
    for row, text in zip(bad.tolist(), parsed.line_texts(bad), strict=True):
        parsed.bad.append(BadLine(block.path, block.line + row, reasons[row], text))
    # Any field will do: from here on it only says that the row is left out.
    field_of[list(unread)] = 0
    parsed.keep(np.flatnonzero(field_of < 0))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read(field: Field, column: pa.Array | Spans, seed: int) -> _Read:
    """Reads a column of a table, or a field of a text's lines."""
    lines = isinstance(column, Spans)
    if field.kind in ("texts", "weights"):
        return _lists(field, column.array() if lines else column, seed)
    if field.kind in ("text", "hex"):
        read = _keys_of_texts(field, column, seed) if lines else _keys(field, column, seed)
        return read._replace(values=without_missing(read.values, field, seed)) if field.missing else read
    values, codes, absent = _numbers_of_texts(field, column, field.decimal) if lines else _numbers(field, plain(column))
    may_be_blank = field.blank and field.kind != "integer"  # no integer stands for a missing one
    # Behind the parser, which calls a blank no number: what is missing is not malformed.
    codes[absent] = OK if may_be_blank else BLANK
    return _Read(values, codes)


def _numbers(field: Field, column: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and codes of a plain column of numbers, labels or times, and which of them are null, NaN or blank."""
    import pyarrow as pa

    kinds = pa.types
    if field.kind in ("number", "weights", "label") and not field.missing and not field.positive and _is_number(column):
        values = _floats(column)
        codes = np.where(np.isinf(values), NOT_FINITE, OK)
        absent = np.isnan(values)
        if field.kind == "label":
            codes = np.where(np.isin(values, _LABELS), OK, spans.NOT_LABEL)
    elif field.kind == "time" and is_temporal(column.type):
        zone = column.type.tz if kinds.is_timestamp(column.type) else None
        nanoseconds = kinds.is_timestamp(column.type) and column.type.unit == "ns"
        absent, codes = _nulls(column), np.full(len(column), OK)
        # Only nanoseconds may lose something; of other units what does not fit is refused.
        column = (column if nanoseconds else column.cast(pa.timestamp("us", zone))).cast(pa.int64())
        values = column.fill_null(0).to_numpy()
        # Arrow would round towards 1970: 11:59:59.9999999 of a day before it would be noon.
        values = np.where(absent, spans.NO_TIME, values // 1000 if nanoseconds else values)
    else:
        decimal = field.decimal if kinds.is_large_binary(column.type) else "."
        return _numbers_of_texts(field, _spans(column, field), decimal)
    return values, codes, absent


def _numbers_of_texts(field: Field, texts: Spans, decimal: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and codes of numbers, labels or times, and which of them are blank; ``decimal`` is numbers' mark."""
    absent = texts.starts == texts.ends
    if field.kind == "label":
        codes, values = read_labels(field, texts)
    elif field.kind == "time":
        codes, values = spans.times_of(*texts, field.unit, field.missing if field.blank else None)
    elif field.kind == "integer":
        codes, values = spans.integers_of(*texts)
    else:
        codes, values = spans.numbers_of(*texts, field.missing, decimal)
        if not field.blank and field.missing:
            codes = np.where(np.isnan(values) & (codes == OK), spans.MISSING_VALUE, codes)
    return values, codes, absent


def _is_number(column: pa.Array) -> bool:
    import pyarrow as pa

    kinds, dtype = pa.types, column.type
    return kinds.is_integer(dtype) or kinds.is_floating(dtype) or kinds.is_boolean(dtype)


def _nulls(column: pa.Array) -> np.ndarray:
    """(n,) bool."""
    return column.is_null().to_numpy(zero_copy_only=False)


def _floats(column: pa.Array) -> np.ndarray:
    """(n,) float64 of numbers or booleans, NaN where null; of float32 those that its shortest decimals are."""
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    values = as_float64(column.fill_null(0).to_numpy() if column.null_count else column.to_numpy())
    if column.null_count:
        values[_nulls(column)] = np.nan
    return values


def without_lone_blanks(offsets: np.ndarray, blank: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Makes lists of one blank empty: the elements that stay, a mask, and the lists' offsets; None where all stay.

    Args:
      offsets: (n + 1,) integers, at which lists begin and end.
      blank: By element whether it is blank.
    """
    lengths = np.diff(offsets)
    alone = lengths == 1
    alone[alone] = blank[offsets[:-1][alone]]
    if not alone.any():
        return None
    ends = np.cumsum(np.where(alone, 0, lengths), dtype=np.int64)
    return ~np.repeat(alone, lengths), np.concatenate([[0], ends])


def as_float64(values: np.ndarray) -> np.ndarray:
    """(n,) numbers as a log's text gives them: of float32, and of float16, those that its shortest decimals are.

    So 0.7 in float32 falls into the bucket of the 0.7 that preparation read, which 0.699999988, its float64, does not.
    """
    if values.dtype == np.float16:
        values = values.astype(np.float32)  # as ``plain`` has it
    if values.dtype != np.float32:
        return values.astype(np.float64)
    import pyarrow as pa

    decimals, left = _decimals(np.ascontiguousarray(values))
    if (rows := np.flatnonzero(left)).size:
        decimals[rows] = pa.array(values[rows]).cast(pa.large_string()).cast(pa.float64()).to_numpy()
    return decimals


@compiled
def _decimals(values):
    """The float64 numbers nearest to the shortest decimals that are float32 numbers.

    Returns:
      (n,) float64, and (n,) bool, of which values this does not find the decimal: very large and small ones, and those
      whose decimal lies within a rounding error of the middle between two float32 numbers, or of two decimals.
    """
    decimals = np.empty(values.shape[0], np.float64)
    left = np.zeros(values.shape[0], np.bool_)
    low, high = 1.0 - 2.0**-50, 1.0 + 2.0**-50
    for i in range(values.shape[0]):
        value = np.float64(values[i])
        size = np.abs(value)
        decimals[i] = value
        if not size <= _SHORTEST:  # or not finite
            left[i] = size < np.inf
            continue
        if np.floor(size) == size:
            continue
        left[i] = True
        # The fewest digits first: the first decimal that rounds to the number is the shortest.
        for digits in range(1, _POWERS.shape[0]):
            scaled = size * _POWERS[digits]  # exact: 24 bits times at most 28
            whole = np.floor(scaled + 0.5)
            if scaled > 1e10:
                break
            near = whole / _POWERS[digits]
            other = (whole - 1) / _POWERS[digits] * high
            if whole - scaled == 0.5 and np.float32(other) == np.float32(size):
                break
            hits = np.float32(near) == np.float32(size)
            # ``near`` is off by a rounding error of float64. Only where its neighbours within that error agree is it
            # sure which side of the border between two float32 numbers the exact decimal lies on; else Arrow prints the
            # number.
            if hits == (np.float32(near * low) == np.float32(size)) == (np.float32(near * high) == np.float32(size)):
                if not hits:
                    continue
                decimals[i] = -near if value < 0 else near
                left[i] = False
            break
    return decimals, left


def _keys(field: Field, column: pa.Array, seed: int) -> _Read:
    """Keys of one value a row; 0 where it is null."""
    import pyarrow as pa

    compute = arrow_compute()
    kinds = pa.types
    if kinds.is_dictionary(column.type) and 0 < len(column.dictionary) <= _DICTIONARY * len(column):
        return _dictionary_keys(field, column, seed)
    column = plain(column)
    if kinds.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        if _all_whole(column):
            column = column.cast(pa.int64())
    if kinds.is_integer(column.type):
        values = column.fill_null(0).to_numpy() if column.null_count else column.to_numpy()
        # Keys straight from the numbers, which need not be printed first.
        if not values.size or (int(values.min()) >= _KEY_RANGE[0] and int(values.max()) <= _KEY_RANGE[1]):
            keys = integer_keys(values.astype(np.int64))
            if column.null_count:
                keys[_nulls(column)] = MISSING
            return _Read(keys, np.full(len(keys), OK))
    texts = _spans(column, field)
    # One pass over all bytes spares the check of each text.
    ascii_only = texts.buffer.min() > 0 and texts.buffer.max() < 128
    return _keys_of_texts(field, texts, seed, ascii_only=ascii_only)


def _keys_of_texts(field: Field, texts: Spans, seed: int, *, ascii_only: bool = False) -> _Read:
    """Keys of texts; of those that are known to be ASCII without NULs nobody checks the bytes."""
    if field.kind == "hex":
        keys, valid = hex8_keys(*texts)
        return _Read(keys, np.where(valid, OK, NOT_HEX))
    codes = np.full(len(texts.starts), OK) if ascii_only else spans.check_texts(*texts)
    if field.canonical:
        texts = texts._replace(ends=canonical_ends(*texts))
    keys, long = LongTexts.among(*texts, seed)
    return _Read(keys, codes, long)


def _dictionary_keys(field: Field, column: pa.DictionaryArray, seed: int) -> _Read:
    """Keys of a column with a dictionary, of which each value is read once."""
    indices = column.indices
    places = indices.fill_null(0).to_numpy() if indices.null_count else indices.to_numpy()
    read = _keys(field, column.dictionary, seed)
    assert isinstance(read.values, np.ndarray)
    keys, codes = read.values[places], read.codes[places]
    if indices.null_count:
        nulls = _nulls(indices)
        keys[nulls], codes[nulls] = MISSING, OK
    if read.texts is None or not len(read.texts.keys):
        return _Read(keys, codes)
    # Only texts that a row of this batch has: a dictionary may be shared by many batches.
    used = np.zeros(len(read.values), np.bool_)
    used[places] = True
    return _Read(keys, codes, read.texts.take(np.flatnonzero(used[read.texts.field])))


def _all_whole(column: pa.Array) -> bool:
    """Whether floats are whole numbers that float64 counts one by one, or null."""
    values = column.fill_null(0).to_numpy() if column.null_count else column.to_numpy()
    return bool(((np.floor(values) == values) & (np.abs(values) < EXACT)).all())


def _lists(field: Field, column: pa.Array, seed: int) -> _Read:
    """Lists of keys or of numbers: of a column of lists, or of texts with separators. Null is the empty list."""
    column = plain(column)
    if is_list(column.type):
        lengths, elements = _elements(column)
    elif not field.separator:
        return _printed_lists(field, _texts(column, field).fill_null(b""), seed)
    else:
        lengths, elements = split_texts(_texts(column, field).fill_null(b""), field.separator)
    if field.kind == "texts":
        values, codes, texts = _keys(field, elements, seed)
        assert isinstance(values, np.ndarray)
        blank = values == MISSING
    else:
        values, codes, blank = _numbers(field, plain(elements))
        codes, texts = np.where(blank, NOT_NUMBER, codes), None
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (shorter := without_lone_blanks(offsets, blank)) is not None:
        kept, offsets = shorter
        values, codes = values[kept], codes[kept]
    row_codes = np.full(len(lengths), OK)
    for code in np.unique(codes[codes != OK]).tolist() if codes.any() else ():
        row_codes[any_of_list(offsets, codes == code)] = code
    lists: Column = ListColumn(offsets, values)
    if field.kind == "texts" and field.missing:
        lists = without_missing(lists, field, seed)
    return _Read(lists, row_codes, texts)


def _printed_lists(field: Field, texts: pa.Array, seed: int) -> _Read:
    """Lists from texts that hold lists as JSON or Python prints them, read as in a text file."""
    buffer, starts, ends = Spans.of(texts)
    for line_end in b"\r\n":  # of JSON that is printed in several lines; inside of quotes it has none
        buffer[buffer == line_end] = ord(" ")
    # Each comma ends an element at most, and each list has one more.
    most = len(texts) + int(np.count_nonzero(buffer == ord(",")))
    keys, weights, long_keys = np.empty(most, np.uint64), np.empty(most), np.empty((most, 2), np.uint64)
    slow, long = np.empty((most, 3), np.int64), np.empty((most, 2), np.int64)
    of_texts = field.kind == "texts"
    codes, offsets, num_slow, num_long = parse_printed_lists(
        buffer, starts, ends, of_texts, field.canonical, np.uint64(seed), keys, weights, slow, long, long_keys
    )
    if not of_texts:
        for element, start, end in slow[:num_slow].tolist():
            weights[element] = float(buffer[start:end].tobytes())
        numbers = ListColumn(offsets, weights[: offsets[-1]])
        codes[(codes == OK) & any_of_list(offsets, np.isinf(numbers.values))] = NOT_FINITE
        return _Read(numbers, codes)
    lists: Column = ListColumn(offsets, keys[: offsets[-1]])
    long, long_keys = long[:num_long], long_keys[:num_long]
    long_texts = LongTexts(long[:, 0], long_keys[:, 0], long_keys[:, 1], long[:, 0], long[:, 1], buffer)
    return _Read(without_missing(lists, field, seed) if field.missing else lists, codes, long_texts)


def _elements(lists: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """(n,) lengths of lists, 0 where they are null, and their elements."""
    compute = arrow_compute()
    return compute.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), lists.flatten()


def check_type(path: str, field: Field, dtype: pa.DataType) -> None:
    """Refuses a column whose type cannot be read as a field.

    Raises:
      DatasetError: Naming file and column.
    """
    import pyarrow as pa

    if field.kind == "skip":
        return
    own = plain_type(dtype)
    many = is_list(own)
    value = plain_type(own.value_type) if many else own
    if is_list(value):
        raise DatasetError(f"{path}: column {field.name!r} holds lists of lists; flatten them first")
    if many and field.kind not in ("texts", "weights"):
        raise DatasetError(
            f"{path}: column {field.name!r} holds lists, but the schema reads one value a row; for a categorical"
            " feature of lists set lists = true"
        )
    texts = pa.types.is_large_binary(own) or pa.types.is_null(own)
    if field.kind in ("texts", "weights") and not many and not field.separator and not texts:
        raise DatasetError(
            f"{path}: column {field.name!r} holds {dtype}, but the schema says lists = true of it; leave that out for"
            " one value a row"
        )
    if is_temporal(value) and field.kind == "integer":
        raise DatasetError(f'{path}: column {field.name!r} holds {value}; set format = "iso" in [time] of the schema')
    if not _reads(field, value):
        wanted = "texts or integers" if field.kind in ("text", "texts", "skip") else "numbers"
        raise DatasetError(
            f"{path}: column {field.name!r} holds {dtype}, which cannot be {_ROLES[field.kind]}; cast it"
            f" to {wanted}, or make columns of its parts"
        )


_ROLES = {
    "number": "a number",
    "weights": "weights",
    "label": "a label",
    "time": "a time",
    "integer": "a time of integers",
    "hex": "a category",
    "text": "a category",
    "texts": "categories",
    "skip": "a value",
}


def _reads(field: Field, dtype: pa.DataType) -> bool:
    """Whether values of a plain type can be what a field is."""
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_null(dtype) or kinds.is_integer(dtype) or kinds.is_floating(dtype) or kinds.is_decimal(dtype):
        return True
    if kinds.is_large_binary(dtype):
        return True
    if kinds.is_boolean(dtype):
        return field.kind not in ("time", "integer")
    if is_temporal(dtype):
        return field.kind in ("text", "texts", "time", "skip")
    return kinds.is_time(dtype) and field.kind in ("text", "texts", "skip")


def is_temporal(dtype: pa.DataType) -> bool:
    """Whether values of an Arrow type are dates, or dates with times."""
    import pyarrow as pa

    return pa.types.is_timestamp(dtype) or pa.types.is_date(dtype)


def is_readable(dtype: pa.DataType) -> bool:
    """Whether a column of an Arrow type can be a feature of any kind."""
    dtype = plain_type(dtype)
    return _reads(Field(name="", kind="text"), plain_type(dtype.value_type) if is_list(dtype) else dtype)


def _row_texts(batch: pa.RecordBatch | SplitLines, field: Field, rows: np.ndarray) -> list[bytes]:
    """The values of (n,) rows as texts, for messages; null is blank."""
    import pyarrow as pa

    if isinstance(batch, SplitLines):
        return batch.texts(field.name, rows)
    column = plain(batch.column(field.name))
    if not is_list(column.type):
        return _texts(column.take(pa.array(rows)), field).fill_null(b"").to_pylist()
    lengths, elements = _elements(column)
    elements, ends = plain(elements), np.cumsum(lengths, dtype=np.int64)
    lists = (elements.slice(end - length, length) for end, length in zip(ends[rows], lengths[rows], strict=True))
    return [_SEPARATOR.join(_texts(one, field).fill_null(b"").to_pylist()) for one in lists]


def split_texts(texts: pa.Array, separator: str) -> tuple[np.ndarray, pa.Array]:
    """(texts,) lengths of the lists that texts with a separator are, and their elements; "" is the empty list.

    Args:
      texts: A LargeBinaryArray without nulls.
      separator: Between elements.
    """
    import pyarrow as pa

    compute = arrow_compute()
    lists = compute.split_pattern(texts, pattern=separator.encode())
    filled = compute.binary_length(texts).to_numpy(zero_copy_only=False) > 0
    lengths = compute.list_value_length(lists).to_numpy(zero_copy_only=False) * filled
    return lengths, lists.filter(pa.array(filled)).flatten().view(pa.large_string())


def sampled(column: pa.Array) -> tuple[list[str], bool]:
    """The values of a column as texts, lists flattened, and whether it holds lists."""
    column = plain(column)
    if many := is_list(column.type):
        column = plain(column.flatten())
    texts = _texts(column, Field(name="", kind="text")).fill_null(b"").to_pylist()
    return [text.decode(errors="replace") for text in texts], many


def _spans(column: pa.Array, field: Field) -> Spans:
    """Values of a plain type as texts; null is blank."""
    texts = _texts(column, field)
    return Spans.of(texts.fill_null(b"") if texts.null_count else texts)


def _texts(column: pa.Array, field: Field) -> pa.Array:
    """Values of a plain type as texts, with nulls."""
    whole = PRINTED if field.canonical else EXACT
    return texts_of(column, number=field.kind in ("number", "weights"), whole=whole)
