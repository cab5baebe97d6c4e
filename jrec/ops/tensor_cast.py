"""Tensor Casting, Algorithm 2: sort the lookups by row, so that the backward pass is a gather-reduce."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jrec.ops.arrays import Ids, Offsets
from jrec.ops.dispatch import Implementation, dispatch
from jrec.ops.doors import check_count, checked_cast
from jrec.ops.explicit_axes import auto_inside
from jrec.ops.gather_reduce import check_segments, segment_of_entries
from jrec.ops.offsets import well_formed, within_bags
from jrec.ops.platforms import cpu_or_other
from jrec.ops.sizes import is_static, larger, smaller, static
from jrec.ops.types import Bags, Cast
from jrec.ops.verdicts import CAST


@auto_inside(lambda *_, **__: PartitionSpec())
def tensor_cast(
    ids: Ids,
    offsets: Offsets | None = None,
    *,
    num_rows: int,
    unique_capacity: int | None = None,
    implementation: Implementation | None = None,
) -> Cast:
    """Sorts lookups by row and finds the segments of equal rows. Depends only on ids, so it can run ahead of time.

    Args:
      ids: int32, (num_bags, length), or (capacity,) with ``offsets``. Negative ids and ids of ``num_rows`` or more are
        padding here: they join no segment.
      offsets: (num_bags + 1,) int32, ascending from 0 and at most ``capacity``, or None. Inside jit, where offsets
        descend, are negative or too large, the lookups of those bags are padding, and on CPUs all lookups.
      num_rows: Rows of the table.
      unique_capacity: How many unique rows fit. The default, the smaller of the lookups and the rows, always
        suffices; with a smaller one, ``num_unique > unique_capacity`` tells that rows were left out, and the caller
        must check it.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest. All give identical
        casts.

    Returns:
      A ``Cast``.

    Raises:
      ValueError: On shapes or dtypes that do not fit, or, outside jit, malformed offsets.

    Example:
      >>> cast = tensor_cast(jnp.array([[0, 5], [5, -1]], jnp.int32), num_rows=100)
      >>> cast.rows.tolist(), int(cast.num_unique)  # rows 0 and 5, then padding
      ([0, 5, 100, 100], 2)
      >>> cast.sources.tolist()  # row 0 is read by bag 0, row 5 by bags 0 and 1
      [0, 0, 1, 2]
    """
    check_segments(ids, offsets, None)
    check_count("num_rows", num_rows)
    if unique_capacity is not None:
        check_count("unique_capacity", unique_capacity)
    room = smaller(ids.size, num_rows) if unique_capacity is None else unique_capacity

    def xla(ids: jax.Array, offsets: jax.Array | None) -> Cast:
        return _xla(ids, offsets, num_rows, room)

    def native(ids: jax.Array, offsets: jax.Array | None) -> Cast:
        from jrec.native import xla as kernels

        return kernels.tensor_cast(ids, offsets, num_rows=num_rows, unique_capacity=room)

    def pallas(ids: jax.Array, offsets: jax.Array | None) -> Cast:
        return _pallas(ids, offsets, num_rows, room)

    args, num_bags = (ids, offsets), ids.shape[0] if offsets is None else offsets.shape[0] - 1
    cast = dispatch("tensor_cast", implementation, args, xla=xla, native=native, pallas=pallas, kernel=CAST)
    return dataclasses.replace(cast, num_rows=static(num_rows), num_bags=static(num_bags))


def cast_of(
    bags: Bags, num_rows: int, *, unique_capacity: int | None = None, implementation: Implementation | None = None
) -> Cast:
    """The bags' cast, made here where nobody made it ahead of time; its ``num_rows`` and ``num_bags`` are known.

    Raises:
      ValueError: If their cast is of other bags or another table; else see ``tensor_cast``.
    """
    if bags.cast is not None:
        return checked_cast(bags.cast, num_rows, bags)
    return tensor_cast(
        bags.ids,
        bags.offsets,
        num_rows=num_rows,
        unique_capacity=unique_capacity,
        implementation=implementation,
    )


def tensor_cast_of_words(ids: jax.Array, offsets: jax.Array | None, *, unique_capacity: int) -> Cast:
    """The cast of rows of a table of 2^31 rows or more, whose ids are modulo 2^32; of these only -1 is padding.

    ``Cast.rows`` is uint32, the rows themselves, and 2^32 - 1 in padding. Arguments as of ``tensor_cast``, by XLA.
    """
    bags, inside, num_bags = _bags_of(ids, offsets)
    highest = np.uint32(2**32 - 1)  # -1 as a word
    words = jnp.where(inside, jax.lax.bitcast_convert_type(ids.reshape(-1), jnp.uint32), highest)
    cast = _cast_of(words, bags, num_bags, highest, unique_capacity)
    return dataclasses.replace(cast, num_bags=static(num_bags))


def _xla(ids: jax.Array, offsets: jax.Array | None, num_rows: int, unique_capacity: int) -> Cast:
    bags, inside, num_bags = _bags_of(ids, offsets)
    return _cast_of(_keys(ids, num_rows, inside), bags, num_bags, jnp.int32(num_rows), unique_capacity)


def _bags_of(ids: jax.Array, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array | bool, int]:
    """(capacity,) int32 bag of each lookup, whether it is one of the bag's, and the number of bags."""
    capacity = ids.size
    if offsets is None:
        bags = jnp.arange(capacity, dtype=jnp.int32) // jnp.int32(larger(1, ids.shape[1]))
        return bags, True, ids.shape[0]
    bags = segment_of_entries(offsets, capacity)
    return bags, cpu_or_other((offsets, bags), cpu=_inside_on_cpu, other=within_bags), offsets.shape[0] - 1


def _cast_of(
    keys: jax.Array, bags: jax.Array, num_bags: int, padding: jax.Array | np.uint32, unique_capacity: int
) -> Cast:
    """The cast of rows as sort keys, of which padding has the greatest; ``rows`` has ``padding``'s type."""
    capacity = keys.shape[0]
    keys, positions = _sorted(keys)
    keys = keys.astype(padding.dtype)
    real = keys < padding
    total = jnp.sum(real, dtype=jnp.int32)
    # Algorithm 2, lines 5 to 9: a scan over the sorted rows, and a running sum that numbers their segments.
    first = jnp.concatenate([jnp.ones(smaller(1, capacity), bool), keys[1:] != keys[:-1]])
    segment = jnp.cumsum(first, dtype=jnp.int32) - 1
    # Padding, and what finds no room, is written past the end, and dropped.
    starts = jnp.where(first & real, segment, unique_capacity)
    iota = jnp.arange(capacity, dtype=jnp.int32)
    return Cast(
        rows=jnp.full(unique_capacity, padding, padding.dtype).at[starts].set(keys, mode="drop"),
        offsets=jnp.full(unique_capacity + 1, total, jnp.int32)
        .at[jnp.where(first & real, segment, unique_capacity + 1)]
        .set(iota, mode="drop"),
        sources=jnp.where(real, bags[positions], num_bags),
        positions=positions,
        num_unique=jnp.sum(first & real, dtype=jnp.int32),
    )


def _inside_on_cpu(offsets: jax.Array, bags: jax.Array) -> jax.Array:
    """Lookups of a bag; none where offsets are malformed, as in the native cast."""
    return (bags < offsets.shape[0] - 1) & jnp.all(well_formed(offsets, bags.shape[0]))


def _pallas(ids: jax.Array, offsets: jax.Array | None, num_rows: int, unique_capacity: int) -> Cast:
    from jrec.pallas import cast

    if offsets is None:
        num_bags, bags = ids.shape
        keys = _keys(ids, num_rows)
    else:
        num_bags = offsets.shape[0] - 1
        keys, bags = cast.ragged_keys(ids, offsets, num_rows=num_rows, key_type=_key_type(num_rows))
    keys, positions = _sorted(keys)
    rows, segments, sources, num_unique = cast.cast_sorted(
        keys, positions, bags, num_bags=num_bags, num_rows=num_rows, unique_capacity=unique_capacity
    )
    return Cast(rows=rows, offsets=segments, sources=sources, positions=positions, num_unique=num_unique)


def _keys(ids: jax.Array, num_rows: int, inside: jax.Array | bool = True) -> jax.Array:
    """(capacity,) rows in the narrowest type; ``num_rows`` for padding and where ``inside`` is False."""
    flat = ids.reshape(-1)
    real = (flat >= 0) & (flat < num_rows) & inside
    return jnp.where(real, flat, num_rows).astype(_key_type(num_rows))


def _sorted(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys in ascending order, and their flat positions, int32."""
    positions = jnp.arange(keys.shape[0], dtype=jnp.int32)
    # Stable: lookups of a row stay in the order of the batch, so that all implementations sum them in one order.
    keys, positions = jax.lax.sort((keys, positions), num_keys=1, is_stable=True)
    return keys, positions


def _key_type(num_rows: int) -> DTypeLike:
    """The type that rows are sorted in: a GPU's radix sort makes a pass for each of its bytes."""
    if not is_static(num_rows):
        return jnp.int32
    return jnp.uint8 if num_rows < 2**8 else jnp.uint16 if num_rows < 2**16 else jnp.int32
