"""Packing a dataset for FAE: ``jrec fae pack`` (FAE, §III-B: embedding classifier and input processor).

Pieces of the training split are read, told apart and written side by side. What is written depends
only on the dataset, the hot rows and the options, and a run that was killed goes on where it was.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data.fae import piece as fae_piece
from jrec.data.fae.manifest import COLD, HOT, FaeManifest, HotSet, check_rows, save_hot_rows
from jrec.data.fae.piece import Job, Packed, Piece
from jrec.data.fae.rows import RowSet, sealed
from jrec.data.identity import Identity, digest_of
from jrec.data.packing_kernels import permutation
from jrec.data.reorder.file import load_orders
from jrec.data.schema import DatasetError, Schema, Shard, Split, Table
from jrec.data.vocabulary_load import buckets_file
from jrec.errors import ConfigError
from jrec.outputs import link, new_folder
from jrec.progress import Progress

PIECE_BLOCKS = 64  # some hundred thousand examples: what a kill costs, and what a shuffle keeps in memory, a thread
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
    source's by content, hot ids led back to their rows, before they are written.

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
    if "train" not in schema.splits or not schema.splits["train"].examples:
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
        job = _job(folder, target, schema, rows, options)
        tables = tuple(save_hot_rows(target, t.name, t.rows, rows[t.name]) for t in schema.tables)
        pieces = fae_piece.cut_pieces(schema, PIECE_BLOCKS)
        packed = _pack_pieces(job, pieces, options.threads, progress)
        splits = {half: _split(half, packed, options.seed) for half in (HOT, COLD)}
        provenance = {"source": dict(schema.provenance), "command": command}
        cold = _finish_cold(job, splits[COLD], provenance)
        hot_schema = None
        if splits[HOT].examples:
            hot_schema = dataclasses.replace(
                job.hot_schema, splits={"train": splits[HOT]}, provenance={**provenance, "part": HOT}
            )
            hot_schema.save(target / HOT)
        else:
            shutil.rmtree(target / HOT)
        shutil.rmtree(fae_piece.journal_folder(target))
        FaeManifest(
            folder=target,
            name=schema.name,
            dataset=schema.identity,
            cold=_without_path(cold.identity),
            hot=None if hot_schema is None else _without_path(hot_schema.identity),
            tables=tables,
            hot_examples=splits[HOT].examples,
            cold_examples=splits[COLD].examples,
            content=f"{sum(p.content for p in packed) % 2**64:016x}",
            seed=options.seed,
            threshold=hot.threshold,
            calibration=hot.calibration,
            files={f"{half}/{s.file}": p.sha256[half] for p in packed for half, s in p.shards.items() if s},
        ).save()
    return FaeManifest.load(out)


def _without_path(identity: Identity) -> Identity:
    """The identity of a part of an FAE folder, which lies wherever that folder lies."""
    return dataclasses.replace(identity, path="")


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
    return {t.name: sealed(np.ascontiguousarray(hot.rows[t.name]).view()) for t in schema.tables}


def _request(schema: Schema, rows: Mapping[str, np.ndarray], options: PackOptions) -> dict[str, Any]:
    """All that the result depends on."""
    return {
        "fae": 2,
        "dataset": schema.name,
        **schema.identity.digests,
        "hot_rows": {name: hashlib.sha256(np.ascontiguousarray(r).data).hexdigest() for name, r in rows.items()},
        "seed": options.seed,
        "piece_blocks": PIECE_BLOCKS,
    }


def _job(
    folder: pathlib.Path, target: pathlib.Path, schema: Schema, rows: Mapping[str, np.ndarray], options: PackOptions
) -> Job:
    for subfolder in (HOT, COLD, fae_piece.journal_folder(target).name):
        (target / subfolder).mkdir(exist_ok=True)
    orders = load_orders(folder, schema, [t.name for t in schema.tables])
    sets = {t.name: RowSet.of(t.rows, rows[t.name], orders.get(t.name)) for t in schema.tables}
    return Job(
        source=folder,
        folder=target,
        schema=schema,
        hot_schema=_hot_schema(schema, rows, orders),
        sets=sets,
        hot_rows={t.name: None if len(rows[t.name]) == t.rows else rows[t.name] for t in schema.tables},
        orders=orders,
        seed=options.seed,
    )


def _hot_schema(schema: Schema, rows: Mapping[str, np.ndarray], orders: Mapping[str, np.ndarray]) -> Schema:
    """Tables of hot rows, with one row where there is none, and without counts: those were of all examples."""

    def hot_table(table: Table) -> Table:
        hot = rows[table.name]
        return Table(
            name=table.name,
            rows=max(len(hot), 1),
            oov_row=_place(table, hot, orders.get(table.name)),
            numbering=digest_of(["hot rows", schema.identity.rows, hashlib.sha256(hot.data).hexdigest()]),
        )

    tables = tuple(map(hot_table, schema.tables))
    return dataclasses.replace(schema, tables=tables, splits={}, ceiling={}, files={}, folder=None)


def _place(table: Table, rows: np.ndarray, order: np.ndarray | None) -> int | None:
    """Where the table's OOV row is among its hot rows, if it is one of them."""
    if table.oov_row is None:
        return None
    row = table.oov_row if order is None else int(order[table.oov_row])
    place = int(np.searchsorted(rows, row))
    return place if place < len(rows) and rows[place] == row else None


def _pack_pieces(job: Job, pieces: Sequence[Piece], threads: int, progress: Progress) -> list[Packed]:
    """Packs what no earlier run has, several pieces at a time; the result is in the order of the pieces."""
    lock, stop = threading.Lock(), threading.Event()
    done = 0

    with progress.stage("packing", sum(p.examples for p in pieces)) as advance:

        def forward(examples: int) -> None:
            nonlocal done
            with lock:
                done += examples
                advance(done)

        def work(piece: Piece) -> Packed:
            before = fae_piece.packed_before(job, piece)
            if before is not None:
                forward(piece.examples)
                return before
            return fae_piece.pack_piece(job, piece, forward, stop)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            pending = [pool.submit(work, piece) for piece in pieces]
            try:
                for future in concurrent.futures.as_completed(pending):
                    future.result()  # the first failure ends the work
                return [future.result() for future in pending]
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _split(half: str, packed: Sequence[Packed], seed: int | None) -> Split:
    shards: list[Shard] = [shard for p in packed if (shard := p.shards[half]) is not None]
    if seed is not None:
        shards = [shards[i] for i in permutation(len(shards), seed, len(packed), (HOT, COLD).index(half))]
    return Split(shards=tuple(shards))


def _finish_cold(job: Job, train: Split, provenance: Mapping[str, Any]) -> Schema:
    """Completes the dataset of the cold examples with all of the source that stays as it is; returns its schema."""
    schema, target = job.schema, job.folder / COLD
    other_splits = {name: split for name, split in schema.splits.items() if name != "train"}
    files = [shard.file for split in other_splits.values() for shard in split.shards]
    for table in schema.tables:
        files += [table.vocabulary] if table.vocabulary else []
        files += [table.bijection.file] if table.bijection else []
        files += [file] if (job.source / (file := buckets_file(table.name))).is_file() else []
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).unlink(missing_ok=True)  # of an interrupted run
        link(job.source / file, target / file)
    cold = dataclasses.replace(
        schema,
        tables=tuple(dataclasses.replace(t, counts=None) for t in schema.tables),
        splits={**({"train": train} if train.examples else {}), **other_splits},
        ceiling={name: metrics for name, metrics in schema.ceiling.items() if name != "train"},
        provenance={**provenance, "part": COLD},
        files={file: digest for file, digest in schema.files.items() if file in files},
        folder=None,
    )
    cold.save(target)
    return cold
