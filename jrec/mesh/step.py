"""One optimizer step on rows of an array whose lines are not the stack's addresses: a shard, or the replicas."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jrec.ops import rounding
from jrec.ops.dispatch import Implementation
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.row_update import casted_gather_reduce, casted_update, row_update
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import Cast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the steps of all arrays of a stack have in common; see ``casted_update``.

    Attributes:
      step: () int32, the number of steps taken before.
      gradient_scale: A factor of the gradients.
      rounding_key: (2,) uint32, the key of this step and stack, or None to round 16-bit rows to nearest.
      implementation: The ops' implementation; None for the platform's fastest.
    """

    step: jax.Array | int = 0
    gradient_scale: jax.Array | float = 1.0
    rounding_key: jax.Array | None = None
    implementation: Implementation | None = dataclasses.field(default=None, metadata={"static": True})

    def rounds(self, table: jax.Array) -> bool:
        """Whether rows of this table are rounded stochastically."""
        return self.rounding_key is not None and table.dtype.itemsize < 4


def cast_rows(rows: jax.Array, *, num_rows: int, options: StepOptions, unique_capacity: int | None = None) -> Cast:
    """The cast of (n,) rows, one bag each; rows of ``num_rows`` or more are padding."""
    named = options.implementation
    return tensor_cast(rows[:, None], num_rows=num_rows, unique_capacity=unique_capacity, implementation=named)


def of_unique(cast: Cast, values: jax.Array) -> jax.Array:
    """(unique_capacity, ...): the values of ``cast.rows``, from one value per lookup, equal for equal rows."""
    firsts = cast.positions.at[cast.offsets[:-1]].get(mode="clip")
    return values.at[firsts].get(mode="clip")


def squares_of(cast: Cast, gradients: jax.Array, weights: jax.Array | None, options: StepOptions) -> jax.Array:
    """The sum of squares of the summed gradients of ``cast.rows``, () float32; arguments as in ``step_casted``."""
    rows = casted_gather_reduce(cast, gradients, weights, implementation=options.implementation)
    return jnp.sum(jnp.square(rows))


def step_casted(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: Cast,
    gradients: jax.Array,
    addresses: jax.Array | None,
    options: StepOptions,
    *,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, Slots]:
    """``casted_update`` of rows that are rounded by their addresses in the stack.

    Args:
      optimizer: The table's optimizer.
      table: (rows, dim).
      slots: The table's slots.
      cast: The cast of n lookups in bags.
      gradients: (num_bags, dim) float32.
      addresses: (unique_capacity,) int32, the addresses in the stack of ``cast.rows``, by which 16-bit rows are
        rounded; None where no row is rounded stochastically.
      options: The step's options.
      weights: (n,) float32, the lookups' weights, or None.
    """
    if not options.rounds(table):
        return casted_update(
            optimizer,
            table,
            slots,
            cast,
            gradients,
            weights=weights,
            step=options.step,
            gradient_scale=options.gradient_scale,
            implementation=options.implementation,
        )
    summed = casted_gather_reduce(cast, gradients, weights, implementation=options.implementation)
    return step_summed(optimizer, table, slots, cast, summed, addresses, options)


def step_summed(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: Cast,
    gradients: jax.Array,
    addresses: jax.Array | None,
    options: StepOptions,
) -> tuple[jax.Array, Slots]:
    """As ``step_casted``, with the summed gradients of ``cast.rows``, (unique_capacity, dim) float32."""
    if not options.rounds(table):
        return row_update(
            optimizer,
            table,
            slots,
            cast.rows,
            gradients,
            step=options.step,
            gradient_scale=options.gradient_scale,
            implementation=options.implementation,
        )
    if addresses is None:
        raise ValueError(
            f"{table.dtype} rows are rounded stochastically by their addresses in the stack, which the route lacks;"
            " give it `addresses`, or no rounding key"
        )
    return _step_rounded(optimizer, table, slots, cast, gradients, addresses, options)


def _step_rounded(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: Cast,
    gradients: jax.Array,
    addresses: jax.Array,
    options: StepOptions,
) -> tuple[jax.Array, Slots]:
    """Steps a float32 copy of the touched rows, rounds it by their addresses and writes it back.

    The kernels round by the line in the array they are given. Here a row's line depends on the plan, and results must
    not depend on the plan.
    """
    count, last = cast.rows.shape[0], table.shape[0]
    numbers = jnp.arange(count, dtype=jnp.int32)
    real = cast.rows < last
    lines = jnp.where(real, cast.rows, last + numbers)

    def take(array: jax.Array) -> jax.Array:
        at = array.at[lines]
        return at.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[lines].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)

    new, new_slots = row_update(
        optimizer,
        take(table).astype(jnp.float32),
        {name: take(slot) for name, slot in slots.items()},
        jnp.where(real, numbers, count),
        gradients,
        step=options.step,
        gradient_scale=options.gradient_scale,
        implementation=options.implementation,
    )
    assert options.rounding_key is not None
    new = rounding.stochastic_round(new, table.dtype, options.rounding_key, addresses)
    return put(table, new), {name: put(slot, new_slots[name]) for name, slot in slots.items()}
