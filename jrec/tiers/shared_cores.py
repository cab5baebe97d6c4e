"""The update of tensor-train cores and their cache that all devices of a mesh hold; inside ``shard_map``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import update_shared
from jrec.mesh.route import Picks
from jrec.mesh.step import StepOptions, cast_rows
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.tt import TTCache, TTCachedResiduals, TTResiduals, TTShape, tt_core_gradients
from jrec.ops.tt.cache_tracker import lookups_of_rows, take
from jrec.ops.tt.cached_lookup import cached_places
from jrec.ops.tt.core_update import core_keys, step_core, touched_slices
from jrec.ops.tt.init import Cores
from jrec.ops.types import Cast
from jrec.tiers.store import Context


def step_cores(
    cores: Cores,
    slots: tuple[Slots, ...],
    shape: TTShape,
    residuals: TTResiduals,
    gradients: jax.Array,
    context: Context,
) -> tuple[Cores, tuple[Slots, ...]]:
    """``tt_apply_gradients`` with core gradients, and the slices touched, of all devices that compute together.

    Args:
      cores: Equal on all devices, as are the slots.
      slots: By core.
      shape: The table's.
      residuals: Of the device's own lookups.
      gradients: (num_bags, dim) float32 of the device's own bags, of its part of the whole batch's loss.
      context: The step. Cores and caches of devices that do not compute stay behind.
    """
    options, optimizer = context.options, context.cores or context.row_optimizer
    keys = core_keys(options.rounding_key, cores)
    found = tt_core_gradients(cores, shape, residuals, gradients, implementation=options.implementation)
    total = context.summed(found)
    new_cores, new_slots = [], []
    for k, (core, of_core) in enumerate(zip(cores, slots, strict=True)):
        touched = touched_slices(residuals.index, k, shape.row_factors[k])
        new_core, new_slot = step_core(
            optimizer,
            core,
            of_core,
            total[k],
            context.summed(touched.astype(jnp.int32)) > 0,
            step=jnp.asarray(options.step, jnp.int32),
            gradient_scale=jnp.float32(1),
            rounding_key=keys[k],
            implementation=options.implementation,
        )
        new_cores.append(new_core)
        new_slots.append(new_slot)
    return tuple(new_cores), tuple(new_slots)


def step_cached(
    cores: Cores,
    slots: tuple[Slots, ...],
    cache: TTCache,
    shape: TTShape,
    residuals: TTCachedResiduals,
    gradients: jax.Array,
    context: Context,
) -> tuple[Cores, tuple[Slots, ...], TTCache]:
    """``tt_cached_apply_gradients`` with the gradients of all devices; arguments as of ``step_cores``."""
    implementation = context.options.implementation
    options = StepOptions(step=context.options.step, implementation=implementation)  # cached rows are float32
    of_rows = casted_gather_reduce(residuals.cast, gradients, residuals.weights, implementation=implementation)
    cores, slots = step_cores(cores, slots, shape, residuals.misses, take(of_rows, residuals.missed, 0), context)
    places, hits = cached_places(residuals, cache)
    communication = context.together
    rows, row_slots = update_shared(
        context.row_optimizer,
        cache.rows,
        cache.slots,
        Picks(rows=places, at=hits),
        of_rows,
        axis=communication.axis,
        reduce=communication.reduce,
        options=options,
    )
    return cores, slots, dataclasses.replace(cache, rows=rows, slots=row_slots)


def cast_of_all(cast: Cast, rows: int, context: Context) -> Cast:
    """The rows that all devices looked up, and how often: what ``tt_cache_step`` reads of a cast.

    Devices tell each other their sorted lookups, or their unique rows with counts, whichever is less.

    Args:
      cast: Of the device's own lookups.
      rows: Of the table.
      context: The step.

    Returns:
      A cast equal on all devices, whose segments are as long as those of the whole batch's.
    """
    size, lookups = cast.rows.shape[0], cast.positions.shape[0]
    gathered, options = context.together.gathered, context.options
    if lookups <= 2 * size:
        ids = take(cast.rows, segment_of_entries(cast.offsets, lookups), rows)
        return cast_rows(gathered(ids), num_rows=rows, options=options)
    counts = gathered(lookups_of_rows(cast))
    found = cast_rows(gathered(cast.rows), num_rows=rows, options=options)
    segments = segment_of_entries(found.offsets, found.positions.shape[0])
    times = jnp.zeros_like(found.rows).at[segments].add(counts[found.positions], mode="drop")
    ends = jnp.cumsum(times, dtype=jnp.int32)
    return dataclasses.replace(found, offsets=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]))


def summed(tree: Any, context: Context) -> Any:
    """Sums over all devices, those that do not compute among them."""
    return jax.lax.psum(tree, context.together.axis)
