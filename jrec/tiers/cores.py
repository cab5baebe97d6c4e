"""A tensor-train table: its cores, and a cache of uncompressed rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jrec.mesh.route import AXIS
from jrec.mesh.step import StepOptions
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
    tt_init_slots,
    tt_lookup,
)
from jrec.ops.tt import init as tt
from jrec.ops.tt.cache_index import TTTracker, empty_tracker
from jrec.ops.tt.cost import Contraction
from jrec.ops.types import Bags, Cast
from jrec.tiers import shared_cores
from jrec.tiers.shared_cores import CoreGradients
from jrec.tiers.store import Context, Deferred, Update

CoreResiduals = TTResiduals | TTCachedResiduals
COUNTERS = ("hits", "lookups")
"""Slots of a table with a cache: how many lookups in training hit the cache, and how many there were."""
_TRACKER = tuple(field.name for field in dataclasses.fields(TTTracker))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores of a tensor-train table, equal on all devices of a mesh.

    On a mesh every device looks up its own part of the batch. Core gradients and the slices touched are summed over the
    devices; cached rows are rows that every device holds. Which rows are cached depends on the lookups of all devices
    together: each decides as one device with the whole batch would, and every copy keeps the same bits.

    Attributes:
      cores: The cores, in the shapes that ``tt_init`` draws.
      cached: "ids", (cache_rows,) int32, and "rows", (cache_rows, dim) float32; empty without a cache.
      slots: Slots of the cores and of the cached rows, the tracker of frequencies and the counters, by name, from
        ``init_slots``; empty to predict.
      shape: The factors and ranks.
      cache: Which rows are cached, and when; None without a cache.
      contraction: How lookups are computed; None for the default.
    """

    cores: tt.Cores
    cached: dict[str, jax.Array]
    slots: Slots
    shape: TTShape = dataclasses.field(metadata={"static": True})
    cache: TTCacheConfig | None = dataclasses.field(default=None, metadata={"static": True})
    contraction: Contraction | None = dataclasses.field(default=None, metadata={"static": True})

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, CoreResiduals]]:
        """Contracts cores for the rows of every bag, and reads cached rows from the cache; see ``Store``."""
        implementation, way = context.options.implementation, self.contraction
        if self.cache is None:
            result = tt_lookup(self.cores, self.shape, bags, contraction=way, implementation=implementation)
        else:
            result = tt_cached_lookup(
                self.cores, self.state(), self.shape, bags, contraction=way, implementation=implementation
            )
        return Deferred.done(result)

    def update(self, residuals: CoreResiduals, gradients: jax.Array, context: Context) -> Update[Cores, CoreResiduals]:
        """Defers the gradients and the step of cores and cached rows; see ``Store``."""
        return _Update(store=self, residuals=residuals, gradients=gradients, context=context)

    def fused_step(self, core_gradients: CoreGradients, options: StepOptions) -> Cores:
        """The step on one device, which updates each core as soon as its gradient is computed."""
        residuals, gradients, context = core_gradients.residuals, core_gradients.gradients, core_gradients.context
        optimizer = context.row_optimizer
        slots = slots_by_core(self.slots, self.shape.num_cores)
        if isinstance(residuals, TTResiduals):
            cores, slots = tt_apply_gradients(
                context.cores or optimizer,
                self.cores,
                slots,
                self.shape,
                residuals,
                gradients,
                step=options.step,
                gradient_scale=options.gradient_scale,
                rounding_key=options.rounding_key,
                implementation=options.implementation,
            )
            return dataclasses.replace(self, cores=cores, slots=named_slots(slots))
        assert core_gradients.cache is not None
        cores, slots, state = tt_cached_apply_gradients(
            optimizer,
            self.cores,
            slots,
            core_gradients.cache,
            self.shape,
            residuals,
            gradients,
            core_optimizer=context.cores,
            step=options.step,
            gradient_scale=options.gradient_scale,
            rounding_key=options.rounding_key,
            implementation=options.implementation,
        )
        return self._ended(cores, slots, state, residuals, context)

    def step(self, core_gradients: CoreGradients, options: StepOptions) -> Cores:
        """The step from gradients that were summed over the devices, or for their norm."""
        cores, slots = core_gradients.step_cores(slots_by_core(self.slots, self.shape.num_cores), options)
        if isinstance(core_gradients.residuals, TTResiduals):
            return dataclasses.replace(self, cores=cores, slots=named_slots(slots))
        return self._ended(
            cores, slots, core_gradients.step_cached(options), core_gradients.residuals, core_gradients.context
        )

    def _ended(
        self,
        cores: tt.Cores,
        slots: tuple[Slots, ...],
        state: TTCache,
        residuals: TTCachedResiduals,
        context: Context,
    ) -> Cores:
        """``tt_cache_step`` after cores and cached rows were updated, and the counts of lookups and hits."""
        # On a mesh the cast of all devices' lookups is an exchange and a sort: made only in steps that track.
        cast: Cast | Callable[[], Cast] = residuals.cast
        counted = {"hits": residuals.hits, "lookups": residuals.lookups}
        if context.communication is not None:
            # Of all devices, so that their copies of the counters stay equal.
            counted = jax.lax.psum(counted, AXIS)
            # May be called under a ``cond`` on the number of the step, which all devices have alike: all of them enter
            # its collectives.
            cast = functools.partial(shared_cores.cast_of_all, residuals.cast, self.shape.rows, context)
        assert self.cache is not None
        state = tt_cache_step(
            self.cache,
            context.row_optimizer,
            cores,
            state,
            self.shape,
            cast,
            step=context.options.step,
            implementation=context.options.implementation,
        )
        counters = {name: count(self.slots[name], counted[name]) for name in COUNTERS}
        return dataclasses.replace(
            self,
            cores=cores,
            cached={"ids": state.ids, "rows": state.rows},
            slots=named_slots(slots) | _beside_rows(state) | counters,
        )

    def state(self) -> TTCache:
        """The cache; its slots and tracker where the store has slots."""
        tracked = {name: self.slots[f"tracked_{name}"] for name in _TRACKER if f"tracked_{name}" in self.slots}
        tracker = TTTracker(**tracked) if tracked else empty_tracker(1, self.shape.rows)
        of_rows = {n.removeprefix("cached_"): slot for n, slot in self.slots.items() if n.startswith("cached_")}
        return TTCache(ids=self.cached["ids"], rows=self.cached["rows"], slots=of_rows, tracker=tracker)


class _Update(Update[Cores, CoreResiduals]):
    """The update of cores and cached rows."""

    @functools.cached_property
    def _core_gradients(self) -> CoreGradients:
        store = self.store
        return CoreGradients(
            cores=store.cores,
            cache=None if store.cache is None else store.state(),
            shape=store.shape,
            residuals=self.residuals,
            gradients=self.gradients,
            context=self.context,
        )

    def squares(self) -> jax.Array:
        return self._core_gradients.squares()

    def step(self, options: StepOptions) -> Deferred[Cores]:
        # Cores that are stepped as their gradients come need no memory for these; a norm needs all of them first.
        fused = self.context.communication is None and not self._core_gradients.made
        step = self.store.fused_step if fused else self.store.step
        return Deferred.done(step(self._core_gradients, options))


def init_slots(
    optimizer: RowOptimizer,
    cores: tt.Cores,
    shape: TTShape,
    cache: TTCacheConfig | None,
    *,
    of_cores: RowOptimizer | None = None,
) -> Slots:
    """Fresh slots of cores and of cached rows, the tracker and the counters, by name.

    Args:
      optimizer: The optimizer of cached rows.
      cores: The cores.
      shape: Their shape.
      cache: The cache's configuration; None without a cache.
      of_cores: The optimizer of the cores, to which a slice is a row; None for ``optimizer``.
    """
    slots = named_slots(tt_init_slots(of_cores or optimizer, cores))
    if cache is None:
        return slots
    return slots | _beside_rows(tt_cache_init(cache, shape, optimizer)) | {name: empty_counter() for name in COUNTERS}


def _beside_rows(state: TTCache) -> Slots:
    tracker = {f"tracked_{name}": getattr(state.tracker, name) for name in _TRACKER}
    return {f"cached_{name}": slot for name, slot in state.slots.items()} | tracker


def named_slots(slots: tuple[Slots, ...]) -> Slots:
    """The slots of all cores by name."""
    return {f"core{k}_{name}": slot for k, of_core in enumerate(slots) for name, slot in of_core.items()}


def slots_by_core(slots: Slots, cores: int) -> tuple[Slots, ...]:
    """The inverse of ``named_slots``."""
    prefixes = [f"core{k}_" for k in range(cores)]
    return tuple({name.removeprefix(p): slot for name, slot in slots.items() if name.startswith(p)} for p in prefixes)


def empty_counter() -> jax.Array:
    """A counter for devices without 64-bit integers, exact up to 2**64: (2,) uint32, the lower word first."""
    return jnp.zeros(2, jnp.uint32)


def count(counter: jax.Array, more: jax.Array) -> jax.Array:
    """The counter raised by ``more``, () int32 of at least 0."""
    # A sum below either of its terms has wrapped: that is the carry.
    low = counter[0] + more.astype(jnp.uint32)
    return jnp.stack([low, counter[1] + (low < counter[0]).astype(jnp.uint32)])


def counted(counter: ArrayLike) -> int:
    """The counter's value; waits for the device."""
    low, high = np.asarray(counter).tolist()
    return (high << 32) + low
