"""The format ``csv`` with joined files: their columns become the log's, by a left join, and everything else follows."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from jrec.data.readers.delimited import Delimited
from jrec.data.readers.delimited_schema import DelimitedSchema
from jrec.data.readers.lines import check_inputs
from jrec.data.readers.parse import Dialect, ParsedBlock
from jrec.data.readers.source import Chunk
from jrec.data.readers.streams import Input, is_stream
from jrec.data.schema import DatasetError
from jrec.data.side_table import SideTable, load_side


def csv_source(schema: DelimitedSchema) -> Delimited:
    """The log that a csv schema describes."""
    return JoinedDelimited(schema) if schema.join else Delimited(schema)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JoinedChunk(Chunk):
    """Examples, and by joined file how many of them have a key that it lacks, and the first such key and its place."""

    lacking: tuple[tuple[int, str], ...]


class JoinedDelimited(Delimited):
    """A log whose lines get the columns of other files.

    A block of the log is given those columns before it is converted, so that they mean what they would in the log.
    """

    def __init__(self, schema: DelimitedSchema):
        super().__init__(schema.prejoined())
        self._whole = schema
        self._tables: tuple[SideTable, ...] = ()
        self._lacking: list[tuple[int, str]] = []
        self._rows = 0

    def options(self) -> dict[str, Any]:
        """The whole schema, with the joined files where they were read."""
        return {"schema": json.loads(json.dumps(dataclasses.asdict(self._whole)))}

    def with_joined(self, files: Mapping[str, str]) -> Self:
        """The same log with other files."""
        titles = [join.title for join in self._whole.join]
        if unknown := [name for name in files if name not in titles]:
            raise DatasetError(f"--join names {unknown[0]!r}, but the joined files are {', '.join(titles)}; name one")
        other = copy.copy(self)
        joins = (
            dataclasses.replace(j, name=j.title, file=str(pathlib.Path(files.get(j.title, j.file)).absolute()))
            for j in self._whole.join
        )
        other._whole, other._tables = dataclasses.replace(self._whole, join=tuple(joins)), ()
        return other

    def joined_inputs(self) -> list[dict[str, object]]:
        """The files with their sizes."""
        for join in self._whole.join:
            place = f"it is joined as {join.title!r}; give its place with --join {join.title}=FILE"
            try:
                check_inputs([join.file], keep_order=True)
            except DatasetError as error:
                raise DatasetError(f"{error}; {place}") from error
            if is_stream(join.file):
                raise DatasetError(f"{join.file} is a pipe, but {place}")
        return [Input(name=j.file, file=j.file).describe() | {"join": j.title} for j in self._whole.join]

    def load_joined(self, *, key_seed: int, threads: int) -> None:
        """Reads the files into memory, once."""
        if not self._tables:
            self.joined_inputs()
            self._tables = tuple(
                load_side(self._whole, join, limits=self._limits, key_seed=key_seed, threads=threads)
                for join in self._whole.join
            )

    def prejoined(self) -> Delimited:
        """The same log with those columns in it."""
        other = Delimited(self._schema).with_labels(self.labels)
        other._limits, other.dense, other.categorical = self._limits, self.dense, self.categorical
        return other

    def dialect(self, path: str) -> Dialect:
        """How the log's own lines split."""
        return Delimited(self._whole, [j.key for j in self._whole.join]).with_labels(self.labels).dialect(path)

    def convert(self, parsed: ParsedBlock) -> _JoinedChunk:
        """What the lines become with the columns of their keys.

        Raises:
          DatasetError: If a key has the hash of another one in the file.
        """
        joins = list(zip(self._whole.join, self._tables, strict=True))
        for join, table in joins:
            if join.needed:
                lacking = table.rows(parsed.numbers(join.key)) == table.missing
                reason = f"is not in {join.file}, of which feature {join.needed!r} needs a value; add the row"
                dense = join.needed in {d.feature for d in join.dense}
                parsed.reject(lacking, join.key, reason + (", or set missing for the feature" if dense else ""))
        for k, (join, table) in enumerate(joins):
            self._check_hashes(parsed, join.key, join.file, table)
            rows = table.rows(parsed.numbers(join.key))
            parsed.columns |= table.take(rows)
            parsed.columns[_rows_name(k)] = rows  # which stays beside the rows that are good
        chunk = super().convert(parsed)
        lacking = tuple(self._first_lacking(parsed, k, join.key, table) for k, (join, table) in enumerate(joins))
        return _JoinedChunk(**{f.name: getattr(chunk, f.name) for f in dataclasses.fields(chunk)}, lacking=lacking)

    @staticmethod
    def _check_hashes(parsed: ParsedBlock, key: str, file: str, table: SideTable) -> None:
        long = parsed.long_texts
        if long is None:
            return
        if (text := table.other_text(long, [f.name for f in parsed.dialect.fields].index(key))) is not None:
            raise DatasetError(
                f"{parsed.block.path}: {text.decode(errors='replace')!r} of column {key!r} has the hash of another key"
                f" of {file}; run again with another --key-seed"
            )

    @staticmethod
    def _first_lacking(parsed: ParsedBlock, k: int, key: str, table: SideTable) -> tuple[int, str]:
        lacking = np.flatnonzero(parsed.numbers(_rows_name(k)) == table.missing)
        if not len(lacking):
            return 0, ""
        row = int(lacking[0])
        line = parsed.block.line + int(parsed.places[row, 0])
        return len(lacking), f"{parsed.field_text(row, key)} at {parsed.block.path}:{line}"

    @property
    def divisible(self) -> bool:
        """No: keys that the files lack are counted over the whole log."""
        return False

    def assemble(self, converted: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks, the first with the files' long texts; counts the keys that the files lack."""
        self._lacking, self._rows = [(0, "") for _ in self._whole.join], 0
        return super().assemble(self._counted(converted))

    def _counted(self, converted: Iterator[Chunk]) -> Iterator[Chunk]:
        texts = {name: long for table in self._tables for name, long in table.texts.items()}
        for chunk in converted:
            assert isinstance(chunk, _JoinedChunk)  # convert makes these
            self._rows += len(chunk.labels)
            pairs = zip(self._lacking, chunk.lacking, strict=True)
            self._lacking = [(a + b, first or second) for (a, first), (b, second) in pairs]
            yield dataclasses.replace(chunk, texts={**chunk.texts, **texts}) if texts else chunk
            texts = {}

    def remarks(self) -> list[str]:
        """How many examples have a key that a file lacks."""
        return [
            f"{count:,} of {self._rows:,} examples ({count / self._rows:.1%}) have a {join.key!r} that {join.file}"
            f" lacks, the first {first}; what they would get of it is missing"
            for join, (count, first) in zip(self._whole.join, self._lacking, strict=True)
            if count
        ]


def _rows_name(k: int) -> str:
    """The column of a block that holds the k-th file's rows; no file's column has the name."""
    return f"\0{k}"
