"""The ops as the check calls them: one function a kernel, with the implementation by name.

A check of other kernels, such as broken ones in tests, names another module with these functions.
"""

from __future__ import annotations

from typing import Any

import jax

from jrec import ops
from jrec.ops.dispatch import Implementation
from jrec.ops.gather_reduce import gather_reduce_call, gather_reduce_together
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_update_call, casted_update_together
from jrec.ops.tt.index import Level
from jrec.ops.tt.products import expand, expand_transpose

BESIDE = ops.SGD(learning_rate=0.1)  # the step of the table beside one that is checked


def gather_reduce(
    implementation: Implementation,
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """See ``jrec.ops.gather_reduce``."""
    return ops.gather_reduce(source, indices, offsets, weights=weights, implementation=implementation)


def gather_reduce_beside(
    implementation: Implementation,
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    *,
    dim: int,
) -> tuple[jax.Array, jax.Array]:
    """The sums of ``source``, and of its first ``dim`` columns in float32 by the launches of the same kernels."""
    beside = source[:, :dim].astype("float32")
    calls = [gather_reduce_call(table, indices, offsets, weights=weights) for table in (source, beside)]
    sums, sums_beside = gather_reduce_together(calls, implementation)
    return sums, sums_beside


def casted_update(
    implementation: Implementation,
    optimizer: ops.RowOptimizer,
    table: jax.Array,
    slots: Slots,
    cast: ops.Cast,
    gradients: jax.Array,
    weights: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, Slots]:
    """See ``jrec.ops.casted_update``."""
    return ops.casted_update(
        optimizer, table, slots, cast, gradients, weights=weights, **options, implementation=implementation
    )


def casted_update_beside(
    implementation: Implementation,
    optimizer: ops.RowOptimizer,
    table: jax.Array,
    slots: Slots,
    beside: jax.Array,
    cast: ops.Cast,
    gradients: jax.Array,
    weights: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, Slots, jax.Array]:
    """An update of ``table``, and one by plain SGD of ``beside``, of fewer columns, by launches of the same kernels."""
    of_beside = gradients[:, : beside.shape[1]]
    calls = [
        casted_update_call(optimizer, table, slots, cast, gradients, weights=weights, **options),
        casted_update_call(BESIDE, beside, {}, cast, of_beside, weights=weights),
    ]
    (table, slots), (beside, _) = casted_update_together(calls, implementation)
    return table, slots, beside


def row_update(
    implementation: Implementation,
    optimizer: ops.RowOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Slots]:
    """See ``jrec.ops.row_update``."""
    return ops.row_update(optimizer, table, slots, rows, gradients, **options, implementation=implementation)


def tensor_cast(
    implementation: Implementation, ids: jax.Array, offsets: jax.Array | None, num_rows: int, unique_capacity: int
) -> ops.Cast:
    """See ``jrec.ops.tensor_cast``."""
    return ops.tensor_cast(
        ids, offsets, num_rows=num_rows, unique_capacity=unique_capacity, implementation=implementation
    )


def tt_products(
    implementation: Implementation, below: jax.Array, core: jax.Array, level: Level, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A tensor-train level's products, and the gradients of what it multiplies; see ``jrec.ops.tt.products``."""
    out = expand(below, core, level, method="grouped", implementation=implementation)
    count = jax.numpy.asarray(below.shape[0], jax.numpy.int32)
    of_below, of_core = expand_transpose(
        gradient, below, core, level, below_count=count, method="grouped", implementation=implementation
    )
    return out, of_below, of_core
