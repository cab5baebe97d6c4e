"""Every kernel compiles for an H200, over dims, dtypes, combiners and optimizers; its code and memory are checked."""

import functools
import itertools
import re

import aot
import jax
import jax.numpy as jnp
import pytest
import reference
from grids import in_turn, some_of

from jrec import ops
from jrec.ops.types import Cast
from jrec.row_optimizers import ROW_OPTIMIZERS

pytestmark = [pytest.mark.aot, aot.needs_environment()]

ROWS, BAGS, LOOKUPS = 40_000_000, 4096, 81_920  # rows times 128 elements pass 2**31, and every size passes 2**32 bytes
DIMS = (4, 8, 16, 20, 64, 100, 128, 256, 1024)
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = tuple(ROW_OPTIMIZERS.values())


def _offsets(segments):
    return aot.shape((segments + 1,), jnp.int32)


# Every dim once, and every dtype where rows are narrow, of a load's width, and of several.
SOME_GATHERS = [*in_turn(DIMS, DTYPES), (4, "bfloat16"), (64, "float32"), (1024, "bfloat16")]


@pytest.mark.parametrize(("dim", "dtype"), some_of(itertools.product(DIMS, DTYPES), *SOME_GATHERS))
def test_gather_reduce(dim, dtype):
    table = aot.shape((ROWS if dim <= 128 else ROWS // 20, dim), dtype)
    weights = aot.shape((LOOKUPS,))
    forms = (
        ("one-hot", aot.shape((BAGS, 1), jnp.int32), None, None),
        ("ragged sum", aot.shape((LOOKUPS,), jnp.int32), _offsets(BAGS), None),
        ("ragged mean", aot.shape((LOOKUPS,), jnp.int32), _offsets(BAGS), weights),
    )
    run = functools.partial(ops.gather_reduce, implementation="pallas")
    for name, ids, offsets, weights in forms:
        compiled, modules = aot.compile_checked(
            f"gather_reduce {name} {dim} {dtype}",
            lambda t, i, o, w: run(t, i, o, weights=w),
            table,
            ids,
            offsets,
            weights,
        )
        # One piece for each 32 lookups, one more for each 32 of them, and a few numbers for each.
        assert compiled.memory_analysis().temp_size_in_bytes <= LOOKUPS // 31 * (dim * 4 + 64) + 4096
        itemsize = jnp.dtype(dtype).itemsize
        access = min(16, (dim * itemsize) & -(dim * itemsize))
        assert _widest_load(next(iter(modules.values()))) == access or name != "one-hot"


def _widest_load(ptx):
    loads = re.findall(r"ld\.global(?:\.v(\d))?\.[bfus](\d+)", ptx)
    return max(int(n or 1) * int(bits) // 8 for n, bits in loads)


@pytest.mark.parametrize("dim", [20, 64, 128])
def test_row_addresses_have_64_bits(dim):
    """A row's byte offset is a widening product: 32 bits would wrap from row 2**32 / (4 * dim) on."""
    ids, table = aot.shape((BAGS, 1), jnp.int32), aot.shape((ROWS, dim))
    run = functools.partial(ops.gather_reduce, implementation="pallas")
    modules = aot.compile_checked(f"addresses {dim}", run, table, ids)[1]
    (module,) = modules.values()
    products = re.findall(rf"mul\.wide\.[su]32 \s*(%rd\d+), %r\d+, {dim * 4};", module)
    assert products
    assert not re.findall(rf"mul\.lo\.[sub]32 \s*%r\d+, %r\d+, {dim * 4};", module)
    assert not re.findall(r"ld\.global\S* \s*[^\[]*\[%r\d", module)


def _cast(unique, lookups):
    i32 = functools.partial(aot.shape, dtype=jnp.int32)
    return Cast(
        rows=i32((unique,)), offsets=i32((unique + 1,)), sources=i32((lookups,)), positions=i32((lookups,)),
        num_unique=i32(()),
    )  # fmt: skip


def _slots(optimizer, rows, dim):
    return {n: aot.shape((rows, dim) if s == "element" else (rows,)) for n, s in optimizer.slots.items()}


VARIANTS = [
    *itertools.product(OPTIMIZERS, (16, 64, 128), ("float32",)),
    *itertools.product(OPTIMIZERS, (64,), ("bfloat16", "float16")),
    *itertools.product((ops.RowWiseAdagrad, ops.Adam), (4, 20, 1024), ("float32", "bfloat16")),
]
# Every optimizer once, at dims and dtypes in turn, where ExactAdam takes the most registers; two of them at all dims.
TURNS = ((64, "bfloat16"), (128, "float32"), (16, "float32"), (64, "float16"), (64, "float32"))
SOME_UPDATES = [
    *((kind, *turn) for kind, turn in in_turn(OPTIMIZERS, TURNS)),
    *((ops.RowWiseAdagrad, *turn) for turn in ((4, "bfloat16"), (20, "float32"), (128, "float32"), (1024, "bfloat16"))),
    *((ops.Adam, *turn) for turn in ((4, "float32"), (20, "bfloat16"), (1024, "float32"))),
]


@pytest.mark.parametrize(
    ("kind", "dim", "dtype"), some_of(VARIANTS, *SOME_UPDATES), ids=lambda v: getattr(v, "__name__", str(v))
)
def test_updates_are_in_place(kind, dim, dtype):
    rows = ROWS if dim <= 64 else ROWS // 10
    optimizer = reference.made(kind, learning_rate=0.1, weight_decay=1e-5, max_row_norm=1.0)
    table, slots = aot.shape((rows, dim), dtype), _slots(optimizer, rows, dim)
    stochastic = dtype != "float32"

    def fused(table, slots, cast, gradients, key, numbers):
        rounds = {"rounding_key": key, "rounding_rows": numbers} if stochastic else {}
        return ops.casted_update(optimizer, table, slots, cast, gradients, implementation="pallas", **rounds)

    def plain(table, slots, rows, gradients):
        return ops.row_update(optimizer, table, slots, rows, gradients, implementation="pallas")

    key = aot.shape((2,), jnp.uint32)
    numbers, of_rows = aot.shape((LOOKUPS,), jnp.int32), aot.shape((LOOKUPS, dim))
    for name, function, arguments in (
        ("casted_update", fused, (table, slots, _cast(LOOKUPS, LOOKUPS), aot.shape((BAGS, dim)), key, numbers)),
        ("row_update", plain, (table, slots, numbers, of_rows)),
    ):
        compiled, modules = aot.compile_checked(
            f"{name} {kind.__name__} {dim} {dtype}", function, *arguments, donate_argnums=(0, 1), keep_unused=True
        )
        assert modules
        memory = compiled.memory_analysis()
        stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((table, slots)))
        assert memory.alias_size_in_bytes == stored
        # The coalesced gradient, (LOOKUPS, dim) float32, is not among the temporaries.
        assert memory.temp_size_in_bytes <= LOOKUPS // 31 * (dim * 4 + 64) + 4096


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_training_step_holds_nothing_of_a_tables_size(implementation):
    optimizer, rows, dim = ops.RowWiseAdagrad(learning_rate=0.1), ROWS // 4, 64
    tables, slots = {"t": aot.shape((rows, dim))}, {"t": _slots(optimizer, rows, dim)}
    bags = {"t": ops.Bags(ids=aot.shape((BAGS, 20), jnp.int32))}

    def step(tables, slots, bags, number):
        activations, residuals = ops.lookup(tables, bags, implementation=implementation)
        gradients = jax.grad(lambda a: jnp.sum(jnp.square(a["t"])))(activations)
        return ops.apply_gradients(
            optimizer, tables, slots, residuals, gradients, step=number, implementation=implementation
        )

    arguments = tables, slots, bags, aot.shape((), jnp.int32)
    compiled, _ = aot.compile_checked(f"step {implementation}", step, *arguments, donate_argnums=(0, 1))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == rows * dim * 4 + rows * 4
    assert memory.temp_size_in_bytes < 4 * LOOKUPS * dim * 4 < rows * dim * 4 / 10


def test_a_step_in_a_shard_map_over_8_gpus():
    """Row-sharded tables, each GPU on its own rows: in place, nothing of a table's size, and no collective."""
    mesh, spec = aot.mesh(8), jax.sharding.PartitionSpec("d")
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1)
    rows, dim = 1_000_000, 64

    def step(table, total, ids):
        activations, residuals = ops.lookup({"t": table}, {"t": ops.Bags(ids=ids)}, implementation="pallas")
        tables, slots = ops.apply_gradients(
            optimizer, {"t": table}, {"t": {"sum": total}}, residuals, activations, implementation="pallas"
        )
        return tables["t"], slots["t"]["sum"]

    def sharded(dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = sharded((8 * rows, dim)), sharded((8 * rows,)), sharded((8 * BAGS, 2), jnp.int32)
    compiled, _ = aot.compile_checked("step in shard_map", mapped, *arguments, donate_argnums=(0, 1))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == rows * dim * 4 + rows * 4
    assert memory.temp_size_in_bytes < 4 * BAGS * dim * 4
    assert not re.findall(r"all-(?:reduce|gather|to-all)|collective-permute", compiled.as_text())
