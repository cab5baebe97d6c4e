"""Arrow streams of anybody: no larger in memory than a body may be, whatever they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pyarrow as pa
import pyarrow.compute
from flatbuffers import encode, packer
from flatbuffers.table import Table

from jrec.errors import JrecError

_compute: ModuleType = pyarrow.compute  # whose functions exist at run time only
_kinds = pa.types
_TEXTS = (_kinds.is_string, _kinds.is_large_string, _kinds.is_binary, _kinds.is_large_binary)
_VALUES = (
    *(_kinds.is_null, _kinds.is_boolean, _kinds.is_integer, _kinds.is_floating, _kinds.is_decimal),
    *(_kinds.is_date, _kinds.is_timestamp, *_TEXTS),
)
_LISTS = (_kinds.is_list, _kinds.is_large_list, _kinds.is_fixed_size_list)
# Places in the vtables of Arrow's Message.fbs: Message's header_type and header, RecordBatch's compression,
# DictionaryBatch's data.
_HEADER_TYPE, _HEADER, _COMPRESSION, _DATA = 6, 8, 10, 6
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


class UnreadableError(JrecError):
    """An Arrow stream that would take much more memory than it has bytes, or of types that no feature has."""


def table_of(content: bytes, *, limit: int, check_count: Callable[[int], None]) -> pa.Table:
    """The table of a stream: valid, without dictionaries.

    Args:
      content: The stream.
      limit: The most values of a column, and bytes of its texts.
      check_count: Takes the number of rows before anything of that length is made; may raise.

    Raises:
      pa.ArrowException: If it is not a stream, or is damaged.
      UnreadableError: If it is compressed, or a column has a type that no feature has, or is larger than ``limit``.
    """
    if any(_is_compressed(message.metadata.to_pybytes()) for message in pa.ipc.MessageReader.open_stream(content)):
        raise UnreadableError("the Arrow stream is compressed; send its buffers as they are")
    batches, count = [], 0
    with pa.ipc.open_stream(content) as reader:
        for batch in reader:
            count += batch.num_rows
            check_count(count)
            # Offsets and indices may point anywhere until this has read them all.
            batch.validate(full=True)
            batches.append(batch)
        table = pa.Table.from_batches(batches, reader.schema)
    columns = zip(table.column_names, table.columns, strict=True)
    return pa.table([_plain(name, column, limit) for name, column in columns], table.column_names)


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message says that its buffers are compressed, which could be to any length."""
    message = Table(metadata, encode.Get(packer.uoffset, metadata, 0))
    kind = metadata[message.Pos + message.Offset(_HEADER_TYPE)]
    header = _table_at(message, _HEADER)
    if kind == _DICTIONARY_BATCH:
        header = _table_at(header, _DATA)
    return kind in (_DICTIONARY_BATCH, _RECORD_BATCH) and header.Offset(_COMPRESSION) != 0


def _table_at(table: Table, place: int) -> Table:
    return Table(table.Bytes, table.Indirect(table.Pos + table.Offset(place)))


def _plain(name: str, column: pa.ChunkedArray, limit: int) -> pa.ChunkedArray:
    dtype = column.type
    if _kinds.is_dictionary(dtype) and _is_any(dtype.value_type, _VALUES):
        if _is_any(dtype.value_type, _TEXTS):
            _check_size(name, sum(_bytes_of_texts(chunk) for chunk in column.chunks), limit)
        return column.cast(dtype.value_type)
    values = dtype.value_type if _is_any(dtype, _LISTS) else dtype
    if not _is_any(values, _VALUES):
        raise UnreadableError(f"column {name!r} holds {dtype}; send numbers, texts, times, or lists of them")
    if values is not dtype:
        _check_size(name, sum(len(chunk.values) for chunk in column.chunks), limit)
    return column


def _bytes_of_texts(chunk: pa.DictionaryArray) -> int:
    """How many bytes the texts of a dictionary array have, each as often as it is there."""
    return _compute.sum(_compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0


def _is_any(dtype: pa.DataType, tests: tuple[Callable[[pa.DataType], bool], ...]) -> bool:
    return any(test(dtype) for test in tests)


def _check_size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise UnreadableError(f"column {name!r} holds {size:,} values or bytes, but at most {limit:,} may be")
