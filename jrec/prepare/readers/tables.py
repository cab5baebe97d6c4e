"""Tables in files, Parquet, Arrow's own (IPC files and streams, Feather) and JSON lines, in record batches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jrec.data.arrow_values import is_list
from jrec.data.parquet import ParquetTable, named_damage
from jrec.data.schema import DatasetError
from jrec.prepare.readers import lines, places
from jrec.prepare.readers.columnar import Rows, is_readable, sampled
from jrec.prepare.readers.json_lines import Bad, JsonLines, is_json_lines
from jrec.prepare.readers.parse import Dialect

if TYPE_CHECKING:
    import pyarrow as pa

_VALUE_BYTES = 12  # about what a value takes as text
_BLOCKS = 4  # so many text blocks' values make a batch: what every column of a batch costs is then small
_MAX_ROWS = 1 << 16
_COPY = "download or copy it again"
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def is_table(path: str) -> bool:
    """Whether a file is a table, by its first bytes: Parquet, Arrow, JSON lines. False for what cannot be read."""
    return places.begins_with(path, 8).startswith(lines.TABLES) or is_json_lines(path)


def column_types(path: str) -> dict[str, pa.DataType]:
    """The Arrow type of every column, by name; of those that folders name (``day=3/``), too, which are texts.

    Raises:
      DatasetError: If the file is damaged, or has two columns of one name.
    """
    import pyarrow as pa

    with opened(path) as table:
        names, types = table.schema.names, table.schema.types
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"{path}: the file has column(s) {', '.join(repeated)} more than once")
    return dict.fromkeys(partition(path), pa.string()) | dict(zip(names, types, strict=True))


def read_rows(path: str, dialect: Dialect) -> Iterator[Rows]:
    """Reads the rows of a file, in pieces.

    Holds a row group's compressed columns at most, or a record batch of an Arrow file.

    Raises:
      DatasetError: If the file is damaged.
    """
    names = [field.name for field in dialect.fields if field.kind != "skip"]
    rows = max(_BLOCKS * lines.BLOCK_BYTES // (_VALUE_BYTES * max(len(names), 1)), 1)
    size, line = places.size_of(path), 1
    categories = [field.name for field in dialect.fields if field.kind == "text"]
    for share, batch, bad in _batches(path, names, min(rows, _MAX_ROWS), _COPY, categories):
        yield Rows(path=path, line=line, batch=batch, bytes_read=int(size * share), bad=bad)
        line += batch.num_rows


def read_batches(
    path: str | os.PathLike[str], names: list[str], rows: int, *, remedy: str = _COPY
) -> Iterator[pa.RecordBatch]:
    """Some columns of a file, in this order, in batches of up to ``rows`` rows.

    Args:
      path: The file.
      names: The columns; it has all of them.
      rows: The most rows of a batch.
      remedy: Ends the message about a damaged file.

    Raises:
      DatasetError: If the file is damaged; of Parquet, with the row group and the column, of JSON lines with the line.
    """
    line = 1
    for _, batch, bad in _batches(path, names, rows, remedy):
        for row, (reason, _) in bad.items():
            raise DatasetError(f"{path}:{line + row}: {reason}; fix the line, or leave it out")
        yield batch
        line += batch.num_rows


def _batches(
    path: str | os.PathLike[str], names: Sequence[str], rows: int, remedy: str, categories: Sequence[str] = ()
) -> Iterator[tuple[float, pa.RecordBatch, Bad]]:
    """The batches, with the share of the file read so far and bad rows; ``categories`` may come with dictionaries."""
    import pyarrow as pa

    with opened(path, remedy=remedy) as table:
        own = set(table.schema.names)
        of_folders = {name: value for name, value in partition(str(path)).items() if name not in own}
        for share, batch, *bad in table.batches([name for name in names if name in own], rows, categories):
            columns = [
                batch.column(name) if name in own else _repeated(of_folders[name], batch.num_rows) for name in names
            ]
            yield share, pa.RecordBatch.from_arrays(columns, list(names)), bad[0] if bad else {}


def partition(path: str) -> dict[str, str | None]:
    """The columns that a file's folders name, as Hive and Spark do (``day=3/hour=12/``), with their texts."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    path = places.path_of(path)
    folder = path.rpartition("/")[0]
    names = [part.partition("=")[0] for part in folder.split("/") if "=" in part.strip("=")]
    if not names:
        return {}
    schema = pa.schema([(name, pa.string()) for name in names])
    partitioning = ds.HivePartitioning(schema, null_fallback=_NULL_PARTITION, segment_encoding="uri")
    return dict.fromkeys(names) | ds.get_partition_keys(partitioning.parse(path))


def _repeated(text: str | None, rows: int) -> pa.Array:
    import pyarrow as pa

    if text is None:
        return pa.nulls(rows, pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([text]))


class _Table(Protocol):
    @property
    def schema(self) -> pa.Schema: ...

    def batches(
        self, names: list[str], rows: int, categories: Sequence[str]
    ) -> Iterator[tuple[float, pa.RecordBatch] | tuple[float, pa.RecordBatch, Bad]]: ...


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, remedy: str = _COPY) -> Iterator[_Table]:
    """Opens a table.

    Raises:
      DatasetError: If the file is damaged: in place of whatever Arrow raises here and inside.
    """
    if not places.begins_with(os.fspath(path), 8).startswith(lines.TABLES):
        yield JsonLines(os.fspath(path))
        return
    kind = "Arrow" if places.begins_with(os.fspath(path), 8).startswith(lines.ARROW) else "Parquet"
    with named_damage(path, kind, remedy), contextlib.closing(_source(os.fspath(path))) as source:
        yield ParquetTable(source) if kind == "Parquet" else _Arrow(source)


def _source(path: str) -> pa.NativeFile:
    import pyarrow as pa

    return places.open_file(path) if places.is_remote(path) else pa.OSFile(path)


class _Arrow:
    """An Arrow IPC file or stream. No checksum covers it; what does not make arrays is noticed."""

    def __init__(self, source: pa.NativeFile):
        import pyarrow as pa

        self._source = source
        self._is_file = source.read(len(lines.ARROW_FILE)) == lines.ARROW_FILE
        source.seek(0)
        reader = pa.ipc.open_file(source) if self._is_file else pa.ipc.open_stream(source)
        self.schema: pa.Schema = reader.schema

    def batches(self, names: list[str], rows: int, categories: Sequence[str]) -> Iterator[tuple[float, pa.RecordBatch]]:
        del categories  # a file's dictionaries are its own
        for share, whole in self._whole([self.schema.get_field_index(name) for name in names]):
            whole.validate(full=True)
            for start in range(0, whole.num_rows, rows):
                yield share, whole.slice(start, rows)

    def _whole(self, columns: list[int]) -> Iterator[tuple[float, pa.RecordBatch]]:
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        self._source.seek(0)
        if self._is_file:
            file = pa.ipc.open_file(self._source, options=options)
            for number in range(file.num_record_batches):
                yield (number + 1) / file.num_record_batches, file.get_batch(number)
            return
        size = self._source.size()
        for batch in pa.ipc.open_stream(self._source, options=options):
            yield self._source.tell() / size, batch


def unreadable(path: str) -> dict[str, str]:
    """A file's columns that no feature can be made of, by name: their type, and what can be done about it."""
    types = {name: dtype for name, dtype in column_types(path).items() if not is_readable(dtype)}
    return {
        name: f"it holds {str(dtype)[:60]}, which jrec does not read; {_cure(dtype)}" for name, dtype in types.items()
    }


def _cure(dtype: pa.DataType) -> str:
    """How values of a type that jrec does not read become such that it does."""
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_duration(dtype):
        return "cast it to integers"
    if kinds.is_struct(dtype):
        return f"make columns of its parts ({', '.join(dtype.names)[:60]})"
    if kinds.is_map(dtype):
        return "make a column of each key that matters, or lists of its keys"
    if is_list(dtype):
        return "make lists of texts or numbers of it"
    return "cast it to texts or integers"


def sample(path: str, rows: int) -> list[tuple[str, list[str], bool]]:
    """The first rows of a file's own columns that can be read: name, values as texts, and whether they are of lists."""
    import pyarrow as pa

    with opened(path) as table:
        own = table.schema.names
    types = {name: dtype for name, dtype in column_types(path).items() if name in own and is_readable(dtype)}
    batch = next(read_batches(path, list(types), rows), None)
    columns = batch.columns if batch is not None else [pa.nulls(0, dtype) for dtype in types.values()]
    return [(name, *sampled(column)) for name, column in zip(types, columns, strict=True)]
