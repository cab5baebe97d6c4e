"""Gradients of rows that all devices have, summed over the devices, and the same step on every device.

"local" is OPER's local-aggregated sparse all-reduce (section 5.3): the devices learn which rows any of them touched,
each writes its gradients to a buffer of only these rows, zeros elsewhere, and one dense all-reduce sums the buffers.
"dense" all-reduces a gradient of all rows. "all_gather" gives every device the sparse gradients of all devices, which
it sums itself. All three do the same optimizer step: rows that no device touched keep their bits, whatever the
optimizer.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.mesh.retrieve import place
from jrec.mesh.route import AXIS, GatherMap
from jrec.mesh.step import StepOptions, cast_rows, of_unique, squares_of
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.row_update import casted_update, row_update
from jrec.ops.types import Cast

Reduce = Literal["local", "dense", "all_gather"]
REDUCES: tuple[str, ...] = get_args(Reduce)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedGradients:
    """Gradients, from all devices, of rows that every device holds; equal on every device.

    Attributes:
      cast: The rows that any device touched.
      gradients: (unique_capacity, dim) float32, summed by row; or the gradients of all devices, not summed yet.
      summed: Whether ``gradients`` are summed.
      addresses: (unique_capacity,) int32, the rows' addresses in the stack where rounding needs them, or None.
    """

    cast: Cast
    gradients: jax.Array
    summed: bool
    addresses: jax.Array | None

    def squares(self, table: jax.Array, options: StepOptions) -> jax.Array:
        """The sum of squares of the rows' gradients, () float32."""
        if not self.summed:
            return squares_of(self.cast, self.gradients, None, options)
        real = (self.cast.rows < table.shape[0])[:, None]  # padding took any row's gradient
        return jnp.sum(jnp.where(real, jnp.square(self.gradients), jnp.float32(0)))

    def step(
        self, optimizer: RowOptimizer, table: jax.Array, slots: Slots, options: StepOptions
    ) -> tuple[jax.Array, Slots]:
        """Steps the touched rows; returns the new table and slots, equal to the bit on all devices."""
        shared = {"implementation": options.implementation, **options.arguments(table, self.addresses)}
        if self.summed:
            return row_update(optimizer, table, slots, self.cast.rows, self.gradients, **shared)
        return casted_update(optimizer, table, slots, self.cast, self.gradients, **shared)


def shared_gradients(
    table: jax.Array,
    picks: GatherMap,
    gradients: jax.Array,
    *,
    reduce: Reduce = "local",
    addresses: jax.Array | None = None,
    options: StepOptions | None = None,
) -> SharedGradients:
    """Sums the gradients, over all devices, of rows that every device holds. Call it inside ``shard_map``.

    Args:
      table: (H, dim), equal on all devices.
      picks: (R,), the rows of the table that this device read.
      gradients: (U, dim) float32, the gradients of this device's unique rows.
      reduce: "local", "dense" or "all_gather".
      addresses: (U,) int32, the unique rows' addresses in the stack; needed where 16-bit rows are rounded
        stochastically.
      options: The step's options.

    Raises:
      ValueError: On an unknown ``reduce``.
    """
    if reduce not in REDUCES:
        raise ValueError(f"reduce={reduce!r} is unknown; choose one of {', '.join(REDUCES)}")
    options = StepOptions() if options is None else options
    # Behind the gradients, so that no collective of the backward pass takes the network while rows are retrieved.
    picked, picked_gradients = jax.lax.optimization_barrier((picks.rows, pick(gradients, picks.at)))
    # Every device casts the same gathered rows, so all have the same unique rows in the same order, without a second
    # exchange: what follows may be summed place by place.
    rows = jax.lax.all_gather(picked, AXIS, tiled=True)
    cast = cast_rows(rows, num_rows=table.shape[0], options=options)
    if options.rounds(table) and addresses is not None:
        # The cast numbers lines of the replicated array, which say nothing of a row's table: rounding goes by
        # addresses, and each device knows only the addresses of the rows that it read itself.
        addresses = of_unique(cast, jax.lax.all_gather(pick(addresses, picks.at), AXIS, tiled=True))
    if reduce == "all_gather":
        # In the order of ``rows``, so that the cast's positions hold for the gradients, too.
        everybody = jax.lax.all_gather(picked_gradients, AXIS, tiled=True)
        return SharedGradients(cast=cast, gradients=everybody, summed=False, addresses=addresses)
    if reduce == "dense":
        # ``picked`` has each row at most once: setting is enough, and the sum over devices is the only addition.
        dense = place(jnp.zeros((table.shape[0], picked_gradients.shape[1]), jnp.float32), picked, picked_gradients)
        # Padding of the cast reads any row, and is dropped by the update.
        summed = pick(jax.lax.psum(dense, AXIS), cast.rows)
    else:
        summed = _local_aggregated(cast, picked_gradients)
    return SharedGradients(cast=cast, gradients=summed, summed=True, addresses=addresses)


def pick(values: jax.Array, at: jax.Array) -> jax.Array:
    """The values at ``at``; padding, which is dropped later, reads any of them."""
    return values.at[at].get(mode="clip", wrap_negative_indices=False)


def _local_aggregated(cast: Cast, gradients: jax.Array) -> jax.Array:
    """(unique_capacity, dim): gradients of the rows of the union, summed over the devices.

    Args:
      cast: The cast of all devices' rows, device by device; all devices know the same.
      gradients: (R, dim) float32, this device's gradients, in the order of its rows.
    """
    # The cast is sorted by row. Back in the order before the sort, device
    # by device, the numbers of this device's rows lie side by side.
    segments = segment_of_entries(cast.offsets, cast.positions.shape[0])
    numbers = jnp.zeros_like(segments).at[cast.positions].set(segments, unique_indices=True)
    # The place of each of this device's rows among the unique rows; past the last one for padding.
    count = gradients.shape[0]
    places = jax.lax.dynamic_slice_in_dim(numbers, jax.lax.axis_index(AXIS) * count, count)
    buffer = place(jnp.zeros((cast.rows.shape[0], gradients.shape[1]), jnp.float32), places, gradients)
    # Zeros of devices that did not touch a row change nothing, and the touched rows are few: that is what makes one
    # dense all-reduce cheaper than a gradient of the whole array (OPER, 5.3).
    return jax.lax.psum(buffer, AXIS)
