"""Checks that a reordered dataset says what the stored one says, under other row numbers and nothing else."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jrec.batch import Batch
from jrec.data.bijection import inverse, load_orders
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.reorder.log import log_layout, stored
from jrec.progress import Progress

_QUIET = Progress(show=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """What was checked.

    Attributes:
      moved: By reordered table, how many of its rows have another number than they are stored under.
      examples: Examples compared, of all splits.
    """

    moved: dict[str, int]
    examples: int


def verify(
    folder: str | os.PathLike[str],
    schema: Schema | None = None,
    *,
    batch_size: int = 8192,
    limit: int = 0,
    progress: Progress = _QUIET,
) -> Verified:
    """Checks files, permutations and examples of a dataset.

    Every bijection has the checksum that the schema states and is a permutation of its table's rows. Labels, dense
    features, lengths and weights of what the loader yields with bijections are the same bits as without, and each id
    is led back to the stored one by the inverse.

    Args:
      folder: The dataset's folder.
      schema: Its description; None reads and checks it.
      batch_size: Examples compared at a time.
      limit: Batches of each split to compare; 0 for all.
      progress: Shows how far it is.

    Raises:
      DatasetError: At the first thing that is not so.
    """
    schema = Schema.load(folder) if schema is None else schema
    tables = [t.name for t in schema.tables if t.bijection is not None]
    orders = load_orders(folder, schema, tables)
    examples = 0
    for split in schema.with_examples(schema.splits) if tables else ():
        examples += _compare(folder, schema, split, orders, batch_size, limit, progress)
    moved = {name: int(np.count_nonzero(order != np.arange(len(order)))) for name, order in orders.items()}
    return Verified(moved=moved, examples=examples)


def _compare(
    folder: str | os.PathLike[str],
    schema: Schema,
    split: str,
    orders: dict[str, np.ndarray],
    batch_size: int,
    limit: int,
    progress: Progress,
) -> int:
    layout = log_layout(schema, list(orders))
    tables = {name: stack.tables[0].name for name, stack in layout.stacks.items()}
    back = {name: (table, inverse(orders[table])) for name, table in tables.items()}
    config = LoaderConfig(batch_size=batch_size, shuffle=False)
    examples = 0
    # Without weights, so that lines of weight 0 are compared, and counted, too.
    schema = dataclasses.replace(schema, weighted=False)
    with (
        make_loader(folder, stored(schema), layout, split, config) as before,
        make_loader(folder, schema, layout, split, config) as after,
    ):
        count = min(limit or before.batches_per_epoch, before.batches_per_epoch)
        with progress.stage(f"verifying {split}", count) as advance:
            for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
                if (problem := _difference(old, new, back)) is not None:
                    raise DatasetError(
                        f"{folder}: {problem} in the {batch_size:,} examples of the {split} split from {examples:,} on"
                        " differ with and without the reordering; run `jrec reorder` on the dataset anew"
                    )
                examples += int(np.count_nonzero(old.mask))
                advance(number)
                if number == count:
                    break
    return examples


def _difference(old: Batch, new: Batch, back: dict[str, tuple[str, np.ndarray]]) -> str | None:
    """What differs that may not, or None."""
    for name in ("labels", "dense", "mask"):
        # By their bits: a number of several labels that is not known is NaN, which differs from itself.
        if np.asarray(getattr(old, name)).tobytes() != np.asarray(getattr(new, name)).tobytes():
            return name
    for stack, (table, stored_row) in back.items():
        one, other = old.bags[stack], new.bags[stack]
        ids, moved = np.asarray(one.ids), np.asarray(other.ids)
        if not np.array_equal(ids < 0, moved < 0) or not np.array_equal(ids[ids >= 0], stored_row[moved[moved >= 0]]):
            return f"ids of table {table!r}"
        for field in ("offsets", "weights"):
            if not np.array_equal(np.asarray(getattr(one, field)), np.asarray(getattr(other, field))):
                return f"{field} of table {table!r}"
    return None
