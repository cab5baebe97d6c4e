"""Packing a piece: some blocks of a source shard into a shard of hot and one of cold examples, and its journal."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data.blocks import LABEL, Column, ListColumn, ShardReader, ShardWriter, shard_file
from jrec.data.columns import concatenate
from jrec.data.fae.manifest import COLD, HOT
from jrec.data.fae.rows import RowSet, check_columns, content, hot_examples, take
from jrec.data.packing_kernels import permutation
from jrec.data.schema import DatasetError, Schema, Shard
from jrec.files import sha256_of
from jrec.outputs import write_file

_FLUSH_BLOCKS = 2  # gathered before they go to the writer, whose every call costs the same
# Examples that kernels work on at once. With 8,192 a call of a kernel takes some 20 microseconds, and threads spend as
# much time on handing each other the GIL around it.
_TOGETHER = 1 << 16
_MASK = (1 << 64) - 1
_HALVES = (HOT, COLD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A unit of work: blocks ``start`` to ``stop`` of a shard of the source.

    Attributes:
      number: Its number among ``count`` pieces, in order of time.
      shard: A shard of the source's training split.
      examples: How many examples these blocks hold.
    """

    number: int
    count: int
    shard: Shard
    start: int
    stop: int
    examples: int

    @property
    def file(self) -> str:
        """The name of the shards written from it."""
        return shard_file("train", self.number, self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """What became of a piece.

    Attributes:
      shards: The shard written for each half ("hot", "cold"), None without examples.
      sha256: The shards' SHA-256, for those that there are.
      content: Checksum of its examples' content.
    """

    shards: Mapping[str, Shard | None]
    sha256: Mapping[str, str]
    content: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What all pieces share.

    Attributes:
      source: The dataset's folder.
      folder: The folder to write into.
      schema, hot_schema: The source's schema, and that which hot examples get.
      sets: The hot rows by table.
      hot_rows: The same as ascending lists; None for tables whose rows are all hot.
      orders: The bijections, by table that has one.
      seed: The seed of the examples' order; None keeps them in order of time.
    """

    source: pathlib.Path
    folder: pathlib.Path
    schema: Schema
    hot_schema: Schema
    sets: Mapping[str, RowSet]
    hot_rows: Mapping[str, np.ndarray | None]
    orders: Mapping[str, np.ndarray]
    seed: int | None = None


def cut_pieces(schema: Schema, blocks: int) -> list[Piece]:
    """The training split in pieces of at most ``blocks`` blocks; no shard of the source shares one with another."""
    bounds = [
        (shard, start, min(start + blocks, shard.blocks))
        for shard in schema.splits["train"].shards
        for start in range(0, shard.blocks, blocks)
    ]
    size = schema.block_size
    return [
        Piece(
            number=number,
            count=len(bounds),
            shard=shard,
            start=start,
            stop=stop,
            examples=min(stop * size, shard.examples) - start * size,
        )
        for number, (shard, start, stop) in enumerate(bounds)
    ]


def pack_piece(job: Job, piece: Piece, advance: Callable[[int], None], stop: threading.Event) -> Packed:
    """Writes a piece, compares what it writes with what it read, and journals it.

    Args:
      job: What all pieces share.
      piece: The piece to pack.
      advance: Is told how many more examples were read.
      stop: When it is set, the piece is given up.

    Raises:
      DatasetError: If the source cannot be read, or what is to be written says something else.
      CancelledError: If ``stop`` was set.
    """
    writers = {name: _HalfWriter(job, piece, name) for name in _HALVES}
    total = 0
    try:
        blocks = read_blocks(job.source, job.schema, piece.shard, piece.start, piece.stop)
        for batch in itertools.batched(blocks, max(1, _TOGETHER // job.schema.block_size)):
            if stop.is_set():
                raise concurrent.futures.CancelledError
            halves, checksum = _split_blocks(job, batch)
            for name, taken in halves.items():
                writers[name].add(taken)
            total += checksum
            advance(sum(len(taken[LABEL]) for taken in halves.values()))
        shards = {name: writer.close() for name, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    digests = {name: sha256_of(job.folder / name / shard.file) for name, shard in shards.items() if shard}
    packed = Packed(shards=shards, sha256=digests, content=total & _MASK)
    _journal(job, piece, packed)
    return packed


def packed_before(job: Job, piece: Piece) -> Packed | None:
    """What the journal of an interrupted run says of a piece, if its files are as they were written."""
    try:
        entry = json.loads(_journal_file(job, piece).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shards = {name: Shard(**fields) if fields else None for name, fields in entry.pop("shards").items()}
    packed = Packed(shards=shards, **entry)
    for name, shard in packed.shards.items():
        path = job.folder / name / piece.file
        if shard and not (path.is_file() and sha256_of(path) == packed.sha256[name]):
            return None
    return packed


def journal_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder that records finished pieces until all are finished."""
    return folder / "journal"


class _HalfWriter:
    """The hot or cold examples of a piece on their way into a shard."""

    def __init__(self, job: Job, piece: Piece, name: str):
        self._path = job.folder / name / piece.file
        self._block_size = job.schema.block_size
        self._key = None if job.seed is None else (job.seed, piece.number, _HALVES.index(name))
        self._waiting: list[dict[str, Column]] = []
        self._examples = 0
        self._schema = job.schema
        self._writer: ShardWriter | None = None

    def add(self, columns: dict[str, Column]) -> None:
        self._waiting.append(columns)
        self._examples += len(columns[LABEL])
        if self._key is None and self._examples >= _FLUSH_BLOCKS * self._block_size:
            self._flush()

    def close(self) -> Shard | None:
        """The finished shard, or None if there was no example."""
        if self._examples:
            self._flush()
        if self._writer is None:
            self._path.unlink(missing_ok=True)  # of an interrupted run, whose journal said nothing
            return None
        return self._writer.close()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _flush(self) -> None:
        columns = {name: concatenate([block[name] for block in self._waiting]) for name in self._waiting[0]}
        if self._key is not None:
            columns = take(columns, permutation(self._examples, *self._key).astype(np.int64), self._schema, None)
        for name, column in columns.items():
            if isinstance(column, ListColumn):
                columns[name] = ListColumn(column.offsets.astype(np.int32), column.values)
        if self._writer is None:
            self._writer = ShardWriter(self._path, self._block_size, compress_columns=True)
        self._writer.write(columns)
        self._waiting, self._examples = [], 0


def read_blocks(
    folder: pathlib.Path, schema: Schema, shard: Shard, start: int, stop: int
) -> Iterator[tuple[str, dict[str, Column]]]:
    """Checked blocks of a shard, each with its name.

    Raises:
      DatasetError: If one cannot be read or has other columns than the schema says.
    """
    reader = ShardReader(folder, shard)
    for block in range(start, stop):
        place = f"block {block} of {reader.path}"
        columns = reader.read(block)
        check_columns(columns, schema, min(schema.block_size, shard.examples - block * schema.block_size), place)
        yield place, columns


def _split_blocks(
    job: Job, blocks: Sequence[tuple[str, dict[str, Column]]]
) -> tuple[dict[str, dict[str, Column]], int]:
    """``_split_block`` of several blocks, each with its name, at once."""
    (place, first), *more = blocks
    if not more:
        return _split_block(job, first, place)
    try:
        joined = {name: concatenate([columns[name] for _, columns in blocks]) for name in first}
        return _split_block(job, joined, f"{place} or one of the {len(more)} behind it")
    except DatasetError:
        for place, columns in blocks:
            _split_block(job, columns, place)  # names the block
        raise


def _split_block(job: Job, columns: Mapping[str, Column], place: str) -> tuple[dict[str, dict[str, Column]], int]:
    """The hot and the cold examples of a block, where there are any, and the block's checksum, which both add up to."""
    hot = hot_examples(columns, job.schema.categorical, job.sets, place)
    halves, checksum = {}, 0
    # Hot ids are led back to their rows: what is written has to say what was read.
    for name, positions, sets, rows in (
        (HOT, np.flatnonzero(hot), job.sets, job.hot_rows.get),
        (COLD, np.flatnonzero(~hot), None, job.orders.get),
    ):
        if len(positions):
            halves[name] = take(columns, positions, job.schema, sets)
            checksum += content(halves[name], job.schema, rows, place)
    expected = content(columns, job.schema, job.orders.get, place)
    if checksum & _MASK != expected:
        raise DatasetError(
            f"{place} has content {expected:016x}, but its hot and cold examples {checksum & _MASK:016x}; the memory of"
            " this machine is at fault, or there is a defect in jrec"
        )
    return halves, expected


def _journal_file(job: Job, piece: Piece) -> pathlib.Path:
    return journal_folder(job.folder) / f"{piece.number:05d}.json"


def _journal(job: Job, piece: Piece, packed: Packed) -> None:
    content: dict[str, Any] = dataclasses.asdict(packed)
    write_file(_journal_file(job, piece), json.dumps(content))
