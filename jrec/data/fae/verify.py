"""Reads a packed folder whole and compares it with what packing found in the source."""

from __future__ import annotations

import os

from jrec.data.fae import FaeManifest
from jrec.data.fae.piece import read_blocks
from jrec.data.fae.rows import content
from jrec.data.reorder.file import load_orders
from jrec.data.schema import DatasetError
from jrec.progress import Progress

_SILENT = Progress(show=False)


def verify(folder: str | os.PathLike[str], *, progress: Progress = _SILENT) -> FaeManifest:
    """Checks every file of an FAE folder, and that it holds each of the source's examples once.

    Raises:
      DatasetError: Naming the file that is missing or damaged, or if the content is another.
    """
    manifest = FaeManifest.load(folder)
    manifest.verify_files()
    hot, cold = manifest.hot_schema, manifest.cold_schema
    orders = load_orders(manifest.cold_folder, cold, [t.name for t in cold.tables])
    # Where all rows of a table are hot, rows are their own numbers.
    rows = {t.name: None if t.whole else manifest.hot_rows[t.name] for t in manifest.tables}
    halves = [(manifest.cold_folder, cold, orders.get)]
    halves += [] if hot is None else [(manifest.hot_folder, hot, rows.get)]
    total, done = 0, 0
    with progress.stage("verifying", manifest.hot_examples + manifest.cold_examples) as advance:
        for half_folder, schema, rows_of in halves:
            for shard in schema.splits["train"].shards if "train" in schema.splits else ():
                for place, columns in read_blocks(half_folder, schema, shard, 0, shard.blocks):
                    total += content(columns, schema, rows_of, place)
                done += shard.examples
                advance(done)
    if f"{total % 2**64:016x}" != manifest.content:
        raise DatasetError(
            f"{folder} holds other examples than the dataset that was packed: their content is {total % 2**64:016x},"
            f" not {manifest.content}; pack the dataset anew with `jrec fae pack`"
        )
    return manifest
