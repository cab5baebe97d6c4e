"""Which rows a tensor-train cache holds: how often rows are looked up, and a batch's lookups by where their rows are.

Frequencies are kept in bounded memory: sorted ids with counts, merged batch by batch without a sort. While the distinct
rows seen fit the tracker, counts are exact. Past that it is Space-Saving (Metwally et al. 2005), batch by batch: a row
that was not tracked enters with its lookups in the batch plus ``floor``, the most it may have had before; then the T
greatest counts are kept, among equal ones the lowest ids', and ``floor`` rises to the greatest that is dropped. Counts
never fall short of the truth and pass it by ``floor`` at most, and that is at most lookups / T: every row of more
lookups is tracked. Nothing is random.

A batch's cast is split in two, and both are casts again, so each side goes on as any table's does: cached rows are
pooled and updated as in an uncompressed table, and the tensor-train cores never hear of lookups that hit.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.sizes import is_static, search_sorted
from jrec.ops.tt.index import unique_row_of_lookups
from jrec.ops.types import Cast, array_record

_HALVED_FROM = 1 << 30


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTracker:
    """Frequencies of at most T rows.

    Attributes:
      ids: (T,) int32, ascending; padding holds the table's rows.
      counts: (T,) int32, 0 for padding. Once one reaches 2**30 all are halved, rounding up.
      floor: () int32, the most lookups a row that is not tracked may have had, and the most by which a count may be too
        high; 0 for as long as counts are exact.
    """

    ids: jax.Array
    counts: jax.Array
    floor: jax.Array


def empty_tracker(tracked_rows: int, rows: int) -> TTTracker:
    """A tracker that has seen nothing, of a table of ``rows`` rows."""
    return TTTracker(
        ids=jnp.full(tracked_rows, rows, jnp.int32),
        counts=jnp.zeros(tracked_rows, jnp.int32),
        floor=jnp.int32(0),
    )


def track(tracker: TTTracker, cast: Cast, rows: int) -> TTTracker:
    """Counts a batch's lookups.

    Args:
      tracker: The tracker before the batch.
      cast: The batch's cast, over ``rows`` rows.
      rows: How many rows the table has.
    """
    ids, counts, capacity, batch = tracker.ids, tracker.counts, tracker.ids.shape[0], cast.rows.shape[0]
    before = count_below(ids, cast.rows)
    known = (before < capacity) & (take(ids, before, rows) == cast.rows) & (cast.rows < rows)
    added = lookups_of_rows(cast)
    # A cast's rows are unique, so no count is added to twice: there is no order to depend on.
    counts = counts.at[jnp.where(known, before, jnp.int32(capacity))].add(added, mode="drop")
    fresh = (cast.rows < rows) & ~known
    fresh_up_to = jnp.cumsum(fresh, dtype=jnp.int32)
    # Merging two sorted lists: an entry goes after its predecessors in both lists.
    fresh_below = jnp.concatenate([jnp.zeros(1, jnp.int32), fresh_up_to])[count_below(cast.rows, ids)]
    # Padding of the tracker sorts behind every row, and is written behind every row.
    old_places = jnp.arange(capacity, dtype=jnp.int32) + fresh_below
    new_places = jnp.where(fresh, before + fresh_up_to - 1, jnp.int32(capacity + batch))

    def merged(old: jax.Array, new: jax.Array, padding: int) -> jax.Array:
        empty = jnp.full(capacity + batch, padding, jnp.int32)
        return empty.at[old_places].set(old, unique_indices=True).at[new_places].set(new, mode="drop")

    # A row that was not tracked may have had up to ``floor`` lookups before: counts never fall short of the truth.
    ids, counts = merged(ids, cast.rows, rows), merged(counts, added + tracker.floor, 0)
    chosen = _greatest(counts, capacity)
    floor = jnp.maximum(tracker.floor, jnp.max(counts, where=~chosen, initial=0))
    kept = compact(chosen, capacity)
    ids, counts = take(ids, kept, rows), take(counts, kept, 0)
    # Long before int32 overflows. Only the order of the counts is ever asked for, and halving turns none around.
    halvings = (jnp.max(counts, initial=0) >= _HALVED_FROM).astype(jnp.int32)
    return TTTracker(
        ids=ids,
        counts=jax.lax.shift_right_arithmetic(counts + halvings, jnp.full_like(counts, halvings)),
        floor=jax.lax.shift_right_arithmetic(floor + halvings, halvings),
    )


def most_frequent(tracker: TTTracker, size: int, rows: int) -> jax.Array:
    """The ``size`` rows of the greatest counts, among equal ones the lowest ids.

    Returns:
      (size,) int32, ascending; padding holds ``rows``.
    """
    return take(tracker.ids, compact(_greatest(tracker.counts, size), size), rows)


def _greatest(counts: jax.Array, size: int) -> jax.Array:
    """Which are the ``size`` greatest counts, the first ones of equal ones; bool of their shape, never true for 0."""
    least = jnp.maximum(kth_greatest(counts, size), 1)
    above, level = counts > least, counts == least
    room = jnp.int32(size) - jnp.sum(above, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, dtype=jnp.int32) <= room))


def lookups_of_rows(cast: Cast) -> jax.Array:
    """How many lookups each unique row of a cast has, (unique_capacity,) int32."""
    return cast.offsets[1:] - cast.offsets[:-1]


def find(keys: jax.Array, queries: jax.Array, limit: int) -> jax.Array:
    """Where ascending ``queries`` lie among ascending unique ``keys``, int32 of the queries' shape.

    Queries that are absent, or of ``limit`` and more (padding), get ``len(keys)``.
    """
    places = count_below(keys, queries)
    present = (queries < limit) & (take(keys, places, limit) == queries)
    return jnp.where(present, places, jnp.int32(keys.shape[0]))


def count_below(keys: jax.Array, queries: jax.Array) -> jax.Array:
    """How many of the ascending keys are less than each of the ascending queries, (q,) int32.

    The shorter list is searched for in the longer one.
    """
    n, q = keys.shape[0], queries.shape[0]
    if not (is_static(n) and is_static(q)):
        return search_sorted(keys, queries, "left")
    # Whichever way takes fewer steps of binary searches in all.
    if q * max(1, n).bit_length() <= n * max(1, q).bit_length():
        return jnp.searchsorted(keys, queries, side="left").astype(jnp.int32)
    reached = jnp.searchsorted(queries, keys, side="right").astype(jnp.int32)
    return jnp.cumsum(jnp.zeros(q + 1, jnp.int32).at[reached].add(1, indices_are_sorted=True), dtype=jnp.int32)[:q]


def kth_greatest(values: jax.Array, k: int) -> jax.Array:
    """The k-th greatest of values of at least 0, () int32; 0 where there are fewer than ``k``.

    One bit at a time, by counting: 31 passes, where a sort costs many times that.
    """

    def with_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | jax.lax.shift_left(jnp.int32(1), jnp.int32(30) - i)
        return jnp.where(jnp.sum(values >= higher, dtype=jnp.int32) >= k, higher, least)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), with_bit, jnp.int32(0))


def compact(mask: jax.Array, size: int) -> jax.Array:
    """Ascending places of the first ``size`` true entries, (size,) int32; padding holds ``len(mask)``."""
    n = mask.shape[0]
    places = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, jnp.int32(size))
    return jnp.full(size, n, jnp.int32).at[places].set(jnp.arange(n, dtype=jnp.int32), mode="drop")


def take(values: jax.Array, places: jax.Array, padding: float) -> jax.Array:
    """``values[places]``, ``padding`` where a place is past the end."""
    if values.shape[0] == 0:
        return jnp.full((*places.shape, *values.shape[1:]), padding, values.dtype)
    return values.at[places].get(mode="fill", fill_value=padding, wrap_negative_indices=False)


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
