"""The backward half: gradients of a batch's rows and sent bags to the rows' owners, and one step there (OPER, 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import Reduce, pick, update_shared
from jrec.mesh.exchange import Exchange
from jrec.mesh.route import AXIS, MeshRows, Route, check_view
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions, cast_rows, step_casted
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tensor_cast import tensor_cast


def update(
    optimizer: RowOptimizer,
    rows: MeshRows,
    route: Route,
    exchange: Exchange | None,
    gradients: jax.Array,
    *,
    sent: Sent | None = None,
    bag_gradients: jax.Array | None = None,
    axis: str = AXIS,
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
      sent: as opened for the lookups that were sent; None where none are.
      bag_gradients: (num_bags, dim) float32 of the device's bags; beside ``sent``.
      axis: of the mesh.
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
        optimizer,
        rows.sharded,
        rows.sharded_slots,
        route,
        gradients,
        exchange=exchange,
        sent=sent,
        bag_gradients=bag_gradients,
        options=options,
    )
    replicated, replicated_slots = update_shared(
        optimizer,
        rows.replicated,
        rows.replicated_slots,
        route.replicated,
        gradients,
        axis=axis,
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
    gradients: jax.Array,
    *,
    exchange: Exchange | None = None,
    sent: Sent | None = None,
    bag_gradients: jax.Array | None = None,
    options: StepOptions | None = None,
) -> tuple[jax.Array, Slots]:
    """Sends gradients to the owners of the rows, which sum all there are of a row in one cast, and step it once.

    A row's gradient has up to three sources: the device's own unique rows, the unique rows that others asked for, and
    the bags that others had pooled here. Optimizers are not linear, so these are one step, never two.

    Args:
      optimizer: whose step.
      shard: (S, dim).
      slots: of the shard.
      route: of the device's part of the batch.
      gradients: (U, dim) float32 of unique rows.
      exchange: as opened for ``retrieve``; None where nothing was asked.
      sent: as opened for the lookups that were sent; None where none were.
      bag_gradients: (num_bags, dim) float32; beside ``sent``.
      options: of the step.

    Returns:
      The new shard and slots.
    """
    options = StepOptions() if options is None else options
    if gradients.ndim != 2 or gradients.shape[0] != route.capacity:
        raise ValueError(
            f"gradients must be ({route.capacity}, dim), one row for each unique row, not {gradients.shape}"
        )
    rows, given = route.own.rows, _collected(route, exchange, gradients)
    if exchange is not None:
        rows = jnp.concatenate([rows, exchange.asked.reshape(-1)])
    addresses = None
    if options.rounds(shard) and route.addresses is not None:
        addresses = _collected(route, exchange, route.addresses)
    if sent is None:
        cast = cast_rows(rows, num_rows=shard.shape[0], options=options)
        return step_casted(optimizer, shard, slots, cast, given, addresses, options)
    if bag_gradients is None:
        raise ValueError("lookups were sent: give the gradients of the bags, too")
    count, weights = rows.shape[0], None
    offsets = jnp.concatenate([jnp.arange(count, dtype=jnp.int32), sent.offsets + jnp.int32(count)])
    if sent.weights is not None:
        weights = jnp.concatenate([jnp.ones(count, jnp.float32), sent.weights])
    if addresses is not None:
        addresses = None if sent.addresses is None else jnp.concatenate([addresses, sent.addresses])
    rows = jnp.concatenate([rows, sent.rows])
    given = jnp.concatenate([given, sent.deliver(bag_gradients)])
    cast = tensor_cast(rows, offsets, num_rows=shard.shape[0], implementation=options.implementation)
    return step_casted(optimizer, shard, slots, cast, given, addresses, options, weights=weights)


def _collected(route: Route, exchange: Exchange | None, values: jax.Array) -> jax.Array:
    """(O + N * C, ...): values of the own rows, then those that the others send, in the order of ``asked``."""
    own = pick(values, route.own.at)
    if exchange is None or route.remote is None:
        return own
    arrived = exchange.deliver(pick(values, route.remote.at))
    return jnp.concatenate([own, arrived.reshape(-1, *values.shape[1:])])
