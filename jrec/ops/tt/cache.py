"""A least-frequently-used cache of full rows for a tensor-train table (TT-Rec, Section 4.2).

The rows looked up most often are kept uncompressed and trained by a row optimizer, which saves their products and
recovers accuracy. Frequencies are tracked over the steps of a warm-up, then the most frequent rows enter the cache, and
again at regular intervals: rows that stay keep what they learned, rows that enter begin as the cores have them, with
fresh slots. Rows that leave are discarded, as in the paper, or folded back into the cores.

All state is in arrays of static shapes: a step is pure, compiles once, and checkpoints as any pytree.

    cache = tt_cache_init(config, shape, optimizer)
    activations, residuals = tt_cached_lookup(cores, cache, shape, bags)
    cores, slots, cache = tt_cached_apply_gradients(
        optimizer, cores, slots, cache, shape, residuals, gradients, step=step
    )
    cores, cache = tt_cache_step(config, optimizer, cores, cache, shape, residuals.cast, step=step)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.ops.arrays import Step
from jrec.ops.dispatch import Implementation
from jrec.ops.doors import INT32, checked, checked_cast, checked_step
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tt.cache_fold import fold_rows
from jrec.ops.tt.cache_tracker import TTTracker, compact, empty_tracker, find, most_frequent, take, track
from jrec.ops.tt.contract import TTResiduals
from jrec.ops.tt.cost import Contraction, TTTraffic
from jrec.ops.tt.init import Cores
from jrec.ops.tt.lookup import tt_lookup
from jrec.ops.tt.shape import TTShape, check_shape
from jrec.ops.types import Bags, Cast, array_record

OnEvict = Literal["discard", "fold"]
ON_EVICT: tuple[str, ...] = get_args(OnEvict)
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
      on_evict: "discard" forgets what an evicted row learned; "fold" moves the cores towards it (``fold_rows``).
      fold_ridge: How much a change of any other row weighs against one of an evicted row, see ``fold_rows``.
      fold_iterations: Iterations of conjugate gradients for each core.

    Raises:
      ValueError: On a value out of its range.
    """

    cache_rows: int
    tracked_rows: int | None = None
    warmup_steps: int = 1000
    refresh_every: int | None = 1000
    track_every: int = 1
    on_evict: OnEvict = "discard"
    fold_ridge: float = 1e-2
    fold_iterations: int = 8

    def __post_init__(self) -> None:
        for name in ("cache_rows", "tracked_rows", "warmup_steps", "refresh_every", "track_every", "fold_iterations"):
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
        if self.on_evict not in ON_EVICT:
            raise ValueError(f"on_evict {self.on_evict!r} is unknown; choose one of {', '.join(ON_EVICT)}")
        if not 0 < self.fold_ridge < float("inf"):
            raise ValueError(f"fold_ridge is {self.fold_ridge}; it must be positive and finite")

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
) -> tuple[Cores, TTCache]:
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
      The cores, which are new where an evicted row was folded back, and the cache.

    Raises:
      ValueError: On shapes that do not fit.
    """
    cache, step = checked_cache(cache, shape), checked_step(step)
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

    def refreshed(state: tuple[Cores, TTCache]) -> tuple[Cores, TTCache]:
        return tt_cache_refresh(config, optimizer, *state, shape, implementation=implementation)

    return _only_if(refreshes, refreshed, (tuple(cores), dataclasses.replace(cache, tracker=tracker)))


def tt_cache_refresh(
    config: TTCacheConfig,
    optimizer: RowOptimizer,
    cores: Cores,
    cache: TTCache,
    shape: TTShape,
    *,
    implementation: Implementation | None = None,
) -> tuple[Cores, TTCache]:
    """Chooses the most frequent rows now; ``tt_cache_step`` does it on schedule.

    Of rows looked up equally often, the ones with lower numbers are chosen.

    Args:
      config: The cache's configuration.
      optimizer: The cached rows' optimizer; entering rows get its fresh slots.
      cores: The table's cores.
      cache: The cache with its tracker.
      shape: The table's shape.
      implementation: As for ``tt_lookup``.

    Returns:
      The cores, which are new where evicted rows are folded back, and the cache.

    Raises:
      ValueError: On shapes that do not fit.
    """
    cache = checked_cache(cache, shape)
    size = cache.ids.shape[0]
    ids = most_frequent(cache.tracker, size, shape.rows)
    if config.on_evict == "fold":
        leaving = compact((cache.ids < shape.rows) & (find(ids, cache.ids, shape.rows) == size), size)
        cores = fold_rows(
            cores,
            shape,
            take(cache.ids, leaving, shape.rows),
            take(cache.rows, leaving, 0),
            ridge=config.fold_ridge,
            iterations=config.fold_iterations,
            implementation=implementation,
        )
    before = find(cache.ids, ids, shape.rows)
    stays = before < size
    enters = compact(~stays & (ids < shape.rows), size)
    entering, _ = lookup_rows(cores, shape, take(ids, enters, shape.rows), implementation=implementation)
    rows = take(cache.rows, before, 0).at[enters].set(entering, mode="drop")
    slots = {name: take(slot, before, optimizer.initial_slot(name)) for name, slot in cache.slots.items()}
    return tuple(cores), dataclasses.replace(cache, ids=ids, rows=rows, slots=slots)


def lookup_rows(
    cores: Cores,
    shape: TTShape,
    rows: jax.Array,
    *,
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, TTResiduals]:
    """Rows made from the cores, by ``tt_lookup`` in bags of one.

    Args:
      cores: The table's cores.
      shape: The table's shape.
      rows: (n,) int32, ascending and unique; padding holds ``shape.rows``.
      contraction: As for ``tt_lookup``.
      traffic: As for ``tt_lookup``.
      implementation: As for ``tt_lookup``.

    Returns:
      (n, dim) float32, zero for padding, and the residuals.
    """
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
    return tt_lookup(cores, shape, bags, contraction=contraction, traffic=traffic, implementation=implementation)


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


def _only_if(condition, change, state):
    return jax.lax.cond(condition, change, lambda state: state, state)
