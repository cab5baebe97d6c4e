"""The backward half: gradients of a batch's rows and sent bags to the rows' owners, and one step there (OPER, 5)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import Reduce, SharedGradients, pick, shared_gradients
from jrec.mesh.exchange import Exchange
from jrec.mesh.route import AXIS, GatherMap, MeshRows, Route, check_view
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions, cast_rows, of_unique, squares_of
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.row_update import casted_update
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import Cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGradients:
    """The gradients of all rows that any device read, on the rows' devices, and the step there; inside ``shard_map``.

    Each part is sent once, at its first use.

    Attributes:
      rows: The device's view of the arrays and slots; donate them to ``jax.jit`` to update in place.
      route: The route of the device's part of the batch.
      exchange: The exchange opened for ``retrieve``: requests do not travel again.
      gradients: (U, dim) float32, gradients of the device's unique rows, from its part of the global batch's loss.
      sent: The ``Sent`` opened in the forward pass, or None.
      bag_gradients: (num_bags, dim) float32 or bfloat16, gradients of the device's bags; needed with ``sent``.
      reduce: How gradients of replicated rows are summed; see ``shared_gradients``.
      options: The step's options.

    Raises:
      ValueError: If shapes do not fit.
    """

    rows: MeshRows
    route: Route
    exchange: Exchange | None
    gradients: jax.Array
    sent: Sent | None = None
    bag_gradients: jax.Array | None = None
    reduce: Reduce = "local"
    options: StepOptions

    def __post_init__(self) -> None:
        check_view(self.rows, self.route)
        if self.gradients.ndim != 2 or self.gradients.shape[0] != self.route.capacity:
            raise ValueError(
                f"gradients must be ({self.route.capacity}, dim), one row for each unique row, not"
                f" {self.gradients.shape}"
            )

    @functools.cached_property
    def arrived(self) -> _Arrived | None:
        """Gradients from other devices and the device's own; None where no row of the stack has an owner."""
        own = self.route.own
        if own is None:
            return None
        rows, addresses, order = own.rows, None, None
        if self.exchange is not None:
            # Own rows first, then line by line what others asked for: ``_collected`` puts their gradients in the same
            # order. Padding holds ``shard_rows`` or more, which every cast below leaves out.
            rows = jnp.concatenate([rows, self.exchange.asked.reshape(-1)])
            order = _by_device(own.rows.shape[0], *self.exchange.asked.shape)
        # Only where they are needed: addresses of asked rows travel like gradients, an exchange more.
        if self.options.rounds(self.rows.sharded) and self.route.addresses is not None:
            addresses = self._collected(own, self.route.addresses)
        arrived = _Arrived(
            rows=rows,
            offsets=None,
            gradients=self._collected(own, self.gradients),
            weights=None,
            addresses=addresses,
            order=order,
        )
        return arrived if self.sent is None else self._with_bags(arrived, self.sent)

    def _with_bags(self, arrived: _Arrived, sent: Sent) -> _Arrived:
        """Gradients of rows, each a bag of its own, and behind them gradients of bags that others had pooled here."""
        if self.bag_gradients is None:
            raise ValueError("lookups were sent: give the gradients of the bags, too")
        # Rows whose gradients were summed by their readers become bags of one lookup with weight 1, so that one cast,
        # and one optimizer step, takes both kinds.
        count, weights, addresses = arrived.rows.shape[0], None, None
        if sent.weights is not None:
            weights = jnp.concatenate([jnp.ones(count, jnp.float32), sent.weights])
        if arrived.addresses is not None and sent.addresses is not None:
            addresses = jnp.concatenate([arrived.addresses, sent.addresses])
        return _Arrived(
            rows=jnp.concatenate([arrived.rows, sent.rows]),
            offsets=jnp.concatenate([jnp.arange(count, dtype=jnp.int32), sent.offsets + jnp.int32(count)]),
            # Bags' gradients may be bfloat16, which halves what travels; sums are float32.
            gradients=jnp.concatenate([arrived.gradients, sent.deliver(self.bag_gradients).astype(jnp.float32)]),
            weights=weights,
            addresses=addresses,
            order=arrived.order,
        )

    def _collected(self, own: GatherMap, values: jax.Array) -> jax.Array:
        """(O + N * C, ...): values of the own rows, then the other devices' values in the order of ``asked``."""
        own_values = pick(values, own.at)
        if self.exchange is None or self.route.remote is None:
            return own_values
        # The lines of the forward pass, backwards: ``asked`` tells
        # the owner what arrives, so no row number travels again.
        delivered = self.exchange.deliver(pick(values, self.route.remote.at))
        return jnp.concatenate([own_values, delivered.reshape(-1, *values.shape[1:])])

    @functools.cached_property
    def sharded(self) -> _OwnGradients | None:
        """Gradients of the device's own shard; None without one."""
        return None if self.arrived is None else self.arrived.of_rows(0, self.rows.sharded.shape[0], self.options)

    @functools.cached_property
    def host(self) -> _OwnGradients | None:
        """Gradients of the device's rows from host memory; None without any."""
        if self.arrived is None or self.rows.host is None:
            return None
        return self.arrived.of_rows(self.rows.sharded.shape[0], self.rows.host.shape[0], self.options)

    @functools.cached_property
    def replicated(self) -> SharedGradients:
        """Gradients of the rows that all devices hold."""
        return shared_gradients(
            self.rows.replicated,
            self.route.replicated,
            self.gradients,
            reduce=self.reduce,
            addresses=self.route.addresses,
            options=self.options,
        )

    def squares(self) -> tuple[jax.Array, jax.Array]:
        """Sums of squares of the rows' gradients, () float32: of the device's own rows, and of replicated rows."""
        own = [part.squares(self.options) for part in (self.sharded, self.host) if part is not None]
        shared = self.replicated.squares(self.rows.replicated, self.options)
        return functools.reduce(jnp.add, own, jnp.float32(0)), shared

    def step(self, optimizer: RowOptimizer, options: StepOptions) -> MeshRows:
        """Steps all rows that any device read, wherever they live; returns the new arrays and slots.

        Raises:
          ValueError: If addresses are missing where rows are rounded by them.
        """
        # In one order on all devices, as ``squares`` has it: each part may have a collective, which all enter together.
        rows = new = self.rows
        if self.sharded is not None:
            sharded, slots = self.sharded.step(optimizer, rows.sharded, rows.sharded_slots, options)
            new = dataclasses.replace(new, sharded=sharded, sharded_slots=slots)
        if self.host is not None and rows.host is not None:
            host, slots = self.host.step(optimizer, rows.host, rows.host_slots, options)
            new = dataclasses.replace(new, host=host, host_slots=slots)
        replicated, slots = self.replicated.step(optimizer, rows.replicated, rows.replicated_slots, options)
        return dataclasses.replace(new, replicated=replicated, replicated_slots=slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OwnGradients:
    """Gradients of rows of one of a device's arrays.

    Attributes:
      cast: The cast of lookups in the array.
      gradients: (bags, dim) float32.
      weights: (n,) float32, the lookups' weights, or None.
      addresses: (unique_capacity,) int32, addresses in the stack where rounding needs them, or None.
    """

    cast: Cast
    gradients: jax.Array
    weights: jax.Array | None
    addresses: jax.Array | None

    def squares(self, options: StepOptions) -> jax.Array:
        """The sum of squares of the rows' gradients, () float32."""
        return squares_of(self.cast, self.gradients, self.weights, options)

    def step(
        self, optimizer: RowOptimizer, table: jax.Array, slots: Slots, options: StepOptions
    ) -> tuple[jax.Array, Slots]:
        """Steps each row once, by the sum of all its gradients."""
        return casted_update(
            optimizer,
            table,
            slots,
            self.cast,
            self.gradients,
            weights=self.weights,
            implementation=options.implementation,
            **options.arguments(table, self.addresses),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arrived:
    """The gradients of a device's rows, as bags of rows that the owner read itself and rows that others asked for.

    A row's gradient has up to three sources: the device's own unique rows, the unique rows that others asked for, and
    the bags that others had pooled here. Optimizers are not linear, so these are one step, never two.

    Attributes:
      rows: (n,) int32, offsets in the shard, then in the rows from host memory behind it.
      offsets: (bags + 1,) int32, the bags of these rows; None where each is a bag.
      gradients: (bags, dim) float32.
      weights: (n,) float32, or None.
      addresses: (n,) int32, addresses in the stack where rounding needs them, or None.
      order: From places in the order in which a row's gradients are summed to where they lie; None where none differs.
    """

    rows: jax.Array
    offsets: jax.Array | None
    gradients: jax.Array
    weights: jax.Array | None
    addresses: jax.Array | None
    order: Callable[[jax.Array], jax.Array] | None

    def of_rows(self, first: int, count: int, options: StepOptions) -> _OwnGradients:
        """The gradients of ``count`` rows from offset ``first`` on."""
        # In the shard's cast rows from host memory are padding, since they lie
        # past ``num_rows``. In their own cast the shard's rows are, from here on.
        rows = self.rows if first == 0 else jnp.where(self.rows < first, count, self.rows - first)
        if self.order is not None:
            # Numbers are moved, not gradients: the sort keeps the order of equal rows, and the cast then says where
            # their gradients really lie.
            rows = rows[self.order(jnp.arange(rows.shape[0], dtype=jnp.int32))]
        if self.offsets is None:
            cast = cast_rows(rows, num_rows=count, options=options)
        else:
            cast = tensor_cast(rows, self.offsets, num_rows=count, implementation=options.implementation)
        if self.order is not None:
            sources, positions = self.order(cast.sources), self.order(cast.positions)
            cast = dataclasses.replace(cast, sources=sources, positions=positions)
        addresses = None if self.addresses is None else of_unique(cast, self.addresses)
        return _OwnGradients(cast=cast, gradients=self.gradients, weights=self.weights, addresses=addresses)


def _by_device(own: int, devices: int, line: int) -> Callable[[jax.Array], jax.Array] | None:
    """Where own rows and the lines behind them lie, by their places in the order of the devices that read them.

    A device asks nothing of itself, so its own rows can stand where its line, all padding, begins. The sum of a row's
    gradients then is the same to the bit whichever device has the row: by any plan, and in host memory.

    Args:
      own: How many own rows there are.
      devices: How many lines.
      line: How long each is.

    Returns:
      From int32 places to int32 places; what is behind the lines stays. None for two devices, whose sums are the same
      in both orders.
    """
    if devices <= 2:
        return None
    begin = jax.lax.axis_index(AXIS) * line
    return lambda at: jnp.where(at < begin, own + at, jnp.where(at < begin + own, at - begin, at))
