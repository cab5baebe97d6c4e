"""A differentiable embedding bag with an ordinary (dense) table gradient: a drop-in for ``jnp.take``-style code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.ops.arrays import AnyBagged, AnyIds, AnyOffsets, AnyWeights, Table
from jrec.ops.dispatch import Implementation
from jrec.ops.doors import checked_table
from jrec.ops.explicit_axes import auto_inside, like_bags
from jrec.ops.forms import FormedBags, formed
from jrec.ops.gather_reduce import lookup_of_table, segment_of_entries
from jrec.ops.offsets import nan_unless, whole_bags, within_bags
from jrec.ops.table import Table as RowTable
from jrec.ops.table import is_table, look_up
from jrec.ops.types import Bags, Cast

Combiner = Literal["sum", "mean", "sqrtn", "max"]


@auto_inside(lambda table, ids, offsets=None, **_: like_bags(ids, offsets, table))
def embedding_bag(
    table: Table | RowTable,
    ids: AnyIds | Bags,
    offsets: AnyOffsets | None = None,
    *,
    weights: AnyWeights | None = None,
    combiner: Combiner = "sum",
    implementation: Implementation | None = None,
) -> AnyBagged:
    """Pools table rows into bags, differentiable in ``table`` and ``weights``.

    ``sum`` adds ``weights * row``; ``mean`` divides that by the number of ids in the bag, ``sqrtn`` by its square root;
    ``max`` takes the elementwise maximum of ``weights * row``. Empty bags are zero.

    The gradient of a ``jrec.Table`` is the rows that were read (``jrec.RowGradients``). The gradient of an array is an
    array of the table's size, as ``jax.grad`` promises, made by a casted gather-reduce. Forward mode (``jax.jvp``,
    ``jax.linearize``) and derivatives of any order (``jax.hessian``) are lookups and casted gather-reduces, too.

    Args:
      table: (rows, dim), float32, bfloat16 or float16, or a ``jrec.Table`` of such rows.
      ids: ``Bags``, with their offsets, weights and cast, or integers of any type, NumPy's or JAX's. Padded:
        (num_bags,) for one id a bag, (num_bags, length), or (batch, features, length) for bags of several features;
        negative ids are absent. Ragged: (capacity,) with ``offsets``. JAX wraps int64 ids that are given to a jitted
        function; convert them by ``jrec.checked_ids``.
      offsets: (num_bags + 1,) integers, ascending from 0 and at most ``capacity``, or None.
      weights: float32 of the shape of ``ids``, or None.
      combiner: "sum", "mean", "sqrtn" or "max".
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest. A ``jrec.Table`` has
        its own.

    Returns:
      (num_bags, dim) float32, or (batch, features, dim). A bag with an id past the table, or whose offsets descend, are
      negative or too large, is NaN; outside jit such ids and offsets raise.

    Raises:
      ValueError: On shapes or dtypes that do not fit, an unknown combiner, or, outside jit, an id past the table or
        malformed offsets.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> table = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
      >>> ids = jnp.array([[0, 2], [1, -1]], jnp.int32)
      >>> embedding_bag(table, ids).tolist()
      [[4.0, 6.0], [2.0, 3.0]]
      >>> embedding_bag(table, np.array([2, -1])).tolist()
      [[4.0, 5.0], [0.0, 0.0]]
    """
    check_combiner(combiner)
    sums = _sums_of(table, implementation)
    bags, cast = _formed(ids, offsets, weights, table.shape[0])
    if bags.axes == (0,):  # JAX has no derivative of sums over no segments
        return jnp.zeros((0, table.shape[1]), jnp.float32)
    if combiner == "max":

        def single(ids: jax.Array, weights: jax.Array | None) -> jax.Array:
            return sums(Bags(ids=ids, weights=weights))

        return bags.in_form(max_of_bags(single, bags.ids, bags.offsets, bags.weights))
    scaled = bags.weights
    if combiner != "sum":
        scaled = normalized_weights(bags.ids, bags.offsets, scaled, combiner)
    return bags.in_form(sums(Bags(ids=bags.ids, offsets=bags.offsets, weights=scaled, cast=cast)))


def _formed(ids: object, offsets: object, weights: object, num_rows: int) -> tuple[FormedBags, Cast | None]:
    """Ids of any form, and the cast of ``Bags`` that bring one."""
    if not isinstance(ids, Bags):
        return formed(ids, offsets, weights, num_rows), None
    if offsets is not None or weights is not None:
        raise ValueError("ids are jrec.Bags, which have offsets and weights themselves; leave these out")
    return formed(ids.ids, ids.offsets, ids.weights, num_rows), ids.cast


def _sums_of(table: Table | RowTable, implementation: Implementation | None) -> Callable[[Bags], jax.Array]:
    """From bags in canonical form the sums of their rows."""
    if not is_table(table):
        rows = checked_table(table)
        return lambda bags: lookup_of_table(
            rows, bags.ids, bags.offsets, weights=bags.weights, implementation=implementation
        )
    if implementation is not None:
        raise ValueError(f"implementation is {implementation!r}, but a jrec.Table has its own; give it to the Table")
    return lambda bags: look_up(table, bags)


def normalized_weights(
    ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, combiner: str
) -> jax.Array:
    """Weights divided by the bag's number of ids, or the root of it."""
    real = ids >= 0
    if offsets is None:
        count = jnp.sum(real, axis=1, keepdims=True, dtype=jnp.float32)
        count = jnp.broadcast_to(count, ids.shape)
    else:
        num_bags = offsets.shape[0] - 1
        segments = segment_of_entries(offsets, ids.shape[0])
        # One more segment, for the ids behind the last bag.
        count = jax.ops.segment_sum(real.astype(jnp.float32), segments, num_bags + 1, indices_are_sorted=True)[segments]
        # Bags that share ids, as malformed offsets make them, have no count that one weight an id could carry.
        count = jnp.where((segments == num_bags) | within_bags(offsets, segments), count, jnp.float32(jnp.nan))
    # An empty bag divides its zeros by one.
    norm = jnp.maximum(count, jnp.float32(1))
    if combiner == "sqrtn":
        norm = jnp.sqrt(norm)
    return 1 / norm if weights is None else weights / norm


def max_of_bags(
    pooled: Callable[[jax.Array, jax.Array | None], jax.Array],
    ids: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """Elementwise maximum; its gradient goes to the row that won, shared between equals as ``jnp.max`` does.

    Args:
      pooled: From ids, (n, 1) int32, and their weights, (n, 1) or None, the sums of bags of one id, (n, dim).
      ids: As given to ``embedding_bag``, as are ``offsets`` and ``weights``.
      offsets: The bags of (capacity,) ids, or None.
      weights: Weights in the shape of ``ids``, or None.

    Returns:
      (num_bags, dim), zeros where a bag is empty.
    """
    lowest = jnp.float32(-jnp.inf)
    columns = None if weights is None else weights.reshape(-1, 1)
    if offsets is None:
        rows, real = pooled(ids.reshape(-1, 1), columns), ids >= 0
        rows = rows.reshape(*ids.shape, rows.shape[1])
        highest = jnp.max(jnp.where(real[..., None], rows, lowest), axis=1, initial=lowest)
        return jnp.where(jnp.any(real, axis=1)[:, None], highest, jnp.float32(0))
    segments, num_bags = segment_of_entries(offsets, ids.shape[0]), offsets.shape[0] - 1
    ids = jnp.where(segments < num_bags, ids, -1)  # what is behind the last bag may be anything
    rows, real = pooled(ids.reshape(-1, 1), columns), ids >= 0
    highest = jax.ops.segment_max(
        jnp.where(real[:, None], rows, lowest), segments, num_bags, indices_are_sorted=True, mode="drop"
    )
    # A bag of absent ids has a maximum of -inf, and is zero by this.
    occupied = jnp.zeros(num_bags, bool).at[segments].max(real, indices_are_sorted=True, mode="drop")
    maximum = jnp.where(occupied[:, None], highest, jnp.float32(0))
    return nan_unless(whole_bags(offsets, segments), maximum)


def check_combiner(combiner: str) -> None:
    """Raises ValueError on an unknown combiner."""
    if combiner not in get_args(Combiner):
        raise ValueError(f"combiner {combiner!r} is unknown; choose sum, mean, sqrtn or max")
