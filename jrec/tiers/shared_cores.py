"""Gradients of tensor-train cores and cached rows, summed over the devices of a mesh, and their step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import SharedGradients, shared_gradients
from jrec.mesh.route import GatherMap
from jrec.mesh.step import StepOptions, cast_rows
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_gather_reduce, row_update
from jrec.ops.tt import TTCache, TTCachedResiduals, TTResiduals, TTShape, tt_core_gradients
from jrec.ops.tt.cache_index import lookups_of_rows, take
from jrec.ops.tt.core_update import core_keys, step_core, touched_slices
from jrec.ops.tt.init import Cores
from jrec.ops.types import Cast
from jrec.tiers.store import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreGradients:
    """Gradients of a table's cores and cached rows, summed over the devices that compute, each made at its first use.

    Attributes:
      cores: The cores, equal on all devices.
      cache: The cached rows, equal on all devices; None without a cache.
      shape: The table's shape.
      residuals: The residuals of the device's own lookups.
      gradients: (num_bags, dim) float32, gradients of the device's own bags, from its part of the whole batch's loss.
      context: The step. Cores and caches of devices that do not compute are not kept up to date.
    """

    cores: Cores
    cache: TTCache | None
    shape: TTShape
    residuals: TTResiduals | TTCachedResiduals
    gradients: jax.Array
    context: Context

    @functools.cached_property
    def _of_unique(self) -> jax.Array:
        """Gradients of the cached rows that the device read, (unique_capacity, dim)."""
        residuals, implementation = self.residuals, self.context.options.implementation
        assert isinstance(residuals, TTCachedResiduals)
        return casted_gather_reduce(residuals.cached, self.gradients, residuals.weights, implementation=implementation)

    @functools.cached_property
    def _by_cores(self) -> tuple[TTResiduals, jax.Array]:
        """The residuals of the cores' lookups, of all rows or of those that are not cached, and their gradients."""
        residuals = self.residuals
        return (residuals if isinstance(residuals, TTResiduals) else residuals.misses), self.gradients

    @functools.cached_property
    def of_cores(self) -> Cores:
        """Gradients of the cores, float32 in the cores' shapes."""
        residuals, gradients = self._by_cores
        implementation = self.context.options.implementation
        # Cores are small and read by all devices: their gradients are summed whole, by one all-reduce a core.
        own = tt_core_gradients(self.cores, self.shape, residuals, gradients, implementation=implementation)
        return self.context.summed(own)

    @property
    def made(self) -> bool:
        """Whether ``of_cores`` are there already, for their norm."""
        return "of_cores" in vars(self)

    @functools.cached_property
    def _picks(self) -> GatherMap:
        """The cached rows that the device read, and where their gradients are; no more of them than the cache has."""
        assert isinstance(self.residuals, TTCachedResiduals)
        assert self.cache is not None
        # Room for unique rows may be more than the cache has rows; those behind are padding.
        rows = self.residuals.cached.rows[: self.cache.ids.shape[0]]
        return GatherMap(rows=rows, at=jnp.arange(rows.shape[0], dtype=jnp.int32))

    @functools.cached_property
    def of_cached(self) -> SharedGradients:
        """Gradients of the cached rows, on a mesh."""
        assert self.cache is not None
        return shared_gradients(
            self.cache.rows,
            self._picks,
            self._of_unique,
            reduce=self.context.together.reduce,
            options=self._of_rows(self.context.options),
        )

    @staticmethod
    def _of_rows(options: StepOptions) -> StepOptions:
        """The options of the cached rows' step, which are float32 and never rounded."""
        return dataclasses.replace(options, rounding_key=None)

    def squares(self) -> jax.Array:
        """The sum of squares of all gradients, () float32; on a mesh, the device's share (``Update``)."""
        total = functools.reduce(jnp.add, [jnp.sum(jnp.square(gradient)) for gradient in self.of_cores])
        communication, options = self.context.communication, self.context.options
        if self.cache is not None and communication is None:
            total += jnp.sum(jnp.square(take(self._of_unique, self._picks.at, 0)))
        elif self.cache is not None:
            total += self.of_cached.squares(self.cache.rows, options)
        return total if communication is None else communication.once(total)

    def step_cores(self, slots: tuple[Slots, ...], options: StepOptions) -> tuple[Cores, tuple[Slots, ...]]:
        """``tt_apply_gradients`` with the core gradients, and the slices touched, of all devices; ``slots`` by core."""
        optimizer = self.context.cores or self.context.row_optimizer
        index = self._by_cores[0].index
        keys, total = core_keys(options.rounding_key, self.cores), self.of_cores
        new_cores, new_slots = [], []
        for k, (core, of_core) in enumerate(zip(self.cores, slots, strict=True)):
            touched = touched_slices(index, k, self.shape.row_factors[k])
            new_core, new_slot = step_core(
                optimizer,
                core,
                of_core,
                total[k],
                # A slice that any device touched is stepped on all, or their copies would drift apart.
                self.context.summed(touched.astype(jnp.int32)) > 0,
                step=jnp.asarray(options.step, jnp.int32),
                gradient_scale=jnp.asarray(options.gradient_scale, jnp.float32),
                rounding_key=keys[k],
                implementation=options.implementation,
            )
            new_cores.append(new_core)
            new_slots.append(new_slot)
        return tuple(new_cores), tuple(new_slots)

    def step_cached(self, options: StepOptions) -> TTCache:
        """The cached rows after the step of ``tt_cached_apply_gradients``."""
        cache, optimizer, options = self.cache, self.context.row_optimizer, self._of_rows(options)
        assert cache is not None
        if self.context.communication is None:
            rows, slots = row_update(
                optimizer,
                cache.rows,
                cache.slots,
                self._picks.rows,
                take(self._of_unique, self._picks.at, 0),
                step=options.step,
                gradient_scale=options.gradient_scale,
                implementation=options.implementation,
            )
        else:
            rows, slots = self.of_cached.step(optimizer, cache.rows, cache.slots, options)
        return dataclasses.replace(cache, rows=rows, slots=slots)


def cast_of_all(cast: Cast, rows: int, context: Context) -> Cast:
    """The rows that all devices looked up, and how often: the parts of a cast that ``tt_cache_step`` reads.

    Devices exchange their sorted lookups, or their unique rows with counts, whichever is less.

    Args:
      cast: The cast of the device's own lookups.
      rows: The table's rows.
      context: The step.

    Returns:
      A cast equal on all devices, with the rows and the segment lengths of the whole batch's cast.
    """
    size, lookups = cast.rows.shape[0], cast.positions.shape[0]
    gathered, options = context.together.gathered, context.options
    if lookups <= 2 * size:
        # A number a lookup, or two a unique row (the row and its count): whatever is less travels.
        ids = take(cast.rows, segment_of_entries(cast.offsets, lookups), rows)
        return cast_rows(gathered(ids), num_rows=rows, options=options)
    counts = gathered(lookups_of_rows(cast))
    every = cast_rows(gathered(cast.rows), num_rows=rows, options=options)
    segments = segment_of_entries(every.offsets, every.positions.shape[0])
    times = jnp.zeros_like(every.rows).at[segments].add(counts[every.positions], mode="drop")
    # Offsets as if each lookup had travelled: only lengths of segments are read of them, never what lies there.
    ends = jnp.cumsum(times, dtype=jnp.int32)
    return dataclasses.replace(every, offsets=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]))
