"""The send-based form of a sum-pooled lookup: owners pool what others ask of them, and only pooled rows travel.

Retrieving moves every unique row and its gradient; this moves every bag that has lookups on another device, and its
gradient. Which is fewer bytes, ``jrec.sharding.runtime.modes`` says. It is also Tensor Casting's memory-centric mode
(section IV-C): devices that keep tables gather-reduce and update locally, others run the dense model (``only_on``).
Symbols: L lookups of one device at another, P bags of one device with lookups at another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.gather_reduce import gather_reduce
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tensor_cast import tensor_cast
from jrec.sharding.runtime.allreduce import pick
from jrec.sharding.runtime.exchange import swap_padded
from jrec.sharding.runtime.route import AXIS, Picks
from jrec.sharding.runtime.step import StepOptions, cast_implementation, step_casted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SendRoute:
    """One device's lookups at all devices, as bags of theirs.

    Attributes:
      rows: (N, L) int32 offsets in each device's shard, bag by bag; padding, behind them, is -1.
      starts: (N, P) int32, where each bag of a line begins in it; padding holds the line's number of lookups.
      at: (N, P) int32, which of this device's bags each is, unique in a line; padding holds ``num_bags``.
      weights: (N, L) float32, or None for ones.
      addresses: (N, L) int32, the rows' addresses in the stack, for stochastic rounding; or None.
      num_bags: of this device.
    """

    rows: jax.Array
    starts: jax.Array
    at: jax.Array
    weights: jax.Array | None = None
    addresses: jax.Array | None = None
    num_bags: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """What the devices have sent each other of a step's lookups; inside ``shard_map``.

    Attributes:
      rows: (N * L,) int32, lookups in this device's shard, asker by asker; padding is -1.
      offsets: (N * P + 1,) int32, the bags of these; line i's are those of device i.
      weights: (N * L,) float32 or None.
      addresses: (N * L,) int32 or None.
      at, num_bags, axis: as in the route.
    """

    rows: jax.Array
    offsets: jax.Array
    weights: jax.Array | None
    addresses: jax.Array | None
    at: jax.Array
    num_bags: int = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    @staticmethod
    def open(route: SendRoute, *, axis: str = AXIS) -> Sent:
        """Sends the lookups."""
        devices, lookups = route.rows.shape
        starts = swap_padded(route.starts, axis) + jnp.arange(devices, dtype=jnp.int32)[:, None] * lookups
        # A line's padding, which no bag reads, falls to its last bag.
        offsets = jnp.concatenate([starts.reshape(-1), jnp.full(1, devices * lookups, jnp.int32)])

        def flat(values: jax.Array | None) -> jax.Array | None:
            return None if values is None else swap_padded(values, axis).reshape(-1)

        rows = swap_padded(route.rows, axis).reshape(-1)
        return Sent(
            rows=rows,
            offsets=offsets,
            weights=flat(route.weights),
            addresses=flat(route.addresses),
            at=route.at,
            num_bags=route.num_bags,
            axis=axis,
        )

    def pooled(self, shard: jax.Array, *, options: StepOptions | None = None) -> jax.Array:
        """(num_bags, dim) float32: for each of this device's bags, the sum of its lookups in the route.

        Args:
          shard: (S, dim).
          options: whose ``implementation`` is taken.
        """
        named = None if options is None else options.implementation
        sums = gather_reduce(shard, self.rows, self.offsets, weights=self.weights, implementation=named)
        arrived = swap_padded(sums.reshape(*self.at.shape, -1), self.axis)
        found = jnp.zeros((self.num_bags, shard.shape[1]), jnp.float32)

        def add_line(line: jax.Array, found: jax.Array) -> jax.Array:
            at = jax.lax.dynamic_index_in_dim(self.at, line, keepdims=False)
            values = jax.lax.dynamic_index_in_dim(arrived, line, keepdims=False)
            at = jnp.where(at < self.num_bags, at, self.num_bags + jnp.arange(at.shape[0], dtype=jnp.int32))
            return found.at[at].add(values, mode="drop", unique_indices=True, wrap_negative_indices=False)

        # Device by device: places are unique in a line alone, and sums must not depend on an order of atomics.
        return jax.lax.fori_loop(0, self.at.shape[0], add_line, found)

    def deliver(self, gradients: jax.Array) -> jax.Array:
        """(N * P, dim): everybody's gradients of the bags that this device pooled, from (num_bags, dim) of its own."""
        arrived = swap_padded(pick(gradients, self.at), self.axis)
        return arrived.reshape(-1, gradients.shape[1])


def update_sent(
    optimizer: RowOptimizer,
    shard: jax.Array,
    slots: Slots,
    sent: Sent,
    bag_gradients: jax.Array,
    *,
    own: Picks | None = None,
    row_gradients: jax.Array | None = None,
    own_addresses: jax.Array | None = None,
    options: StepOptions | None = None,
) -> tuple[jax.Array, Slots]:
    """Steps the rows of a shard by the gradients of the bags that it pooled, and of rows that its device read itself.

    Args:
      optimizer: whose step.
      shard: (S, dim); donate it to update in place.
      slots: of the shard.
      sent: as opened for the forward pass.
      bag_gradients: (num_bags, dim) float32 of this device's bags.
      own: (O,), rows that the device retrieved from its own shard; None where all lookups were sent.
      row_gradients: (U, dim) float32, of unique rows; beside ``own``.
      own_addresses: (U,) int32, of unique rows; beside ``own``, where rows are rounded by them.
      options: of the step.

    Returns:
      The new shard and slots.
    """
    options = StepOptions() if options is None else options
    rows, offsets, weights, addresses = sent.rows, sent.offsets, sent.weights, sent.addresses
    given = sent.deliver(bag_gradients)
    if own is not None and row_gradients is not None:
        count = own.rows.shape[0]
        mine = jnp.where(own.rows < shard.shape[0], own.rows, jnp.int32(-1))
        ends = offsets[-1] + jnp.arange(1, count + 1, dtype=jnp.int32)
        rows, offsets = jnp.concatenate([rows, mine]), jnp.concatenate([offsets, ends])
        given = jnp.concatenate([given, pick(row_gradients, own.at)])
        if weights is not None:
            weights = jnp.concatenate([weights, jnp.ones(count, jnp.float32)])
        if addresses is not None and own_addresses is not None:
            addresses = jnp.concatenate([addresses, pick(own_addresses, own.at)])
    named = cast_implementation(options)
    cast = tensor_cast(rows, offsets, num_rows=shard.shape[0], implementation=named)
    return step_casted(optimizer, shard, slots, cast, given, addresses, options, weights=weights)


def only_on(devices: Sequence[bool], work: Callable[..., Any], *arguments: Any, axis: str = AXIS) -> Any:
    """What ``work(*arguments)`` gives on some of the devices; zeros, at no cost, on the others.

    Args:
      devices: (N,), which do the work. A memory-centric plan's other devices keep tables and skip the dense model.
      work: without collectives, which all devices must enter.
      *arguments: of it.
      axis: of the mesh.
    """
    shapes = jax.eval_shape(work, *arguments)
    chosen = jnp.asarray(np.asarray(devices, bool))[jax.lax.axis_index(axis)]

    def nothing(*_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.lax.cond(chosen, work, nothing, *arguments)


def send_route(
    bags: np.ndarray,
    owners: np.ndarray,
    offsets: np.ndarray,
    *,
    devices: int,
    num_bags: int,
    lookups: int,
    pooled: int,
    weights: np.ndarray | None = None,
    addresses: np.ndarray | None = None,
) -> SendRoute:
    """A device's route, in NumPy arrays, from its lookups. It runs on the host.

    Args:
      bags: (n,) the bag of each lookup.
      owners: (n,) the device of its row.
      offsets: (n,) the row of that device's shard.
      devices: N.
      num_bags: of the device.
      lookups, pooled: L and P.
      weights: (n,) float32, or None.
      addresses: (n,) of the rows in the stack, or None.

    Raises:
      ValueError: where a line has more lookups or bags than there is room for.
    """
    order = np.lexsort((bags, owners))
    counts = np.bincount(owners, minlength=devices)
    rows = np.full((devices, lookups), -1, np.int32)
    beside = {"weights": (weights, np.float32), "addresses": (addresses, np.int32)}
    made = {k: None if a is None else np.zeros((devices, lookups), t) for k, (a, t) in beside.items()}
    starts, at = np.empty((devices, pooled), np.int32), np.full((devices, pooled), num_bags, np.int32)
    for device, line in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        found, first = np.unique(bags[line], return_index=True)
        for what, count, room in (("lookups", line.size, lookups), ("bags with lookups", found.size, pooled)):
            if count > room:
                raise ValueError(f"there are {count:,} {what} at device {device}, but room for {room:,}")
        rows[device, : line.size] = offsets[line]
        for name, (array, _) in beside.items():
            if (out := made[name]) is not None and array is not None:
                out[device, : line.size] = array[line]
        starts[device], starts[device, : found.size] = line.size, first
        at[device, : found.size] = found
    arrays: Any = made | {"rows": rows, "starts": starts, "at": at}
    return SendRoute(num_bags=num_bags, **arrays)
