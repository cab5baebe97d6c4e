"""Parquet files as lines: rows become text whose marks no value holds, and one parser reads both forms.

So what a schema says of a column (missing values, times, labels, errors that name a row) holds for both alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.data.readers import lines
from jrec.data.readers.arrow_values import DELIMITER, SEPARATOR, is_list, plain, plain_type
from jrec.data.readers.lines import Block
from jrec.data.readers.parse import Dialect, Field
from jrec.data.schema import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_HINT = ", since a text in it holds a line end or one of the characters U+001E and U+001F; replace them"
_VALUE_BYTES = 12  # about what a value takes as text
_MAX_ROWS = 1 << 16
_COPY = "download or copy it again"
_EXACT = float(1 << 53)


def is_parquet(path: str) -> bool:
    """Whether a file is Parquet, by its first bytes. False for what cannot be read."""
    try:
        with pathlib.Path(path).open("rb") as file:
            return file.read(len(lines.PARQUET)) == lines.PARQUET
    except OSError:
        return False


def column_types(path: str) -> dict[str, pa.DataType]:
    """The Arrow type of every column, by name.

    Raises:
      DatasetError: If the file is damaged, or has two columns of one name.
    """
    with opened(path) as file:
        schema = file.schema_arrow
    if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise DatasetError(f"{path}: the file has column(s) {', '.join(repeated)} more than once")
    return dict(zip(schema.names, schema.types, strict=True))


def may_be_lists(dtype: pa.DataType) -> bool:
    """Whether a column of an Arrow type has lists, or nothing but nulls."""
    import pyarrow as pa

    dtype = plain_type(dtype)
    return is_list(dtype) or pa.types.is_null(dtype)


def dialect_of(path: str, fields: list[Field]) -> Dialect:
    """How the rows of a file, as text, split into fields.

    Args:
      path: The file.
      fields: What is read of it. All are columns of the file.

    Raises:
      DatasetError: If a column's type cannot be read as its field.
    """
    types = column_types(path)
    read = tuple(_field(path, field, types[field.name]) for field in fields)
    end = Field(name="", kind="skip")  # a last field, so that no value stands before a line end
    return Dialect(fields=(*read, end), delimiter=DELIMITER, table=True, hint=_HINT)


def _field(path: str, field: Field, dtype: pa.DataType) -> Field:
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
    temporal = _is_temporal(value)
    if temporal and field.kind == "integer":
        raise DatasetError(f'{path}: column {field.name!r} holds {value}; set format = "iso" in [time] of the schema')
    if not _reads(field, value):
        wanted = "texts or integers" if field.kind in ("text", "texts", "skip") else "numbers"
        raise DatasetError(
            f"{path}: column {field.name!r} holds {dtype}, which cannot be {_ROLES[field.kind]}; cast it"
            f" to {wanted}, or make columns of its parts"
        )
    if many:
        return dataclasses.replace(field, separator=SEPARATOR)
    return dataclasses.replace(field, unit="microseconds") if temporal and field.kind == "time" else field


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
    if _is_temporal(dtype):
        return field.kind in ("text", "texts", "time", "skip")
    return kinds.is_time(dtype) and field.kind in ("text", "texts", "skip")


def _is_temporal(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_timestamp(dtype) or pa.types.is_date(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a file.

    Attributes:
      path: The file.
      line: The number of the first row, counted from 1.
      batch: The rows, of the fields' columns in order; a RecordBatch of Arrow.
      fields: What the columns are read as.
      bytes_read: How far into the file reading has come, as its share of all rows.
    """

    path: str
    line: int
    batch: pa.RecordBatch
    fields: tuple[Field, ...]
    bytes_read: int

    def block(self) -> Block:
        """The rows as lines of text; those of a text that holds a mark have too many fields.

        Raises:
          DatasetError: If values have no text, such as times in a zone that does not exist.
        """
        import pyarrow as pa
        import pyarrow.compute

        columns = []
        for column, field in zip(self.batch.columns, self.fields, strict=True):
            try:
                columns.append(_texts(column, field))
            except pa.ArrowException as error:
                raise DatasetError(
                    f"{self.path}: column {field.name!r} of {column.type} cannot be read ({_first_line(error)}) in rows"
                    f" {self.line:,} to {self.line + self.batch.num_rows - 1:,}; cast it to texts or integers"
                ) from error
        text = _joined(columns)
        marks = self.batch.num_rows * len(columns), self.batch.num_rows
        if tuple(int(np.count_nonzero(text == ord(mark))) for mark in (DELIMITER, "\n")) != marks:
            compute: Any = pyarrow.compute
            text = _joined([compute.replace_substring(column, "\n", DELIMITER) for column in columns])
        return Block(path=self.path, line=self.line, text=text, bytes_read=self.bytes_read)


def read_rows(path: str, dialect: Dialect) -> Iterator[Rows]:
    """Reads a file's rows, in pieces whose text is about a block's.

    Holds the compressed columns of one row group at most.

    Raises:
      DatasetError: If the file is damaged.
    """
    fields = tuple(field for field in dialect.fields if field.name)
    rows = max(lines.BLOCK_BYTES // (_VALUE_BYTES * len(fields)), 1)
    with opened(path) as file:
        total, size = max(file.metadata.num_rows, 1), pathlib.Path(path).stat().st_size
    done = 0
    for batch in read_batches(path, [field.name for field in fields], min(rows, _MAX_ROWS)):
        done += batch.num_rows
        yield Rows(
            path=path,
            line=done - batch.num_rows + 1,
            batch=batch,
            fields=fields,
            bytes_read=size * done // total,
        )


def read_batches(
    path: str | os.PathLike[str], names: list[str], rows: int, *, remedy: str = _COPY
) -> Iterator[pa.RecordBatch]:
    """Some columns of a Parquet file, in this order, in batches of up to ``rows`` rows.

    Args:
      path: The file.
      names: The columns; it has all of them.
      rows: The most rows of a batch.
      remedy: Ends the message about a damaged file.

    Raises:
      DatasetError: If the file is damaged, with the row group and the column.
    """
    with opened(path, remedy=remedy) as file:
        done, total = 0, file.metadata.num_rows
        try:
            for batch in file.iter_batches(rows, columns=names, use_threads=False):
                done += batch.num_rows
                yield batch.select(names)
        except _damage() as error:
            raise ValueError(f"{_first_line(error)}{_culprit(file, names, done)}") from error
        if done != total:
            raise ValueError(f"the footer counts {total:,} rows, but its columns have {done:,}")


def _culprit(file: pq.ParquetFile, names: list[str], done: int) -> str:
    """Which column of which row group, from the one after ``done`` rows on, cannot be read."""
    end = 0
    for number in range(file.num_row_groups):
        end += file.metadata.row_group(number).num_rows
        for name in names if end > done else ():
            try:
                for _ in file.iter_batches(_MAX_ROWS, row_groups=[number], columns=[name], use_threads=False):
                    pass
            except _damage():
                return f" (row group {number + 1}, column {name!r})"
    return ""


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, remedy: str = _COPY) -> Iterator[pq.ParquetFile]:
    """A Parquet file; pages are checked where its writer gave them checksums.

    Raises:
      DatasetError: If the file is damaged: in place of whatever Arrow raises here and inside.
    """
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"page_checksum_verification": True, "arrow_extensions_enabled": True}
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, **options) as file:
            rows = sum(file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
            if rows != file.metadata.num_rows:
                raise ValueError(f"the footer counts {file.metadata.num_rows:,} rows, but its row groups {rows:,}")
            yield file
    except _damage() as error:
        missing = isinstance(error, OSError) and error.errno  # what Arrow finds in a file has no number
        fault = "cannot be read" if missing else "is a damaged Parquet file"
        raise DatasetError(f"{path} {fault}: {_first_line(error)}; {remedy}") from error


def _damage() -> tuple[type[Exception], ...]:
    """What Arrow, and its Python code, raise for damaged files."""
    import pyarrow as pa

    return pa.ArrowException, OSError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _texts(column: pa.Array, field: Field) -> pa.Array:
    """A column as a LargeBinaryArray without nulls; missing values are blank.

    Raises:
      pa.ArrowException: If values have no text.
    """
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute  # whose functions exist at run time only
    column = plain(column)
    if not is_list(column.type):
        return _value_texts(column, field).fill_null(b"")
    lengths = compute.list_value_length(column).fill_null(0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]).astype(np.int64))
    values = _value_texts(plain(column.flatten()), field).fill_null(b"")
    values = compute.replace_substring(values, SEPARATOR, DELIMITER)
    mark = pa.scalar(SEPARATOR.encode(), pa.large_binary())
    return compute.binary_join(pa.LargeListArray.from_arrays(offsets, values), mark)


def _value_texts(column: pa.Array, field: Field) -> pa.Array:
    """Values of a plain type as texts, with nulls."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute
    kinds, number = pa.types, field.kind in ("number", "weights")
    if kinds.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        if not number:
            return _whole(column).cast(pa.large_binary())
    if kinds.is_boolean(column.type) and number:
        column = column.cast(pa.int8())
    if field.kind == "time" and _is_temporal(column.type):
        zone = column.type.tz if kinds.is_timestamp(column.type) else None
        nanoseconds = kinds.is_timestamp(column.type) and column.type.unit == "ns"
        # Only nanoseconds may lose something; of other units what does not fit is refused.
        column = column.cast(pa.timestamp("us", zone), safe=not nanoseconds).cast(pa.int64())
    if kinds.is_decimal(column.type):
        return compute.replace_substring_regex(column.cast(pa.large_string()), r"\.0+$", "").cast(pa.large_binary())
    if not kinds.is_large_binary(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def _whole(column: pa.Array) -> pa.Array:
    """Floats as texts, whole numbers among them as integers have them: columns of ids with gaps are often floats."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute
    whole = compute.and_(compute.equal(compute.floor(column), column), compute.less(compute.abs(column), _EXACT))
    integers = compute.if_else(whole, column, None).cast(pa.int64()).cast(pa.large_string())
    return compute.coalesce(integers, column.cast(pa.large_string()))


def _joined(columns: list[pa.Array]) -> np.ndarray:
    """Rows of texts as lines: (bytes,) uint8."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute
    ends = pa.scalar(b"\n", pa.large_binary()), pa.scalar(DELIMITER.encode(), pa.large_binary())
    joined = compute.binary_join_element_wise(*columns, *ends)
    _, places, content = joined.buffers()
    bounds = np.frombuffer(places, np.int64)[joined.offset : joined.offset + len(joined) + 1]
    return np.frombuffer(content, np.uint8)[bounds[0] : bounds[-1]]


def sample(path: str, rows: int) -> list[tuple[str, list[str], bool]]:
    """The first rows of a file's columns that can be read: name, values as texts, and whether they are of lists."""
    read = []
    types = {name: dtype for name, dtype in column_types(path).items() if _readable(dtype)}
    batch = next(read_batches(path, list(types), rows), None)
    for name, dtype in types.items():
        many, values = is_list(plain_type(dtype)), []
        if batch is not None:
            column = plain(batch.column(name))
            texts = _value_texts(plain(column.flatten()) if many else column, Field(name=name, kind="text"))
            values = [text.decode(errors="replace") for text in texts.fill_null(b"").to_pylist()]
        read.append((name, values, many))
    return read


def _readable(dtype: pa.DataType) -> bool:
    dtype = plain_type(dtype)
    return _reads(Field(name="", kind="text"), plain_type(dtype.value_type) if is_list(dtype) else dtype)
