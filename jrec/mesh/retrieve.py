"""The forward half: the unique rows of a batch, from wherever they live (OPER, sections 5.1 and 5.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrec.mesh.exchange import Exchange
from jrec.mesh.route import MeshRows, Route, check_view
from jrec.row_optimizers import Slots

Current = Callable[[jax.Array, Slots], jax.Array]
"""Rows as lookups read them, from those that an array holds and their slots."""


def as_stored(values: jax.Array, slots: Slots) -> jax.Array:
    """The rows that an array holds, which are what lookups read unless the optimizer is exact."""
    del slots
    return values


def retrieve(rows: MeshRows, route: Route, exchange: Exchange | None, current: Current = as_stored) -> jax.Array:
    """A device's unique rows, ready to be pooled by ids that number them. Call it inside ``shard_map``.

    Only the rows of other devices wait for the network: the gathers from the device's own arrays depend on no
    collective, so a scheduler that hides latency runs them while requests and answers travel.

    Args:
      rows: The device's view: (S, dim) sharded, (H, dim) replicated, (K, dim) from host memory.
      route: The route of the device's part of the batch, without the axis of devices.
      exchange: The exchange opened with ``route.remote``; None where the route has none.
      current: What is read of rows; owners apply it before rows travel.

    Returns:
      (U, dim) of the table's dtype; places that the route does not fill are zero.

    Raises:
      ValueError: If shapes do not fit.
    """
    check_view(rows, route)
    if (exchange is None) != (route.remote is None):
        raise ValueError("open the exchange with the route's remote picks: there is only one of the two")
    # First, since only this waits for other devices. Nothing below reads it before the last line.
    answers = None if exchange is None else exchange.answer(_of_shard(rows, exchange.asked, current))
    # Each of the U places is written by exactly one of the picks, so their order does not matter.
    unique_rows = jnp.zeros((route.capacity, rows.sharded.shape[1]), rows.sharded.dtype)
    if route.own is not None:
        unique_rows = place(unique_rows, route.own.at, _of_shard(rows, route.own.rows, current))
    # An owner makes rows of an exact optimizer current before they travel, as here before they are placed: slots stay
    # where they are.
    copies = gather(rows.replicated, rows.replicated_slots, route.replicated.rows, current)
    unique_rows = place(unique_rows, route.replicated.at, copies)
    if route.remote is None or answers is None:
        return unique_rows
    return place(unique_rows, route.remote.at, answers)


def _of_shard(rows: MeshRows, offsets: jax.Array, current: Current) -> jax.Array:
    """(..., dim): rows of the device's shard, in which rows from host memory follow the rows that it keeps."""
    kept = gather(rows.sharded, rows.sharded_slots, offsets, current)
    if rows.host is None:
        return kept
    count = rows.sharded.shape[0]
    # Both arrays are read for every offset, and one of the two rows is dropped: an offset past the shard reads the
    # shard's last row, an offset within it the first row from host memory.
    fetched = gather(rows.host, rows.host_slots, jnp.maximum(offsets - count, 0), current)
    return jnp.where((offsets < count)[..., None], kept, fetched)


def gather(source: jax.Array, slots: Slots, rows: jax.Array, current: Current) -> jax.Array:
    """(..., dim): rows of ``source``; padding, which is dropped later, may read any row."""

    def read(array: jax.Array) -> jax.Array:
        return array.at[rows.reshape(-1)].get(mode="clip", wrap_negative_indices=False)

    if current is as_stored:  # the slots of other rows are not read
        slots = {}
    return current(read(source), {name: read(slot) for name, slot in slots.items()}).reshape(*rows.shape, -1)


def place(target: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values to unique places, whatever leading axes both have; padded places are dropped.

    Args:
      target: (U, dim).
      at: (...) int32, U or more for padding.
      values: (..., dim).
    """
    flat = unique_places(at, target.shape[0])
    values = values.reshape(-1, *target.shape[1:]).astype(target.dtype)
    # ``unique_indices`` says that no two writes meet, so that their order does not matter; nobody checks the promise.
    return target.at[flat].set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def unique_places(at: jax.Array, capacity: int) -> jax.Array:
    """Flat places; padding is made distinct past the end, so that the promise of unique indices holds for all."""
    flat = at.reshape(-1)
    return jnp.where(flat < capacity, flat, capacity + jnp.arange(flat.size, dtype=jnp.int32))
