"""First values of rows of growing tables, for wherever the rows live."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jrec.data.growing_tables import Grown
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.ring import Rows
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.row_init import key_words
from jrec.row_optimizers import RowOptimizer, RowOptimizers, optimizer_of
from jrec.run.new_lines import NewLines, new_addresses, renewed


class FirstRows:
    """Gives rows of growing tables their first values when they are given to other keys. Use it from one thread.

    Args:
      layout: The run's tables.
      growing: The names of the tables that grow.
      key: The key of the model's initial rows.
      optimizer: The row optimizers.

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
    ):
        self._layout, self._optimizer = layout, optimizer
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
        return _replaced(stack, optimizer, rows, self.words, new.lines(at[chosen], chosen))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first(stack: Stack, optimizer: RowOptimizer, words: jax.Array, lines: NewLines) -> Rows:
    values = jax.numpy.zeros((lines.at.shape[0], stack.dim), stack.dtype)
    first, slots = renewed(values, optimizer.init(values), stack, optimizer, words, lines)
    return Rows(values=first, slots=dict(slots))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _replaced(stack: Stack, optimizer: RowOptimizer | None, rows: Rows, words: jax.Array, lines: NewLines) -> Rows:
    values, slots = renewed(rows.values, rows.slots, stack, optimizer, words, lines)
    return Rows(values=values, slots=dict(slots))
