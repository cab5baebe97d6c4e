"""Gradients of rows that all devices have, summed over the devices, and the same step on every device.

"local" is OPER's local-aggregated sparse all-reduce (section 5.3): the devices learn which rows any of them touched,
each puts its gradients in the places of these, zeros elsewhere, and one dense all-reduce sums the buffers. "dense"
all-reduces a gradient of all rows. "all_gather" gives every device everybody's sparse gradients, which it sums itself.
All three do one and the same optimizer step: rows that no device touched keep their bits, whatever the optimizer.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.types import Cast
from jrec.sharding.runtime.retrieve import place
from jrec.sharding.runtime.route import AXIS, Picks
from jrec.sharding.runtime.step import StepOptions, cast_rows, step_casted, step_summed

Reduce = Literal["local", "dense", "all_gather"]
REDUCES: tuple[str, ...] = get_args(Reduce)


def update_shared(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    picks: Picks,
    gradients: jax.Array,
    *,
    axis: str = AXIS,
    reduce: Reduce = "local",
    union: int | None = None,
    addresses: jax.Array | None = None,
    options: StepOptions | None = None,
) -> tuple[jax.Array, Slots]:
    """Steps rows that every device holds, by the sum of all devices' gradients. Call it inside ``shard_map``.

    Serves replicated rows, and rows of a batch that came from host memory.

    Args:
      optimizer: whose step.
      table: (H, dim), equal on all devices.
      slots: of the table, equal on all devices.
      picks: (R,), what this device read of the table.
      gradients: (U, dim) float32 of this device's unique rows.
      axis: of the mesh.
      reduce: "local", "dense" or "all_gather".
      union: "local": for how many touched rows there is room before a buffer for all that could be is taken; None for
        that at once.
      addresses: (U,) int32 of the unique rows in the stack; needed where 16-bit rows are rounded stochastically.
      options: of the step.

    Returns:
      The new table and slots, equal to the bit on all devices.

    Raises:
      ValueError: on an unknown ``reduce``, or shapes that do not fit.
    """
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; choose one of {', '.join(REDUCES)}")
    options = StepOptions() if options is None else options
    if picks.rows.size == 0 or table.shape[0] == 0:
        return table, slots
    rows = jax.lax.all_gather(picks.rows, axis, tiled=True)
    given = pick(gradients, picks.at)
    if options.rounds(table) and addresses is not None:
        addresses = jax.lax.all_gather(pick(addresses, picks.at), axis, tiled=True)
    if reduce == "all_gather":
        cast = cast_rows(rows, num_rows=table.shape[0], options=options)
        everybody = jax.lax.all_gather(given, axis, tiled=True)
        return step_casted(optimizer, table, slots, cast, everybody, addresses, options)
    if reduce == "dense":
        cast = cast_rows(rows, num_rows=table.shape[0], options=options)
        summed = jax.lax.psum(place(jnp.zeros((table.shape[0], given.shape[1]), jnp.float32), picks.rows, given), axis)
        return step_summed(optimizer, table, slots, cast, pick(summed, cast.rows), addresses, options)

    def step(capacity: int) -> tuple[jax.Array, Slots]:
        cast = cast_rows(rows, num_rows=table.shape[0], options=options, unique_capacity=capacity)
        summed = jax.lax.psum(_in_places(cast, given, axis), axis)
        return step_summed(optimizer, table, slots, cast, summed, addresses, options)

    return step(min(rows.size, table.shape[0]))


def pick(values: jax.Array, at: jax.Array) -> jax.Array:
    """Values at places; padding, which is dropped later, takes any of them."""
    return values.at[at].get(mode="clip", wrap_negative_indices=False)


def _in_places(cast: Cast, given: jax.Array, axis: str) -> jax.Array:
    """(unique_capacity, dim): this device's gradients where the rows of the union have them, zeros elsewhere."""
    capacity, own = cast.rows.shape[0], given.shape[0]
    segments = segment_of_entries(cast.offsets, cast.positions.shape[0])
    numbers = jnp.zeros_like(segments).at[cast.positions].set(segments, unique_indices=True)
    mine = jax.lax.dynamic_slice_in_dim(numbers, jax.lax.axis_index(axis) * own, own)
    return place(jnp.zeros((capacity, given.shape[1]), jnp.float32), mine, given)
