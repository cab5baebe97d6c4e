"""A stack whose rows a plan places: sharded, on all devices, in host memory.

The rows in host memory are in a table of the whole stack, by the stack's own addresses. So their first values, their
rounding and their checkpoints do not depend on the plan: a row is the same row wherever it lives, and only rows that
are written take memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrec.checkpoint import HostRows as HostSource
from jrec.checkpoint import Saved
from jrec.checkpoint.host import check_same
from jrec.checkpoint.manifest import VALUES
from jrec.host import HostTable
from jrec.host.paging import MemoryLimit
from jrec.mesh.route import MeshRows
from jrec.ops.layout import Stack
from jrec.ops.row_fill import PIECE_BYTES
from jrec.row_optimizers import RowOptimizer
from jrec.run.options import HostOptions
from jrec.run.placement.checkpoint import MeshSource, saved_stack
from jrec.run.placement.host_owners import HostOwners
from jrec.run.placement.model_rows import ModelRows, WithFirstRows
from jrec.run.placement.new_lines import Addresses, Lines, MeshLines, SetAddresses
from jrec.run.placement.rows import based, initial_stack, on_mesh
from jrec.run.placement.setup import MeshSetup
from jrec.run.placement.tiers import Tier, host_table
from jrec.sharding.contents import host_ranges
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED
from jrec.sharding.plans import Plan

_MOST = 1 << 16  # rows at once


class ShardedTier(Tier):
    """A stack by a plan; see ``jrec.run.placement.tiers.Tier``.

    With several processes each has its devices' rows, and its own rows of host memory.

    Args:
      stack: The tables.
      setup: Mesh and plan.
      optimizer: The row optimizer; None without slots.
      key: The key of the model's tables.
      options: Where and how rows in host memory are kept.
      held: Rows to begin with; None for initial ones, which are made at their first use: a restored run makes none.
      limit: See ``HostTier``.

    Raises:
      ConfigError: If ``options.folder`` cannot hold the rows in host memory.
    """

    def __init__(
        self,
        stack: Stack,
        setup: MeshSetup,
        optimizer: RowOptimizer | None,
        key: jax.Array,
        options: HostOptions,
        held: ModelRows | None = None,
        limit: MemoryLimit | None = None,
    ):
        super().__init__(stack)
        self._setup, self._optimizer, self._key = setup, optimizer, key
        self._rows: MeshRows | None = None
        self._table: HostTable | None = None
        plan = setup.plan
        self.changing = MeshSource(stack, plan, setup.mesh, optimizer, lambda: self.rows, setup.peers)
        self.sources = (self.changing,)
        if plan.rows_in("host"):
            self._table = placed_host_table(stack, plan, optimizer, key, options, setup.owners, limit)
            self.sources = (self.changing, HostSource(self._table))
        self.host = self._table if plan.host_rows(stack.name) else None
        if held is not None and held.has(stack):
            self._rows = saved_stack(WithFirstRows(held, key, optimizer), stack, plan, setup.mesh, optimizer)
            if self._table is not None:
                _store_held(held, self._table, plan, setup.owners)

    @property
    def rows(self) -> MeshRows:
        """The stack's rows on the devices; initial rows are made here, at the first use."""
        if self._rows is None:
            self._rows = initial_stack(self.stack, self._setup.plan, self._setup.mesh, self._key, self._optimizer)
        return self._rows

    def put(self, rows: MeshRows) -> None:
        """Takes back the rows on the devices after a step."""
        self._rows = rows

    def new_lines(self, new: Addresses) -> MeshLines:
        """Lines of the devices' shards, and of the replicated rows; on the mesh."""
        setup = self._setup
        tier, owner, offset = self._located(new)
        # All shards get lines of one size, ``most``, as an array over the mesh needs.
        by_device = [np.flatnonzero((tier == SHARDED) & (owner == device)) for device in range(setup.plan.devices)]
        shared, most = np.flatnonzero(tier == REPLICATED), max(map(len, by_device))
        sharded = [new.lines(offset[chosen], chosen, most) for chosen in (by_device[d] for d in setup.local)]
        replicated = [new.lines(offset[shared], shared)] * len(setup.local)
        return on_mesh(MeshLines(sharded=_stacked(sharded), replicated=_stacked(replicated)), setup.mesh)

    def _located(self, new: Addresses) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tier, owner and offset of rows, (n,) each, by the plan."""
        tier, owner = np.empty(new.addresses.size, np.uint8), np.empty(new.addresses.size, np.int64)
        offset = np.empty(new.addresses.size, np.int64)
        for number in np.unique(new.numbers):
            own = new.numbers == number
            rows = new.addresses[own] - self.stack.bases[number]
            tier[own], owner[own], offset[own] = self._setup.plan.locate(self.stack.tables[number].name, rows)
        return tier, owner, offset

    def store(self, new: SetAddresses) -> None:
        """See ``Tier``."""
        if self._table is not None:
            addresses, owners = new.addresses.astype(self.stack.address_dtype), self._setup.owners
            ours = owners.of(self.stack, addresses) == owners.process
            new.store(self._table, (self._located(new)[0] == HOST) & ours)

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """See ``Tier``; of several processes all get them."""
        pieces = np.array_split(addresses, max(1, -(-addresses.size // _MOST)))
        return np.concatenate([self._read(some, [VALUES])[VALUES] for some in pieces])

    def read_all(self, addresses: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """See ``Tier``; of several processes all get them."""
        arrays = self._read(addresses, [VALUES, *self.rows.sharded_slots])
        return arrays.pop(VALUES), arrays

    def _read(self, addresses: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        setup, held, number = self._setup, self.rows, self._number(addresses)
        where = setup.plan.locate(self.stack.tables[number].name, addresses - self.stack.bases[number])
        shared, lines, on_host = (where.tier == tier for tier in (REPLICATED, SHARDED, HOST))
        sharded, replicated = (
            held.sharded_slots | {VALUES: held.sharded},
            held.replicated_slots | {VALUES: held.replicated},
        )
        # Offsets lie in one device's array, so that int32 holds them however many rows the stack has.
        copies, count = where.offset[shared].astype(np.int32), int(lines.sum())
        # Sizes are powers of two, so that reads of any number of rows share few compiled programs.
        places = np.zeros((2, 1 << max(0, count - 1).bit_length()), np.int32)
        places[:, :count] = where.owner[lines], where.offset[lines]
        from_lines = _gather(NamedSharding(setup.mesh, PartitionSpec()), setup.plan.devices)
        out = {}
        for name in names:
            array = sharded[name]
            out[name] = np.zeros((addresses.size, *array.shape[1:]), array.dtype)
            out[name][shared] = np.asarray(replicated[name].addressable_shards[0].data[copies])
            if count:
                out[name][lines] = np.asarray(from_lines(array, *places))[:count]
        if on_host.any():
            assert self._table is not None  # the plan has rows there
            asked = addresses[on_host].astype(self.stack.address_dtype)
            own = setup.owners.of(self.stack, asked) == setup.owners.process
            table = self._table
            values, slots = (table.read(asked[own]), {}) if names == [VALUES] else table.read_all(asked[own])
            for name in names:
                own_rows = np.zeros((asked.size, *out[name].shape[1:]), out[name].dtype)
                own_rows[own] = values if name == VALUES else slots[name]
                out[name][on_host] = _from_owners(own_rows, own)
        return out

    def _number(self, addresses: np.ndarray) -> int:
        """Which table of the stack addresses are of, all of one."""
        first = addresses[0] if addresses.size else 0
        return int(np.searchsorted(self.stack.bases, first, side="right")) - 1

    def load(self, saved: Saved, *, slots: bool) -> None:
        """See ``Tier``; from a checkpoint of any plan."""
        del slots  # rows have the optimizer's
        setup = self._setup
        if self._table is not None:
            load_host_rows(self._table, setup.plan, saved, setup.owners)
        self._rows = saved_stack(saved, self.stack, setup.plan, setup.mesh, self._optimizer)


def placed_host_table(
    stack: Stack,
    plan: Plan,
    optimizer: RowOptimizer | None,
    key: jax.Array,
    options: HostOptions,
    owners: HostOwners,
    limit: MemoryLimit | None = None,
) -> HostTable:
    """The table of a stack of which only the plan's host rows, and of these this process's own, are used."""
    written = owners.ranges(stack, host_ranges(plan, based(stack)))
    return host_table(stack, optimizer, key, options, written=written, limit=limit)


def load_host_rows(table: HostTable, plan: Plan, saved: Saved, owners: HostOwners) -> None:
    """Reads a plan's host rows of a stack from a checkpoint of any plan. Rows with first values take no memory.

    Only rows in the checkpoint are read, however many others there are.

    Args:
      table: See ``placed_host_table``.
      plan: Where rows live now.
      saved: The checkpoint.
      owners: How processes share the rows; each takes its own.

    Raises:
      CheckpointError: If it is damaged, or has other tables, slots or first values.
    """
    table.reset()
    ranges = owners.ranges(table.stack, host_ranges(plan, based(table.stack)))
    arrays = [VALUES, *table.optimizer.slots]
    shapes = HostSource(table).tables.values()
    for shape, base, one in zip(shapes, table.stack.bases, saved.stack_tables(table.stack), strict=True):
        if one.record.shape.first is not None:
            check_same(saved, shape, one.record.shape, slots=len(arrays) > 1)
        for rows, saved_arrays in one.written(arrays):
            addresses = rows.astype(np.int64) + base
            if (ours := _within(ranges, addresses)).any():
                _store_changed(table, addresses, saved_arrays, ours)
    table.clear_dirty()


def _store_held(held: ModelRows, table: HostTable, plan: Plan, owners: HostOwners) -> None:
    """Writes held rows that the plan has in host memory. Rows with first values take no memory."""
    here = np.array([held.has_table(table_config.name) for table_config in table.stack.tables])
    most = max(1, PIECE_BYTES // (4 * table.dim))
    for begin, stop in owners.ranges(table.stack, host_ranges(plan, based(table.stack))):
        for first in range(begin, stop, most):
            addresses = np.arange(first, min(first + most, stop))
            addresses = addresses[here[np.searchsorted(table.stack.bases, addresses, side="right") - 1]]
            # Tables of tier "host" share the stack under a plan: the model holds none of their rows.
            if not addresses.size:
                continue
            arrays = {n: held.read(table.stack, n, addresses) for n in (VALUES, *table.optimizer.slots)}
            _store_changed(table, addresses, arrays, np.ones(addresses.size, bool))


def _store_changed(table: HostTable, addresses: np.ndarray, saved: Mapping[str, np.ndarray], ours: np.ndarray) -> None:
    """Writes the rows of ``ours``, (n,) bool, that differ from the table's."""
    before, slots_before = table.fetch(addresses[ours])
    # Only rows that differ from what the table would make anyway: the others take no memory.
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


def _stacked(lines: list[Lines]) -> Lines:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lines)


@functools.cache
def _gather(everywhere: NamedSharding, devices: int) -> jax.stages.Wrapped:
    """Reads lines of devices' shards. All shards together may have more lines than int32 numbers, each has fewer."""

    def read(rows: jax.Array, owners: jax.Array, offsets: jax.Array) -> jax.Array:
        return rows.reshape(devices, -1, *rows.shape[1:])[owners, offsets]

    return jax.jit(read, out_shardings=everywhere)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.itemsize * math.prod(rows.shape[1:]))


def _from_owners(rows: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Rows of all processes, each of which has some of them."""
    if jax.process_count() == 1:
        return rows
    from jax.experimental import multihost_utils

    every, owned = multihost_utils.process_allgather((_bytes(rows), own))
    # Each row comes from one process, the others add zeros: of bytes the sum is exact, whatever bits a float has.
    bits = np.sum(np.where(np.asarray(owned)[:, :, None], np.asarray(every), 0), axis=0, dtype=np.uint8)
    return bits.view(rows.dtype).reshape(rows.shape)
