"""Parquet files in record batches: checksums of pages are verified, and damage is named by row group and column."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jrec.data.schema import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

_INDEX_BYTES = 2  # a value, of a dictionary of some 30,000 texts at most: larger ones take memory for less gain
_PROBED_ROWS = 1 << 16  # of a damaged column at a time


def read_batches(path: str | os.PathLike[str], names: list[str], rows: int, *, remedy: str) -> Iterator[pa.RecordBatch]:
    """Some columns of a local file, in this order, in batches of up to ``rows`` rows.

    Args:
      path: The file.
      names: The columns; it has all of them.
      rows: The most rows of a batch.
      remedy: Ends the message about a damaged file.

    Raises:
      DatasetError: If the file is damaged; with the row group and the column.
    """
    import pyarrow as pa

    with named_damage(path, "Parquet", remedy), contextlib.closing(pa.OSFile(os.fspath(path))) as source:
        for _, batch in ParquetTable(source).batches(names, rows, ()):
            yield batch


@contextlib.contextmanager
def named_damage(path: str | os.PathLike[str], kind: str, remedy: str) -> Iterator[None]:
    """Raises a ``DatasetError`` about a damaged file in place of whatever Arrow raises inside."""
    try:
        yield
    except _damage() as error:
        missing = isinstance(error, OSError) and error.errno  # what Arrow finds in a file has no number
        fault = "cannot be read" if missing else f"is a damaged {kind} file"
        raise DatasetError(f"{path} {fault}: {_first_line(error)}; {remedy}") from error


class ParquetTable:
    """A Parquet file; pages are checked where its writer gave them checksums."""

    def __init__(self, source: str | os.PathLike[str] | pa.NativeFile):
        import pyarrow.parquet as pq

        self._open = functools.partial(
            pq.ParquetFile,
            source,
            pre_buffer=False,
            buffer_size=1 << 20,
            page_checksum_verification=True,
            arrow_extensions_enabled=True,
        )
        self._file = self._open()
        rows = sum(self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups))
        # Footers have no checksum; a wrong number of rows would end the file early without a word.
        if rows != self._file.metadata.num_rows:
            raise ValueError(f"the footer counts {self._file.metadata.num_rows:,} rows, but its row groups {rows:,}")

    @property
    def schema(self) -> pa.Schema:
        """The file's columns and their types."""
        return self._file.schema_arrow

    def batches(self, names: list[str], rows: int, categories: Sequence[str]) -> Iterator[tuple[float, pa.RecordBatch]]:
        """Batches of up to ``rows`` rows, each with the share of the file read so far.

        Args:
          names: The columns, in order.
          rows: The most rows of a batch.
          categories: Columns that may come with dictionaries.

        Raises:
          ValueError: If the file is damaged; with the row group and the column.
        """
        done, total = 0, self._file.metadata.num_rows
        if kept := [name for name in self._with_dictionary() if name in categories]:
            self._file = self._open(metadata=self._file.metadata, read_dictionary=kept)
        try:
            for batch in self._file.iter_batches(rows, columns=names, use_threads=False):
                done += batch.num_rows
                yield done / max(total, 1), batch
        except _damage() as error:
            raise ValueError(f"{_first_line(error)}{self._culprit(names, done)}") from error
        if done != total:
            raise ValueError(f"the footer counts {total:,} rows, but its columns have {done:,}")

    def _with_dictionary(self) -> list[str]:
        """Columns of texts whose pages hold few of them, by their bytes in the first row group.

        Their values are half as dear to read as a dictionary and numbers of its entries; others would be looked up.
        """
        import pyarrow as pa

        if not self._file.num_row_groups:
            return []
        group, kinds = self._file.metadata.row_group(0), pa.types
        chunks = [group.column(number) for number in range(group.num_columns)]
        few = {
            c.path_in_schema
            for c in chunks
            if c.has_dictionary_page and c.total_uncompressed_size < _INDEX_BYTES * c.num_values
        }
        return [
            f.name for f in self.schema if f.name in few and (kinds.is_string(f.type) or kinds.is_large_string(f.type))
        ]

    def _culprit(self, names: list[str], done: int) -> str:
        """Which column of which row group, from the one after ``done`` rows on, cannot be read."""
        end = 0
        for number in range(self._file.num_row_groups):
            end += self._file.metadata.row_group(number).num_rows
            for name in names if end > done else ():
                try:
                    groups, columns = [number], [name]
                    for _ in self._file.iter_batches(_PROBED_ROWS, groups, columns, use_threads=False):
                        pass
                except _damage():
                    return f" (row group {number + 1}, column {name!r})"
        return ""


def _damage() -> tuple[type[Exception], ...]:
    """What Arrow, and its Python code, raise for damaged files."""
    import pyarrow as pa

    return pa.ArrowException, OSError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
