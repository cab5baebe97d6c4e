"""The backward half: gradients of a batch's unique rows to the rows' owners, and one step there (OPER, section 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.sharding.runtime.allreduce import Reduce, pick, update_shared
from jrec.sharding.runtime.exchange import Exchange
from jrec.sharding.runtime.route import MeshRows, Route, check_view
from jrec.sharding.runtime.step import StepOptions, cast_rows, step_casted


def update(
    optimizer: RowOptimizer,
    rows: MeshRows,
    route: Route,
    exchange: Exchange,
    gradients: jax.Array,
    *,
    reduce: Reduce = "local",
    options: StepOptions | None = None,
) -> MeshRows:
    """Steps all sharded and replicated rows that any device read. Call it inside ``shard_map``.

    Rows of the batch that came from host memory are ``update_shared``'s.

    Args:
      optimizer: whose step.
      rows: the device's view of the arrays and slots; donate them to ``jax.jit`` to update in place.
      route: of the device's part of the batch.
      exchange: as opened for ``retrieve``: requests do not travel again.
      gradients: (U, dim) float32 of the device's unique rows, of its part of the global batch's loss.
      reduce: how gradients of replicated rows are summed; see ``update_shared``.
      options: of the step.

    Returns:
      The new arrays and slots.

    Raises:
      ValueError: if shapes do not fit, or addresses are missing where rows are rounded by them.
    """
    options = StepOptions() if options is None else options
    check_view(rows, route)
    sharded, sharded_slots = update_sharded(
        optimizer, rows.sharded, rows.sharded_slots, route, exchange, gradients, options=options
    )
    replicated, replicated_slots = update_shared(
        optimizer,
        rows.replicated,
        rows.replicated_slots,
        route.replicated,
        gradients,
        axis=exchange.axis,
        reduce=reduce,
        union=route.union,
        addresses=route.addresses,
        options=options,
    )
    return MeshRows(
        sharded=sharded,
        replicated=replicated,
        sharded_slots=sharded_slots,
        replicated_slots=replicated_slots,
    )


def update_sharded(
    optimizer: RowOptimizer,
    shard: jax.Array,
    slots: Slots,
    route: Route,
    exchange: Exchange,
    gradients: jax.Array,
    *,
    options: StepOptions | None = None,
) -> tuple[jax.Array, Slots]:
    """Sends gradients to the owners of their rows, which sum them by a cast of what was asked and step the rows.

    Args:
      optimizer: whose step.
      shard: (S, dim).
      slots: of the shard.
      route: of the device's part of the batch.
      exchange: as opened for ``retrieve``.
      gradients: (U, dim) float32.
      options: of the step.

    Returns:
      The new shard and slots.
    """
    options = StepOptions() if options is None else options
    if gradients.ndim != 2 or gradients.shape[0] != route.capacity:
        raise ValueError(
            f"gradients must be ({route.capacity}, dim), one row for each unique row, not {gradients.shape}"
        )
    rows = jnp.concatenate([route.own.rows, exchange.asked.reshape(-1)])
    given = _collected(route, exchange, gradients)
    addresses = None
    if options.rounds(shard) and route.addresses is not None:
        addresses = _collected(route, exchange, route.addresses)
    cast = cast_rows(rows, num_rows=shard.shape[0], options=options)
    return step_casted(optimizer, shard, slots, cast, given, addresses, options)


def _collected(route: Route, exchange: Exchange, values: jax.Array) -> jax.Array:
    """(O + N * C, ...): values of the own rows, then those that the others send, in the order of ``asked``."""
    arrived = exchange.deliver(pick(values, route.remote.at))
    return jnp.concatenate([pick(values, route.own.at), arrived.reshape(-1, *values.shape[1:])])
