"""The rows that a plan keeps in host memory: one table per planned stack, by the stack's own addresses.

So their first values, their rounding and their checkpoints do not depend on the plan: a row is the same row wherever it
lives, and only rows that are written take memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from jrec.checkpoint import HostRows, Saved
from jrec.checkpoint.host import check_same
from jrec.checkpoint.manifest import VALUES
from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizers, optimizer_of
from jrec.run.host_owners import ALONE, HostOwners
from jrec.run.mesh_rows import based
from jrec.run.options import HostOptions
from jrec.sharding.contents import host_ranges
from jrec.sharding.plans import Plan


def planned_host_tables(
    layout: EmbeddingLayout,
    plan: Plan,
    key: jax.Array,
    optimizer: RowOptimizers | None,
    host: HostOptions,
    owners: HostOwners = ALONE,
) -> dict[str, HostTable]:
    """Tables of all planned stacks, of which only the plan's host rows are used; none if the plan has no such rows.

    With several processes each has only its own rows.

    Args:
      layout: The tables' layout.
      plan: Where rows live (``placed_plan``).
      key: The key of the model's tables.
      optimizer: One optimizer for all rows, or one for each stack, which determines their slots; None without slots.
      host: Where and how rows are kept.
      owners: How processes share the rows.

    Raises:
      ConfigError: If ``host.folder`` cannot hold them.
    """
    if not plan.rows_in("host"):
        return {}
    return {
        stack.name: HostTable(
            stack,
            optimizer_of(optimizer, stack.name) or SGD(learning_rate=0.0),
            key,
            folder=host.folder or None,
            threads=host.threads or None,
            written=owners.ranges(stack, host_ranges(plan, based(stack))),
        )
        for stack in layout.planned_stacks
    }


def load_host_rows(tables: Mapping[str, HostTable], plan: Plan, saved: Saved, owners: HostOwners = ALONE) -> None:
    """Reads a plan's host rows from a checkpoint of any plan. Rows with first values take no memory.

    Only rows in the checkpoint are read, however many others there are.

    Args:
      tables: See ``planned_host_tables``.
      plan: Where rows live now.
      saved: The checkpoint.
      owners: How processes share the rows; each takes its own.

    Raises:
      CheckpointError: If it is damaged, or has other tables, slots or first values.
    """
    for table in tables.values():
        table.reset()
        ranges = owners.ranges(table.stack, host_ranges(plan, based(table.stack)))
        arrays = [VALUES, *table.optimizer.slots]
        shapes = HostRows(table).tables.values()
        for shape, base, one in zip(shapes, table.stack.bases, saved.stack_tables(table.stack), strict=True):
            if one.record.shape.first is not None:
                check_same(saved, shape, one.record.shape, slots=len(arrays) > 1)
            for rows, saved_arrays in one.written(arrays):
                addresses = rows.astype(np.int64) + base
                if (ours := _within(ranges, addresses)).any():
                    store_changed(table, addresses, saved_arrays, ours)
        table.clear_dirty()


def store_changed(table: HostTable, addresses: np.ndarray, saved: Mapping[str, np.ndarray], ours: np.ndarray) -> None:
    """Writes the rows of ``ours``, (n,) bool, that differ from the table's."""
    before, slots_before = table.fetch(addresses[ours])
    own = {name: np.ascontiguousarray(array[ours]) for name, array in saved.items()}
    changed = _differ(own[VALUES], before)
    for name, slot in slots_before.items():
        changed |= _differ(own[name], slot)
    values = own.pop(VALUES)[changed]
    table.store(addresses[ours][changed], values, {name: slot[changed] for name, slot in own.items()})


def _within(ranges: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Which addresses lie in one of the ascending ranges, (n,) bool."""
    at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
    return (at >= 0) & (addresses < np.append(ranges[:, 1], 0)[at])


def _differ(rows: np.ndarray, other_rows: np.ndarray) -> np.ndarray:
    """Which rows have different bits, (n,) bool."""
    bits, other_bits = (array.reshape(len(array), -1).view(np.uint8) for array in (rows, other_rows))
    return (bits != other_bits).any(axis=1)
