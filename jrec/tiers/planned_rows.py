"""Rows that live where a plan says: sharded over devices, replicated on all of them, or in host memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import SharedGradients, shared_gradients
from jrec.mesh.exchange import Exchange
from jrec.mesh.retrieve import as_stored, retrieve
from jrec.mesh.route import AXIS, MeshRows, Route
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions
from jrec.mesh.update import RowGradients
from jrec.ops.gather_reduce import gather_reduce_call
from jrec.ops.lookup import Residuals as BagResiduals
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.types import Bags
from jrec.tiers.local_rows import LocalRows, LocalUpdate
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
    exchange: Exchange | None = None
    sent: Sent | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """A stack on a mesh, inside ``shard_map``: bags read a window's unique rows, which a route locates.

    A bag is the sum of its unique rows and of the partial sums that owners of other rows have pooled.

    Attributes:
      rows: The device's view of the arrays, with the batch's rows from host memory.
      route: Where the batch's unique rows are.
    """

    rows: MeshRows
    route: Route

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, PlannedResiduals]]:
        """Retrieves the batch's unique rows, has others pool sent lookups, and defers the pooling; see ``Store``."""
        route, links = self.route, context.together.links
        if bags.cast is None:
            raise ValueError(_NO_CAST)
        # Nothing to fetch and nothing to send: the replicated array
        # is a plain table, whose rows need no copy in between.
        if _all_replicated(route):
            copies = self.copies.lookup(_on_copies(bags, route), context)
            return copies.then(lambda result: (result[0], PlannedResiduals(bags=result[1])))
        exchange = sent = None
        if route.remote is not None:
            exchange = Exchange.open(route.remote, shard_rows=self.rows.shard_rows, links=links)
        if route.send is not None:
            sent = Sent.open(route.send, links=links)
        # All requests are out before the first answer is waited for: answers and pooled sums travel side by side.
        current, away = context.current if context.has_tail else as_stored, None
        table = retrieve(self.rows, route, exchange, current)
        if sent is not None:
            away = sent.pooled(self.rows.sharded, self.rows.sharded_slots, current, options=context.options)
        residuals = PlannedResiduals(
            bags=BagResiduals(cast=bags.cast, weights=bags.weights), exchange=exchange, sent=sent
        )

        def finish(pooled: jax.Array) -> tuple[jax.Array, PlannedResiduals]:
            return pooled if away is None else pooled + away, residuals

        return Deferred(call=gather_reduce_call(table, bags.ids, bags.offsets, weights=bags.weights), finish=finish)

    def update(
        self, residuals: PlannedResiduals, gradients: jax.Array, context: Context
    ) -> Update[PlannedRows, PlannedResiduals]:
        """Defers sending gradients to the rows' owners and the step there; see ``Store``."""
        # Which arrays a route reads is static, so a program has only the update that it needs.
        if not _all_replicated(self.route):
            kind = _OwnedUpdate
        else:
            # On one device the kernel that sums and steps at once: no row gradients are written, and the bits are the
            # plain step's.
            kind = _SharedUpdate if jax.lax.axis_size(AXIS) > 1 else _LocalUpdate
        return kind(store=self, residuals=residuals, gradients=gradients, context=context)

    @property
    def copies(self) -> LocalRows:
        """The replicated rows, as the device has them."""
        values, slots = self.rows.replicated, self.rows.replicated_slots
        return LocalRows(values=values, slots=slots, addresses=self.route.addresses, dim=values.shape[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MeshUpdate(Update[PlannedRows, PlannedResiduals]):
    """An update on a mesh: gradients travel once, for ``squares`` or else for ``step``."""

    @functools.cached_property
    def of_unique(self) -> jax.Array:
        """(U, dim) float32, gradients of the device's unique rows."""
        bags, implementation = self.residuals.bags, self.context.options.implementation
        return casted_gather_reduce(bags.cast, self.gradients, bags.weights, implementation=implementation)

    def _with_copies(self, values: jax.Array, slots: Slots) -> PlannedRows:
        rows = dataclasses.replace(self.store.rows, replicated=values, replicated_slots=slots)
        return dataclasses.replace(self.store, rows=rows)


class _OwnedUpdate(_MeshUpdate):
    """The update of rows of which some have owners."""

    @functools.cached_property
    def _row_gradients(self) -> RowGradients:
        return RowGradients(
            rows=self.store.rows,
            route=self.store.route,
            exchange=self.residuals.exchange,
            gradients=self.of_unique,
            sent=self.residuals.sent,
            bag_gradients=self.gradients,
            reduce=self.context.together.reduce,
            options=self.context.options,
        )

    def squares(self) -> jax.Array:
        own, shared = self._row_gradients.squares()
        return own + self.context.together.once(shared)

    def step(self, options: StepOptions) -> Deferred[PlannedRows]:
        rows = self._row_gradients.step(self.context.row_optimizer, options)
        return Deferred.done(dataclasses.replace(self.store, rows=rows))


class _SharedUpdate(_MeshUpdate):
    """The update of a step that read only replicated rows, on several devices."""

    @functools.cached_property
    def _row_gradients(self) -> SharedGradients:
        return shared_gradients(
            self.store.rows.replicated,
            self.store.route.replicated,
            self.of_unique,
            reduce=self.context.together.reduce,
            addresses=self.store.route.addresses,
            options=self.context.options,
        )

    def squares(self) -> jax.Array:
        return self.context.together.once(self._row_gradients.squares(self.store.rows.replicated, self.context.options))

    def step(self, options: StepOptions) -> Deferred[PlannedRows]:
        rows, optimizer = self.store.rows, self.context.row_optimizer
        values, slots = self._row_gradients.step(optimizer, rows.replicated, rows.replicated_slots, options)
        return Deferred.done(self._with_copies(values, slots))


class _LocalUpdate(_MeshUpdate):
    """The update of a step that read only replicated rows, on a mesh of one device: in place, by one kernel."""

    @functools.cached_property
    def _copies(self) -> LocalUpdate:
        return self.store.copies.update(self.residuals.bags, self.gradients, self.context)

    def squares(self) -> jax.Array:
        return self._copies.squares()

    def step(self, options: StepOptions) -> Deferred[PlannedRows]:
        return self._copies.step(options).then(lambda copies: self._with_copies(copies.values, copies.slots))


def _all_replicated(route: Route) -> bool:
    """Whether every row of the batch is replicated."""
    return route.own is None and route.remote is None and route.send is None


def _on_copies(bags: Bags, route: Route) -> Bags:
    """Bags whose ids and cast number the replicated rows, from bags that number the batch's unique rows."""
    copies, cast = route.replicated.rows, bags.cast  # as many as unique rows, in their order
    if cast is None:
        raise ValueError(_NO_CAST)
    # All unique rows are replicated here, so that the k-th of these is the k-th pick: ``MeshSizes.places`` gives both
    # one size.
    ids = jnp.where(bags.ids < 0, bags.ids, copies.at[bags.ids].get(mode="clip", wrap_negative_indices=False))
    return dataclasses.replace(bags, ids=ids, cast=dataclasses.replace(cast, rows=copies))
