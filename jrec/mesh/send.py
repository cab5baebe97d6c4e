"""The send-based mode of a sum-pooled lookup: owners pool the rows that others look up, and only pooled rows travel.

Retrieving moves every unique row and its gradient; sending moves every bag that has lookups on another device, and its
gradient. ``jrec.sharding.modes`` tells which is fewer bytes. It is also Tensor Casting's memory-centric mode
(section IV-C): devices that keep tables gather-reduce and update locally, others run the dense model
(``jrec.mesh.communication``).
Symbols: L lookups of one device at another, P bags of one device with lookups at another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import pick
from jrec.mesh.exchange import DEFAULT, Links, swap, swap_padded
from jrec.mesh.retrieve import Current, as_stored, gather
from jrec.mesh.route import SendRoute
from jrec.mesh.step import StepOptions
from jrec.ops.gather_reduce import gather_reduce
from jrec.row_optimizers import Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A step's lookups that other devices sent to this one; inside ``shard_map``.

    Attributes:
      rows: (N * L,) int32, lookups in this device's shard, asker by asker; padding is -1.
      offsets: (N * P + 1,) int32, the bags of these lookups, P of each device.
      weights: (N * L,) float32 or None.
      addresses: (N * L,) int32 or None.
      at, num_bags: As in the route.
      sends: (N,) int32, how many bags of this device have lookups at each other device.
      answers: (N,) int32, how many bags of each other device have lookups at this one.
      links: How sums and their gradients travel.
    """

    rows: jax.Array
    offsets: jax.Array
    weights: jax.Array | None
    addresses: jax.Array | None
    at: jax.Array
    sends: jax.Array
    answers: jax.Array
    num_bags: int = dataclasses.field(metadata={"static": True})
    links: Links = dataclasses.field(metadata={"static": True})

    @staticmethod
    def open(route: SendRoute, *, links: Links = DEFAULT) -> Sent:
        """Sends the lookups.

        Args:
          route: The route of the device's part of the batch, without the axis of devices.
          links: How sums will travel; lookups are always padded.
        """
        devices, lookups = route.rows.shape
        # Starts and lookups travel once, here, before any sum: the gradients later go the same way back.
        begin = swap_padded(route.starts)
        # Starts count within an asker's line; the lines lie one behind another in the flat lookups.
        starts = begin + jnp.arange(devices, dtype=jnp.int32)[:, None] * lookups
        # A line's padding, which no bag reads, falls to its last bag.
        offsets = jnp.concatenate([starts.reshape(-1), jnp.full(1, devices * lookups, jnp.int32)])

        def flat(values: jax.Array | None) -> jax.Array | None:
            return None if values is None else swap_padded(values).reshape(-1)

        rows = swap_padded(route.rows)
        # Padding begins where the lookups of its line end; every bag has a lookup.
        asked = begin < jnp.sum(rows >= 0, axis=1, dtype=jnp.int32)[:, None]
        return Sent(
            rows=rows.reshape(-1),
            offsets=offsets,
            weights=flat(route.weights),
            addresses=flat(route.addresses),
            at=route.at,
            sends=jnp.sum(route.at < route.num_bags, axis=1, dtype=jnp.int32),
            answers=jnp.sum(asked, axis=1, dtype=jnp.int32),
            num_bags=route.num_bags,
            links=links,
        )

    def pooled(
        self,
        shard: jax.Array,
        slots: Slots | None = None,
        current: Current = as_stored,
        *,
        options: StepOptions | None = None,
    ) -> jax.Array:
        """(num_bags, dim) float32: for each of this device's bags, the sum of its lookups in the route.

        Args:
          shard: (S, dim).
          slots: The shard's slots; needed where ``current`` reads them.
          current: See ``retrieve``.
          options: The step's options; only ``implementation`` is read.
        """
        rows, named = self.rows, None if options is None else options.implementation
        if current is not as_stored:
            # Rows as they are now are no array: those looked up are gathered, each to the place of its lookup, which
            # numbers it.
            shard = gather(shard, slots or {}, jnp.maximum(rows, 0), current)
            rows = jnp.where(rows < 0, rows, jnp.arange(rows.size, dtype=jnp.int32))
        sums = gather_reduce(shard, rows, self.offsets, weights=self.weights, implementation=named)
        # As sums go back along the lines, ``answers`` is what this device sends now, and ``sends`` what it gets.
        lines = sums.reshape(*self.at.shape, -1)
        arrived = swap(lines, self.answers, self.sends, kind=self.links.kind, dtype=self.links.rows)
        # float32 whatever travelled: a bag's sum is that of up to N devices' parts.
        sums_by_bag = jnp.zeros((self.num_bags, shard.shape[1]), jnp.float32)

        def add_line(line: jax.Array, sums_by_bag: jax.Array) -> jax.Array:
            at = jax.lax.dynamic_index_in_dim(self.at, line, keepdims=False)
            values = jax.lax.dynamic_index_in_dim(arrived, line, keepdims=False)
            # Padding points to distinct places past the end, so that the promise of unique indices holds for it, too.
            at = jnp.where(at < self.num_bags, at, self.num_bags + jnp.arange(at.shape[0], dtype=jnp.int32))
            return sums_by_bag.at[at].add(values, mode="drop", unique_indices=True, wrap_negative_indices=False)

        # Device by device: places are unique only within a line, and sums must not depend on an order of atomics.
        return jax.lax.fori_loop(0, self.at.shape[0], add_line, sums_by_bag)

    def deliver(self, gradients: jax.Array) -> jax.Array:
        """Sends the gradients of this device's bags, (num_bags, dim), to the owners that pooled them.

        Returns:
          (N * P, dim), the other devices' gradients of the bags that this device pooled.
        """
        # A bag's gradient goes to every owner that pooled a part of it: each part has the factor 1 in the bag's sum.
        lines = pick(gradients, self.at)
        arrived = swap(lines, self.sends, self.answers, kind=self.links.kind, dtype=self.links.gradients)
        return arrived.reshape(-1, gradients.shape[1])
