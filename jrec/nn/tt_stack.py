"""A tensor-train table among the stacks of a model: its cores, a cache of rows, and the two phases of a step."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.nn.counter import count, empty_counter
from jrec.ops import rounding
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import Stack
from jrec.ops.row_init import table_key
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tt import (
    TTCache,
    TTCacheConfig,
    TTCachedResiduals,
    TTResiduals,
    TTShape,
    tt_apply_gradients,
    tt_cache_init,
    tt_cache_step,
    tt_cached_apply_gradients,
    tt_cached_lookup,
    tt_init,
    tt_init_slots,
    tt_lookup,
)
from jrec.ops.tt.cache_tracker import TTTracker, empty_tracker
from jrec.ops.tt.init import Cores, Initializer
from jrec.ops.types import Bags, Cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTOptions:
    """How the tensor-train tables of a model start, and which of them have a cache.

    Attributes:
      initializer: of the cores, see ``tt_init``.
      caches: of full rows, by name of the table; a table that is not named has none.
    """

    initializer: Initializer = "sampled_gaussian"
    caches: Mapping[str, TTCacheConfig] = dataclasses.field(default_factory=dict)


class TTCore(nnx.Variable):
    """A core of a tensor-train table. Not an ``nnx.Param``: it is updated in the backward pass, as a ``Table`` is."""


class TTCached(nnx.Variable):
    """Rows that a tensor-train table keeps in full, or their numbers."""


class TTStack(nnx.Module):
    """A tensor-train table whose cores a row optimizer updates in place; ``EmbeddingCollection`` makes it.

    A table with a cache holds the cached rows and their numbers as well, which predictions need; their slots, the
    tracker of frequencies and the counts of lookups and hits are among the optimizer's slots.

    (``TTEmbeddingBag`` is the module to use alone, with gradients and any optax optimizer.)

    Args:
      stack: of tier "tt".
      key: of the collection's initial parameters; the cores follow from it and the table's name.
      options: see ``TTOptions``.
      implementation: of the ops; None for the platform's fastest.
    """

    def __init__(
        self, stack: Stack, key: jax.Array, *, options: TTOptions, implementation: Implementation | None = None
    ):
        if stack.tt_shape is None:
            raise ValueError(f"stack {stack.name} is of tier {stack.tier!r}, not a tensor-train table")
        table = stack.tables[0].name
        self.name = stack.name
        self.shape: TTShape = stack.tt_shape
        self.implementation: Implementation | None = implementation
        cores = tt_init(self.shape, table_key(key, table), initializer=options.initializer, dtype=stack.dtype)
        self.cores = nnx.List([TTCore(core) for core in cores])
        self.cache_config: TTCacheConfig | None = options.caches.get(table)
        self.cached = nnx.Dict({})
        if self.cache_config is not None:
            size = self.cache_config.cache_rows
            ids = jnp.full(size, self.shape.rows, jnp.int32)
            rows = jnp.zeros((size, self.shape.dim), jnp.float32)
            self.cached = nnx.Dict({"ids": TTCached(ids), "rows": TTCached(rows)})

    def arrays(self) -> Cores:
        """The cores as plain arrays."""
        return tuple(core.get_value() for core in self.cores)

    def set_arrays(self, cores: Cores) -> None:
        """Replaces the cores."""
        for variable, core in zip(self.cores, cores, strict=True):
            variable[...] = core

    def lookup(self, bags: Bags) -> tuple[jax.Array, TTStackResiduals]:
        """Phase one: activations (num_bags, dim) float32, and what ``apply_gradients`` needs."""
        if self.cache_config is None:
            return tt_lookup(self.arrays(), self.shape, bags, implementation=self.implementation)
        cache = self.cache({})
        return tt_cached_lookup(self.arrays(), cache, self.shape, bags, implementation=self.implementation)

    def init_slots(self, optimizer: RowOptimizer, *, cores: RowOptimizer | None = None) -> Slots:
        """Fresh slots of all cores and of the cached rows, the tracker and the counters, by name.

        Args:
          optimizer: of cached rows.
          cores: to which a slice of a core is a row; None for the same.
        """
        slots = named_slots(tt_init_slots(cores or optimizer, self.arrays()))
        if self.cache_config is None:
            return slots
        cache = tt_cache_init(self.cache_config, self.shape, optimizer)
        return slots | _state_beside_rows(cache) | {name: empty_counter() for name in COUNTERS}

    def apply_gradients(
        self,
        optimizer: RowOptimizer,
        slots: Slots,
        residuals: TTStackResiduals,
        gradients: jax.Array,
        *,
        cores: RowOptimizer | None = None,
        step: jax.Array | int = 0,
        rounding_key: jax.Array | None = None,
    ) -> Slots:
        """Phase two, in place on the cores and the cached rows; see ``tt_apply_gradients`` and ``tt_cache_step``.

        Args:
          optimizer: of cached rows.
          slots: as ``init_slots`` makes them.
          residuals: from ``lookup``.
          gradients: (num_bags, dim) float32, of the activations.
          cores: to which a slice of a core is a row; None for ``optimizer``.
          step: () int32, how many steps were taken before.
          rounding_key: (2,) uint32 of this step, the same for all tables; None rounds bfloat16 cores to nearest.

        Returns:
          The new slots.
        """
        of_cores = slots_by_core(slots, self.shape.num_cores)
        key = self.rounding_key(rounding_key)
        how = {"step": step, "rounding_key": key, "implementation": self.implementation}
        if isinstance(residuals, TTResiduals):
            new_cores, of_cores = tt_apply_gradients(
                cores or optimizer, self.arrays(), of_cores, self.shape, residuals, gradients, **how
            )
            self.set_arrays(new_cores)
            return named_slots(of_cores)
        new_cores, of_cores, cache = tt_cached_apply_gradients(
            optimizer,
            self.arrays(),
            of_cores,
            self.cache(slots),
            self.shape,
            residuals,
            gradients,
            core_optimizer=cores,
            **how,
        )
        self.set_arrays(new_cores)
        counted = {"hits": residuals.hits, "lookups": residuals.lookups}
        return named_slots(of_cores) | self.end_step(optimizer, slots, cache, residuals.cast, counted, step=step)

    def end_step(
        self,
        optimizer: RowOptimizer,
        slots: Slots,
        cache: TTCache,
        cast: Cast | Callable[[], Cast],
        counted: Mapping[str, jax.Array],
        *,
        step: jax.Array | int,
    ) -> Slots:
        """``tt_cache_step`` in place on the cores and the cached rows, after both were updated.

        Args:
          optimizer: of cached rows.
          slots: before the step, with the counters of hits.
          cache: after the update.
          cast: of the step's lookups; see ``tt_cache_step``.
          counted: () int32, the step's "hits" and "lookups".
          step: () int32, how many steps were taken before.

        Returns:
          The new slots, but for those of the cores.
        """
        if self.cache_config is None:
            raise ValueError(f"{self.name} has no cache, but the residuals are of a cached lookup")
        cores, cache = tt_cache_step(
            self.cache_config,
            optimizer,
            self.arrays(),
            cache,
            self.shape,
            cast,
            step=step,
            implementation=self.implementation,
        )
        self.set_arrays(cores)
        self.cached["ids"][...], self.cached["rows"][...] = cache.ids, cache.rows
        return _state_beside_rows(cache) | {name: count(slots[name], counted[name]) for name in COUNTERS}

    def rounding_key(self, key: jax.Array | None) -> jax.Array | None:
        """The table's own key of a step's, which is the same for all tables."""
        return None if key is None else rounding.derived_key(key, zlib.crc32(self.name.encode()))

    def cache(self, slots: Slots) -> TTCache:
        """The cache's state; of the optimizer's part, what ``slots`` has of it."""
        tracked = {name: slots[f"tracked_{name}"] for name in _TRACKER if f"tracked_{name}" in slots}
        tracker = TTTracker(**tracked) if tracked else empty_tracker(1, self.shape.rows)
        of_rows = {n.removeprefix("cached_"): slot for n, slot in slots.items() if n.startswith("cached_")}
        return TTCache(ids=self.cached["ids"][...], rows=self.cached["rows"][...], slots=of_rows, tracker=tracker)


TTStackResiduals = TTResiduals | TTCachedResiduals
COUNTERS = ("hits", "lookups")
"""Slots of a table with a cache: how many of its lookups in training found their row in it, and how many there were."""
_TRACKER = tuple(field.name for field in dataclasses.fields(TTTracker))


def _state_beside_rows(cache: TTCache) -> Slots:
    tracker = {f"tracked_{name}": getattr(cache.tracker, name) for name in _TRACKER}
    return {f"cached_{name}": slot for name, slot in cache.slots.items()} | tracker


def named_slots(slots: tuple[Slots, ...]) -> Slots:
    """The slots of all cores by name."""
    return {f"core{k}_{name}": slot for k, of in enumerate(slots) for name, slot in of.items()}


def slots_by_core(slots: Slots, cores: int) -> tuple[Slots, ...]:
    """The inverse of ``named_slots``."""
    prefixes = [f"core{k}_" for k in range(cores)]
    return tuple({name.removeprefix(p): slot for name, slot in slots.items() if name.startswith(p)} for p in prefixes)
