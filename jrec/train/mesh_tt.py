"""The step of tensor-train tables on a mesh, for ``shard_map``: equal cores and equal caches on all devices.

Every device looks up its own part of the batch. Core gradients and the slices touched are summed over the devices.
Cached rows are rows that every device holds: their gradients take OPER's sparse all-reduce and one step with their
slots. Which rows are cached depends on the lookups of all devices together, which all of them learn: each takes the
decisions of one device that saw the whole batch, and every copy keeps the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrec.mesh.allreduce import Reduce, update_shared
from jrec.mesh.route import AXIS, Picks
from jrec.mesh.step import StepOptions, cast_rows
from jrec.nn.tt_stack import TTStack, TTStackResiduals, named_slots, slots_by_core
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.tt import TTResiduals, tt_core_gradients
from jrec.ops.tt.cache_tracker import lookups_of_rows, take
from jrec.ops.tt.cached_lookup import cached_places
from jrec.ops.tt.core_update import core_keys, step_core, touched_slices
from jrec.ops.types import Cast
from jrec.train.mesh_dense import Computes, summed


def step_tt(
    stack: TTStack,
    optimizer: RowOptimizer,
    slots: Slots,
    residuals: TTStackResiduals,
    gradients: jax.Array,
    *,
    cores: RowOptimizer | None = None,
    step: jax.Array,
    rounding_key: jax.Array | None = None,
    reduce: Reduce = "local",
    computes: Computes = None,
) -> Slots:
    """``TTStack.apply_gradients``, in place on the stack, with the gradients and lookups of all devices.

    Args:
      stack: equal on all devices.
      optimizer: of cached rows.
      slots: of the stack.
      residuals: of the device's own lookups.
      gradients: (num_bags, dim) float32 of the device's own bags, of its part of the whole batch's loss.
      cores: to which a slice of a core is a row; None for ``optimizer``.
      step: () int32, how many steps were taken before.
      rounding_key: (2,) uint32 of this step, or None.
      reduce: how gradients of cached rows are summed; see ``update_shared``.
      computes: which devices have examples; the cores and caches of the others stay behind (``jrec.train.mesh_dense``).

    Returns:
      The new slots, equal to the bit on all devices.
    """
    how: dict[str, Any] = {"step": step, "rounding_key": rounding_key, "computes": computes}
    of_slices = cores or optimizer
    if isinstance(residuals, TTResiduals):
        return _step_cores(stack, of_slices, slots, residuals, gradients, **how)
    options, cache = StepOptions(step=step, implementation=stack.implementation), stack.cache(slots)
    of_rows = casted_gather_reduce(residuals.cast, gradients, residuals.weights, implementation=stack.implementation)
    of_cores = _step_cores(stack, of_slices, slots, residuals.misses, take(of_rows, residuals.missed, 0), **how)
    places, hits = cached_places(residuals, cache)
    rows, row_slots = update_shared(
        optimizer,
        cache.rows,
        cache.slots,
        Picks(rows=places, at=hits),
        of_rows,
        reduce=reduce,
        options=options,
    )
    cache = dataclasses.replace(cache, rows=rows, slots=row_slots)
    counted = jax.lax.psum({"hits": residuals.hits, "lookups": residuals.lookups}, AXIS)

    def of_all() -> Cast:
        return cast_of_all(residuals.cast, stack.shape.rows, options)

    return of_cores | stack.end_step(optimizer, slots, cache, of_all, counted, step=step)


def cast_of_all(cast: Cast, rows: int, options: StepOptions) -> Cast:
    """The rows that all devices looked up, and how often: what ``tt_cache_step`` reads of a cast.

    Devices tell each other their sorted lookups, or their unique rows with counts, whichever is less.

    Args:
      cast: of the device's own lookups.
      rows: of the table.
      options: of the step.

    Returns:
      A cast equal on all devices, whose segments are as long as those of the whole batch's.
    """
    size, lookups = cast.rows.shape[0], cast.positions.shape[0]
    if lookups <= 2 * size:
        ids = take(cast.rows, segment_of_entries(cast.offsets, lookups), rows)
        return cast_rows(_gathered(ids), num_rows=rows, options=options)
    counts = _gathered(lookups_of_rows(cast))
    found = cast_rows(_gathered(cast.rows), num_rows=rows, options=options)
    segments = segment_of_entries(found.offsets, found.positions.shape[0])
    times = jnp.zeros_like(found.rows).at[segments].add(counts[found.positions], mode="drop")
    ends = jnp.cumsum(times, dtype=jnp.int32)
    return dataclasses.replace(found, offsets=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]))


def _step_cores(
    stack: TTStack,
    optimizer: RowOptimizer,
    slots: Slots,
    residuals: TTResiduals,
    gradients: jax.Array,
    *,
    step: jax.Array,
    rounding_key: jax.Array | None,
    computes: Computes,
) -> Slots:
    """``tt_apply_gradients``, in place, with core gradients, and the slices touched, of all that compute together."""
    cores = stack.arrays()
    keys = core_keys(stack.rounding_key(rounding_key), cores)
    found = tt_core_gradients(cores, stack.shape, residuals, gradients, implementation=stack.implementation)
    total = summed(found, computes)
    new_cores, new_slots = [], []
    for k, (core, of_core) in enumerate(zip(cores, slots_by_core(slots, len(cores)), strict=True)):
        touched = touched_slices(residuals.index, k, stack.shape.row_factors[k])
        core, of_core = step_core(
            optimizer,
            core,
            of_core,
            total[k],
            summed(touched.astype(jnp.int32), computes) > 0,
            step=step,
            gradient_scale=jnp.float32(1),
            rounding_key=keys[k],
            implementation=stack.implementation,
        )
        new_cores.append(core)
        new_slots.append(of_core)
    stack.set_arrays(tuple(new_cores))
    return named_slots(tuple(new_slots))


def _gathered(values: jax.Array) -> jax.Array:
    return jax.lax.all_gather(values, AXIS, tiled=True)
