"""Rows that live where a plan says, which each device finds by itself: no host routes the batches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.mesh.exchange import Exchange
from jrec.mesh.route import MeshRows, Route
from jrec.mesh.routing import AddressMap, Routing, Window
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions
from jrec.ops.gather_reduce import gather_reduce_together
from jrec.ops.lookup import Residuals as BagResiduals
from jrec.ops.row_update import casted_update_together
from jrec.ops.types import Bags
from jrec.tiers.planned_rows import PlannedResiduals, PlannedRows
from jrec.tiers.store import Context, Deferred, Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedResiduals:
    """The residuals of a lookup: the routing, and what the first window left."""

    routing: Routing
    window: Window
    first: PlannedResiduals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """A stack on a mesh, inside ``shard_map``, whose bags hold addresses.

    Attributes:
      rows: The device's view of the arrays.
      places: Where the stack's rows lie.
      routing: Where the batch's rows lie, if it was routed ahead of the step (``routed_ahead``).
    """

    rows: MeshRows
    places: AddressMap
    routing: Routing | None = None

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, RoutedResiduals]]:
        """Routes the bags and pools the rows of every window; see ``Store``."""
        routing = self.routing or self.places.routed(bags, context.options.implementation)
        window = routing.first()

        def further(pooled: jax.Array, window: Window) -> jax.Array:
            planned = PlannedRows(rows=self.rows, route=_without_sent(routing.route_of(window)))
            deferred = planned.lookup(routing.bags_of(window), context)
            assert deferred.call is not None  # every lookup of planned rows pools
            # Inside the loop over further windows a call stands by itself:
            # only the first window's shares a launch with other stacks.
            (sums,) = gather_reduce_together([deferred.call], context.options.implementation, tables=True)
            return pooled + deferred.finish(sums)[0]

        def finish(result: tuple[jax.Array, PlannedResiduals]) -> tuple[jax.Array, RoutedResiduals]:
            pooled, first = result
            return routing.following(pooled, window, further), RoutedResiduals(
                routing=routing, window=window, first=first
            )

        first = routing.bags_of(window, first=True)
        return PlannedRows(rows=self.rows, route=routing.route_of(window)).lookup(first, context).then(finish)

    def update(
        self, residuals: RoutedResiduals, gradients: jax.Array, context: Context
    ) -> Update[RoutedRows, RoutedResiduals]:
        """Defers the steps of every window; see ``Store``."""
        return _RoutedUpdate(store=self, residuals=residuals, gradients=gradients, context=context)


class _RoutedUpdate(Update[RoutedRows, RoutedResiduals]):
    """The updates of all windows: a row's gradients from all devices meet in one of them."""

    @functools.cached_property
    def _first(self) -> Update[PlannedRows, PlannedResiduals]:
        """The first window's update, whose gradients travel once for the squares and the step."""
        return self._of(self.store.rows, self.residuals.window, self.residuals.first)

    def squares(self) -> jax.Array:
        residuals, rows = self.residuals, self.store.rows

        def further(squares: jax.Array, window: Window) -> jax.Array:
            return squares + self._of(rows, window, None).squares()

        squares = jnp.asarray(self._first.squares(), jnp.float32)
        return residuals.routing.following(squares, residuals.window, further)

    def step(self, options: StepOptions) -> Deferred[RoutedRows]:
        residuals = self.residuals

        def further(rows: MeshRows, window: Window) -> MeshRows:
            deferred, result = self._of(rows, window, None).step(options), None
            if deferred.call is not None:
                (result,) = casted_update_together([deferred.call], options.implementation)
            return deferred.finish(result).rows

        def finish(first: PlannedRows) -> RoutedRows:
            rows = residuals.routing.following(first.rows, residuals.window, further)
            return dataclasses.replace(self.store, rows=rows)

        return self._first.step(options).then(finish)

    def _of(
        self, rows: MeshRows, window: Window, residuals: PlannedResiduals | None
    ) -> Update[PlannedRows, PlannedResiduals]:
        """The update of a window's rows; ``residuals`` from its lookup, where it is the first one."""
        routing, links = self.residuals.routing, self.context.together.links
        route, sent = routing.route_of(window), self.residuals.first.sent
        if residuals is None:
            # A further window's requests travel again: the forward
            # loop cannot hand on exchanges whose number is not static.
            exchange = None
            if route.remote is not None:
                exchange = Exchange.open(route.remote, shard_rows=rows.shard_rows, links=links)
            bags = BagResiduals(cast=routing.bags_of(window).cast, weights=routing.bags.weights)  # pyright: ignore[reportArgumentType]
            residuals = PlannedResiduals(bags=bags, exchange=exchange)
        # Sent lookups are pooled once, with the first window, but a row takes
        # its step in the window that holds it: there all of its gradients meet.
        if sent is not None and not routing.fits:  # else all are, and their addresses need not travel
            sent = _within(sent, window, self.store.places)
        residuals = dataclasses.replace(residuals, sent=sent)
        return PlannedRows(rows=rows, route=_without_sent(route)).update(residuals, self.gradients, self.context)


def _without_sent(route: Route) -> Route:
    return dataclasses.replace(route, send=None)


def _within(sent: Sent, window: Window, places: AddressMap) -> Sent:
    """Sent lookups whose rows are in a window; the others are padding, which no row's gradient has."""
    assert sent.addresses is not None  # ``AddressMap`` sends them
    addresses = places.compared(sent.addresses)
    inside = (addresses >= window.low) & (addresses < window.high)
    return dataclasses.replace(sent, rows=jnp.where(inside, sent.rows, -1))
