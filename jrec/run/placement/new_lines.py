"""Rows that begin anew, of another key of a growing table or with new values, written with slots where they lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jrec.data.growing_tables import Grown
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.ring import Rows, bucket
from jrec.mesh.route import MeshRows
from jrec.nn.optimizer import SparseModel, SparseOptimizer
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.row_init import init_rows_of_keys, key_words
from jrec.row_optimizers import LAST, RowOptimizer, RowOptimizers, Slots, optimizer_of, taken_before

NO_LINE = 2**31 - 1
"""A line of no array: padding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewLines:
    """Lines of an array of a stack's rows, and the keys that they belong to from now on.

    Attributes:
      at: (n,) int32, unique; padding holds the number of lines of the array, or more.
      numbers: (n,) int32, which table of the stack each is of.
      words: (n, 2) uint32, upper and lower half of the keys.
    """

    at: jax.Array
    numbers: jax.Array
    words: jax.Array

    def first(self, stack: Stack, words: jax.Array) -> jax.Array:
        """The rows, (n, dim), as the key of the model's initial rows makes them."""
        return init_rows_of_keys(stack.tables, words, self.numbers, self.words)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SetLines:
    """Lines of an array of a stack's rows, and what they hold from now on.

    Attributes:
      at: As of ``NewLines``.
      values: (n, dim) of the stack's dtype.
    """

    at: jax.Array
    values: jax.Array

    def first(self, stack: Stack, words: jax.Array) -> jax.Array:
        """The rows, (n, dim), whatever the key of the model's initial rows is."""
        del stack, words
        return self.values


def without_past(optimizer: RowOptimizer, rows: jax.Array, step: jax.Array) -> Slots:
    """Slots of (n, dim) rows that begin before step number ``step``, () int32, and have missed none."""
    slots = dict(optimizer.init(rows))
    return slots | {LAST: jnp.full_like(slots[LAST], taken_before(step))} if LAST in slots else slots


Lines = NewLines | SetLines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshLines:
    """New lines of ``MeshRows``; on a mesh, every leaf has an axis of devices in front.

    Attributes:
      sharded: Lines of the device's shard.
      replicated: Lines of the replicated array, the same for all devices.
    """

    sharded: Lines
    replicated: Lines


NewInStacks = Mapping[str, Lines | MeshLines]
"""New lines by stack: ``Lines`` of a stack that the model holds, ``MeshLines`` of a planned one."""


class Addresses(Protocol):
    """Rows of a stack that begin anew.

    Attributes:
      addresses: (n,) int64, ascending.
      numbers: (n,) int32, which table of the stack each is of.
    """

    @property
    def addresses(self) -> np.ndarray:
        """See the class."""
        ...

    @property
    def numbers(self) -> np.ndarray:
        """See the class."""
        ...

    def lines(self, at: np.ndarray, chosen: np.ndarray | None = None, most: int = 0) -> Lines:
        """Some of the rows as lines of an array, with padding.

        Args:
          at: (m,) lines of the chosen rows.
          chosen: (m,) positions of these rows; None for all.
          most: The least number of lines that there is room for, however few are chosen.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SetAddresses:
    """Rows of a stack that get values.

    Attributes:
      addresses, numbers: As of ``Addresses``.
      values: (n, dim) of the stack's dtype.
      step: How many steps the optimizer has taken.
    """

    addresses: np.ndarray
    numbers: np.ndarray
    values: np.ndarray
    step: int

    def lines(self, at: np.ndarray, chosen: np.ndarray | None = None, most: int = 0) -> SetLines:
        """See ``Addresses``."""
        size, rows = bucket(max(at.size, most), NO_LINE), self.values if chosen is None else self.values[chosen]
        lines, values = np.full(size, NO_LINE, np.int32), np.zeros((size, rows.shape[1]), rows.dtype)
        lines[: at.size], values[: at.size] = at, rows
        return SetLines(at=lines, values=values)  # pyright: ignore[reportArgumentType]

    def store(self, table: HostTable, chosen: np.ndarray) -> None:
        """Writes the rows of ``chosen``, (n,) bool, to host memory. Not while another thread uses them."""
        values = self.values[chosen]
        slots = without_past(table.optimizer, jnp.asarray(values), jnp.int32(self.step))
        addresses = self.addresses[chosen].astype(table.stack.address_dtype)
        table.store(addresses, values, {name: np.asarray(slot) for name, slot in slots.items()})


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

    def lines(self, at: np.ndarray, chosen: np.ndarray | None = None, most: int = 0) -> NewLines:
        """See ``Addresses``."""
        chosen = np.arange(at.size) if chosen is None else chosen
        # A bucket, so that few programs are compiled; ``_put`` drops what is written to ``NO_LINE``.
        size = bucket(max(at.size, most), NO_LINE)
        lines = np.full(size, NO_LINE, np.int32)
        numbers, words = np.zeros(size, np.int32), np.zeros((size, 2), np.uint32)
        lines[: at.size], numbers[: at.size], words[: at.size] = at, self.numbers[chosen], self.words[chosen]
        return NewLines(at=lines, numbers=numbers, words=words)  # pyright: ignore[reportArgumentType]


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


def renewed(
    values: jax.Array,
    slots: Slots,
    stack: Stack,
    optimizer: RowOptimizer | None,
    words: jax.Array,
    lines: Lines,
    step: jax.Array,
) -> tuple[jax.Array, Slots]:
    """The array with what its new lines begin with, and the slots as the optimizer makes them; inside jit.

    Args:
      values: (lines, dim or more) rows; zeros follow each where rows are padded.
      slots: The rows' slots, or none.
      stack: The rows' stack.
      optimizer: The optimizer that made the slots.
      words: (2,) uint32, the key of the model's initial rows (``key_words``).
      lines: Where, and for which keys, or with which values.
      step: () int32, how many steps the optimizer has taken.
    """
    fresh = jnp.pad(lines.first(stack, words), ((0, 0), (0, values.shape[1] - stack.dim)))
    own = {} if optimizer is None or not slots else without_past(optimizer, fresh, step)
    return _put(values, lines.at, fresh), {name: _put(slot, lines.at, own[name]) for name, slot in slots.items()}


def renewed_in(model: SparseModel, optimizer: SparseOptimizer, words: jax.Array, new: NewInStacks) -> None:
    """Renews lines of the stacks that the model holds, in place; inside jit.

    Args:
      model: The model.
      optimizer: The model's optimizer.
      words: (2,) uint32, the key of the model's initial rows (``key_words``).
      new: By stack.
    """
    arrays, stacks = model.embeddings.arrays(), model.embeddings.layout.stacks
    for name in arrays.keys() & new.keys():
        lines = new[name]
        assert not isinstance(lines, MeshLines)  # the model is on one device
        slots = {slot: held[...] for slot, held in optimizer.slots[name].items()}
        arrays[name], slots = renewed(
            arrays[name], slots, stacks[name], optimizer.of(name), words, lines, optimizer.step
        )
        for slot, array in slots.items():
            optimizer.slots[name][slot][...] = array
    model.embeddings.set_arrays(arrays)


def on_device(
    rows: MeshRows, stack: Stack, optimizer: RowOptimizer | None, words: jax.Array, lines: MeshLines, step: jax.Array
) -> MeshRows:
    """Renews lines of a planned stack on one device; inside ``shard_map``."""
    sharded, sharded_slots = renewed(rows.sharded, rows.sharded_slots, stack, optimizer, words, lines.sharded, step)
    replicated, slots = renewed(rows.replicated, rows.replicated_slots, stack, optimizer, words, lines.replicated, step)
    return dataclasses.replace(
        rows, sharded=sharded, sharded_slots=sharded_slots, replicated=replicated, replicated_slots=slots
    )


def _put(array: jax.Array, at: jax.Array, lines: jax.Array) -> jax.Array:
    # Padding repeats one line, which lies outside of every array and is dropped: lines that are written are unique.
    return array.at[at].set(lines, mode="drop", unique_indices=True)


class FirstRows:
    """Gives rows of growing tables their first values when they are given to other keys. Use it from one thread.

    Args:
      layout: The run's tables.
      growing: The names of the tables that grow.
      key: The key of the model's initial rows.
      optimizer: The row optimizers.
      step: Gives how many steps they have taken, () int32 on one device.

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
        step: Callable[[], jax.Array],
    ):
        self._layout, self._optimizer, self._step = layout, optimizer, step
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

    def store(self, table: HostTable, grown: Grown) -> None:
        """Writes the first values and slots of rows in host memory. Not while another thread uses these rows."""
        if (new := new_addresses(table.stack, grown)) is None:
            return
        count = new.addresses.size
        lines = new.lines(np.arange(count))
        rows = _first(table.stack, table.optimizer, self.words, lines, self._step())
        # Without the bucket's padding: a host table has a row for each address, and no place for more.
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
        # Of a stack that a plan divides, a batch may read rows on devices alone, and renew only these.
        if (new := new_addresses(stack, grown)) is None or not read.size:
            return rows
        # Every new row is one that the batch reads somewhere: here, or where ``renewed`` writes it.
        at = np.searchsorted(read, new.addresses)
        chosen = np.flatnonzero((at < read.size) & (read[np.minimum(at, read.size - 1)] == new.addresses))
        if not chosen.size:
            return rows
        optimizer = optimizer_of(self._optimizer, name)
        return _replaced(stack, optimizer, rows, self.words, new.lines(at[chosen], chosen), self._step())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first(stack: Stack, optimizer: RowOptimizer, words: jax.Array, lines: NewLines, step: jax.Array) -> Rows:
    values = jax.numpy.zeros((lines.at.shape[0], stack.dim), stack.dtype)
    first, slots = renewed(values, optimizer.init(values), stack, optimizer, words, lines, step)
    return Rows(values=first, slots=dict(slots))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _replaced(
    stack: Stack, optimizer: RowOptimizer | None, rows: Rows, words: jax.Array, lines: NewLines, step: jax.Array
) -> Rows:
    values, slots = renewed(rows.values, rows.slots, stack, optimizer, words, lines, step)
    return Rows(values=values, slots=dict(slots))
