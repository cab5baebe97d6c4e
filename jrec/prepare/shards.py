"""The last pass of preparation: columns on disk into shards of blocks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.data import blocks
from jrec.data.columns import Column, ListColumn
from jrec.data.schema import CategoricalFeature, DenseFeature, Shard
from jrec.prepare.ingest import LABEL, dense_name, keys_name, task_name, weights_name
from jrec.prepare.spill import PlainColumn, Spill, SpilledLists
from jrec.prepare.tasks import Task, running
from jrec.progress import Advance

_READ_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRows:
    """One shard to write: rows ``start`` to ``stop`` of the log into ``file``."""

    split: str
    file: str
    start: int
    stop: int


def write_shards(
    slices: Sequence[ShardRows],
    folder: pathlib.Path,
    spill: Spill,
    ids: Mapping[str, PlainColumn],
    dense: Sequence[DenseFeature],
    categorical: Sequence[CategoricalFeature],
    *,
    beside_labels: Sequence[str] = (),
    block_size: int,
    executor: concurrent.futures.Executor,
    attempts: int,
    advance: Advance,
) -> list[Shard]:
    """Writes all shards, several at a time; returns them in order.

    Args:
      slices: The shards' rows.
      folder: The dataset.
      spill: The examples.
      ids: Row numbers by feature.
      dense, categorical: The features.
      beside_labels: The names of further labels, and of weights.
      block_size: Examples a block.
      executor: Who writes; processes among its workers see the same folders.
      attempts: How often a shard is tried.
      advance: Told the rows written.
    """
    options = {"dense": dense, "categorical": categorical, "beside_labels": beside_labels, "block_size": block_size}
    write = functools.partial(_write, folder=folder, spill=spill, ids=ids, **options)
    writes = [Task(f"writing {one.file}", write, (one,)) for one in slices]
    shards = []
    with running(executor, writes, attempts=attempts) as written:
        for one, shard in zip(slices, written, strict=True):
            shards.append(shard)
            advance(one.stop)
    return shards


def _write(
    rows: ShardRows,
    *,
    folder: pathlib.Path,
    spill: Spill,
    ids: Mapping[str, PlainColumn],
    dense: Sequence[DenseFeature],
    categorical: Sequence[CategoricalFeature],
    beside_labels: Sequence[str],
    block_size: int,
) -> Shard:
    def columns(start: int, stop: int) -> dict[str, Column]:
        read: dict[str, Column] = {blocks.LABEL: spill.plain(LABEL).read(start, stop)}
        for name in beside_labels:
            read[name] = spill.plain(task_name(name)).read(start, stop)
        for feature in dense:
            read[feature.name] = spill.plain(dense_name(feature.name)).read(start, stop)
        for feature in categorical:
            keys = spill.columns[keys_name(feature.name)]
            if not isinstance(keys, SpilledLists):
                read[feature.name] = ids[feature.name].read(start, stop)
                continue
            ends = keys.ends.read(start, stop + 1)
            offsets = (ends - ends[0]).astype(np.int32)
            read[feature.name] = ListColumn(offsets, ids[feature.name].read(int(ends[0]), int(ends[-1])))
            if weights := blocks.weight_column(feature):
                values = spill.columns[weights_name(feature.name)]
                assert isinstance(values, SpilledLists)
                read[weights] = ListColumn(offsets, values.read(start, stop).values)
        return read

    # Whole blocks, so that the writer keeps nothing back from one piece to the next.
    step = max(_READ_ROWS // block_size, 1) * block_size
    with blocks.ShardWriter(folder / rows.file, block_size) as writer:
        for start in range(rows.start, rows.stop, step):
            writer.write(columns(start, min(start + step, rows.stop)))
        return writer.close()
