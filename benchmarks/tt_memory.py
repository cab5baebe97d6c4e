"""Memory of a step of a tensor-train table over rows and batch (TT-Rec, Figure 8).

A step's memory is what XLA's compiler says the compiled program holds: arguments (cores, slots, ids, targets), results
that are not in their place, and temporaries. Nothing is allocated to find it out, so rows may be as many as one likes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.tt_side import FUSED, KAGGLE_ROWS, PLAIN, describe, shape_of, train, train_plain
from jrec.ops import tt

DIM, RANK = 16, 32
ROWS = (1_000_000, 2_500_000, KAGGLE_ROWS, 40_000_000)
BATCHES = (4096, 16384, 65536)


def run(report: harness.Report) -> None:
    """Reports it."""
    over_rows = [(rows, BATCHES[0]) for rows in (ROWS[:1] if report.quick else ROWS)]
    over_batches = [] if report.quick else [(KAGGLE_ROWS, batch) for batch in BATCHES[1:]]
    for rows, batch in over_rows + over_batches:
        shape = shape_of(rows, DIM, RANK)
        case = describe(shape, batch)
        sizes = {"tensor train": tt_step_bytes(shape, batch), "uncompressed table": plain_step_bytes(shape, batch)}
        for name, size in sizes.items():
            report.add(case, f"memory of a step, {name}", size / 1e6, "MB")


def tt_step_bytes(shape: tt.TTShape, batch: int) -> int:
    """Of a step of forward, backward and fused update."""
    cores = tuple(jax.ShapeDtypeStruct(core, jnp.float32) for core in shape.core_shapes)
    slots = jax.eval_shape(functools.partial(tt.tt_init_slots, FUSED), cores)
    return _bytes(functools.partial(train, shape), cores, slots, *_batch(shape, batch))


def plain_step_bytes(shape: tt.TTShape, batch: int) -> int:
    """The same of the uncompressed table with row-wise Adagrad."""
    table = jax.ShapeDtypeStruct((shape.rows, shape.dim), jnp.float32)
    return _bytes(train_plain, table, jax.eval_shape(PLAIN.init, table), *_batch(shape, batch))


def _batch(shape: tt.TTShape, batch: int) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((batch, shape.dim), jnp.float32)


def _bytes(step: Any, *arguments: Any) -> int:
    analysis: Any = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes
