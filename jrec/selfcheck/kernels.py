"""The ops as the check calls them: one function a kernel, with the implementation by name.

A check of other kernels, such as broken ones in tests, names another module with these functions.
"""

from __future__ import annotations

from typing import Any

import jax

from jrec import ops
from jrec.ops.dispatch import Implementation
from jrec.ops.row_optimizers import Slots
from jrec.ops.tt.plan import Level
from jrec.ops.tt.products import expand, expand_transpose


def gather_reduce(
    implementation: Implementation,
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """See ``jrec.ops.gather_reduce``."""
    return ops.gather_reduce(source, indices, offsets, weights=weights, implementation=implementation)


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
