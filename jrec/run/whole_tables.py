"""Rows of a run's tables by table and number, wherever they live."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrec.host import HostTable
from jrec.mesh.route import MeshRows
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.tt import tt_rows
from jrec.run.mesh_setup import MeshSetup
from jrec.run.state import RunState
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED

_MOST = 1 << 16  # rows at once


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
      state: The run's state; rows in host memory have settled.
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
            parts.append((here, _of_stack(state, stack, name, ids[here] - table.first_row, base)))
    out = np.empty((ids.size, parts[0][1].shape[1]), np.result_type(*(part.dtype for _, part in parts)))
    for here, part in parts:
        out[here] = part
    return out


def _of_stack(state: RunState, stack: Stack, table: str, rows: np.ndarray, base: int) -> np.ndarray:
    layout = state.layout
    if stack in layout.tt_stacks:
        return _of_cores(state, stack, rows)
    if stack in layout.planned_stacks:
        assert state.setup is not None  # a plan has a mesh
        pieces = [
            _planned(state.setup, state.rows[stack.name], state.tables.get(stack.name), stack, table, some, base)
            for some in np.array_split(rows, max(1, -(-rows.size // _MOST)))
        ]
        return np.concatenate(pieces)
    if (host := state.tables.get(stack.name)) is not None:
        return host.read((rows + base).astype(stack.address_dtype))
    embeddings = state.modules()[0].embeddings
    values = embeddings.arrays()[stack.name]
    return np.asarray(values[(rows + base).astype(np.int32)])[:, : stack.dim]


def _of_cores(state: RunState, stack: Stack, rows: np.ndarray) -> np.ndarray:
    cores = state.modules()[0].embeddings.tt[stack.name]
    values = np.array(tt_rows(cores.arrays(), cores.shape, rows))
    if cores.cache_config is not None:  # a cached row has changed since it was in the cores
        numbers, changed = (np.asarray(cores.cached[key][...]) for key in ("ids", "rows"))
        order = np.argsort(numbers, kind="stable")
        at = np.minimum(np.searchsorted(numbers, rows, sorter=order), numbers.size - 1)
        cached = numbers[order[at]] == rows
        values[cached] = changed[order[at[cached]]]
    return values


def _planned(
    setup: MeshSetup, held: MeshRows, host: HostTable | None, stack: Stack, table: str, rows: np.ndarray, base: int
) -> np.ndarray:
    """Rows of a planned stack; of several processes all get them."""
    plan = setup.plan
    where = plan.locate(table, rows)
    out = np.zeros((rows.size, stack.dim), held.sharded.dtype)
    shared, lines = where.tier == REPLICATED, where.tier == SHARDED
    out[shared] = np.asarray(held.replicated.addressable_shards[0].data[where.offset[shared].astype(np.int32)])
    if lines.any():
        capacity = held.sharded.shape[0] // plan.devices
        numbers = where.owner[lines].astype(np.int64) * capacity + where.offset[lines]
        padded = np.zeros(1 << int(np.ceil(np.log2(numbers.size))), np.int32)
        padded[: numbers.size] = numbers
        out[lines] = np.asarray(_gather(NamedSharding(setup.mesh, PartitionSpec()))(held.sharded, padded))[
            : numbers.size
        ]
    if (on_host := where.tier == HOST).any():
        assert host is not None  # the plan has rows there
        addresses = (rows[on_host] + base).astype(stack.address_dtype)
        own = setup.owners.of(stack, addresses) == setup.owners.process
        own_rows = np.zeros((addresses.size, stack.dim), out.dtype)
        own_rows[own] = host.read(addresses[own])
        out[on_host] = _from_owners(own_rows, own)
    return out


@functools.cache
def _gather(everywhere: NamedSharding) -> jax.stages.Wrapped:
    return jax.jit(lambda rows, numbers: rows[numbers], out_shardings=everywhere)


def _from_owners(rows: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Rows of all processes, each of which has some of them."""
    if jax.process_count() == 1:
        return rows
    from jax.experimental import multihost_utils

    every, owned = multihost_utils.process_allgather((rows.view(np.uint8), own))
    bits = np.sum(np.where(np.asarray(owned)[:, :, None], np.asarray(every), 0), axis=0, dtype=np.uint8)
    return bits.view(rows.dtype).reshape(rows.shape)
