"""Columns of a raw log that `jrec predict` copies beside the scores: the log is read once more, by its own dialect."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from jrec.app.models.predictor import Piece
from jrec.data.schema import DatasetError
from jrec.prepare.readers.lines import read_blocks
from jrec.prepare.readers.parse import Dialect
from jrec.prepare.readers.streams import is_stream
from jrec.prepare.readers.tables import column_types, is_table, read_batches

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1 << 16


class KeptColumns:
    """Columns of a log, as it writes them, in the order of its lines.

    Args:
      paths: The log's files.
      names: The columns.
      dialect: How the lines of a file that is text split.

    Raises:
      DatasetError: If a file is a pipe, which is read once, or has no such column.
    """

    def __init__(self, paths: Sequence[str], names: Sequence[str], dialect: Callable[[str], Dialect]):
        import pyarrow as pa

        self._paths, self._names, self._dialect = paths, list(dict.fromkeys(names)), dialect
        types: dict[str, pa.DataType] = {}
        for path in paths:
            if is_stream(path):
                raise DatasetError(f"--keep reads the input again, but {path} can be read only once; give files")
            of_file = column_types(path) if is_table(path) else dict.fromkeys(self._columns_of(path), pa.string())
            for name in self._names:
                if name not in of_file:
                    near = difflib.get_close_matches(name, of_file, n=1)
                    advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(of_file)[:200]}"
                    raise DatasetError(f"--keep names {name!r}, but {path} has no such column; {advice}")
                types.setdefault(name, of_file[name])
        self._schema = pa.schema(
            [(name, t.value_type if pa.types.is_dictionary(t) else t) for name, t in types.items()]
        )
        self._batches = self._read()
        self._ahead = self._schema.empty_table()

    def beside(self, table: pa.Table, piece: Piece) -> pa.Table:
        """A piece's table, with the columns of its examples after ``row``; pieces come in the order of the log.

        Raises:
          DatasetError: If the log has fewer lines than were predicted, or scores have a column of the same name.
        """
        if taken := sorted(set(self._names) & set(table.column_names)):
            raise DatasetError(
                f"--keep names {taken[0]!r}, but scores have a column of that name; rename it in the input"
            )
        kept = self._next(piece.examples).take(table["row"].combine_chunks().cast("int64").to_numpy() - piece.first)
        at = table.column_names.index("row") + 1
        for name in reversed(self._names):
            table = table.add_column(at, self._schema.field(name), kept[name])
        return table

    def finish(self) -> None:
        """Refuses a log that has more lines than were predicted."""
        if self._ahead.num_rows or any(batch.num_rows for batch in self._batches):
            raise DatasetError("--keep: the input has more lines than predictions; leave out blank lines, or --keep")

    def _next(self, count: int) -> pa.Table:
        import pyarrow as pa

        parts, rows = [self._ahead], self._ahead.num_rows
        while rows < count:
            batch = next(self._batches, None)
            if batch is None:
                raise DatasetError("--keep: the input has fewer lines than predictions; did it change meanwhile?")
            parts.append(batch)
            rows += batch.num_rows
        table = pa.concat_tables(parts)
        self._ahead = table.slice(count)
        return table.slice(0, count)

    def _read(self) -> Iterator[pa.Table]:
        import pyarrow as pa

        for path in self._paths:
            if is_table(path):
                for batch in read_batches(path, self._names, _ROWS):
                    yield pa.Table.from_batches([batch]).cast(self._schema)
            else:
                yield from map(self._table, self._lines(path))

    def _columns_of(self, path: str) -> list[str]:
        dialect = self._dialect(path)
        if dialect.libsvm:
            raise DatasetError(f"--keep names columns, but the lines of {path} are libsvm's; leave it out")
        return [field.name for field in dialect.fields]

    def _lines(self, path: str) -> Iterator[list[list[str]]]:
        """The chosen fields of a text file's lines, block by block."""
        dialect, columns = self._dialect(path), self._columns_of(path)
        places = [columns.index(name) for name in self._names]
        for block in read_blocks(path, skip_lines=dialect.skip_lines):
            lines = [
                line.removesuffix("\r") for line in block.text.decode(dialect.encoding, "replace").split("\n")[:-1]
            ]
            if dialect.quoting and len(dialect.delimiter) == 1:
                rows = csv.reader(lines, delimiter=dialect.delimiter)
            else:
                rows = (line.split(dialect.delimiter) for line in lines)
            yield [[row[place] for place in places] for row in rows if row]

    def _table(self, rows: list[list[str]]) -> pa.Table:
        import pyarrow as pa

        columns = zip(*rows, strict=True) if rows else [()] * len(self._names)
        return pa.Table.from_arrays([pa.array(column, pa.string()) for column in columns], schema=self._schema)
