"""First values of rows of growing tables, for wherever the rows live."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jrec.data.growing_tables import Grown
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.ring import Rows, bucket
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.row_init import key_words
from jrec.row_optimizers import RowOptimizer, RowOptimizers, optimizer_of
from jrec.run.mesh_arrays import on_mesh
from jrec.run.mesh_setup import MeshSetup
from jrec.run.new_lines import MeshLines, NewLines, renewed
from jrec.sharding.pieces import REPLICATED, SHARDED

NO_LINE = 2**31 - 1
"""A line of no array: padding."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NewAddresses:
    """Rows of a stack that are given to other keys.

    Attributes:
      addresses: (n,) int64, ascending.
      numbers: (n,) int32, which table of the stack each is of.
      words: (n, 2) uint32, upper and lower half of the keys.
    """

    addresses: np.ndarray
    numbers: np.ndarray
    words: np.ndarray

    def lines(self, at: np.ndarray, chosen: np.ndarray, size: int) -> NewLines:
        """Some of the rows as lines of an array, with padding.

        Args:
          at: (m,) lines of the chosen rows.
          chosen: (m,) positions of these rows.
          size: How many lines there are with padding.
        """
        lines = np.full(size, NO_LINE, np.int32)
        numbers, words = np.zeros(size, np.int32), np.zeros((size, 2), np.uint32)
        lines[: at.size], numbers[: at.size], words[: at.size] = at, self.numbers[chosen], self.words[chosen]
        return NewLines(at=lines, numbers=numbers, words=words)


def new_addresses(stack: Stack, grown: Grown) -> NewAddresses | None:
    """The rows of a stack that a batch gave to other keys; None without any."""
    pieces = [
        (base, number, grown.new[table.name])
        for number, (table, base) in enumerate(zip(stack.tables, stack.bases, strict=True))
        if table.name in grown.new
    ]
    if not pieces:
        return None
    keys = np.concatenate([new.keys for _, _, new in pieces])
    return NewAddresses(
        addresses=np.concatenate([new.rows.astype(np.int64) + base for base, _, new in pieces]),
        numbers=np.concatenate([np.full(new.rows.size, number, np.int32) for _, number, new in pieces]),
        words=np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32),
    )


class FirstRows:
    """Gives rows of growing tables their first values when they are given to other keys. Use it from one thread.

    Args:
      layout: The run's tables.
      growing: The names of the tables that grow.
      key: The key of the model's initial rows.
      optimizer: The row optimizers.
      setup: Mesh and plan; None on one device without a plan.

    Attributes:
      words: (2,) uint32, the key; a copy, since the model's own is donated to its steps.

    Raises:
      ConfigError: If a table that grows is a tensor train, or frozen.
      ValueError: If a table grows, and the key is not one of Threefry.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        growing: frozenset[str],
        *,
        key: jax.Array,
        optimizer: RowOptimizers | None,
        setup: MeshSetup | None,
    ):
        self._layout, self._optimizer, self._setup = layout, optimizer, setup
        self.words = key_words(key) if growing else np.zeros(2, np.uint32)
        for stack in layout.members:
            for table in stack.tables:
                if table.name not in growing:
                    continue
                if table.tier == "tt" or table.is_part:
                    raise ConfigError(
                        f"table {table.name!r} grows, but is a tensor train, whose cores all rows share; keep it whole"
                    )
                if optimizer is not None and optimizer_of(optimizer, stack.name) is None:
                    raise ConfigError(f"table {table.name!r} grows, but is frozen; train it, or prepare it with rows")

    def on_devices(self, grown: Grown) -> dict[str, Any]:
        """What ``CompiledRun.renew`` takes: the rows that live on devices, by stack."""
        lines, setup = {}, self._setup
        for stack in self._layout.device_stacks if setup is None else self._layout.planned_stacks:
            if (new := new_addresses(stack, grown)) is None:
                continue
            if setup is None:
                count = new.addresses.size
                lines[stack.name] = new.lines(new.addresses, np.arange(count), _room(count))
            else:
                lines[stack.name] = self._on_mesh(stack, new, setup)
        return lines if setup is None or not lines else on_mesh(lines, setup.mesh)

    def _on_mesh(self, stack: Stack, new: NewAddresses, setup: MeshSetup) -> MeshLines:
        tier, owner = np.empty(new.addresses.size, np.uint8), np.empty(new.addresses.size, np.int64)
        offset = np.empty(new.addresses.size, np.int64)
        for number in np.unique(new.numbers):
            own = new.numbers == number
            rows = new.addresses[own] - stack.bases[number]
            tier[own], owner[own], offset[own] = setup.plan.locate(stack.tables[number].name, rows)
        by_device = [np.flatnonzero((tier == SHARDED) & (owner == device)) for device in range(setup.plan.devices)]
        shared = np.flatnonzero(tier == REPLICATED)
        size = _room(max(map(len, by_device)))
        sharded = [new.lines(offset[chosen], chosen, size) for chosen in (by_device[d] for d in setup.local)]
        replicated = [new.lines(offset[shared], shared, _room(shared.size))] * len(setup.local)
        return MeshLines(sharded=_stacked(sharded), replicated=_stacked(replicated))

    def store(self, table: HostTable, grown: Grown) -> None:
        """Writes the first values and slots of rows in host memory. Not while another thread uses these rows."""
        if (new := new_addresses(table.stack, grown)) is None:
            return
        count = new.addresses.size
        lines = new.lines(np.arange(count), np.arange(count), _room(count))
        rows = _first(table.stack, table.optimizer, self.words, lines)
        slots = {name: np.asarray(slot)[:count] for name, slot in rows.slots.items()}
        table.store(new.addresses, np.asarray(rows.values)[:count], slots)

    def among(self, name: str, rows: Rows, read: np.ndarray, grown: Grown) -> Rows:
        """A batch's rows from host memory with first values where a row has another key now.

        Args:
          name: The stack.
          rows: The batch's rows on the device, of which no copy is needed any more.
          read: (n,) ascending addresses of the rows.
          grown: What the batch changed.
        """
        stack = self._layout.stacks[name]
        if (new := new_addresses(stack, grown)) is None:
            return rows
        at = np.searchsorted(read, new.addresses)
        chosen = np.flatnonzero((at < read.size) & (read[np.minimum(at, read.size - 1)] == new.addresses))
        if not chosen.size:
            return rows
        optimizer = optimizer_of(self._optimizer, name)
        return _replaced(stack, optimizer, rows, self.words, new.lines(at[chosen], chosen, _room(chosen.size)))


def _room(count: int) -> int:
    return bucket(count, NO_LINE)


def _stacked(lines: list[NewLines]) -> NewLines:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lines)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first(stack: Stack, optimizer: RowOptimizer, words: jax.Array, lines: NewLines) -> Rows:
    values = jax.numpy.zeros((lines.at.shape[0], stack.dim), stack.dtype)
    first, slots = renewed(values, optimizer.init(values), stack, optimizer, words, lines)
    return Rows(values=first, slots=dict(slots))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _replaced(stack: Stack, optimizer: RowOptimizer | None, rows: Rows, words: jax.Array, lines: NewLines) -> Rows:
    values, slots = renewed(rows.values, rows.slots, stack, optimizer, words, lines)
    return Rows(values=values, slots=dict(slots))
