"""What XLA's own path launches, holds and adds up on one H200; run with -s for the figures."""

import functools
import os
import pathlib
import subprocess
import sys

import aot
import hlo
import jax
import jax.numpy as jnp
import pytest
import xla_ptx
from grids import some_of

from benchmarks import mlperf, workloads
from benchmarks.dispatched import dispatched, workload_of
from jrec import ops
from jrec.ops.types import Cast

pytestmark = [pytest.mark.aot, aot.needs_environment()]

BAGS, LENGTH, DIM, ROWS = 16_384, 20, 64, 800_000
LOOKUPS = UNIQUE = BAGS * LENGTH
ROW_BYTES = 4 * DIM
COALESCED = UNIQUE * ROW_BYTES  # bytes of one (unique capacity, dim) float32 array
OPTIMIZERS = (ops.SGD, ops.Momentum, ops.Adagrad, ops.RowWiseAdagrad, ops.RMSProp, ops.Adam)

i32 = functools.partial(aot.shape, dtype=jnp.int32)
_table = functools.partial(aot.shape, (ROWS, DIM))


def _compile(name, function, *arguments, **options):
    """The optimized HLO, temporaries in bytes, and the PTX of XLA's kernels, in which no float is added atomically."""
    with xla_ptx.captured() as (compiler, kernels):
        compiled = aot.compile_for_h200(function, *arguments, compiler_options=compiler, **options)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    _report(f"{name}: {hlo.launches(text)}", memory)
    assert _atomics(kernels) == {}
    return text, memory


def _report(what, memory):
    sys.stdout.write(f"\n{what}; temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB\n")


def _atomics(kernels):
    found = {name: xla_ptx.float_atomics(ptx) + xla_ptx.compare_and_swap(ptx) for name, ptx in kernels.items()}
    return {name: atomics for name, atomics in found.items() if atomics}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("length", "dim", "dtype"), [(1, 16, "float32"), (20, 64, "float32"), (31, 128, "bfloat16")])
def test_padded_bags_are_one_kernel_of_gathers_and_one_of_masks(length, dim, dtype, weighted):
    weights = aot.shape((BAGS, length)) if weighted else None
    text, memory = _compile(
        f"forward, {length} ids x {dim} {dtype}{', weighted' if weighted else ''}",
        lambda t, i, w: ops.gather_reduce(t, i, weights=w),
        aot.shape((ROWS, dim), dtype), i32((BAGS, length)), weights,
    )  # fmt: skip
    assert hlo.launches(text).kinds == {"fusion": 1 if length == 1 else 2}
    assert memory.temp_size_in_bytes <= 2 * BAGS * length + 256  # a mask of ids that are skipped, one of bad ids


def test_long_bags_are_two_kernels_for_every_31_ids():
    text, memory = _compile("forward, 80 ids", ops.gather_reduce, _table(), i32((BAGS, 80)))
    assert not hlo.launches(text).loops
    assert hlo.launches(text).total <= 6
    assert memory.temp_size_in_bytes <= 2 * BAGS * ROW_BYTES


def test_ragged_bags_hold_only_pieces():
    text, memory = _compile("forward, ragged", ops.gather_reduce, _table(), i32((LOOKUPS,)), i32((BAGS + 1,)))
    assert not hlo.launches(text).loops
    assert not hlo.arrays(text, "f32", LOOKUPS * DIM)
    assert memory.temp_size_in_bytes <= LOOKUPS / 4 * ROW_BYTES


def _cast():
    return Cast(
        rows=i32((UNIQUE,)), offsets=i32((UNIQUE + 1,)), sources=i32((LOOKUPS,)), positions=i32((LOOKUPS,)),
        num_unique=i32(()),
    )  # fmt: skip


def _slots(optimizer):
    return {n: aot.shape((ROWS, DIM) if s == "element" else (ROWS,)) for n, s in optimizer.slots.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_holds_one_array_of_gradients_at_most(kind):
    optimizer = kind(learning_rate=0.1)
    table, slots = _table(), _slots(optimizer)
    text, memory = _compile(
        f"update, {kind.__name__}",
        lambda t, s, c, g: ops.casted_update(optimizer, t, s, c, g),
        table, slots, _cast(), aot.shape((BAGS, DIM)), donate_argnums=(0, 1),
    )  # fmt: skip
    _check_update(text, memory, table, slots)
    # Where a step reads the summed gradient once, no array holds it: it is summed within the scatter.
    assert len(hlo.arrays(text, "f32", UNIQUE * DIM)) <= (kind not in (ops.SGD, ops.Momentum))


def _check_update(text, memory, table, slots):
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((table, slots)))
    assert memory.alias_size_in_bytes == stored
    assert not hlo.launches(text).loops
    # Beside it: sums of runs of 8 lookups, twice, and about 30 numbers for every lookup.
    assert memory.temp_size_in_bytes <= COALESCED * 1.5


def test_cast_and_update():
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1)
    table, slots = _table(), _slots(optimizer)

    def run(table, slots, ids, gradients):
        cast = ops.tensor_cast(ids, num_rows=ROWS)
        return ops.casted_update(optimizer, table, slots, cast, gradients)

    gradients = aot.shape((BAGS, DIM))
    text, memory = _compile("cast and update", run, table, slots, i32((BAGS, LENGTH)), gradients, donate_argnums=(0, 1))
    _check_update(text, memory, table, slots)
    assert len(hlo.arrays(text, "f32", UNIQUE * DIM)) == 1


@pytest.mark.parametrize("model", some_of(["kaggle", "rm1"], "rm1"))  # Kaggle's on 8 GPUs: test_aot_mesh
def test_steps_as_they_are_dispatched(model):
    """No atomic additions of floats but of the AUC's counts, whose sums are exact, and no array of a table's size."""
    workload = workload_of(model)
    program = dispatched(workload, mesh=aot.mesh(1), implementation="xla")
    with xla_ptx.captured() as (compiler, kernels):
        compiled = program.lower().compile(compiler_options=compiler)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    coalesced = workload.lookups * workload.dim * 4
    (loop,) = hlo.launches(text).loops
    coalesced_mb = coalesced / 1e6
    _report(f"{model}, batch {workload.batch}: {loop.once}; coalesced gradients {coalesced_mb:.1f} MB", memory)
    ((name, atomics),) = _atomics(kernels).items()
    assert name.startswith("input_scatter_fusion")
    assert len(atomics) == 1
    assert (loop.trips, loop.once.loops) == (program.batch.steps, ())
    rows = sum(workload.rows)
    assert len(hlo.arrays(text, "f32", rows * workload.dim)) == 1  # the scatter into the donated table
    assert len(hlo.arrays(text, "f32", coalesced // 4)) <= 1


def test_mlperfs_step_fits_one_gpu():
    """204 million rows of 128 floats with row-wise Adagrad and a batch of 55,296: in place, and little beside."""
    workload = workloads.WORKLOADS[mlperf.WORKLOAD]
    memory = mlperf.step_memory(workload)
    stored = 4 * sum(workload.rows) * (workload.dim + 1)
    assert stored <= memory.alias_size_in_bytes <= memory.argument_size_in_bytes <= 1.002 * stored
    assert memory.temp_size_in_bytes <= 10e9
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= mlperf.H200_BYTES - 20e9


def test_what_the_checks_would_see_in_a_segment_sum():
    """Sorted sums as ``jax.ops`` makes them: atomics by default, none with the option that ``deterministic`` sets.

    jaxlib 0.10.2 and 0.11.0 made such an addition a loop of compare-and-swap, hundreds of times slower where rows
    repeat (github.com/openxla/xla/issues/46225): that is why ``pyproject.toml`` asks for 0.11.2 at least.
    """

    text, kernels = _segment_sum(xla_gpu_deterministic_ops=False)
    assert any(xla_ptx.float_atomics(ptx) for ptx in kernels.values())
    assert not any(xla_ptx.compare_and_swap(ptx) for ptx in kernels.values())
    assert not any(loop for loop in hlo.launches(text).loops)
    assert _atomics(_segment_sum(xla_gpu_deterministic_ops=True)[1]) == {}


def _segment_sum(**options):
    """The HLO and the PTX of a sorted sum of 327,680 rows of 64 floats."""

    def sums(rows, segments):
        return jax.ops.segment_sum(rows, segments, UNIQUE, indices_are_sorted=True)

    with xla_ptx.captured() as (compiler, kernels):
        arguments = aot.shape((LOOKUPS, DIM)), i32((LOOKUPS,))
        compiled = aot.compile_for_h200(sums, *arguments, compiler_options={**compiler, **options})
    text = compiled.as_text()
    _report(f"segment_sum with {options}: {hlo.launches(text)}", compiled.memory_analysis())
    return text, kernels


def test_the_key_reaches_xla_by_its_flags():
    """As ``jrec train`` sets it: in a process of its own, before JAX starts."""
    program = (
        "from jrec.app import determinism; determinism.request()\n"
        "import test_aot_xla as t, jax, xla_ptx\n"
        "kernels = t._segment_sum()[1]\n"
        "assert kernels and not t._atomics(kernels), kernels.keys()\n"
    )
    folder = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder.parent}"}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True, timeout=600)
