"""The forward half: the unique rows of a batch, from wherever they live (OPER, sections 5.1 and 5.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrec.mesh.exchange import Exchange
from jrec.mesh.route import MeshRows, Picks, Route, check_view


def retrieve(rows: MeshRows, route: Route, exchange: Exchange | None, *, host: jax.Array | None = None) -> jax.Array:
    """A device's unique rows, ready to be pooled by ids that number them. Call it inside ``shard_map``.

    Only the rows of other devices wait for the network: the gathers from the device's own arrays depend on no
    collective, so a scheduler that hides latency runs them while requests and answers travel.

    Args:
      rows: the device's view: (S, dim) sharded, (H, dim) replicated.
      route: of the device's part of the batch, without the axis of devices.
      exchange: opened with ``route.remote``; None where the route has none.
      host: (K, dim), the batch's rows from host memory; None where the route has none.

    Returns:
      (U, dim) of the table's dtype; places that the route does not fill are zero.

    Raises:
      ValueError: if shapes do not fit, or the route reads host rows and none are given.
    """
    check_view(rows, route)
    if host is None and route.host.rows.size:
        raise ValueError(
            f"the route reads up to {route.host.rows.size} rows from host memory, but no host rows were given"
        )
    if (exchange is None) != (route.remote is None):
        raise ValueError("open the exchange with the route's remote picks: there is only one of the two")
    answers = None if exchange is None else exchange.answer(_gather(rows.sharded, exchange.asked))
    found = jnp.zeros((route.capacity, rows.sharded.shape[1]), rows.sharded.dtype)
    found = _place(found, route.own, rows.sharded)
    found = _place(found, route.replicated, rows.replicated)
    if host is not None and route.host.rows.size:
        found = _place(found, route.host, host)
    if route.remote is None or answers is None:
        return found
    return place(found, route.remote.at, answers)


def _place(found: jax.Array, picks: Picks, source: jax.Array) -> jax.Array:
    return place(found, picks.at, _gather(source, picks.rows))


def _gather(source: jax.Array, rows: jax.Array) -> jax.Array:
    """(..., dim): rows of ``source``; padding, which ends up nowhere, may read any row."""
    return source.at[rows].get(mode="clip", wrap_negative_indices=False)


def place(found: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values to unique places, whatever axes both have in front; padded places are dropped.

    Args:
      found: (U, dim).
      at: int32, U or more for padding.
      values: (..., dim) for ``at`` of (...).
    """
    flat = unique_places(at, found.shape[0])
    values = values.reshape(-1, *found.shape[1:]).astype(found.dtype)
    return found.at[flat].set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def unique_places(at: jax.Array, capacity: int) -> jax.Array:
    """Flat places with padding made distinct past the end: so the promise of unique indices holds for all of them."""
    flat = at.reshape(-1)
    return jnp.where(flat < capacity, flat, capacity + jnp.arange(flat.size, dtype=jnp.int32))
