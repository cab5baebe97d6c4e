"""Rows of a run's tables by table and number, wherever they live."""

from __future__ import annotations

import numpy as np

from jrec.ops.layout import EmbeddingLayout
from jrec.run.state import RunState


def table_rows(layout: EmbeddingLayout, name: str) -> int:
    """How many rows a table has.

    Raises:
      ValueError: If there is no such table.
    """
    tables = {table.name: table.table_rows for stack in layout.members for table in stack.tables}
    if name not in tables:
        raise ValueError(f"there is no table {name!r}; the tables are {', '.join(sorted(tables))}")
    return tables[name]


def read_rows(state: RunState, name: str, ids: np.ndarray) -> np.ndarray:
    """Rows of a table as the last step left them; every process calls it with the same arguments.

    Args:
      state: The run's state; rows in host memory are flushed.
      name: The table.
      ids: (n,) integers.

    Returns:
      (n, dim) of the table's dtype; of tensor-train rows, float32.

    Raises:
      ValueError: If there is no such table or row.
    """
    ids, rows = np.asarray(ids), table_rows(state.layout, name)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids must be integers of shape (n,), but are {ids.dtype} of shape {ids.shape}")
    ids = ids.astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < rows:
        worst = ids[(ids < 0) | (ids >= rows)][0]
        raise ValueError(f"table {name!r} has no row {worst}; its rows are 0 to {rows - 1:,}")
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for stack in state.layout.members:
        for table, base in zip(stack.tables, stack.bases, strict=True):
            if table.name != name:
                continue
            here = (ids >= table.first_row) & (ids < table.first_row + table.rows)
            parts.append((here, state.tiers[stack.name].read(ids[here] - table.first_row + base)))
    out = np.empty((ids.size, parts[0][1].shape[1]), np.result_type(*(part.dtype for _, part in parts)))
    for here, part in parts:
        out[here] = part
    return out
