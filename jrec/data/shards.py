"""The last pass of preparation: columns on disk into shards of blocks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data import blocks
from jrec.data.ingest import LABEL, dense_name, keys_name, weights_name
from jrec.data.schema import CategoricalFeature, DenseFeature, Shard
from jrec.data.spill import ListColumn, PlainColumn, Spill
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
    block_size: int,
    threads: int,
    advance: Advance,
) -> list[Shard]:
    """Writes all shards, several at a time; returns them in order."""
    done, lock = 0, threading.Lock()
    step = max(_READ_ROWS // block_size, 1) * block_size

    def write(shard_rows: ShardRows) -> Shard:
        nonlocal done
        writer = blocks.ShardWriter(folder / shard_rows.file, block_size)
        with writer:
            for start in range(shard_rows.start, shard_rows.stop, step):
                stop = min(start + step, shard_rows.stop)
                writer.write(_columns(spill, ids, dense, categorical, start, stop))
                with lock:
                    done += stop - start
                    advance(done)
            return writer.close()

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        pending = [pool.submit(write, shard_rows) for shard_rows in slices]
        try:
            return [future.result() for future in pending]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _columns(
    spill: Spill,
    ids: Mapping[str, PlainColumn],
    dense: Sequence[DenseFeature],
    categorical: Sequence[CategoricalFeature],
    start: int,
    stop: int,
) -> dict[str, Any]:
    columns: dict[str, Any] = {blocks.LABEL: spill.plain(LABEL).read(start, stop)}
    for feature in dense:
        columns[feature.name] = spill.plain(dense_name(feature.name)).read(start, stop)
    for feature in categorical:
        keys = spill.columns[keys_name(feature.name)]
        if not isinstance(keys, ListColumn):
            columns[feature.name] = ids[feature.name].read(start, stop)
            continue
        ends = keys.ends.read(start, stop + 1)
        offsets = (ends - ends[0]).astype(np.int32)
        columns[feature.name] = blocks.ListColumn(offsets, ids[feature.name].read(int(ends[0]), int(ends[-1])))
        weights = blocks.weight_column(feature)
        if weights:
            values = spill.columns[weights_name(feature.name)]
            assert isinstance(values, ListColumn)
            columns[weights] = blocks.ListColumn(offsets, values.read(start, stop).values)
    return columns
