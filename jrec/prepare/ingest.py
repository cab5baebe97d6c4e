"""The first pass of preparation: files through the parser into the spill, bad lines aside."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrec.data.columns import Column, gather_all
from jrec.data.schema import DatasetError
from jrec.data.texts import TextStore
from jrec.prepare.readers.columnar import Rows, parse_rows, rows_of_lines
from jrec.prepare.readers.lines import Block, count_lines, read_blocks, transcoded
from jrec.prepare.readers.log_format import Chunk, LogFormat, has_label
from jrec.prepare.readers.parse import BadLine, Dialect, sort_bad_lines
from jrec.prepare.readers.streams import Input
from jrec.prepare.readers.tables import read_rows
from jrec.prepare.spill import Spill
from jrec.progress import Advance

LABEL, TIME = "label", "time"
BAD_LINES_FILE = "bad_lines.tsv"
BAD_LINE_REMEDY = "Fix the line, or pass --on-bad-line skip to leave such lines out"


def dense_name(feature: str) -> str:
    """The spill's column of a dense feature."""
    return f"dense/{feature}"


def keys_name(feature: str) -> str:
    """The spill's column of a categorical feature."""
    return f"keys/{feature}"


def task_name(task: str) -> str:
    """The spill's column of a further label, or of examples' weights."""
    return f"task/{task}"


def label_name(source: LogFormat, task: str) -> str:
    """The spill's column of a label; of the first, or the only one, where ``task`` is ""."""
    return LABEL if task in ("", *source.tasks[:1]) else task_name(task)


def weights_name(feature: str) -> str:
    """The spill's column of a feature's weights."""
    return f"weights/{feature}"


class BadLines:
    """What to do with bad lines: raise at the first, saying ``remedy``, or count them and write them aside."""

    def __init__(self, path: pathlib.Path, skip: bool):
        self.count = 0
        self.remedy = BAD_LINE_REMEDY
        self._path = path
        self.skip = skip
        self.first: BadLine | None = None

    def take(self, lines: list[BadLine]) -> None:
        """Handles the bad lines of one block.

        Raises:
          DatasetError: Unless bad lines are to be skipped.
        """
        for bad in sort_bad_lines(lines):
            if not self.skip:
                raise DatasetError(f"{bad.path}:{bad.line}: {bad.reason}. {self.remedy}")
            self.first = self.first or bad
            self.count += 1
            with self._path.open("ab") as file:
                if self.count == 1:
                    file.write(b"file\tline\treason\ttext\n")
                # The text comes last in its line and is not changed: it may hold tabs, and is the line as it stood.
                reason = bad.reason.replace("\t", " ").replace("\r", " ").replace("\n", " ")
                file.write(f"{bad.path}\t{bad.line}\t{reason}\t".encode() + bad.text + b"\n")


class Log:
    """All files of a log in one format, to be iterated as often as needed."""

    def __init__(self, source: LogFormat, inputs: Sequence[Input], *, key_seed: int, threads: int):
        self._source = source
        self._inputs = inputs
        self._key_seed = key_seed
        self._threads = threads
        self._dialects: list[Dialect] = []
        self._last: Block | None = None
        source.load_joined(key_seed=key_seed, threads=threads)
        for one in inputs:
            if not one.bytes:
                raise DatasetError(f"{one.name} is empty; leave it out, or download or copy it again")
            with one.errors_by_name():
                self._dialects.append(source.dialect(one.file))
        self.bytes = sum(one.bytes for one in inputs)

    @property
    def lines(self) -> int:
        """How many lines of the last text file were read."""
        return 0 if self._last is None else self._last.line - 1 + count_lines(self._last.text)

    @property
    def labelled(self) -> bool:
        """Whether every file has labels, as all files of most formats do; of several labels, one is enough."""
        label = self._source.label
        names = self._source.task_fields or (label,)
        return label is None or all(any(has_label(d, name) for name in names if name) for d in self._dialects)

    def converted(self, advance: Advance, bad: BadLines | None) -> Iterator[Any]:
        """What the log's format makes of every block, in the order of the files; parses in several threads.

        Args:
          advance: Told the bytes read.
          bad: Takes bad lines; None ignores them, for a first look.
        """
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            pending: collections.deque[tuple[int, concurrent.futures.Future]] = collections.deque()
            try:
                for done, dialect, block in self._blocks():
                    pending.append((done + block.bytes_read, pool.submit(self._parse, dialect, block)))
                    # Taken in the order of the files, whichever block is parsed first: the dataset does not depend on
                    # the threads, and memory holds one block more than there are threads.
                    if len(pending) > self._threads:
                        yield self._take(pending, advance, bad)
                while pending:
                    yield self._take(pending, advance, bad)
            finally:
                for _, future in pending:
                    future.cancel()

    def _blocks(self):
        done = 0
        for one, dialect in zip(self._inputs, self._dialects, strict=True):
            with one.errors_by_name():
                blocks: Iterator[Block | Rows]
                blocks = (
                    read_rows(one.file, dialect)
                    if dialect.table
                    else read_blocks(one.file, skip_lines=dialect.skip_lines, start=one.start, stop=one.stop)
                )
                for block in blocks:
                    if isinstance(block, Block):
                        self._last = block = transcoded(block, dialect.encoding)
                    yield done, dialect, dataclasses.replace(block, path=one.name)
            done += one.bytes

    def _parse(self, dialect: Dialect, block: Block | Rows) -> tuple[Any, list[BadLine]]:
        rows = rows_of_lines(block, dialect) if isinstance(block, Block) else block
        parsed = parse_rows(rows, dialect, self._key_seed)
        converted = self._source.convert(parsed)
        return converted, parsed.bad

    @staticmethod
    def _take(pending: collections.deque, advance: Advance, bad: BadLines | None) -> Any:
        done, future = pending.popleft()
        converted, lines = future.result()
        if bad is not None:
            bad.take(lines)
        advance(done)
        return converted


def new_spill(source: LogFormat, folder: pathlib.Path) -> Spill:
    """An empty spill for the examples of a log."""
    plain: dict[str, np.dtype] = {LABEL: np.dtype(np.float32)} | {
        dense_name(d.name): np.dtype(np.float64 if d.unfitted else np.float32)
        for d in source.dense
        if not any(d.name in mean.features for mean in source.target_means)
    }
    plain |= {task_name(task): np.dtype(np.float32) for task in source.beside_labels}
    lists: dict[str, np.dtype] = {}
    for spec in source.categorical:
        if spec.name in source.histories:
            continue
        (lists if spec.many else plain)[keys_name(spec.name)] = np.dtype(np.float64 if spec.unfitted else np.uint64)
        if spec.weighted:
            lists[weights_name(spec.name)] = np.dtype(np.float32)
    if source.timed:
        plain[TIME] = np.dtype(np.int64)
    return Spill(folder, plain, lists)


def fill_spill(source: LogFormat, chunks: Iterator[Chunk], spill: Spill, texts: dict[str, TextStore]) -> bool:
    """Appends every chunk as a run sorted by time; returns whether the runs are in order already."""
    latest, ordered = np.iinfo(np.int64).min, True
    table_of = {spec.name: spec.table for spec in source.categorical}
    for chunk in chunks:
        for feature, new_texts in chunk.texts.items():
            texts[table_of[feature]].add(new_texts)
        if not len(chunk.labels):
            continue
        columns: dict[str, Column] = {LABEL: chunk.labels}
        columns |= {task_name(n): c for n, c in chunk.tasks.items()}
        columns |= {dense_name(n): c for n, c in chunk.dense.items()}
        columns |= {keys_name(n): c for n, c in chunk.keys.items()}
        columns |= {weights_name(n): c for n, c in chunk.weights.items()}
        if chunk.times is not None:
            columns[TIME] = chunk.times
            if (np.diff(chunk.times) < 0).any():
                # Each chunk becomes a run that is sorted by itself, which merging relies on; lines of one moment keep
                # their order.
                columns = gather_all(columns, np.argsort(chunk.times, kind="stable"))
            times = columns[TIME]
            assert isinstance(times, np.ndarray)
            # Most logs are in order of time, or nearly so: then nothing has to be merged.
            ordered &= bool(times[0] >= latest)
            latest = max(latest, times[-1])
        spill.append(columns)
    spill.finish()
    return ordered
