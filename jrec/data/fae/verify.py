"""Reads a packed folder whole and compares it with what packing found in the source."""

from __future__ import annotations

import os

from jrec.data.blocks import ShardReader
from jrec.data.fae.examples import content, read_blocks
from jrec.data.fae.manifest import FaeManifest
from jrec.data.reorder.file import load_orders
from jrec.data.schema import DatasetError
from jrec.progress import Progress

_SILENT = Progress(show=False)


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
