"""The access log of a dataset: which stored rows of each table every batch of a split reads."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import DatasetError, Schema
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.progress import Progress

_QUIET = Progress(show=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How batches are read.

    Attributes:
      batch_size: Examples in a batch.
      window_blocks: 0 reads in order of time, more as training does with that ``data.window_blocks``.
      seed: The seed of training's permutations.
      limit: How many batches at most, spread evenly over the split where it has more; 0 for all.
      full: Leave a short last batch out.
      workers: Threads that read; the batches do not depend on them.
    """

    batch_size: int
    window_blocks: int = 0
    seed: int = 0
    limit: int = 0
    full: bool = False
    workers: int = 2


def stored(schema: Schema) -> Schema:
    """The schema without its bijections: a loader of it yields rows as they are stored."""
    return dataclasses.replace(schema, tables=tuple(dataclasses.replace(t, bijection=None) for t in schema.tables))


def log_layout(schema: Schema, tables: Sequence[str]) -> EmbeddingLayout:
    """A layout for reading only ids: table ``k`` is stack ``k`` by itself, so that addresses are ids."""
    return EmbeddingLayout.build(
        # Tables of different dims are never stacked.
        [TableConfig(name=name, rows=schema.table(name).rows, dim=k + 1) for k, name in enumerate(tables)],
        [
            FeatureConfig(
                name=f.name,
                table=f.table,
                max_length=f.max_length,
                weighted=f.scaled,
                fixed_length=f.fixed_length,
            )
            for f in schema.categorical
            if f.table in tables
        ],
    )


def batches(
    folder: str | os.PathLike[str],
    schema: Schema,
    split: str,
    tables: Sequence[str],
    reading: Reading,
    *,
    progress: Progress = _QUIET,
    title: str = "reading",
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the ids of every batch by table: (lookups,) int32 rows, of all features that read the table.

    Ids are those that the schema's loader yields: pass ``stored(schema)`` for the stored ones. A split of fewer
    examples than a batch is one batch.
    """
    layout = log_layout(schema, tables)
    names = {stack.tables[0].name: name for name, stack in layout.stacks.items()}
    config = LoaderConfig(
        batch_size=min(reading.batch_size, max(schema.splits[split].examples, 1) if split in schema.splits else 1),
        shuffle=reading.window_blocks > 0,
        seed=reading.seed,
        window_blocks=max(1, reading.window_blocks),
        workers=reading.workers,
        drop_remainder=reading.full,
    )
    # The loader that trains, so that a batch is what a step reads.
    with make_loader(folder, schema, layout, split, config) as loader:
        total = loader.batches_per_epoch
        count = min(reading.limit or total, total)
        picked = iter(loader) if count == total else (loader.batch(i * total // count) for i in range(count))
        with progress.stage(title, count) as advance:
            for done, batch in enumerate(itertools.islice(picked, count), 1):
                rows = {}
                for table in tables:
                    ids = np.asarray(batch.bags[names[table]].ids).reshape(-1)
                    rows[table] = ids[ids >= 0]
                yield rows
                advance(done)


def frequencies(
    folder: str | os.PathLike[str], schema: Schema, table: str, reading: Reading, *, progress: Progress = _QUIET
) -> np.ndarray:
    """(rows,) int64, how often the training split reads every stored row: the dataset's counts, or else counted now.

    Raises:
      DatasetError: If the dataset's counts cannot be read, or are of another shape than the table.
    """
    entry = schema.table(table)
    if entry.counts is not None:
        path = schema.check_file(folder, entry.counts)
        try:
            counts = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); prepare the dataset again") from error
        if counts.shape != (entry.rows,) or counts.dtype.kind not in "iu":
            raise DatasetError(
                f"{path} holds {counts.dtype}{list(counts.shape)}, but table {table!r} has {entry.rows:,} rows; prepare"
                " the dataset again"
            )
        return np.asarray(counts)
    counts = np.zeros(entry.rows, np.int64)
    for batch in batches(
        folder, stored(schema), "train", [table], reading, progress=progress, title=f"counting {table}"
    ):
        np.add.at(counts, batch[table], 1)
    return counts
