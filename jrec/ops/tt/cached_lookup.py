"""The two phases of a tensor-train table with a cache of full rows: hits read and train rows, misses cores.

The ids are cast once, and the cast is split: lookups of cached rows go on as in an uncompressed table, the others as
in a tensor-train table without a cache. Each bag's rows of both are pooled apart, then added.
"""

from __future__ import annotations

import dataclasses

import jax

from jrec.ops.arrays import Bagged, RoundingKey, Scale, Slots, Step
from jrec.ops.dispatch import Implementation
from jrec.ops.forms import formed_bags
from jrec.ops.gather_reduce import check_segments, gather_reduce
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.row_update import casted_update
from jrec.ops.tensor_cast import cast_of
from jrec.ops.tt.cache import TTCache, checked_cache
from jrec.ops.tt.cache_split import split_cast
from jrec.ops.tt.contract import TTResiduals
from jrec.ops.tt.cost import Contraction, TTTraffic
from jrec.ops.tt.init import Cores
from jrec.ops.tt.lookup import tt_apply_gradients, tt_lookup
from jrec.ops.tt.shape import TTShape
from jrec.ops.types import Bags, Cast, array_record


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class TTCachedResiduals:
    """What a cached lookup leaves for its backward pass and for ``tt_cache_step``, and its hit rate.

    Attributes:
      cast: The cast of all lookups.
      weights: The lookups' weights, or None.
      cached: The cast of the lookups that hit, over the cache's rows.
      misses: The residuals of the other lookups, in the same bags.
      hits: () int32, lookups that found their row in the cache.
      lookups: () int32, all lookups of rows of the table.
    """

    cast: Cast
    weights: jax.Array | None
    cached: Cast
    misses: TTResiduals
    hits: jax.Array
    lookups: jax.Array


def tt_cached_lookup(
    cores: Cores,
    cache: TTCache,
    shape: TTShape,
    bags: Bags,
    *,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    unique_capacity: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Bagged, TTCachedResiduals]:
    """Phase one: pooled rows of every bag, from the cache where it holds them, else from the cores.

    Args:
      cores: As for ``tt_lookup``.
      cache: This table's cache, from ``tt_cache_init`` or ``tt_cache_step``.
      shape: The table's shape.
      bags: As for ``tt_lookup``; a cast made ahead of time is used. "mean" and "sqrtn" are weights.
      contraction: The misses' contraction: None, "unique" or "dense".
      traffic: The misses' traffic, for the choice of their contraction.
      unique_capacity: How many unique rows fit, hits and misses together; see ``tt_lookup``.
      implementation: As for ``tt_lookup``.

    Returns:
      Activations, (num_bags, dim) float32, and residuals; ``residuals.hits / residuals.lookups`` is the hit rate. A
      bag with an id past the table is NaN.

    Raises:
      ValueError: On shapes or dtypes that do not fit, or unknown names.
    """
    bags = formed_bags(bags)
    check_segments(bags.ids, bags.offsets, bags.weights)
    cache = checked_cache(cache, shape)
    if contraction == "sample":
        raise ValueError(
            "contraction 'sample' sums slices bag by bag, which cached rows have none of; use None, 'unique' or 'dense'"
        )
    cast = cast_of(bags, shape.rows, unique_capacity=unique_capacity, implementation=implementation)
    split = split_cast(
        cast, cache.ids, bags.ids, rows=shape.rows, num_bags=bags.num_bags, implementation=implementation
    )
    missed = dataclasses.replace(bags, ids=split.missed_ids, cast=split.misses)
    from_cores, misses = tt_lookup(
        cores, shape, missed, contraction=contraction, traffic=traffic, implementation=implementation
    )
    from_cache = gather_reduce(
        cache.rows, split.places, bags.offsets, weights=bags.weights, implementation=implementation
    )
    return from_cores + from_cache, TTCachedResiduals(
        cast=cast,
        weights=bags.weights,
        cached=dataclasses.replace(split.hits, num_rows=cache.ids.shape[0], num_bags=cast.num_bags),
        misses=misses,
        hits=split.hits.offsets[-1],
        lookups=cast.offsets[-1],
    )


def tt_cached_apply_gradients(
    optimizer: RowOptimizer,
    cores: Cores,
    slots: tuple[Slots, ...],
    cache: TTCache,
    shape: TTShape,
    residuals: TTCachedResiduals,
    gradients: Bagged,
    *,
    step: Step = 0,
    gradient_scale: Scale = 1.0,
    core_optimizer: RowOptimizer | None = None,
    rounding_key: RoundingKey | None = None,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    implementation: Implementation | None = None,
) -> tuple[Cores, tuple[Slots, ...], TTCache]:
    """Phase two: the optimizer's step on the cached rows that were hit, and the fused core update for the misses.

    Args:
      optimizer: Any row optimizer; the one given to ``tt_cache_init``.
      cores: As given to ``tt_cached_lookup``.
      slots: The cores' slots, as ``tt_init_slots`` makes them.
      cache: As given to ``tt_cached_lookup``.
      shape: The table's shape.
      residuals: From ``tt_cached_lookup``.
      gradients: (num_bags, dim) float32, of the activations.
      step: () int32, how many steps were taken before.
      gradient_scale: Multiplies the gradients: one over the loss scale.
      core_optimizer: The cores' optimizer, which ``slots`` belong to, if it is another than the cached rows'.
      rounding_key: As for ``tt_apply_gradients``; cached rows are float32 and never rounded.
      contraction: As for ``tt_cached_lookup``.
      traffic: As for ``tt_cached_lookup``.
      implementation: As for ``tt_lookup``.

    Returns:
      The new cores, their slots, and the cache; its tracker and its choice of rows change only in ``tt_cache_step``.

    Raises:
      ValueError: On shapes, dtypes or slots that do not fit, or unknown names.
    """
    cache = checked_cache(cache, shape)
    if not isinstance(residuals, TTCachedResiduals):
        raise ValueError(f"the residuals must come from tt_cached_lookup, but are of type {type(residuals).__name__}")
    rows, row_slots = casted_update(
        optimizer,
        cache.rows,
        cache.slots,
        residuals.cached,
        gradients,
        weights=residuals.weights,
        step=step,
        gradient_scale=gradient_scale,
        implementation=implementation,
    )
    cores, slots = tt_apply_gradients(
        core_optimizer or optimizer,
        cores,
        slots,
        shape,
        residuals.misses,
        gradients,
        step=step,
        gradient_scale=gradient_scale,
        rounding_key=rounding_key,
        contraction=contraction,
        traffic=traffic,
        implementation=implementation,
    )
    return cores, slots, dataclasses.replace(cache, rows=rows, slots=row_slots)
