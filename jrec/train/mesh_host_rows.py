"""The rows that a plan keeps in host memory: one table a planned stack, by the stack's own addresses.

So their first values, their rounding and their checkpoints know nothing of the plan: a row is the same row wherever it
lives, and only what is written takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrec.checkpoint import Saved
from jrec.checkpoint.manifest import VALUES
from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout, plan_name
from jrec.ops.row_optimizers import RowOptimizer
from jrec.sharding.contents import host_ranges
from jrec.sharding.plan import Plan
from jrec.train.build import table_key
from jrec.train.config import TrainConfig
from jrec.train.mesh_plan import planned_stacks
from jrec.train.mesh_rows import based

_ROWS_AT_A_TIME = 1 << 18


def planned_host_tables(
    config: TrainConfig, layout: EmbeddingLayout, plan: Plan, optimizer: RowOptimizer | None
) -> dict[str, HostTable]:
    """Tables of all planned stacks, of which only the plan's host rows are used; none where it has no such rows.

    Args:
      config: of the run.
      layout: of the tables.
      plan: where rows live (``run_plan``).
      optimizer: whose slots the rows have; None for none.

    Raises:
      ConfigError: if ``tables.host.folder`` cannot hold them.
    """
    if not plan.rows_in("host"):
        return {}
    key, host = table_key(config), config.tables.host
    return {
        stack.name: HostTable(
            stack,
            SGD(learning_rate=0.0) if optimizer is None else optimizer,
            key,
            folder=host.folder or None,
            threads=host.threads or None,
            written=host_ranges(plan, based(stack)),
        )
        for stack in planned_stacks(layout)
    }


def load_host_rows(tables: Mapping[str, HostTable], plan: Plan, saved: Saved) -> None:
    """Takes a plan's host rows from a checkpoint, whoever had them there. Rows with first values take no memory.

    Args:
      tables: see ``planned_host_tables``.
      plan: where rows live now.
      saved: The checkpoint.
    """
    for table in tables.values():
        table.reset()
        for part in _parts(host_ranges(plan, based(table.stack))):
            first, first_slots = table.fetch(part)
            values = np.ascontiguousarray(saved.read(table.stack, VALUES, part))
            slots = {name: np.ascontiguousarray(saved.read(table.stack, name, part)) for name in first_slots}
            changed = _differ(values, first)
            for name, slot in slots.items():
                changed |= _differ(slot, first_slots[name])
            table.store(part[changed], values[changed], {name: slot[changed] for name, slot in slots.items()})


def with_host_rows(
    parameters: Mapping[str, Mapping[str, Any]], layout: EmbeddingLayout, plan: Plan
) -> dict[str, dict[str, Any]]:
    """``parameter_counts`` that say how many rows of planned stacks, and bytes of them, are in host memory."""
    counts = {name: dict(of) for name, of in parameters.items()}
    for stack in planned_stacks(layout):
        if rows := plan.host_rows(plan_name(stack)):
            size = rows * stack.dim * np.dtype(jnp.dtype(stack.dtype)).itemsize
            counts[stack.name] |= {"host_rows": rows, "host_bytes": size}
    return counts


def _parts(ranges: np.ndarray) -> Iterator[np.ndarray]:
    """The addresses of ranges, some after others, int32 ascending."""
    lengths = ranges[:, 1] - ranges[:, 0]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    for low in range(0, total, _ROWS_AT_A_TIME):
        numbers = np.arange(low, min(low + _ROWS_AT_A_TIME, total))
        of = np.searchsorted(ends, numbers, side="right")
        yield (ranges[of, 0] + numbers - (ends - lengths)[of]).astype(np.int32)


def _differ(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(n,) bool: where rows have other bits."""
    bits, those = (array.reshape(len(array), -1).view(np.uint8) for array in (rows, others))
    return (bits != those).any(axis=1)
