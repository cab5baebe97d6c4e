"""What a step by jrec's kernels launches and holds on one H200, many tables together; run with -s for the figures."""

import functools
import math
import sys

import aot
import hlo
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks import models, workloads
from jrec import ops
from jrec.nn import DLRM, SparseOptimizer
from jrec.run.step import compile_run

pytestmark = [pytest.mark.aot, aot.needs_environment()]

BAGS, LENGTH, ROWS = 16_384, 20, 800_000
LOOKUPS = BAGS * LENGTH
TABLES = {"a": (16, "float32"), "b": (64, "bfloat16"), "c": (128, "float32")}
OPTIMIZER = ops.RowWiseAdagrad(learning_rate=0.1)
i32 = functools.partial(aot.shape, dtype=jnp.int32)


def _tables():
    return {name: aot.shape((ROWS, dim), dtype) for name, (dim, dtype) in TABLES.items()}


def _slots():
    return {name: {"sum": aot.shape((ROWS,))} for name in TABLES}


def _cast(unique=LOOKUPS):
    return ops.Cast(
        rows=i32((unique,)), offsets=i32((unique + 1,)), sources=i32((LOOKUPS,)), positions=i32((LOOKUPS,)),
        num_unique=i32(()),
    )  # fmt: skip


def _program(name, function, *arguments, **options):
    program = aot.check_program(name, function, *arguments, **options)
    text, memory = program.executable.as_text(), program.executable.memory_analysis()
    assert ".remat" not in text, "XLA computes something twice to save memory"
    kernels = [f"{kernel.name} ({kernel.registers} registers)" for kernel in program.kernels]
    sys.stdout.write(
        f"\n{name}: {hlo.launches(text)}; {', '.join(kernels)}; temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB\n"
    )
    return hlo.launches(text), memory


def test_tables_of_several_dims_are_looked_up_in_one_launch():
    def forward(tables, bags):
        return ops.lookup(tables, bags, implementation="pallas")[0]

    bags = {name: ops.Bags(ids=i32((BAGS, LENGTH)), cast=_cast()) for name in TABLES}
    launches, memory = _program("forward, 3 tables", forward, _tables(), bags)
    assert launches.kinds == {"custom-call": 1}
    assert memory.temp_size_in_bytes <= 1024


def test_tables_of_several_dims_are_updated_in_the_launches_of_one():
    def update(tables, slots, casts, gradients):
        residuals = {name: ops.Residuals(cast=cast) for name, cast in casts.items()}
        return ops.apply_gradients(OPTIMIZER, tables, slots, residuals, gradients, implementation="pallas")

    tables, slots = _tables(), _slots()
    gradients = {name: aot.shape((BAGS, dim)) for name, (dim, _) in TABLES.items()}
    casts = {name: _cast() for name in TABLES}
    launches, memory = _program("update, 3 tables", update, tables, slots, casts, gradients, donate_argnums=(0, 1))
    # Two levels of pieces, then short segments beside long ones.
    assert launches.kinds == {"custom-call": 3}
    assert memory.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((tables, slots)))
    # A piece of float32 for every 32 lookups and for every 1,024, and whom it belongs to.
    pieces = LOOKUPS // 32 * 34 // 32 + 1
    assert memory.temp_size_in_bytes <= sum(pieces * (4 * dim + 8) for dim, _ in TABLES.values()) + 4096


@pytest.mark.parametrize(("dim", "dtype"), [(16, "float32"), (64, "float32"), (128, "float32"), (128, "bfloat16")])
@pytest.mark.parametrize("optimizer", [OPTIMIZER, ops.Adagrad(learning_rate=0.1)], ids=lambda o: type(o).__name__)
def test_long_segments_cost_short_ones_no_warps(dim, dtype, optimizer):
    """They share a launch: four blocks of 128 threads, 16 warps, fit the 65,536 registers of a multiprocessor."""

    def update(table, slots, cast, gradients):
        left = {"a": ops.Residuals(cast=cast)}
        return ops.apply_gradients(
            optimizer, {"a": table}, {"a": slots}, left, {"a": gradients}, implementation="pallas"
        )

    table = aot.shape((ROWS, dim), dtype)
    slots = jax.tree.map(lambda x: aot.shape(x.shape, x.dtype), jax.eval_shape(optimizer.init, table))
    program = aot.check_program(
        f"update, dim {dim}, {dtype}", update, table, slots, _cast(), aot.shape((BAGS, dim)), donate_argnums=(0, 1)
    )
    last = program.kernels[-1]
    sys.stdout.write(f"\n{last.name}, dim {dim}, {dtype}: {last.registers} registers\n")
    assert last.name == "casted_update_long_and_casted_update_short"
    assert last.registers <= 65_536 // (4 * 128)


# The most launches of a whole step, and of those jrec's: one forward, or with bags of several lengths in a stack short
# segments, two levels of pieces and long ones; two or three of the cast; three or four of the update.
@pytest.mark.parametrize(
    ("name", "batch", "launched", "ours"),
    [("kaggle", 2048, 71, 6), ("rm1", 2048, 63, 7), ("mlperf-dcnv2", 6912, 122, 11)],
)
def test_a_whole_step(name, batch, launched, ours):
    """The step as training runs it, its state donated: tables and slots are updated in place, nothing is made twice."""
    workload = workloads.WORKLOADS[name].with_batch(batch)

    def modules():
        config, layout = models.dense_part(workload), models.layout(workload)
        model = DLRM(config, layout, implementation="pallas", rngs=nnx.Rngs(params=0))
        return model, SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=OPTIMIZER)

    state, run = compile_run(*nnx.eval_shape(modules))
    state, example = (
        jax.tree.map(lambda x: aot.shape(x.shape, x.dtype), x) for x in (state, models.batch(workload, seed=0))
    )
    launches, memory = _program(f"{name}, batch {batch:,}", run.step, state, example, donate_argnums=(0,))
    assert not launches.loops
    assert launches.kinds["custom-call"] <= ours
    assert launches.total <= launched
    stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.999 * stored
    coalesced = workload.lookups * workload.dim * 4
    # Three cross layers keep their inputs, outputs and gradients, each as wide as the top MLP's input.
    interactions = 3 * workload.cross_layers * batch * workloads.interaction_width(workload) * 4
    assert memory.temp_size_in_bytes <= coalesced / 8 + 64 * workload.lookups + 2**26 + interactions
