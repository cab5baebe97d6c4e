"""A least-frequently-used cache of full rows for a tensor-train table (TT-Rec, Section 4.2), and its two phases.

The rows looked up most often are kept uncompressed and trained by a row optimizer, which saves their products and
recovers accuracy. Frequencies are tracked over the steps of a warm-up, then the most frequent rows enter the cache, and
again at regular intervals: rows that stay keep what they learned, rows that enter begin as the cores have them, with
fresh slots. Rows that leave are discarded, as in the paper.

The ids of a batch are cast once, and the cast is split: lookups of cached rows go on as in an uncompressed table, the
others as in a tensor-train table without a cache. Each bag's rows of both are pooled apart, then added.

All state is in arrays of static shapes: a step is pure, compiles once, and checkpoints as any pytree.

    cache = tt_cache_init(config, shape, optimizer)
    activations, residuals = tt_cached_lookup(cores, cache, shape, bags)
    cores, slots, cache = tt_cached_apply_gradients(
        optimizer, cores, slots, cache, shape, residuals, gradients, step=step
    )
    cache = tt_cache_step(config, optimizer, cores, cache, shape, residuals.cast, step=step)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrec.ops.arrays import Bagged, RoundingKey, Scale, Slots, Step
from jrec.ops.dispatch import Implementation
from jrec.ops.doors import INT32, checked, checked_cast, checked_step
from jrec.ops.explicit_axes import auto_inside, like, like_bags
from jrec.ops.forms import formed_bags
from jrec.ops.gather_reduce import check_segments, gather_reduce
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.row_update import casted_update
from jrec.ops.tensor_cast import cast_of
from jrec.ops.tt.cache_index import TTTracker, compact, empty_tracker, find, most_frequent, split_cast, take, track
from jrec.ops.tt.contract import TTResiduals
from jrec.ops.tt.cost import Contraction, TTTraffic
from jrec.ops.tt.init import Cores
from jrec.ops.tt.lookup import tt_apply_gradients, tt_lookup
from jrec.ops.tt.shape import TTShape, check_shape
from jrec.ops.types import Bags, Cast, array_record

TRACKED_PER_CACHED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTCacheConfig:
    """What the cache of one table holds, and when that changes.

    Attributes:
      cache_rows: How many rows it holds; TT-Rec found a ten-thousandth of the table enough. At most the table's rows.
      tracked_rows: Rows whose lookups are counted; None for 8 times ``cache_rows``. With as many as distinct rows are
        ever seen, counts are exact; with fewer, see ``TTTracker``.
      warmup_steps: Steps of tracking before rows enter the cache for the first time.
      refresh_every: Steps between later choices of rows; None keeps the rows chosen at the end of the warm-up for good.
      track_every: Lookups are tracked in one of this many steps.

    Raises:
      ValueError: On a value out of its range.
    """

    cache_rows: int
    tracked_rows: int | None = None
    warmup_steps: int = 1000
    refresh_every: int | None = 1000
    track_every: int = 1

    def __post_init__(self) -> None:
        for name in ("cache_rows", "tracked_rows", "warmup_steps", "refresh_every", "track_every"):
            value = getattr(self, name)
            if value is None and name in ("tracked_rows", "refresh_every"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                hint = "; a table without a cache uses tt_lookup" if name == "cache_rows" else ""
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1{hint}")
        if self.tracked_rows is not None and self.tracked_rows < self.cache_rows:
            raise ValueError(
                f"tracked_rows is {self.tracked_rows}, but {self.cache_rows} cache_rows are chosen from the tracked"
                " ones; track at least as many, or leave it out"
            )

    def tracked(self, rows: int) -> int:
        """Rows that are tracked of a table of ``rows``."""
        wanted = TRACKED_PER_CACHED * self.cache_rows if self.tracked_rows is None else self.tracked_rows
        return min(wanted, rows)


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class TTCache:
    """State of a cache: arrays only.

    Attributes:
      ids: (C,) int32, the cached rows' numbers, ascending; padding holds the table's rows.
      rows: (C, dim) float32, what they have learned.
      slots: The row optimizer's slots for ``rows``.
      tracker: The tracker of the frequencies.
    """

    ids: jax.Array
    rows: jax.Array
    slots: Slots
    tracker: TTTracker


def tt_cache_init(config: TTCacheConfig, shape: TTShape, optimizer: RowOptimizer) -> TTCache:
    """An empty cache.

    Args:
      config: The cache's configuration.
      shape: The table's shape.
      optimizer: The cached rows' optimizer.

    Raises:
      ValueError: If the cache is greater than the table.
    """
    if config.cache_rows > shape.rows:
        raise ValueError(f"cache_rows is {config.cache_rows:,}, but the table has {shape.rows:,} rows")
    rows = jnp.zeros((config.cache_rows, shape.dim), jnp.float32)
    return TTCache(
        ids=jnp.full(config.cache_rows, shape.rows, jnp.int32),
        rows=rows,
        slots=optimizer.init(rows),
        tracker=empty_tracker(config.tracked(shape.rows), shape.rows),
    )


@auto_inside(lambda config, optimizer, cores, cache, *_, **__: like(cache))
def tt_cache_step(
    config: TTCacheConfig,
    optimizer: RowOptimizer,
    cores: Cores,
    cache: TTCache,
    shape: TTShape,
    cast: Cast | Callable[[], Cast],
    *,
    step: Step,
    implementation: Implementation | None = None,
) -> TTCache:
    """What a cache does at the end of a training step: tracks its lookups, and chooses rows anew when it is time.

    Steps 0 to ``warmup_steps - 1`` run without cached rows; the first choice is made at the end of the last of them.

    Args:
      config: The cache's configuration.
      optimizer: The cached rows' optimizer.
      cores: The cores after the step's update.
      cache: The cache after the step's update.
      shape: The table's shape.
      cast: The cast of the step's lookups, ``residuals.cast``, or a function that makes it, called in steps that are
        tracked. Its ``rows`` and ``offsets`` are read: what was looked up, and how often.
      step: () int32, how many steps were taken before this one.
      implementation: As for ``tt_lookup``.

    Returns:
      The cache; the cores stay as they are.

    Raises:
      ValueError: On shapes that do not fit.
    """
    cache, step = checked_cache(cache, shape), checked_step(step)
    # Steps after the warm-up's last one: 0 at the end of that, when rows enter the cache for the first time.
    since = step + 1 - jnp.int32(config.warmup_steps)
    if config.refresh_every is None:
        tracks, refreshes = since <= 0, since == 0  # nobody would read later counts
    else:
        tracks, refreshes = None, (since >= 0) & (since % jnp.int32(config.refresh_every) == 0)
    if config.track_every > 1:
        due = step % jnp.int32(config.track_every) == 0
        tracks = due if tracks is None else tracks & due

    def tracked(tracker: TTTracker) -> TTTracker:
        return track(tracker, checked_cast(cast() if callable(cast) else cast, shape.rows), shape.rows)

    tracker = tracked(cache.tracker) if tracks is None else _only_if(tracks, tracked, cache.tracker)

    def refreshed(cache: TTCache) -> TTCache:
        return tt_cache_refresh(optimizer, cores, cache, shape, implementation=implementation)

    return _only_if(refreshes, refreshed, dataclasses.replace(cache, tracker=tracker))


@auto_inside(lambda optimizer, cores, cache, *_, **__: like(cache))
def tt_cache_refresh(
    optimizer: RowOptimizer,
    cores: Cores,
    cache: TTCache,
    shape: TTShape,
    *,
    implementation: Implementation | None = None,
) -> TTCache:
    """Chooses the most frequent rows now; ``tt_cache_step`` does it on schedule.

    Of rows looked up equally often, the ones with lower numbers are chosen.

    Args:
      optimizer: The cached rows' optimizer; entering rows get its fresh slots.
      cores: The table's cores.
      cache: The cache with its tracker.
      shape: The table's shape.
      implementation: As for ``tt_lookup``.

    Returns:
      The cache with the rows that are now the most frequent.

    Raises:
      ValueError: On shapes that do not fit.
    """
    cache = checked_cache(cache, shape)
    size = cache.ids.shape[0]
    ids = most_frequent(cache.tracker, size, shape.rows)
    before = find(cache.ids, ids, shape.rows)
    stays = before < size
    enters = compact(~stays & (ids < shape.rows), size)
    # Rows that stay keep what they learned; only those that enter are made from the cores, as ``size`` lookups at most.
    entering = _rows_of_cores(cores, shape, take(ids, enters, shape.rows), implementation)
    # The cores have gone on learning without the cached rows, so only rows that enter are made from them (TT-Rec, 4.2).
    rows = take(cache.rows, before, 0).at[enters].set(entering, mode="drop")
    slots = {name: take(slot, before, optimizer.initial_slot(name)) for name, slot in cache.slots.items()}
    return dataclasses.replace(cache, ids=ids, rows=rows, slots=slots)


def _rows_of_cores(cores: Cores, shape: TTShape, rows: jax.Array, implementation: Implementation | None) -> jax.Array:
    """(n, dim) float32 of (n,) int32 ascending and unique rows, looked up in bags of one; padding becomes zero."""
    n = rows.shape[0]
    places = jnp.arange(n, dtype=jnp.int32)
    real = rows < shape.rows
    count = jnp.sum(real, dtype=jnp.int32)
    cast = Cast(
        rows=rows,
        offsets=jnp.minimum(jnp.arange(n + 1, dtype=jnp.int32), count),
        sources=jnp.where(real, places, jnp.int32(n)),
        positions=places,
        num_unique=count,
    )
    bags = Bags(ids=jnp.where(real, rows, jnp.int32(-1))[:, None], cast=cast)
    return tt_lookup(cores, shape, bags, implementation=implementation)[0]


def checked_cache(cache: TTCache, shape: TTShape) -> TTCache:
    """A cache of a table of this shape.

    Raises:
      ValueError: If it is something else.
    """
    check_shape(shape)
    if not isinstance(cache, TTCache):
        raise ValueError(f"the cache must be made with tt_cache_init, but is of type {type(cache).__name__}")
    remedy = "; make the cache with tt_cache_init for this table"
    ids = checked("cache ids", cache.ids, ("cache_rows",), INT32, why=remedy)
    if ids.shape[0] > shape.rows:
        raise ValueError(f"cache ids must be at most the table's {shape.rows} rows, but are {ids.shape[0]}{remedy}")
    rows = checked("cached rows", cache.rows, (ids.shape[0], shape.dim), why=remedy)
    return dataclasses.replace(cache, ids=ids, rows=rows)


def _only_if[State](condition: jax.Array, change: Callable[[State], State], state: State) -> State:
    return jax.lax.cond(condition, change, lambda state: state, state)


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


@auto_inside(lambda cores, cache, shape, bags, **_: (like_bags(bags.ids, bags.offsets), PartitionSpec()))
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
    # One sort for both: a cast split in two is two casts.
    split = split_cast(
        cast, cache.ids, bags.ids, rows=shape.rows, num_bags=bags.num_bags, implementation=implementation
    )
    missed = dataclasses.replace(bags, ids=split.missed_ids, cast=split.misses)
    from_cores, misses = tt_lookup(
        cores, shape, missed, contraction=contraction, traffic=traffic, implementation=implementation
    )
    # Misses are absent here, as hits are among the cores' lookups: each bag is the sum of both.
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


@auto_inside(lambda optimizer, cores, slots, cache, *_, **__: like((tuple(cores), tuple(slots), cache)))
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
