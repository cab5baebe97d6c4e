"""Synthetic datasets: ``jrec synth``. Two passes: count the items of the training split, then write all examples.

Rows are numbered by the counts, so that the dataset's rows descend by frequency exactly. Memory holds the counts, then
the row numbers, of every table (4 bytes a row) and some chunks of examples, whatever the length of the log.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from jrec import environment
from jrec.data import blocks
from jrec.data.schema import DatasetError, Schema, Shard, Split, Table
from jrec.data.vocabulary_file import file_digests
from jrec.json_values import JsonObject
from jrec.outputs import new_folder, writing
from jrec.prepare.splits import SPLITS, split_bounds
from jrec.prepare.synth import kernels
from jrec.prepare.synth.examples import ExampleGenerator, Examples
from jrec.prepare.synth.shapes import Shape
from jrec.prepare.synth.teacher import Ceiling, Teacher
from jrec.progress import Progress

T = TypeVar("T")
_BLOCK_BYTES = 8 << 20
_SHARD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """How much to make, and how.

    Attributes:
      rows: Examples in all splits together.
      seed: The same seed gives the same dataset.
      split: Fractions of the examples, in order of time, of train, valid and test.
      block_size: Examples in a block; None chooses up to 8192, so that a block stays below 8 MiB.
      drift: Whether popularity drifts from day to day.
      threads: How many examples' chunks are made at once.
      overwrite: Replace a finished dataset.
    """

    rows: int
    seed: int = 0
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)
    block_size: int | None = None
    drift: bool = True
    threads: int = dataclasses.field(default_factory=lambda: min(8, os.cpu_count() or 1))
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "block_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DatasetError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if len(self.split) != 3 or not all(0 <= f <= 1 for f in self.split) or abs(sum(self.split) - 1) > 1e-6:
            raise DatasetError(f"--split is {self.split}; give three fractions that add up to 1, like 0.8,0.1,0.1")
        if not self.bounds[0]:
            raise DatasetError(f"{self.rows} example(s) leave none to train on with --split {self.split}")

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Where train, valid and test end."""
        return split_bounds(self.rows, self.split)


def synthesize(
    shape: Shape,
    out: str | os.PathLike[str],
    options: SynthOptions,
    *,
    command: str = "",
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> Schema:
    """Makes a synthetic dataset.

    Args:
      shape: What the log is like; see ``shape_like``.
      out: The folder to make. Work is done in ``OUT.partial`` beside it, which is renamed at the end.
      options: How much, and how.
      command: What the user typed, for the provenance.
      progress: Bars to show.
      report: Takes messages for the user.

    Returns:
      The schema. Its ``ceiling`` has the teacher's own metrics on every split that has examples.

    Raises:
      DatasetError: If there is no room, or ``out`` must not be replaced; ``out`` is then as it was.
    """
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("threads", "overwrite")}
    provenance = {
        "command": command,
        "format": "synthetic",
        "like": shape.name,
        "options": {**settings, "exponent": shape.exponent, "days": shape.days, "click_rate": shape.click_rate},
        "sources": list(shape.sources),
        "jrec": environment.version("jrec"),
    }
    with new_folder(out, provenance, kind="dataset", overwrite=options.overwrite, report=report) as folder:
        source = ExampleGenerator(shape=shape, seed=options.seed, total=options.rows, drift=options.drift)
        made = _Dataset(folder, source, options, progress or Progress(show=False)).write(provenance)
        made.save(folder)
    return Schema.load(out)


class _Dataset:
    def __init__(self, folder: pathlib.Path, source: ExampleGenerator, options: SynthOptions, progress: Progress):
        self.folder, self.source, self.options, self.progress = folder, source, options, progress
        self.shape = source.shape
        self.block_size = options.block_size or default_block_size(self.shape)

    def write(self, provenance: JsonObject) -> Schema:
        counts = self._count()
        tables, self.row_of_item = [], {}
        (self.folder / "counts").mkdir()
        for name in list(counts):
            file = f"counts/{name}.npy"
            self.row_of_item[name], counted = number_rows(counts.pop(name))
            with writing(self.folder):
                save_counts(self.folder / file, counted, self.shape.rows[name])
            numbering = self._numbering(name)
            tables.append(Table(name=name, rows=self.shape.rows[name], counts=file, numbering=numbering))
        splits, ceiling = self._write_splits()
        return Schema(
            name=self.shape.name,
            block_size=self.block_size,
            dense=self.shape.dense_features,
            categorical=self.shape.categorical,
            tables=tuple(tables),
            splits=splits,
            provenance=provenance,
            ceiling=ceiling,
            files=file_digests(self.folder, tables, self.options.threads),
        )

    def _numbering(self, table: str) -> str:
        """Digest of what the items of a table are like, and which row each of them has."""
        shape = self.shape
        recipe = [shape.name, self.options.seed, self.options.drift, shape.exponent, shape.days, shape.click_rate]
        rows = self.row_of_item[table]
        digest = hashlib.sha256(json.dumps(["synthetic", recipe, table]).encode())
        digest.update(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def _count(self) -> dict[str, np.ndarray]:
        """Accesses of every item in the training split."""
        counts = {name: np.zeros(rows, np.uint32) for name, rows in self.shape.rows.items()}
        train = self.options.bounds[0]
        with self.progress.stage("counting", train) as advance:
            for stop, items in self._chunks(0, train, self.source.items):
                for synth in self.shape.features:
                    kernels.count_items(items[synth.feature.name].items, counts[synth.feature.table])
                advance(stop)
        return counts

    def _write_splits(self) -> tuple[dict[str, Split], dict[str, dict[str, float]]]:
        teacher = Teacher.calibrated(self.source)

        def make(numbers: np.ndarray) -> tuple[dict[str, blocks.Column], np.ndarray]:
            examples = self.source.examples(numbers)
            logits = teacher.logits(examples)
            return self._columns(examples, teacher.labels(examples, logits)), logits

        per_shard = max(_SHARD_BYTES // bytes_per_example(self.shape) // self.block_size, 1) * self.block_size
        splits, ceiling, start = {}, {}, 0
        with self.progress.stage("writing", self.options.rows) as advance:
            for name, stop in zip(SPLITS, self.options.bounds, strict=True):
                measured, shards = Ceiling(), []
                count = math.ceil((stop - start) / per_shard)
                for i in range(count):
                    first = start + i * per_shard
                    file = blocks.shard_file(name, i, count)
                    shards.append(self._write_shard(file, first, min(first + per_shard, stop), make, measured, advance))
                splits[name] = Split(shards=tuple(shards))
                if metrics := measured.metrics():
                    ceiling[name] = metrics
                start = stop
        return splits, ceiling

    def _write_shard(
        self, file: str, start: int, stop: int, make: Callable, measured: Ceiling, advance: Callable
    ) -> Shard:
        with blocks.ShardWriter(self.folder / file, self.block_size) as writer:
            for done, (columns, logits) in self._chunks(start, stop, make):
                measured.add(logits, columns[blocks.LABEL])
                writer.write(columns)
                advance(done)
        return writer.close()

    def _columns(self, examples: Examples, labels: np.ndarray) -> dict[str, blocks.Column]:
        columns: dict[str, blocks.Column] = {blocks.LABEL: labels}
        for j, dense in enumerate(self.shape.dense_features):
            columns[dense.name] = np.ascontiguousarray(examples.dense[:, j])
        for feature in self.shape.categorical:
            drawn = examples.items[feature.name]
            ids = self.row_of_item[feature.table][drawn.items]
            if feature.one_hot:
                columns[feature.name] = ids
                continue
            offsets = drawn.offsets.astype(np.int32)
            columns[feature.name] = blocks.ListColumn(offsets, ids)
            if name := blocks.weight_column(feature):
                columns[name] = blocks.ListColumn(offsets, drawn.weights)
        return columns

    def _chunks(self, start: int, stop: int, make: Callable[[np.ndarray], T]) -> Iterator[tuple[int, T]]:
        """(end of the chunk, what ``make`` makes of its numbers), in order, some chunks ahead."""
        bounds = [(i, min(i + self.block_size, stop)) for i in range(start, stop, self.block_size)]
        ahead = 2 * self.options.threads
        with concurrent.futures.ThreadPoolExecutor(self.options.threads) as pool:
            # Examples are functions of their numbers alone: threads may make them in any order, and they are taken in
            # theirs.
            pending = [pool.submit(make, np.arange(*b, dtype=np.int64)) for b in bounds[:ahead]]
            try:
                for i, (_, end) in enumerate(bounds):
                    made = pending.pop(0).result()
                    if i + ahead < len(bounds):
                        pending.append(pool.submit(make, np.arange(*bounds[i + ahead], dtype=np.int64)))
                    yield end, made
            finally:
                for future in pending:
                    future.cancel()


def number_rows(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the items of a table by descending count.

    Args:
      counts: (rows,) of the items.

    Returns:
      The row of every item, (rows,) of the narrowest type; and the counts of the leading rows, those above 0.
    """
    touched = np.flatnonzero(counts)
    # Only those that were accessed are sorted, of tables of which most rows never are. int64, since uint32 has no
    # negative numbers.
    touched = touched[np.argsort(-counts[touched].astype(np.int64), kind="stable")]
    rows = np.empty(len(counts), blocks.id_dtype(len(counts)))
    untouched = counts == 0
    rows[untouched] = np.arange(len(touched), len(counts), dtype=rows.dtype)
    rows[touched] = np.arange(len(touched), dtype=rows.dtype)
    return rows, counts[touched].astype(np.int64)


def save_counts(path: pathlib.Path, leading: np.ndarray, rows: int) -> None:
    """Writes (rows,) int64 counts, ``leading`` and zeros; the zeros are a hole that takes no room on the disk."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(rows,))
    array[: len(leading)] = leading
    array.flush()


def bytes_per_example(shape: Shape) -> int:
    """The most bytes an example takes in a block."""
    size = 4 + 4 * shape.dense
    for feature in shape.categorical:
        one = blocks.id_dtype(shape.rows[feature.table]).itemsize + (4 if feature.weighted else 0)
        size += one * feature.max_length + (0 if feature.one_hot else 4)
    return size


def default_block_size(shape: Shape) -> int:
    """The largest power of two up to 8192 at which a block stays below 8 MiB."""
    fitting = max(_BLOCK_BYTES // bytes_per_example(shape), 1)
    return min(8192, 1 << (fitting.bit_length() - 1))
