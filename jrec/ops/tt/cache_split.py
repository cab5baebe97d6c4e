"""Splits a batch's cast in two: lookups of rows that a cache holds, and the others.

Both are casts again, so each side goes on as any table's does: cached rows are pooled and updated as in an
uncompressed table, and the tensor-train cores never hear of lookups that hit.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.tt.cache_tracker import compact, find, lookups_of_rows, take
from jrec.ops.tt.index import unique_row_of_lookups
from jrec.ops.types import Cast, array_record


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSplit:
    """The lookups of a batch by where their rows are.

    Attributes:
      hits: The cast of the lookups that hit, over the cache's rows.
      misses: The cast of the others, over the table's rows.
      places: int32 of the ids' shape, the cached row of every lookup; -1 for misses and padding.
      missed_ids: int32 of the ids' shape, the ids without those that hit, -1 instead.
    """

    hits: Cast
    misses: Cast
    places: jax.Array
    missed_ids: jax.Array


def split_cast(
    cast: Cast, cached: jax.Array, ids: jax.Array, *, rows: int, num_bags: int, implementation: Implementation | None
) -> CacheSplit:
    """Splits a cast by whether its rows are cached.

    Args:
      cast: The cast of ``ids``, over ``rows`` rows.
      cached: (C,) int32, the cached rows' numbers, ascending; padding holds ``rows``.
      ids: int32, (num_bags, length) or (capacity,).
      rows: How many rows the table has.
      num_bags: How many bags there are.
      implementation: "xla", "native" or None.
    """
    split = functools.partial(_split, rows=rows, num_bags=num_bags)
    native = functools.partial(_native_split, rows=rows, num_bags=num_bags)
    named = "xla" if implementation == "pallas" else implementation
    return dispatch("tt_split", named, (cast, cached, ids), xla=split, native=native)


def _native_split(cast: Cast, cached: jax.Array, ids: jax.Array, *, rows: int, num_bags: int) -> CacheSplit:
    from jrec.native import tt

    hits, misses, places, missed_ids = tt.split(cast, cached, ids, rows=rows, num_bags=num_bags)
    return CacheSplit(hits=hits, misses=misses, places=places, missed_ids=missed_ids)


def _split(cast: Cast, cached: jax.Array, ids: jax.Array, *, rows: int, num_bags: int) -> CacheSplit:
    size = cached.shape[0]
    cached_rows = find(cached, cast.rows, rows)
    hit = cached_rows < size
    sources = unique_row_of_lookups(cast, ids)
    places = jnp.where(sources >= 0, take(cached_rows, jnp.maximum(sources, 0), size), jnp.int32(size))
    places = jnp.where(places < size, places, jnp.int32(-1))
    return CacheSplit(
        hits=_chosen(cast, hit, cached_rows, size, num_bags),
        misses=_chosen(cast, ~hit & (cast.rows < rows), cast.rows, rows, num_bags),
        places=places,
        missed_ids=jnp.where(places < 0, ids, jnp.int32(-1)),
    )


def _chosen(cast: Cast, mask: jax.Array, rows: jax.Array, padding: int, num_bags: int) -> Cast:
    """The segments of a cast that ``mask`` chooses, numbered by ``rows``."""
    kept = compact(mask, mask.shape[0])
    lengths = take(lookups_of_rows(cast), kept, 0)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    capacity = cast.positions.shape[0]
    chosen = take(mask, segment_of_entries(cast.offsets, capacity), False)
    total = jnp.sum(lengths, dtype=jnp.int32)
    # A stable partition: positions stay a permutation.
    first = jnp.cumsum(chosen, dtype=jnp.int32) - 1
    place = jnp.where(chosen, first, total + jnp.arange(capacity, dtype=jnp.int32) - first - 1)
    sources = jnp.where(chosen, cast.sources, jnp.int32(num_bags))
    return Cast(
        rows=take(rows, kept, padding),
        offsets=offsets,
        sources=jnp.zeros(capacity, jnp.int32).at[place].set(sources, unique_indices=True),
        positions=jnp.zeros(capacity, jnp.int32).at[place].set(cast.positions, unique_indices=True),
        num_unique=jnp.sum(mask, dtype=jnp.int32),
    )
