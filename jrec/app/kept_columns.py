"""Columns of a raw log that `jrec predict` copies beside the scores: the log is read once more, by its own dialect."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.app.models.predictor import Piece
from jrec.data.arrow_values import decoded_type
from jrec.data.schema import DatasetError
from jrec.prepare.readers.lines import read_blocks, transcoded
from jrec.prepare.readers.parse import Dialect
from jrec.prepare.readers.splitting import split
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
        types: dict[str, list[pa.DataType]] = {name: [] for name in self._names}
        for path in paths:
            if is_stream(path):
                raise DatasetError(f"--keep reads the input again, but {path} can be read only once; give files")
            of_file = column_types(path) if is_table(path) else dict.fromkeys(self._columns_of(path), pa.string())
            for name in self._names:
                if name not in of_file:
                    near = difflib.get_close_matches(name, of_file, n=1)
                    advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(of_file)[:200]}"
                    raise DatasetError(f"--keep names {name!r}, but {path} has no such column; {advice}")
                types[name].append(of_file[name])
        self._schema = pa.schema([(name, _common(name, kinds)) for name, kinds in types.items()])
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
        # By ``row``: a ranked example has several lines, one for each of its items, or none.
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
                yield from self._lines(path)

    def _columns_of(self, path: str) -> list[str]:
        dialect = self._dialect(path)
        if dialect.libsvm:
            raise DatasetError(f"--keep names columns, but the lines of {path} are libsvm's; leave it out")
        return [field.name for field in dialect.fields]

    def _lines(self, path: str) -> Iterator[pa.Table]:
        """The chosen fields of a text file's lines, block by block."""
        import pyarrow as pa

        dialect = self._dialect(path)
        # Split as predictions split them, so that a row stands beside its own score: Python's csv module would drop the
        # blank lines of a file with one column, which are examples, and refuse long fields and returns within them.
        chosen = tuple(
            dataclasses.replace(field, kind="text" if field.name in self._names else "skip") for field in dialect.fields
        )
        for block in read_blocks(path, skip_lines=dialect.skip_lines):
            lines = split(transcoded(block, dialect.encoding).text, dataclasses.replace(dialect, fields=chosen))
            every = np.arange(lines.num_rows)
            texts = {name: [x.decode(errors="replace") for x in lines.texts(name, every)] for name in self._names}
            yield pa.table({name: pa.array(texts[name], pa.string()) for name in self._names})


def _common(name: str, kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The type that a column is written as, of the types that files have it in: texts where these differ in kind.

    Raises:
      DatasetError: If they differ, and one is of lists.
    """
    import pyarrow as pa

    plain = set(map(decoded_type, kinds))
    if len(plain) > 1 and any(map(pa.types.is_nested, plain)):
        shown = " and ".join(sorted(map(str, plain)))
        raise DatasetError(f"--keep names {name!r}, which files have as {shown}; predict them one by one")
    if len(plain) > 1:  # no floats, in which large integers would be others
        return pa.int64() if all(map(pa.types.is_signed_integer, plain)) else pa.string()
    return next(iter(plain), pa.string())
