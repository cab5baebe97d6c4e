"""What a reordering does for tensor-train tables: the unique prefixes that a batch's rows share.

A tensor-train table of d cores whose last has m slices computes one product of the first d - 1 cores for each distinct
``row // m`` of a batch (its *prefix*), however many rows share it. So the fewer prefixes, the less work.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jrec.data.schema import Schema
from jrec.ops.tt.shape import TTShape
from jrec.prepare.reorder.log import Reading, batches, stored
from jrec.progress import Progress

_QUIET = Progress(show=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """One table's mean unique prefixes of a batch, in each of several orders of its rows.

    Attributes:
      table: Its name.
      split, batch_size, window_blocks: What was read and how; 0 window blocks is the order of time.
      batches: How many.
      rows_per_prefix: Slices of the last core.
      unique_rows: Mean distinct rows of a batch, the least that any order could need with one row a prefix.
      prefixes: The unique prefixes, by the order's name.
    """

    table: str
    split: str
    batch_size: int
    window_blocks: int
    batches: int
    rows_per_prefix: int
    unique_rows: float
    prefixes: Mapping[str, float]


def rows_per_prefix(rows: int) -> int:
    """Slices of the last of three cores, as ``TTShape.search`` factors a table of ``rows`` rows."""
    return TTShape.search(rows, 1, ranks=1).row_factors[-1]


def random_order(rows: int, seed: int) -> np.ndarray:
    """(rows,) uint32, rows placed at random, as a hash would place them."""
    return np.random.default_rng(seed).permutation(rows).astype(np.uint32)


def measure_effects(
    folder: str | os.PathLike[str],
    schema: Schema,
    split: str,
    orders: Mapping[str, Mapping[str, np.ndarray]],
    readings: Iterable[Reading],
    *,
    progress: Progress = _QUIET,
) -> list[Effect]:
    """Counts unique prefixes.

    Args:
      folder, schema: The dataset.
      split: The split whose batches are read.
      orders: By table, the orders to compare by name, each (rows,) as a bijection of stored rows.
      readings: Batch sizes and orders of the examples.
      progress: Shows how far the counting is.

    Returns:
      An effect for every reading and table.
    """
    effects = []
    widths = {table: rows_per_prefix(schema.table(table).rows) for table in orders}
    for reading in readings:
        counts: dict[str, list[list[int]]] = {table: [] for table in orders}
        title = f"{split}, batch {reading.batch_size:,}"
        for batch in batches(folder, stored(schema), split, list(orders), reading, progress=progress, title=title):
            for table, named in orders.items():
                rows = np.unique(batch[table])
                prefixes = [len(np.unique(order[rows] // widths[table])) for order in named.values()]
                counts[table].append([len(rows), *prefixes])
        for table, named in orders.items():
            means = np.mean(counts[table], axis=0)
            effects.append(
                Effect(
                    table=table,
                    split=split,
                    batch_size=reading.batch_size,
                    window_blocks=reading.window_blocks,
                    batches=len(counts[table]),
                    rows_per_prefix=widths[table],
                    unique_rows=float(means[0]),
                    prefixes={name: float(mean) for name, mean in zip(named, means[1:], strict=True)},
                )
            )
    return effects


def total_prefixes(effects: Sequence[Effect], name: str) -> float:
    """Unique prefixes of a batch in an order, over all tables."""
    return sum(effect.prefixes[name] for effect in effects)
