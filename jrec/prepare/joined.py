"""The format ``csv`` with joined files: their columns become the log's, by a left join, and everything else follows.

Joined files are held in memory: 8 bytes a number or value, 24 to 56 a row, and the texts of 8 bytes or more.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from jrec.data.columns import Column, ListColumn, concatenate, gather_all
from jrec.data.keys import MISSING, decode_keys, is_text
from jrec.data.long_texts import LongTexts
from jrec.data.schema import DatasetError, DenseFeature
from jrec.data.vocabulary import Vocabulary
from jrec.json_values import JsonObject
from jrec.prepare.ingest import BadLines, Log
from jrec.prepare.readers import places
from jrec.prepare.readers.delimited import Delimited, with_given_histories
from jrec.prepare.readers.delimited_schema import DelimitedSchema, Join
from jrec.prepare.readers.lines import check_inputs
from jrec.prepare.readers.log_format import Chunk
from jrec.prepare.readers.parse import Dialect, ParsedBlock
from jrec.prepare.readers.streams import Input, is_stream

_ROW_BYTES = 64  # at most, beside its values: the key, its place in a hash table, and the line while it is read
_NO_TEXTS = LongTexts(*(np.empty(0, t) for t in (np.int64, np.uint64, np.uint64, np.int64, np.int64, np.uint8)))


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

    def options(self) -> JsonObject:
        """The whole schema, with the joined files where they were read, and which are histories of the same lines."""
        return self._stored(self._whole)

    def predicted(self) -> Self:
        """The same log with its histories as columns."""
        other = super().predicted()
        other._whole = with_given_histories(self._whole)
        return other

    def with_joined(self, files: Mapping[str, str]) -> Self:
        """The same log with other files."""
        titles = [join.title for join in self._whole.join]
        if unknown := [name for name in files if name not in titles]:
            raise DatasetError(f"--join names {unknown[0]!r}, but the joined files are {', '.join(titles)}; name one")
        other = copy.copy(self)
        joins = (
            dataclasses.replace(j, name=j.title, file=places.absolute(files.get(j.title, j.file)))
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
                load_side(
                    self._whole,
                    join,
                    limits=self._limits,
                    key_seed=key_seed,
                    threads=threads,
                    predicted={f.name: f for f in self.dense} if self._predicted else None,
                )
                for join in self._whole.join
            )

    def prejoined(self) -> Delimited:
        """The same log with those columns in it."""
        other = Delimited(self._schema).with_labels(self.labels)
        other._limits, other.dense, other.categorical = self._limits, self.dense, self.categorical
        other._predicted, other.steps = self._predicted, self.steps
        return other

    def dialect(self, path: str) -> Dialect:
        """How the log's own lines split."""
        own = Delimited(self._whole, [j.key for j in self._whole.join]).with_labels(self.labels)
        known = {feature.name: feature for feature in self.dense}
        own.dense, own._predicted = tuple(known[feature.name] for feature in own.dense), self._predicted
        own.histories = self.histories
        return own.dialect(path)

    def convert(self, parsed: ParsedBlock) -> _JoinedChunk:
        """What the lines become with the columns of their keys.

        Raises:
          DatasetError: If a key has the hash of another one in the file.
        """
        joins = list(zip(self._whole.join, self._tables, strict=True))
        for join, table in joins:
            if join.needed and not self._predicted:
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
        line = parsed.block.line + int(parsed.lines[row])
        return len(lacking), f"{parsed.field_texts(lacking[:1], key)[0]} at {parsed.block.path}:{line}"

    @property
    def divisible(self) -> bool:
        """No: keys that the files lack are counted over the whole log."""
        return False

    def assemble(self, converted: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks, the first with the files' long texts; counts the keys that the files lack."""
        self._lacking, self._rows = [(0, "") for _ in self._whole.join], 0
        return super().assemble(self._counted(converted))

    def _counted(self, converted: Iterator[Chunk]) -> Iterator[Chunk]:
        # With the first chunk: the vocabulary needs each of the file's long texts once, and a store asks for a chunk.
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


class SideTable:
    """The rows of a joined file by key.

    Attributes:
      missing: The row that keys without one have: NaN, the missing value, empty lists.
      texts: By feature, the texts whose keys are hashes.
    """

    def __init__(self, columns: dict[str, Column], keys: np.ndarray, texts: dict[str, LongTexts], long: LongTexts):
        self.missing = len(keys)
        self.texts = texts
        self._columns = columns
        # The row of missing values takes the place of the OOV row, which every key without one of its own gets.
        self._row_of = Vocabulary(np.append(keys, MISSING), self.missing).encoder()
        self._fingerprints = None
        if len(long.keys):
            self._fingerprints = np.zeros(self.missing + 1, np.uint64)
            self._fingerprints[self._row_of(long.keys)] = long.fingerprints

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """(n,) uint32, where (n,) uint64 keys stand; ``missing`` where they do not."""
        return self._row_of(keys)

    def take(self, rows: np.ndarray) -> dict[str, Column]:
        """The columns at (n,) rows, called as ``Join.by_feature`` says."""
        return gather_all(self._columns, rows)

    def other_text(self, long: LongTexts, field: int) -> bytes | None:
        """The first text of a field that is not the key of the file that has its hash; None where there is none."""
        if self._fingerprints is None:
            return None
        rows = self._row_of(np.ascontiguousarray(long.keys))
        clash = (long.field == field) & (rows != self.missing) & (self._fingerprints[rows] != long.fingerprints)
        if not clash.any():
            return None
        k = int(clash.argmax())
        return long.buffer[long.starts[k] : long.ends[k]].tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of the file: columns by the file's own names, (rows,) int64 lines, and the long texts by column."""

    columns: dict[str, Column]
    lines: np.ndarray
    texts: dict[str, LongTexts]

    @property
    def bytes(self) -> int:
        columns = (part for c in self.columns.values() for part in (c if isinstance(c, ListColumn) else (c,)))
        texts = (array for long in self.texts.values() for array in long)
        return sum(array.nbytes for array in (*columns, *texts)) + _ROW_BYTES * len(self.lines)


class _SideFile(Delimited):
    """A joined file as a log of which no examples are made."""

    def convert(self, parsed: ParsedBlock) -> _Piece:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The block's rows, rejecting those whose key is missing or whose values cannot be features."""
        (key,) = self._keys
        parsed.reject(parsed.numbers(key) == MISSING, key, "is a missing value, which no line of the log is joined by")
        self.check(parsed)
        return _Piece(
            # Copies: an array may be a view of a record batch, which would stay in memory as a whole.
            columns={n: c.copy() if isinstance(c, np.ndarray) else c for n, c in parsed.columns.items()},
            lines=parsed.lines + parsed.block.line,
            texts=_texts_by_column(parsed),
        )


def load_side(
    schema: DelimitedSchema,
    join: Join,
    *,
    limits: Mapping[str, int],
    key_seed: int,
    threads: int,
    predicted: Mapping[str, DenseFeature] | None = None,
) -> SideTable:
    """Reads a joined file.

    Args:
      schema: The log's schema.
      join: One of its joins.
      limits: The longest lists of an earlier dataset, by feature, for lists whose schema says none.
      key_seed: The seed of the hash of long values.
      threads: Threads that parse.
      predicted: The dataset's dense features by name, for a log that is only predicted.

    Raises:
      DatasetError: If the file cannot be read or is malformed, a key is there twice, or memory would not hold it;
        names file, line and value.
    """
    source = _SideFile(schema.side(join), [join.own_key]).limited(limits).with_labels("none")
    if predicted is not None:
        source = source.fitted(predicted, {}).predicted()
    log = Log(source, [Input(name=join.file, file=join.file)], key_seed=key_seed, threads=threads)
    bad = BadLines(pathlib.Path(os.devnull), skip=False)
    bad.remedy = "Fix the line of the joined file, or take it out"
    pieces: list[_Piece] = []
    done = held = 0

    def advance(read: float) -> None:
        nonlocal done
        done = read

    for piece in log.converted(advance, bad):
        pieces.append(piece)
        held += piece.bytes
        # By the share read so far, so that a file that cannot fit is refused at its beginning, not by the system's
        # killer.
        _check_memory(join, int(held * log.bytes / done) if done else held)
    if not sum(len(piece.lines) for piece in pieces):
        raise DatasetError(f"{join.file} has no line but its header; give the file to join as --join {join.title}=FILE")
    return _joined(pieces, join)


def _joined(pieces: list[_Piece], join: Join) -> SideTable:
    """One table of all rows; takes the pieces apart, so that memory holds one column twice at most."""
    texts = {
        name: LongTexts.joined([_NO_TEXTS, *(p.texts[name] for p in pieces if name in p.texts)])
        for name in pieces[0].columns
    }
    keys, lines = (np.concatenate(arrays) for arrays in zip(*((_key(p, join), p.lines) for p in pieces), strict=True))
    _check_once(keys, lines, texts[join.own_key], join)
    columns: dict[str, Column] = {}
    for own, name in join.by_feature.items():
        parts = [p.columns.pop(own) if own != join.own_key else p.columns[own] for p in pieces]
        columns[name] = _with_missing(parts)
    kept = {name: texts[own] for own, name in join.by_feature.items() if len(texts[own].keys)}
    return SideTable(columns, keys, kept, texts[join.own_key])


def _key(piece: _Piece, join: Join) -> np.ndarray:
    keys = piece.columns[join.own_key]
    assert isinstance(keys, np.ndarray)
    return keys


def _with_missing(parts: Sequence[Column]) -> Column:
    """All rows of a column, and the row of missing values."""
    first = parts[0]
    if isinstance(first, ListColumn):
        return concatenate([*parts, ListColumn(np.zeros(2, np.int64), first.values[:0])])
    missing = np.nan if first.dtype.kind == "f" else MISSING
    return concatenate([*parts, np.array([missing], first.dtype)])


def _check_once(keys: np.ndarray, lines: np.ndarray, long: LongTexts, join: Join) -> None:
    order = np.argsort(keys, kind="stable")
    again = order[1:][keys[order[1:]] == keys[order[:-1]]]
    if not len(again):
        return
    second = int(again.min())
    first = int(np.flatnonzero(keys == keys[second])[0])
    raise DatasetError(
        f"{join.file}:{lines[second]}: column {join.own_key!r} holds {_text_of(keys[second], long)!r}, as line"
        f" {lines[first]} does; a joined file has one row a key, so take one of them out"
    )


def _text_of(key: np.uint64, long: LongTexts) -> str:
    if is_text(np.array([key]))[0]:
        k = int((long.keys == key).argmax())
        text = long.buffer[long.starts[k] : long.ends[k]]
    else:
        text = decode_keys(np.array([key], np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8))[1]
    return text.tobytes().decode(errors="replace")


def _texts_by_column(parsed: ParsedBlock) -> dict[str, LongTexts]:
    """A block's long texts by column, each once, apart from the block's other text."""
    long = parsed.long_texts
    if long is None:
        return {}
    by_column = {}
    for index in np.unique(long.field).tolist():
        own = np.flatnonzero(long.field == index)
        pairs = np.stack([long.keys[own], long.fingerprints[own]], 1)
        own = own[np.unique(pairs, axis=0, return_index=True)[1]]
        texts = [long.buffer[a:b] for a, b in zip(long.starts[own].tolist(), long.ends[own].tolist(), strict=True)]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        starts = ends - [len(text) for text in texts]
        by_column[parsed.dialect.fields[index].name] = LongTexts(
            long.field[own], long.keys[own], long.fingerprints[own], starts, ends, np.concatenate(texts)
        )
    return by_column


def _check_memory(join: Join, needed: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise DatasetError(
            f"{join.file} takes about {needed:,} bytes of memory as a joined file, but this machine has {memory:,};"
            f" leave columns out of join {join.title!r}, or join it to the log before"
        )
