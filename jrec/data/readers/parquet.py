"""Parquet files as lines: rows become text whose marks no value holds, and one parser reads both forms.

So what a schema says of a column (missing values, times, labels, errors that name a row) holds for both alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrec.data.readers import lines
from jrec.data.readers.lines import Block
from jrec.data.readers.parse import Dialect, Field
from jrec.data.schema import DatasetError

DELIMITER, SEPARATOR = "\x1f", "\x1e"  # ASCII's unit and record separators
_HINT = ", since a text in it holds a line end or one of the characters U+001E and U+001F; replace them"
_VALUE_BYTES = 12  # about what a value takes as text
_MAX_ROWS = 1 << 16
_EXACT = float(1 << 53)


def is_parquet(path: str) -> bool:
    """Whether a file is Parquet, by its first bytes. False for what cannot be read."""
    try:
        with pathlib.Path(path).open("rb") as file:
            return file.read(len(lines.PARQUET)) == lines.PARQUET
    except OSError:
        return False


def column_types(path: str) -> dict[str, Any]:
    """The Arrow type of every column, by name.

    Raises:
      DatasetError: If the file is damaged, or has two columns of one name.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
    if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise DatasetError(f"{path}: the file has column(s) {', '.join(repeated)} more than once")
    return dict(zip(schema.names, schema.types, strict=True))


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


def _field(path: str, field: Field, dtype: Any) -> Field:
    import pyarrow as pa

    kinds, many = pa.types, _is_list(dtype)
    while _is_list(dtype):
        dtype = dtype.value_type
        if _is_list(dtype):
            raise DatasetError(f"{path}: column {field.name!r} holds lists of lists; flatten them first")
    if kinds.is_dictionary(dtype):
        dtype = dtype.value_type
    if kinds.is_nested(dtype):
        raise DatasetError(f"{path}: column {field.name!r} holds {dtype}, which is no value; make columns of its parts")
    temporal = kinds.is_timestamp(dtype) or kinds.is_date(dtype)
    if temporal and field.kind == "integer":
        raise DatasetError(f'{path}: column {field.name!r} holds {dtype}; set format = "iso" in [time] of the schema')
    if not many:
        return dataclasses.replace(field, unit="microseconds") if temporal and field.kind == "time" else field
    if field.kind not in ("texts", "weights"):
        raise DatasetError(
            f"{path}: column {field.name!r} holds lists, but the schema reads one value a row; for a categorical"
            " feature of lists set lists = true"
        )
    return dataclasses.replace(field, separator=SEPARATOR)


def _is_list(dtype: Any) -> bool:
    import pyarrow as pa

    kinds = pa.types
    return kinds.is_list(dtype) or kinds.is_large_list(dtype) or kinds.is_fixed_size_list(dtype)


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
    batch: Any
    fields: tuple[Field, ...]
    bytes_read: int

    def block(self) -> Block:
        """The rows as lines of text; those of a text that holds a mark have too many fields."""
        import pyarrow.compute

        columns = [_texts(column, field) for column, field in zip(self.batch.columns, self.fields, strict=True)]
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
    with _opened(path) as file:
        total, size = max(file.metadata.num_rows, 1), pathlib.Path(path).stat().st_size
        done = 0
        batches = file.iter_batches(min(rows, _MAX_ROWS), columns=[field.name for field in fields], use_threads=False)
        for batch in batches:
            done += batch.num_rows
            yield Rows(
                path=path,
                line=done - batch.num_rows + 1,
                batch=batch.select([field.name for field in fields]),
                fields=fields,
                bytes_read=size * done // total,
            )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        fault = str(error).splitlines()[0]
        raise DatasetError(f"{path} is a damaged Parquet file: {fault}; download or copy it again") from error


def _texts(column: Any, field: Field) -> Any:
    """A column as a LargeBinaryArray without nulls; missing values are blank."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute  # whose functions exist at run time only
    if not _is_list(column.type):
        return _plain(column, field).fill_null(b"")
    lengths = compute.list_value_length(column).fill_null(0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]).astype(np.int64))
    values = _plain(column.flatten(), field).fill_null(b"")
    values = compute.replace_substring(values, SEPARATOR, DELIMITER)
    mark = pa.scalar(SEPARATOR.encode(), pa.large_binary())
    return compute.binary_join(pa.LargeListArray.from_arrays(offsets, values), mark)


def _plain(column: Any, field: Field) -> Any:
    """Values as texts, with nulls."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute
    kinds, number = pa.types, field.kind in ("number", "weights")
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        if not number:
            return _whole(column).cast(pa.large_binary())
    if kinds.is_boolean(column.type) and number:
        column = column.cast(pa.int8())
    if field.kind == "time" and (kinds.is_timestamp(column.type) or kinds.is_date(column.type)):
        zone = column.type.tz if kinds.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    if not (kinds.is_binary(column.type) or kinds.is_large_binary(column.type)):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def _whole(column: Any) -> Any:
    """Floats as texts, whole numbers among them as integers have them: columns of ids with gaps are often floats."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute
    column = column.cast(pa.float64()) if pa.types.is_float16(column.type) else column
    whole = compute.and_(compute.equal(compute.floor(column), column), compute.less(compute.abs(column), _EXACT))
    integers = compute.if_else(whole, column, None).cast(pa.int64()).cast(pa.large_string())
    return compute.coalesce(integers, column.cast(pa.large_string()))


def _joined(columns: list[Any]) -> np.ndarray:
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
    with _opened(path) as file:
        batch = next(file.iter_batches(rows, columns=list(types), use_threads=False), None)
        if batch is None:
            return [(name, [], _is_list(dtype)) for name, dtype in types.items()]
        for name, dtype in types.items():
            many = _is_list(dtype)
            column = batch.column(name).flatten() if many else batch.column(name)
            texts = _plain(column, Field(name=name, kind="text")).fill_null(b"")
            read.append((name, [text.decode(errors="replace") for text in texts.to_pylist()], many))
    return read


def _readable(dtype: Any) -> bool:
    import pyarrow as pa

    dtype = dtype.value_type if _is_list(dtype) else dtype
    return not pa.types.is_nested(dtype)
