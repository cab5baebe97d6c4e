"""The index work of a tensor-train lookup: its unique rows, their unique prefixes, and which row has which prefix.

EL-Rec's Algorithm 1 finds reusable prefixes with atomic flags. Here rows are sorted once (``tensor_cast``); a prefix is
a row divided by the factors of the cores after it, so prefixes come out sorted too, and whatever belongs to one of them
is a contiguous run. All arithmetic is in integers, one division a core: no stride is ever multiplied out.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.sizes import smaller
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.tt.shape import TTShape
from jrec.ops.types import Cast, array_record


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """The unique products of the first ``k`` cores that a batch needs: entry ``u`` is ``parents[u]`` by one slice.

    Attributes:
      parents: (capacity,) int32 ascending, the entry of the level below, or of the first core at level 2; padding
        holds the size of the level below.
      digits: (capacity,) int32, the slice of core ``k``; padding holds m_k.
      count: () int32, how many entries are real.
    """

    parents: jax.Array
    digits: jax.Array
    count: jax.Array

    @property
    def capacity(self) -> int:
        """How many entries fit."""
        return self.parents.shape[0]


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class TTIndex:
    """Which lookups need which products; depends only on ids.

    Attributes:
      cast: The ids' cast, over the table's rows.
      sources: int32 of the ids' shape, the unique row of every lookup; negative for padding, and one past the unique
        rows for an id past the table or past ``unique_capacity``.
      levels: The levels of cores 2 to d; the last one's entries are the unique rows.
    """

    cast: Cast
    sources: jax.Array
    levels: tuple[Level, ...]


def tt_index(
    shape: TTShape,
    ids: jax.Array,
    offsets: jax.Array | None = None,
    *,
    cast: Cast | None = None,
    unique_capacity: int | None = None,
    implementation: Implementation | None = None,
) -> TTIndex:
    """Finds the unique rows and prefixes of a lookup.

    Args:
      shape: The table's shape.
      ids: int32, (num_bags, length), or (capacity,) with ``offsets``; negative ids are padding.
      offsets: (num_bags + 1,) int32 or None.
      cast: The cast of these ids over ``shape.rows`` rows, where the loader made it ahead of time.
      unique_capacity: How many unique rows fit; see ``tensor_cast``. Lookups of rows that do not fit become NaN.
      implementation: The cast's implementation.

    Returns:
      The index.
    """
    if cast is None:
        cast = tensor_cast(
            ids, offsets, num_rows=shape.rows, unique_capacity=unique_capacity, implementation=implementation
        )
    levels, sources = dispatch(
        "tt_index",
        index_implementation(implementation),
        (cast, ids),
        xla=functools.partial(_levels_and_sources, shape),
        native=functools.partial(_native_levels_and_sources, shape),
    )
    return TTIndex(cast=cast, sources=sources, levels=levels)


def _levels_and_sources(shape: TTShape, cast: Cast, ids: jax.Array) -> tuple[tuple[Level, ...], jax.Array]:
    levels: list[Level] = []
    entries, count = cast.rows, _real_rows(cast)
    for core in range(shape.num_cores - 1, 0, -1):
        level, entries, count = _level(shape, core, entries, count)
        levels.insert(0, level)
    return tuple(levels), unique_row_of_lookups(cast, ids)


def _native_levels_and_sources(shape: TTShape, cast: Cast, ids: jax.Array) -> tuple[tuple[Level, ...], jax.Array]:
    from jrec.native import tt

    rooms, capacity = [], cast.rows.shape[0]
    for core in range(shape.num_cores - 1, 0, -1):
        capacity = _entries_below(shape, core, capacity)
        rooms.append(capacity)
    levels, sources = tt.index(cast, _real_rows(cast), ids, shape.row_factors[:0:-1], rooms)
    return tuple(Level(parents=p, digits=d, count=count) for p, d, count in reversed(levels)), sources


def _real_rows(cast: Cast) -> jax.Array:
    return jnp.minimum(cast.num_unique, jnp.int32(cast.rows.shape[0]))


def unique_row_of_lookups(cast: Cast, ids: jax.Array) -> jax.Array:
    """The place of every lookup's row among the cast's unique rows, of the ids' shape; see ``TTIndex.sources``."""
    segments = segment_of_entries(cast.offsets, ids.size)
    places = jnp.full(ids.size, cast.rows.shape[0], jnp.int32).at[cast.positions].set(segments, unique_indices=True)
    return jnp.where(ids < 0, jnp.int32(-1), places.reshape(ids.shape))


def index_implementation(implementation: Implementation | None) -> Implementation | None:
    """XLA does the index work of Pallas kernels."""
    return "xla" if implementation == "pallas" else implementation


def _entries_below(shape: TTShape, core: int, capacity: int) -> int:
    """How many entries the level below a (0-based) core has room for."""
    return shape.row_factors[0] if core == 1 else smaller(capacity, shape.prefixes(core))


def _level(shape: TTShape, core: int, entries: jax.Array, count: jax.Array) -> tuple[Level, jax.Array, jax.Array]:
    """The level of a (0-based) core with these sorted unique entries; then the sorted unique prefixes of it."""
    capacity, factor = entries.shape[0], shape.row_factors[core]
    below = _entries_below(shape, core, capacity)
    real = jnp.arange(capacity, dtype=jnp.int32) < count
    # Entries ascend and are unique, and division keeps their
    # order: equal prefixes are neighbours, without a second sort.
    prefixes = entries // jnp.int32(factor)
    digits = jnp.where(real, entries % jnp.int32(factor), jnp.int32(factor))
    # The level below is the first core, all of whose slices are there: a prefix is its own place.
    if core == 1:
        parents = jnp.where(real, prefixes, jnp.int32(below))
        return Level(parents=parents, digits=digits, count=count), entries, count
    first = real & jnp.concatenate([jnp.ones(smaller(1, capacity), bool), prefixes[1:] != prefixes[:-1]])
    ranks = jnp.cumsum(first, dtype=jnp.int32) - 1
    parents = jnp.where(real, ranks, jnp.int32(below))
    unique = jnp.zeros(below, jnp.int32).at[jnp.where(first, ranks, below)].set(prefixes, mode="drop")
    return Level(parents=parents, digits=digits, count=count), unique, jnp.sum(first, dtype=jnp.int32)


def digit_cast(level: Level, factor: int, implementation: Implementation | None = None) -> Cast:
    """Entries of a level sorted by digit, so that the gradient of a core's slice is a sum over one segment."""
    return tensor_cast(level.digits[:, None], num_rows=factor, unique_capacity=factor, implementation=implementation)
