"""What a step by jrec's kernels launches and holds on one H200, many tables together; run with -s for the figures."""

import functools
import itertools
import math
import sys

import aot
import hlo
import jax
import jax.numpy as jnp
import pytest
import thunks
from grids import some_of

from benchmarks import ahead_of_time, workloads
from benchmarks.dispatched import dispatched, workload_of
from jrec import ops

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


WIDTHS = ((16, "float32"), (64, "float32"), (128, "float32"), (128, "bfloat16"))
ELEMENTWISE = ops.Adagrad(learning_rate=0.1)


@pytest.mark.parametrize(
    ("optimizer", "width"),
    some_of(
        itertools.product((OPTIMIZER, ELEMENTWISE), WIDTHS),
        *((OPTIMIZER, WIDTHS[k]) for k in (0, 3)),
        *((ELEMENTWISE, WIDTHS[k]) for k in (1, 2)),
    ),
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else type(v).__name__,
)
def test_long_segments_cost_short_ones_no_warps(width, optimizer):
    """They share a launch: four blocks of 128 threads, 16 warps, fit the 65,536 registers of a multiprocessor."""

    dim, dtype = width

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


# The most launches of a step, and of those jrec's: one forward, or with bags of several lengths in a stack short
# segments, two levels of pieces and long ones; two or three of the cast; three or four of the update.
@pytest.mark.parametrize(
    ("model", "dtype", "launched", "ours"),
    # RM1's bags of 80 ids are pooled as DLRM-DCNv2's of 100 are.
    some_of(
        [("kaggle", "float32", 73, 6), ("rm1", "float32", 66, 7), ("dcnv2", "bfloat16", 141, 11)],
        ("kaggle", "float32", 73, 6),
        ("dcnv2", "bfloat16", 141, 11),
    ),
)
def test_steps_as_they_are_dispatched(model, dtype, launched, ours):
    """16 steps in a scan: each is one CUDA graph, changes tables and slots in place, and makes nothing twice."""
    workload = workload_of(model)
    program = dispatched(workload, dtype=dtype, mesh=aot.mesh(1))
    compiled = aot.check_kernels(model, ahead_of_time.program_of(program.lower(), thunks=True))
    text, memory = compiled.executable.as_text(), compiled.executable.memory_analysis()
    (loop,) = hlo.launches(text).loops
    kernels = sum(kernel.launches for kernel in compiled.kernels)
    sys.stdout.write(
        f"\n{model}, {dtype}, batch {workload.batch:,}: {loop.once}, {kernels} of them jrec's; temporaries"
        f" {memory.temp_size_in_bytes / 1e6:.1f} MB\n"
    )
    assert (loop.trips, loop.once.loops) == (program.batch.steps, ())
    assert loop.once.total <= launched
    assert kernels <= ours
    _check_one_graph(compiled)
    assert ".remat" not in text, "XLA computes something twice to save memory"
    assert set(hlo.copies(text)) <= {
        "s32[]",
        "f32[2,8192]{1,0}",
    }  # once a dispatch: its count, and what metrics begin at
    stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.state))
    assert memory.alias_size_in_bytes >= 0.999 * stored
    coalesced = workload.lookups * workload.dim * 4
    # Three cross layers keep their inputs, outputs and gradients, each as wide as the top MLP's input.
    interactions = 3 * workload.cross_layers * workload.batch * workloads.interaction_width(workload) * 4
    assert memory.temp_size_in_bytes <= coalesced / 8 + 64 * workload.lookups + 2**26 + interactions


def _check_one_graph(compiled):
    """A loop's step is one command buffer that holds every custom call; beside it only what begins the dispatch."""
    program = thunks.parse(compiled.thunks)
    (loop,) = [thunk for thunk in program.inside if thunk.kind == "kWhile"]
    assert [thunk.kind for thunk in loop.part("body")] == [thunks.COMMAND_BUFFER]
    (graph,) = loop.part("body")
    inside = [thunk.kind for thunk in graph.every()]
    assert inside.count("kCustomCall") == sum(kernel.launches for kernel in compiled.kernels)
    outside = {thunk.kind for thunk in program.every(within=thunks.COMMAND_BUFFER)}
    assert outside == {"program", "kCopy", "kCustomKernel", "kWhile", "condition", "body", thunks.COMMAND_BUFFER}
