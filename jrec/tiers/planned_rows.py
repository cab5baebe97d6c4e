"""Rows that live where a plan says: sharded over devices, replicated on all of them, or in host memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import SharedGradients, shared_gradients
from jrec.mesh.exchange import Exchange
from jrec.mesh.retrieve import retrieve
from jrec.mesh.route import MeshRows, Route
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions
from jrec.mesh.update import RowGradients
from jrec.ops.gather_reduce import gather_reduce_call
from jrec.ops.lookup import Residuals as BagResiduals
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.types import Bags
from jrec.tiers.local_rows import LocalRows
from jrec.tiers.store import Context, Deferred, Update

_NO_CAST = "bags of planned rows have no cast; what cuts batches into the devices' parts makes it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedResiduals:
    """The residuals of a lookup: the cast of the ids, which number unique rows, and the step's open exchanges.

    Attributes:
      bags: The cast and the weights.
      exchange: The requests for rows between devices; None without any.
      sent: The lookups sent between devices; None without any.
    """

    bags: BagResiduals
    exchange: Exchange | None
    sent: Sent | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """A stack on a mesh, inside ``shard_map``: bags read the batch's unique rows, which a route locates.

    A bag is the sum of its unique rows and of the partial sums that owners of other rows have pooled.

    Attributes:
      rows: The device's view of the arrays, with the batch's rows from host memory.
    """

    rows: MeshRows

    def lookup(self, bags: Bags, route: Route | None, context: Context) -> Deferred[tuple[jax.Array, Any]]:
        """Retrieves the batch's unique rows, has others pool sent lookups, and defers the pooling; see ``Store``."""
        route, communication = _given(route), context.together
        if _all_replicated(route):
            return self._copies(route).lookup(_on_copies(bags, route), None, context)
        axis, kind = communication.axis, communication.exchange
        exchange = sent = None
        if route.remote is not None:
            exchange = Exchange.open(route.remote, shard_rows=self.rows.shard_rows, axis=axis, kind=kind)
        if route.send is not None:
            sent = Sent.open(route.send, axis=axis, kind=kind)
        table = retrieve(self.rows, route, exchange)
        away = None if sent is None else sent.pooled(self.rows.sharded, options=context.options)
        cast = bags.cast
        if cast is None:
            raise ValueError(_NO_CAST)
        left = PlannedResiduals(bags=BagResiduals(cast=cast, weights=bags.weights), exchange=exchange, sent=sent)

        def finish(pooled: jax.Array) -> tuple[jax.Array, PlannedResiduals]:
            return pooled if away is None else pooled + away, left

        return Deferred(call=gather_reduce_call(table, bags.ids, bags.offsets, weights=bags.weights), finish=finish)

    def update(
        self, residuals: Any, gradients: jax.Array, route: Route | None, context: Context
    ) -> Update[PlannedRows]:
        """Defers sending gradients to the rows' owners and the step there; see ``Store``."""
        route = _given(route)
        if _all_replicated(route):
            return self._updated_copies(residuals, gradients, route, context)
        communication, options = context.together, context.options

        @functools.cache
        def row_gradients() -> RowGradients:
            bags = residuals.bags
            of_rows = casted_gather_reduce(bags.cast, gradients, bags.weights, implementation=options.implementation)
            return RowGradients(
                rows=self.rows,
                route=route,
                exchange=residuals.exchange,
                gradients=of_rows,
                sent=residuals.sent,
                bag_gradients=gradients,
                axis=communication.axis,
                reduce=communication.reduce,
                options=options,
            )

        def squares() -> jax.Array:
            own, shared = row_gradients().squares()
            return own + communication.once(shared)

        def step(options: StepOptions) -> Deferred[PlannedRows]:
            rows = row_gradients().step(context.row_optimizer, options)
            return Deferred(finish=lambda _: PlannedRows(rows=rows))

        return Update(squares=squares, step=step)

    def _copies(self, route: Route) -> LocalRows:
        """The replicated rows, as the device has them."""
        values, slots = self.rows.replicated, self.rows.replicated_slots
        return LocalRows(values=values, slots=slots, addresses=route.addresses, dim=values.shape[1])

    def _updated_copies(
        self, residuals: BagResiduals, gradients: jax.Array, route: Route, context: Context
    ) -> Update[PlannedRows]:
        """The rows after a step that read only replicated rows: in place by one kernel on a mesh of one device."""

        def with_copies(values: jax.Array, slots: Slots) -> PlannedRows:
            rows = dataclasses.replace(self.rows, replicated=values, replicated_slots=slots)
            return PlannedRows(rows=rows)

        communication, cast = context.together, residuals.cast
        if jax.lax.axis_size(communication.axis) == 1:
            update = self._copies(route).update(residuals, gradients, None, context)

            def step_copies(options: StepOptions) -> Deferred[PlannedRows]:
                pending = update.step(options)

                def finish(result: Any) -> PlannedRows:
                    copies = pending.finish(result)
                    return with_copies(copies.values, copies.slots)

                return Deferred(call=pending.call, finish=finish)

            return Update(squares=update.squares, step=step_copies)

        @functools.cache
        def row_gradients() -> SharedGradients:
            options = context.options
            of_rows = casted_gather_reduce(cast, gradients, residuals.weights, implementation=options.implementation)
            return shared_gradients(
                self.rows.replicated,
                route.replicated,
                of_rows,
                axis=communication.axis,
                reduce=communication.reduce,
                union=route.union,
                addresses=route.addresses,
                options=options,
            )

        def squares() -> jax.Array:
            return communication.once(row_gradients().squares(self.rows.replicated, context.options))

        def step(options: StepOptions) -> Deferred[PlannedRows]:
            rows = self.rows
            new = row_gradients().step(context.row_optimizer, rows.replicated, rows.replicated_slots, options)
            return Deferred(finish=lambda _: with_copies(*new))

        return Update(squares=squares, step=step)


def _all_replicated(route: Route) -> bool:
    """Whether every row of the batch is replicated."""
    return route.own is None and route.remote is None and route.send is None


def _on_copies(bags: Bags, route: Route) -> Bags:
    """Bags whose ids and cast number the replicated rows, from bags that number the batch's unique rows."""
    copies, cast = route.replicated.rows, bags.cast  # as many as unique rows, in their order
    if cast is None:
        raise ValueError(_NO_CAST)
    ids = jnp.where(bags.ids < 0, bags.ids, copies.at[bags.ids].get(mode="clip", wrap_negative_indices=False))
    return dataclasses.replace(bags, ids=ids, cast=dataclasses.replace(cast, rows=copies))


def _given(route: Route | None) -> Route:
    if route is None:
        raise ValueError(
            "a stack of planned rows has no route; give the step the routes of the device's part of the batch"
        )
    return route
