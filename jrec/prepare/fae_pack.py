"""Packing a dataset for FAE: ``jrec fae pack`` (FAE, §III-B: embedding classifier and input processor).

Pieces of the training split are read, split into hot and cold examples and written side by side. What is written
depends only on the dataset, the hot rows and the options, and a run that was killed goes on where it was.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.data.bijection import inverse, load_order, load_orders
from jrec.data.blocks import LABEL, ShardReader, ShardWriter, shard_file
from jrec.data.columns import Column, concatenate, gather
from jrec.data.fae.examples import content, hot_examples, read_blocks, row_set
from jrec.data.fae.manifest import COLD, HOT, FaeManifest, HotSet, check_rows, save_hot_rows
from jrec.data.identity import Identity
from jrec.data.packing_kernels import permutation
from jrec.data.schema import DatasetError, Schema, Shard, Split
from jrec.data.vocabulary_file import buckets_file
from jrec.errors import ConfigError
from jrec.json_values import JsonMapping, JsonObject
from jrec.outputs import link, new_folder, write_file
from jrec.prepare.tasks import Task, running
from jrec.progress import Progress

PIECE_BLOCKS = 64  # some hundred thousand examples: what a kill costs, and what a shuffle keeps in memory, a thread
_TOGETHER = 1 << 16  # examples worked on at once: with 8,192, threads wait for the GIL as long as they work
_HALVES = (HOT, COLD)
_JOURNAL = "journal"
_SILENT = Progress(show=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How to pack.

    Attributes:
      seed: Shuffles the examples of each piece (some hundred thousand that follow each other in time) and the order of
        the pieces; None keeps the order of time within hot and within cold examples.
      threads: How many threads read and write; nothing that is written depends on them.
      overwrite: Whether a finished FAE folder may be replaced.
    """

    seed: int | None = None
    threads: int = dataclasses.field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed is {self.seed}; it must be at least 0 and below 2^63")


def pack(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    hot: HotSet,
    options: PackOptions | None = None,
    *,
    command: str = "",
    progress: Progress = _SILENT,
    report: Callable[[str], None] = lambda message: None,
) -> FaeManifest:
    """Packs a dataset for FAE.

    Work is done in ``OUT.partial``, which is renamed at the end. The examples of every block are compared with the
    source's by content before they are written.

    Args:
      folder: The dataset.
      out: The folder to make.
      hot: Its hot rows.
      options: how.
      command: What the user typed, for the provenance.
      progress: Shows how far it is.
      report: Takes messages for the user.

    Returns:
      What was written.

    Raises:
      DatasetError: If the dataset cannot be used, an id lies past its table, ``out`` must not be replaced, or an
        interrupted run with other hot rows or options is in the way.
      ValueError: If hot rows are no ascending uint32 list of rows of their table.
    """
    options = options or PackOptions()
    folder, out = pathlib.Path(folder), pathlib.Path(out)
    schema = Schema.load(folder)
    schema.check_labels()
    schema.check_numbered("`jrec fae pack` looks for examples that read only rows chosen before training")
    if not schema.with_examples(["train"]):
        raise DatasetError(f"{folder} has no training examples to pack; prepare it with another --split")
    rows = _checked_rows(schema, hot)
    with new_folder(
        out,
        _request(schema, rows, options),
        kind="FAE folder",
        overwrite=options.overwrite,
        resume=True,
        inputs=[folder],
        report=report,
    ) as target:
        for subfolder in (*_HALVES, _JOURNAL):
            (target / subfolder).mkdir(exist_ok=True)
        sets = _row_sets(folder, schema, rows)
        job = _Job(source=folder, folder=target, schema=schema, sets=sets, seed=options.seed)
        packed = _pack_pieces(job, _pieces(schema), options.threads, progress)
        hot_split, cold_split = (_split(half, packed, options.seed) for half in _HALVES)
        other_splits = {name: split for name, split in schema.splits.items() if name != "train"}
        provenance = {"source": dict(schema.provenance), "command": command}
        for name in (_JOURNAL, *([] if hot_split.examples else [HOT])):
            shutil.rmtree(target / name)
        FaeManifest(
            folder=target,
            name=schema.name,
            dataset=schema.identity,
            hot=_finish(job, HOT, hot_split, {}, provenance) if hot_split.examples else None,
            cold=_finish(job, COLD, cold_split, other_splits, provenance),
            tables=tuple(save_hot_rows(target, t.name, t.rows, rows[t.name]) for t in schema.tables),
            hot_examples=hot_split.examples,
            cold_examples=cold_split.examples,
            content=f"{sum(p.content for p in packed) % 2**64:016x}",
            seed=options.seed,
            threshold=hot.threshold,
            calibration=hot.calibration,
        ).save()
    return FaeManifest.load(out)


def verify(folder: str | os.PathLike[str], *, progress: Progress = _SILENT) -> FaeManifest:
    """Reads all that training reads of an FAE folder, and checks that it holds each of the source's examples once.

    Raises:
      DatasetError: Naming the file that is missing or damaged, or if the content is another.
    """
    manifest = FaeManifest.load(folder)
    _ = manifest.hot_rows
    halves = [(manifest.cold_folder, manifest.cold_schema), (manifest.hot_folder, manifest.hot_schema)]
    total, done = 0, 0
    with progress.stage("verifying", manifest.hot_examples + manifest.cold_examples) as advance:
        for half, schema in halves:
            if schema is None or "train" not in schema.splits:
                continue
            load_orders(half, schema, [t.name for t in schema.tables])
            for shard in schema.splits["train"].shards:
                reader = ShardReader(half, shard)
                total += sum(content(read_blocks(reader, schema, k, k + 1), schema) for k in range(shard.blocks))
                done += shard.examples
                advance(done)
    if f"{total % 2**64:016x}" != manifest.content:
        raise DatasetError(
            f"{folder} holds other examples than the dataset that was packed: their content is {total % 2**64:016x},"
            f" not {manifest.content}; pack the dataset anew with `jrec fae pack`"
        )
    return manifest


def _checked_rows(schema: Schema, hot: HotSet) -> dict[str, np.ndarray]:
    if hot.dataset is not None:
        remedy = "calibrate this dataset with `jrec fae calibrate`"
        hot.dataset.check(schema.identity, subject="the hot rows", remedy=remedy, error=DatasetError)
    names = {t.name for t in schema.tables}
    if odd := sorted(names ^ set(hot.rows)):
        raise DatasetError(
            f"hot rows of table(s) {', '.join(odd)} do not go with dataset {schema.name!r}: each of its tables needs a"
            " list, and no other has one; calibrate this dataset with `jrec fae calibrate`"
        )
    for table in schema.tables:
        check_rows(table.name, table.rows, hot.rows[table.name])
    return {t.name: np.ascontiguousarray(hot.rows[t.name]) for t in schema.tables}


def _request(schema: Schema, rows: Mapping[str, np.ndarray], options: PackOptions) -> JsonObject:
    """All that the result depends on."""
    return {
        "fae": 3,
        "dataset": schema.name,
        **schema.identity.digests,
        "hot_rows": {name: hashlib.sha256(r.data).hexdigest() for name, r in rows.items()},
        "seed": options.seed,
        "piece_blocks": PIECE_BLOCKS,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What all pieces share: the dataset, the folder to write into, hot rows by table (``row_set``), the seed."""

    source: pathlib.Path
    folder: pathlib.Path
    schema: Schema
    sets: Mapping[str, np.ndarray]
    seed: int | None


def _row_sets(folder: pathlib.Path, schema: Schema, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The hot rows as examples name them: as they are stored."""
    sets = {}
    for table in schema.tables:
        hot, order = rows[table.name], load_order(folder, table)
        # Hot rows are numbered as the loader yields them, examples as they are stored.
        sets[table.name] = row_set(table, hot if order is None else inverse(order)[hot])
    return sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """A unit of work: blocks ``start`` to ``stop`` of a shard of the source's training split, written as ``file``."""

    number: int
    file: str
    shard: Shard
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packed:
    """What became of a piece: the shards written, by half that has examples; the checksum of its content."""

    shards: Mapping[str, Shard]
    content: int


def _pieces(schema: Schema) -> list[_Piece]:
    """The training split in order of time; no shard of the source shares a piece with another."""
    bounds = [
        (shard, start, min(start + PIECE_BLOCKS, shard.blocks))
        for shard in schema.splits["train"].shards
        for start in range(0, shard.blocks, PIECE_BLOCKS)
    ]
    return [
        _Piece(number=number, file=shard_file("train", number, len(bounds)), shard=shard, start=start, stop=stop)
        for number, (shard, start, stop) in enumerate(bounds)
    ]


def _pack_pieces(job: _Job, pieces: Sequence[_Piece], threads: int, progress: Progress) -> list[_Packed]:
    """Packs what no earlier run has, several pieces at a time; the result is in the order of the pieces."""
    tasks = [Task(f"packing {piece.file}", _pack_piece, (job, piece)) for piece in pieces]
    packed, done = [], 0
    with (
        progress.stage("packing", job.schema.splits["train"].examples) as advance,
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
        running(pool, tasks, attempts=1) as results,
    ):
        for one in results:
            packed.append(one)
            done += sum(shard.examples for shard in one.shards.values())
            advance(done)
    return packed


def _pack_piece(job: _Job, piece: _Piece) -> _Packed:
    """Writes a piece and journals it; or finds it in the journal of an interrupted run, with its shards."""
    journal = job.folder / _JOURNAL / f"{piece.number:05d}.json"
    if (before := _packed_before(job, journal)) is not None:
        return before
    with contextlib.ExitStack() as stack:
        writers = {half: stack.enter_context(_writer(job, piece, half)) for half in _HALVES}
        checksum = _write(job, piece, writers)
    shards = {half: writer.close() for half, writer in writers.items()}
    for half in (half for half in _HALVES if not shards[half].examples):
        writers[half].path.unlink()
        del shards[half]
    packed = _Packed(shards=shards, content=checksum)
    # Behind its shards, which are whole when they have their names: a piece that is in the journal is done.
    write_file(journal, json.dumps(dataclasses.asdict(packed)))
    return packed


def _writer(job: _Job, piece: _Piece, half: str) -> ShardWriter:
    return ShardWriter(job.folder / half / piece.file, job.schema.block_size, compress_columns=True)


def _packed_before(job: _Job, journal: pathlib.Path) -> _Packed | None:
    """What the journal says of a piece, if its shards can be read."""
    try:
        entry = json.loads(journal.read_text(encoding="utf-8"))
        shards = {half: Shard(**fields) for half, fields in entry["shards"].items()}
        for reader in (ShardReader(job.folder / half, shard) for half, shard in shards.items()):
            for block in range(len(reader)):
                reader.read(block)
    except (OSError, ValueError, DatasetError):
        return None
    return _Packed(shards=shards, content=entry["content"])


def _write(job: _Job, piece: _Piece, writers: Mapping[str, ShardWriter]) -> int:
    """Writes the hot and the cold examples of a piece; returns the checksum of its content."""
    waiting: dict[str, list[dict[str, Column]]] = {half: [] for half in _HALVES}
    total = 0
    for halves, checksum in _halves(job, piece):
        total += checksum
        for half, columns in halves.items():
            if job.seed is None:
                writers[half].write(columns)
            else:
                waiting[half].append(columns)
    for number, (half, parts) in enumerate(waiting.items()):
        if parts:
            key, size = (job.seed or 0, piece.number, number), sum(len(part[LABEL]) for part in parts)
            order = permutation(size, *key).astype(np.int64)
            # Column by column, so that memory holds little more than the piece.
            names = list(parts[0])
            columns = {name: gather(concatenate([part.pop(name) for part in parts]), order) for name in names}
            writers[half].write(columns)
    return total % 2**64


def _halves(job: _Job, piece: _Piece) -> Iterator[tuple[dict[str, dict[str, Column]], int]]:
    """The hot and the cold examples of some blocks at a time, and the checksum of their content."""
    reader = ShardReader(job.source, piece.shard)
    step = max(1, _TOGETHER // job.schema.block_size)
    for start in range(piece.start, piece.stop, step):
        columns = read_blocks(reader, job.schema, start, min(start + step, piece.stop))
        hot = hot_examples(columns, job.schema, job.sets)
        expected, halves = content(columns, job.schema), {}
        for half, positions in ((HOT, np.flatnonzero(hot)), (COLD, np.flatnonzero(~hot))):
            halves[half] = {name: gather(column, positions) for name, column in columns.items()}
        # A sum of hashes, the same in any order: it sees examples that are lost, there twice, or changed.
        of_halves = sum(content(half, job.schema) for half in halves.values()) % 2**64
        if of_halves != expected:
            raise DatasetError(
                f"block {start} of {reader.path}, or one of the {step - 1} behind it, has content {expected:016x}, but"
                f" its hot and cold examples {of_halves:016x}; the memory of this machine is at fault, or there is a"
                " defect in jrec"
            )
        yield halves, expected


def _split(half: str, packed: Sequence[_Packed], seed: int | None) -> Split:
    shards = [p.shards[half] for p in packed if half in p.shards]
    if seed is not None:
        shards = [shards[i] for i in permutation(len(shards), seed, len(packed), _HALVES.index(half))]
    return Split(shards=tuple(shards))


def _finish(job: _Job, half: str, train: Split, splits: Mapping[str, Split], provenance: JsonMapping) -> Identity:
    """Completes a half with all of the source that stays as it is; returns its identity."""
    schema, folder = job.schema, job.folder / half
    splits = {**({"train": train} if train.examples else {}), **splits}
    files = [shard.file for name, split in splits.items() if name != "train" for shard in split.shards]
    files += schema.statistic_files
    for table in schema.tables:
        files += [file for file in (table.vocabulary, table.bijection and table.bijection.file) if file]
        files += [file] if (job.source / (file := buckets_file(table.name))).is_file() else []
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an interrupted run
        link(job.source / file, path)
    schema = dataclasses.replace(
        schema,
        tables=tuple(dataclasses.replace(t, counts=None) for t in schema.tables),
        splits=splits,
        ceiling={name: schema.ceiling[name] for name in schema.ceiling if name in splits and name != "train"},
        provenance={**provenance, "part": half},
        files={file: digest for file, digest in schema.files.items() if file in files},
        folder=None,
    )
    schema.save(folder)
    return schema.identity
