"""The backward half: gradients of a batch's rows and sent bags to the rows' owners, and one step there (OPER, 5)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import Reduce, pick, update_shared
from jrec.mesh.exchange import Exchange
from jrec.mesh.route import AXIS, MeshRows, Picks, Route, check_view
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions, cast_rows, of_unique, step_casted
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
    """Steps all rows that any device read, wherever they live. Call it inside ``shard_map``.

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
    if gradients.ndim != 2 or gradients.shape[0] != route.capacity:
        raise ValueError(
            f"gradients must be ({route.capacity}, dim), one row for each unique row, not {gradients.shape}"
        )
    sharded, sharded_slots, host, host_slots = rows.sharded, rows.sharded_slots, rows.host, rows.host_slots
    if route.own is not None:
        arrived = _arrived(
            rows, route, route.own, exchange, gradients, sent=sent, bag_gradients=bag_gradients, options=options
        )
        first, sharded, sharded_slots = sharded.shape[0], *arrived.step(optimizer, sharded, sharded_slots, 0, options)
        if host is not None:
            host, host_slots = arrived.step(optimizer, host, host_slots, first, options)
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
        host=host,
        host_slots=host_slots,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arrived:
    """The gradients of a device's rows, as bags of what the rows' owner read itself and what others asked of it.

    A row's gradient has up to three sources: the device's own unique rows, the unique rows that others asked for, and
    the bags that others had pooled here. Optimizers are not linear, so these are one step, never two.

    Attributes:
      rows: (n,) int32, offsets in the shard, then in the rows from host memory behind it.
      offsets: (bags + 1,) int32, the bags of these rows; None where each is a bag.
      gradients: (bags, dim) float32.
      weights: (n,) float32, or None.
      addresses: (n,) int32 in the stack, where rows are rounded by them.
    """

    rows: jax.Array
    offsets: jax.Array | None
    gradients: jax.Array
    weights: jax.Array | None
    addresses: jax.Array | None

    def step(
        self, optimizer: RowOptimizer, table: jax.Array, slots: Slots, first: int, options: StepOptions
    ) -> tuple[jax.Array, Slots]:
        """Sums all there is of a row, and steps it once: of the rows that begin at offset ``first``."""
        count = table.shape[0]
        rows = self.rows if first == 0 else jnp.where(self.rows < first, count, self.rows - first)
        if self.offsets is None:
            cast = cast_rows(rows, num_rows=count, options=options)
        else:
            cast = tensor_cast(rows, self.offsets, num_rows=count, implementation=options.implementation)
        addresses = None if self.addresses is None else of_unique(cast, self.addresses)
        return step_casted(optimizer, table, slots, cast, self.gradients, addresses, options, weights=self.weights)


def _arrived(
    rows: MeshRows,
    route: Route,
    own: Picks,
    exchange: Exchange | None,
    gradients: jax.Array,
    *,
    sent: Sent | None,
    bag_gradients: jax.Array | None,
    options: StepOptions,
) -> _Arrived:
    """Sends gradients to the owners of the rows; arguments as of ``update``."""
    read, given = own.rows, _collected(route, own, exchange, gradients)
    if exchange is not None:
        read = jnp.concatenate([read, exchange.asked.reshape(-1)])
    addresses = None
    if options.rounds(rows.sharded) and route.addresses is not None:
        addresses = _collected(route, own, exchange, route.addresses)
    if sent is None:
        return _Arrived(rows=read, offsets=None, gradients=given, weights=None, addresses=addresses)
    if bag_gradients is None:
        raise ValueError("lookups were sent: give the gradients of the bags, too")
    count, weights = read.shape[0], None
    if sent.weights is not None:
        weights = jnp.concatenate([jnp.ones(count, jnp.float32), sent.weights])
    if addresses is not None:
        addresses = None if sent.addresses is None else jnp.concatenate([addresses, sent.addresses])
    return _Arrived(
        rows=jnp.concatenate([read, sent.rows]),
        offsets=jnp.concatenate([jnp.arange(count, dtype=jnp.int32), sent.offsets + jnp.int32(count)]),
        gradients=jnp.concatenate([given, sent.deliver(bag_gradients)]),
        weights=weights,
        addresses=addresses,
    )


def _collected(route: Route, own: Picks, exchange: Exchange | None, values: jax.Array) -> jax.Array:
    """(O + N * C, ...): values of the own rows, then those that the others send, in the order of ``asked``."""
    mine = pick(values, own.at)
    if exchange is None or route.remote is None:
        return mine
    arrived = exchange.deliver(pick(values, route.remote.at))
    return jnp.concatenate([mine, arrived.reshape(-1, *values.shape[1:])])
