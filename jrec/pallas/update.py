"""The part of a kernel that updates table rows in place, once their gradient is in registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrec.pallas import rules
from jrec.pallas.rules import Rule
from jrec.pallas.tile import Operand, Tile

# (values, dtype, key0, key1, addresses, columns) -> values on the grid of dtype; see jrec.ops.rounding.round_values.
Rounding = Callable[[jax.Array, np.dtype, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Target(NamedTuple):
    """What an update reads and writes: arrays outside a kernel, refs inside.

    Attributes:
      table: (num_rows, dim), written in place.
      slots: The slots by name, (num_rows, dim) or (num_rows,) float32, written in place.
      rows: (n,) int32, the table row of each item; ``num_rows`` and more is padding.
      hyper: (5,) float32 or more, see ``rules.hyperparameters``.
      key: (2,) uint32 of stochastic rounding, or None.
      rounding_rows: (n,) int32, the number of each item's row for stochastic rounding; None for the row itself.
    """

    table: Any
    slots: dict[str, Any]
    rows: Operand
    hyper: Operand
    key: Operand | None = None
    rounding_rows: Operand | None = None


class Loaded(NamedTuple):
    """A tile's rows before the update: their addresses (-1 for none), values, slots, and numbers for rounding."""

    address: jax.Array
    rows: jax.Array
    slots: rules.State
    number: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updater:
    """One optimizer step on a tile of rows.

    Attributes:
      tile: The geometry.
      ops: ``inline`` or ``twins``.
      rule: The optimizer.
      rounding: How sums become 16-bit numbers; None for round to nearest.
    """

    tile: Tile
    ops: ModuleType
    rule: Rule
    rounding: Rounding | None

    def addresses(self, target: Target, item: jax.Array) -> jax.Array:
        """Table rows of items; -1 for padding and for no item."""
        address = self.ops.load_scalars(self.tile, target.rows, item, fill=-1)
        # One number for both kinds of no row, which loads and stores leave out.
        return jnp.where(address < target.table.shape[0], address, -1)

    def load(self, target: Target, item: jax.Array, address: jax.Array) -> Loaded:
        """Reads rows and slots of items at their addresses."""
        tile, ops = self.tile, self.ops
        slots = {
            name: (ops.load_rows if shape == "element" else ops.load_scalars)(
                tile, target.slots[name], address, written=True
            )
            for name, shape in self.rule.slots
        }
        number = address
        if self.rounding is not None and target.rounding_rows is not None:
            number = ops.load_scalars(tile, target.rounding_rows, item)
        return Loaded(address, ops.load_rows(tile, target.table, address, written=True), slots, number)

    def apply(self, target: Target, old: Loaded, gradients: jax.Array) -> None:
        """Writes rows and slots after a step along ``gradients``, values."""
        tile, ops = self.tile, self.ops

        def number(i: int | jax.Array) -> jax.Array:
            return ops.load_scalars(tile, target.hyper, tile.row_scalars(i, jnp.int32))

        rate, scale, first, second = map(number, range(rules.NUMBERS))
        step = rules.Step(
            tile=tile,
            ops=ops,
            dim=self.rule.dim,
            learning_rate=rate,
            gradient_scale=scale,
            factors=(first, second),
            number=number,
        )
        optimizer = self.rule.optimizer
        # The same mathematics as XLA's (``jrec.row_optimizers``), on registers: padding columns are zeros throughout.
        gradients = optimizer.prepare(old.rows, gradients, step)
        rows, slots = optimizer.step_rows(old.rows, gradients, old.slots, step)
        if self.rounding is not None:
            key = [ops.spread(tile, ops.load_scalars(tile, target.key, tile.row_scalars(i, jnp.int32))) for i in (0, 1)]
            of_row = ops.spread(tile, old.number)
            rows = self.rounding(rows, target.table.dtype, key[0], key[1], of_row, tile.columns())
        # Rows are unique, so that no other tile reads or writes these, whenever it runs.
        ops.store_rows(tile, target.table, old.address, rows)
        for name, shape in self.rule.slots:
            store = ops.store_rows if shape == "element" else ops.store_scalars
            store(tile, target.slots[name], old.address, slots[name])


def in_place(target: Target) -> Target:
    """The target with table and slots as refs, which kernels write without copies."""
    return target._replace(
        table=jax.new_ref(target.table), slots={name: jax.new_ref(slot) for name, slot in target.slots.items()}
    )


def finished(target: Target) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Table and slots of an ``in_place`` target, after all kernels."""
    return jax.freeze(target.table), {name: jax.freeze(slot) for name, slot in target.slots.items()}
