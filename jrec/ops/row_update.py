"""Optimizer steps on the unique rows of a cast, in place under donation; no gradient of a table's size anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrec.ops import rounding
from jrec.ops.arrays import Bagged, RoundingKey, RowGradients, Rows, RowSlots, Scale, Step, Table, Weights
from jrec.ops.dispatch import Call, Implementation, dispatch, dispatch_together
from jrec.ops.doors import (
    INT32,
    checked,
    checked_cast,
    checked_gradients,
    checked_scale,
    checked_slots,
    checked_step,
    checked_table,
    checked_weights,
)
from jrec.ops.explicit_axes import auto_inside, like
from jrec.ops.gather_reduce import gather_reduce
from jrec.ops.row_update_xla import update_rows
from jrec.ops.storage import real_dim
from jrec.ops.types import Cast
from jrec.ops.undivided import undivided
from jrec.ops.verdicts import KernelClass
from jrec.row_optimizers import RowOptimizer, Slots

if TYPE_CHECKING:
    from jrec.pallas.casted_update import UpdateRequest


@auto_inside(lambda optimizer, table, slots, *_, **__: like((table, slots)))
def row_update(
    optimizer: RowOptimizer,
    table: Table,
    slots: RowSlots,
    rows: Rows,
    gradients: RowGradients,
    *,
    step: Step = 0,
    gradient_scale: Scale = 1.0,
    rounding_key: RoundingKey | None = None,
    rounding_rows: Rows | None = None,
    dim: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Table, RowSlots]:
    """One optimizer step on ``table[rows]``; all other rows and slots keep their bits.

    Args:
      optimizer: The optimizer that takes the step.
      table: (num_rows, dim), float32, bfloat16 or float16; the arithmetic is float32.
      slots: As ``optimizer.init(table)`` makes them.
      rows: (n,) int32, ascending and unique, as ``Cast.rows``; entries of ``num_rows`` and more are padding.
      gradients: (n, dim) float32, one row each.
      step: () int32, how many steps were taken before; feeds schedules and Adam's bias correction.
      gradient_scale: Multiplies the gradients: one over the loss scale.
      rounding_key: (2,) uint32, a new one for every step: 16-bit rows are rounded stochastically with it (see
        ``jrec.ops.rounding``); None rounds to nearest.
      rounding_rows: (n,) int32, the numbers that rounding hashes in place of ``rows``; None for the rows themselves.
      dim: How many elements of a row are real, where the table and its slots are padded behind them (see
        ``jrec.ops.storage``); the others keep what they hold. None for all.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest.

    Returns:
      The new table and slots. Donate the old ones to ``jax.jit`` to update in place.

    Raises:
      ValueError: If shapes, dtypes or slots do not fit the table and optimizer.
    """
    table, rows = checked_table(table), checked("rows", rows, ("n",), INT32)
    gradients = checked("gradients", gradients, (rows.shape[0], real_dim(table.shape[1], dim)))
    slots = checked_slots(optimizer, table, slots)
    _check_rounding(rows, rounding_key, rounding_rows)
    step, scale = checked_step(step), checked_scale(gradient_scale)

    def xla(table, slots, rows, gradients, step, scale, key, numbers):
        return update_rows(optimizer, table, slots, rows, gradients, step, scale, key, numbers)

    def native(table, slots, rows, gradients, step, scale, key, numbers):
        from jrec.native import xla as kernels

        return kernels.row_update(optimizer, table, slots, rows, gradients, step, scale, key, numbers)

    def pallas(table, slots, rows, gradients, step, scale, key, numbers):
        from jrec.pallas.row_update import row_update as kernel

        return kernel(
            optimizer,
            undivided(table),
            slots,
            rows,
            _widened(gradients, table),
            step,
            scale,
            rounding=rounding.round_values,
            rounding_key=key,
            rounding_rows=numbers,
            dim=dim,
        )

    args = (table, slots, rows, gradients, step, scale, rounding_key, rounding_rows)
    return dispatch(
        "row_update",
        implementation,
        args,
        xla=xla,
        native=native if has_native(optimizer, table) else None,
        pallas=pallas,
        kernel=_kernel("row_update", optimizer, table),
    )


@auto_inside(lambda optimizer, table, slots, *_, **__: like((table, slots)))
def casted_update(
    optimizer: RowOptimizer,
    table: Table,
    slots: RowSlots,
    cast: Cast,
    bag_gradients: Bagged,
    *,
    weights: Weights | None = None,
    step: Step = 0,
    gradient_scale: Scale = 1.0,
    rounding_key: RoundingKey | None = None,
    rounding_rows: Rows | None = None,
    dim: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Table, RowSlots]:
    """The whole backward pass of a lookup: casted gather-reduce of the bag gradients, then the optimizer's step.

    Kernels fuse the two, so that the coalesced gradient never reaches memory. XLA holds (unique_capacity, dim) of it,
    float32; on GPUs nothing else of that size but the new rows of a 16-bit table, and decayed gradients where both
    ``weight_decay`` and ``max_row_norm`` are set.

    Args:
      optimizer: The optimizer that takes the step.
      table: (num_rows, dim).
      slots: As ``optimizer.init(table)`` makes them.
      cast: The cast of the lookup's ids.
      bag_gradients: (num_bags, dim) float32 or bfloat16, the gradient of the lookup's output. Sums are float32 either
        way; bfloat16 halves the bytes that a GPU gathers.
      weights: float32, the lookup's weights in the order and shape of its ids, or None.
      step: () int32, how many steps were taken before.
      gradient_scale: Multiplies the gradients: one over the loss scale.
      rounding_key: (2,) uint32, a new one for every step: 16-bit rows are rounded stochastically with it (see
        ``jrec.ops.rounding``); None rounds to nearest.
      rounding_rows: (unique_capacity,) int32, the numbers that rounding hashes in place of ``cast.rows``; None for
        these rows themselves.
      dim: How many elements of a row are real, where the table and its slots are padded behind them (see
        ``jrec.ops.storage``); the others keep what they hold. None for all.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest.

    Returns:
      The new table and slots.

    Raises:
      ValueError: If shapes, dtypes or slots do not fit the table and optimizer.
    """
    call = casted_update_call(
        optimizer,
        table,
        slots,
        cast,
        bag_gradients,
        weights=weights,
        step=step,
        gradient_scale=gradient_scale,
        rounding_key=rounding_key,
        rounding_rows=rounding_rows,
        dim=dim,
    )
    return call.dispatch("casted_update", implementation, _together)


def casted_update_call(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: Cast,
    bag_gradients: jax.Array,
    *,
    weights: jax.Array | None = None,
    step: jax.Array | int = 0,
    gradient_scale: jax.Array | float = 1.0,
    rounding_key: jax.Array | None = None,
    rounding_rows: jax.Array | None = None,
    dim: int | None = None,
) -> Call:
    """One of several for ``casted_update_together``; see ``casted_update`` for arguments and errors."""
    table = checked_table(table)
    cast = checked_cast(cast, table.shape[0])
    bag_gradients = checked_gradients(bag_gradients, cast, real_dim(table.shape[1], dim))
    slots = checked_slots(optimizer, table, slots)
    _check_rounding(cast.rows, rounding_key, rounding_rows)
    if weights is not None:
        weights = checked_weights(weights, cast)
    step, scale = checked_step(step), checked_scale(gradient_scale)

    def xla(table, slots, cast, bag_gradients, weights, step, scale, key, numbers):
        gradients = casted_gather_reduce(cast, bag_gradients, weights, implementation="xla")
        return update_rows(optimizer, table, slots, cast.rows, gradients, step, scale, key, numbers)

    def native(table, slots, cast, bag_gradients, weights, step, scale, key, numbers):
        from jrec.native import xla as kernels

        gradients = bag_gradients.astype(jnp.float32)  # the kernel's only dtype; exact
        return kernels.casted_update(optimizer, table, slots, cast, gradients, weights, step, scale, key, numbers)

    def request(table, slots, cast, bag_gradients, weights, step, scale, key, numbers):
        from jrec.pallas.casted_update import UpdateRequest

        return UpdateRequest(
            optimizer=optimizer,
            table=undivided(table),
            slots=slots,
            rows=cast.rows,
            offsets=cast.offsets,
            sources=cast.sources,
            num_unique=cast.num_unique,
            bag_gradients=_widened(bag_gradients, table),
            weights=None if weights is None else weights.reshape(-1)[cast.positions],
            step=step,
            gradient_scale=scale,
            rounding=rounding.round_values,
            rounding_key=key,
            rounding_rows=numbers,
            dim=dim,
        )

    return Call(
        args=(table, slots, cast, bag_gradients, weights, step, scale, rounding_key, rounding_rows),
        xla=xla,
        native=native if has_native(optimizer, table) else None,
        request=request,
        kernel=_kernel("casted_update", optimizer, table),
    )


def casted_update_together(
    calls: Sequence[Call], implementation: Implementation | None
) -> list[tuple[jax.Array, Slots]]:
    """What ``casted_update`` returns for each call; on a GPU, kernels of all of them share launches."""
    return dispatch_together("casted_update", implementation, calls, _together)


def _together(requests: Sequence[UpdateRequest]) -> list[tuple[jax.Array, Slots]]:
    from jrec.pallas.casted_update import casted_update_many

    return casted_update_many(requests)


def _kernel(name: str, optimizer: RowOptimizer, table: jax.Array) -> KernelClass:
    return KernelClass(kernel=name, dtype=table.dtype.name, dim=table.shape[1], optimizer=type(optimizer).__name__)


def _widened(gradients: jax.Array, table: jax.Array) -> jax.Array:
    """Gradients of a padded table with zeros for the padding."""
    missing = table.shape[1] - gradients.shape[1]
    return jnp.pad(gradients, ((0, 0), (0, missing))) if missing else gradients


def has_native(optimizer: RowOptimizer, table: jax.Array) -> bool:
    """Whether the native kernels know the optimizer and the table's dtype."""
    from jrec.native.hyper import STEPS

    return type(optimizer) in STEPS and table.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def casted_gather_reduce(
    cast: Cast,
    bag_gradients: jax.Array,
    weights: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gradients of the unique rows, (unique_capacity, dim) float32, from the bags' gradients (Algorithm 3).

    ``weights`` come in the order of the lookup's ids, as in the forward pass.
    """
    if weights is not None:
        weights = weights.reshape(-1)[cast.positions]
    return gather_reduce(bag_gradients, cast.sources, cast.offsets, weights=weights, implementation=implementation)


def _check_rounding(rows: jax.Array, key: jax.Array | None, numbers: jax.Array | None) -> None:
    if key is not None:
        rounding.check_key(key)
    if numbers is not None:
        checked("rounding_rows", numbers, rows.shape, INT32)
