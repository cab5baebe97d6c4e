"""The kernels as compiled for an H200, run on the PTX machine, against float64 NumPy."""

import dataclasses
import itertools

import aot
import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest
import reference
from grids import in_turn, some_of
from update_cases import OPTIMIZERS, SCALE, STEP, _assert_close, _expected, _fused, _slots, update_request

import jrec.pallas.casted_update
import jrec.pallas.gather_reduce
from jrec import ops
from jrec.ops.rounding import round_values, stochastic_round
from jrec.pallas.casted_update import casted_update_many
from jrec.pallas.gather_reduce import Request, gather_reduce, gather_reduce_many
from jrec.pallas.row_update import row_update
from jrec.pallas.tuning import TuningConfig
from jrec.row_optimizers import Exact

pytestmark = [pytest.mark.aot, aot.needs_environment()]

CONFIG = TuningConfig(chunks=1, unroll=2, long_unroll=1, split=2, top=16, blocks=3)
SHAPES = (
    reference.Shape(rows=40, dim=4, bags=70, length=1),
    reference.Shape(rows=50, dim=3, bags=9, length=5, weighted=True),
    reference.Shape(rows=50, dim=6, bags=9, capacity=30, dtype="bfloat16"),
    reference.Shape(rows=50, dim=16, bags=33, length=3, dtype="float16", weighted=True),
    reference.Shape(rows=90, dim=20, bags=12, capacity=77, dtype="bfloat16", weighted=True),
    reference.Shape(rows=90, dim=64, bags=12, capacity=77),
    reference.Shape(rows=30, dim=100, bags=7, capacity=50, dtype="float16"),
    reference.Shape(rows=30, dim=128, bags=7, length=4, dtype="bfloat16"),
    reference.Shape(rows=30, dim=200, bags=7, capacity=33, weighted=True),
    reference.Shape(rows=9, dim=1024, bags=5, capacity=33, dtype="bfloat16"),
)


def _jax(array):
    return None if array is None else jnp.asarray(array)


@pytest.mark.parametrize(
    ("case_shape", "chunks"),
    some_of(itertools.product(SHAPES, (1, 3)), *in_turn(SHAPES, (1, 3)), (SHAPES[5], 1)),
    ids=lambda v: f"{v.dim}-{v.dtype}" if isinstance(v, reference.Shape) else str(v),
)
def test_gather_reduce(case_shape, chunks):
    case = reference.make_case(case_shape, np.random.default_rng(case_shape.dim), kind="power law", past=True)
    config = dataclasses.replace(CONFIG, chunks=chunks, split=4, long_unroll=4, top=64)
    with aot.ptx_machine_launches() as modules:
        got = gather_reduce(_jax(case.table), _jax(case.ids), _jax(case.offsets), _jax(case.weights), config=config)
    assert modules
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)


UPDATED = (20, 128, 1000)  # dims


@pytest.mark.parametrize(
    ("optimizer", "dim"),
    some_of(
        itertools.product(OPTIMIZERS, UPDATED),
        *in_turn(OPTIMIZERS, UPDATED),
        *((OPTIMIZERS[3], dim) for dim in UPDATED),
    ),
    ids=lambda v: str(v) if isinstance(v, int) else type(v).__name__,
)
def test_casted_update(optimizer, dim):
    case_shape = reference.Shape(rows=17, dim=dim, bags=14, length=4, weighted=dim == 20)
    case = reference.make_case(case_shape, np.random.default_rng(dim), kind="power law", past=True)
    slots = _slots(optimizer, case.table)
    with aot.ptx_machine_launches() as modules:
        got = _fused(optimizer, case, slots, config=CONFIG)
    assert len(modules) == 3  # two levels of pieces, then short segments beside long ones
    # An exact optimizer's rows go over where they come to rest, tens of units away where ``nu`` is small.
    _assert_close(got, _expected(optimizer, case, slots), atol=4e-5 if isinstance(optimizer, Exact) else 1e-5)


@pytest.mark.parametrize("dim", [20, 128])
def test_casted_update_from_bfloat16_gradients(dim):
    case = reference.make_case(
        reference.Shape(rows=17, dim=dim, bags=14, length=4), np.random.default_rng(dim), kind="power law", past=True
    )
    optimizer = OPTIMIZERS[3]
    request = update_request(optimizer, case, _slots(optimizer, case.table), config=CONFIG)
    narrow = request.bag_gradients.astype(jnp.bfloat16)
    sums = []
    for gradients in (narrow, narrow.astype(jnp.float32)):
        with aot.ptx_machine_launches() as modules:
            sums += casted_update_many([dataclasses.replace(request, bag_gradients=gradients)])
        assert modules
    jax.tree.map(np.testing.assert_array_equal, *sums)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [4, 24])
def test_row_update_rounds_stochastically_as_xla_does(dim, dtype):
    rng = np.random.default_rng(dim)
    table = jnp.asarray(rng.normal(size=(50, dim)) * rng.choice([1, 1e-5], (50, 1)), dtype)
    gradients = jnp.asarray(rng.normal(size=(30, dim)) * 1e-3, jnp.float32)
    rows = jnp.asarray(np.sort(rng.choice(60, 30, replace=False)), jnp.int32)
    key = jax.random.key_data(jax.random.key(5))
    numbers = jnp.asarray(rng.integers(-(2**31), 2**31, 30), jnp.int32)
    with aot.ptx_machine_launches():
        got, _ = row_update(
            ops.SGD(learning_rate=1.0),
            table,
            {},
            rows,
            gradients,
            jnp.int32(0),
            jnp.float32(1),
            rounding=round_values,
            rounding_key=key,
            rounding_rows=numbers,
        )
    real = np.asarray(rows) < 50
    taken = rows[real]
    sums = table[taken].astype(jnp.float32) - gradients[real]
    want = table.at[taken].set(stochastic_round(sums, table.dtype, key, numbers[real]))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[3], OPTIMIZERS[5]], ids=lambda o: type(o).__name__)
def test_row_update_of_16_bit_tables(optimizer):
    case_shape = reference.Shape(rows=17, dim=40, bags=14, length=4, dtype="bfloat16")
    case = reference.make_case(case_shape, np.random.default_rng(1))
    gradients = reference.row_gradients(case)
    rows = jnp.asarray([*sorted(gradients), 17, 17], jnp.int32)
    dense = jnp.asarray([*(gradients[r] for r in sorted(gradients)), *np.full((2, 40), np.nan)], jnp.float32)
    slots = _slots(optimizer, case.table)
    with aot.ptx_machine_launches():
        got = row_update(optimizer, jnp.asarray(case.table), slots, rows, dense, jnp.int32(STEP), jnp.float32(SCALE))
    table, new_slots = _expected(optimizer, case, slots)
    np.testing.assert_allclose(np.asarray(got[0], np.float64), table, rtol=2**-8, atol=1e-6)
    for name, slot in new_slots.items():
        np.testing.assert_allclose(got[1][name], slot, rtol=1e-5, atol=1e-6, err_msg=name)


def test_two_runs_are_bit_equal():
    case = reference.make_case(SHAPES[5], np.random.default_rng(2), kind="identical", full=True)
    runs = []
    for _ in range(2):
        with aot.ptx_machine_launches():
            runs.append(gather_reduce(_jax(case.table), _jax(case.ids), _jax(case.offsets), config=CONFIG))
    np.testing.assert_array_equal(*runs)


_ADD_ONE = """
.visible .entry kernel(
	.param .u64 .ptr .align 256 kernel_param_0
)
.maxntid 128, 1, 1
{{
	.reg .b32 	%r<9>;
	ld.param::entry.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, {stride};
	add.s64 	%rd3, %rd1, %rd2;
	ld.global.b32 	%r2, [%rd3];
	add.f32 	%r3, %r2, 0f3F800000;
	st.global.b32 	[%rd3], %r3;
	ret;
}}
"""


def test_the_machine_runs_and_finds_faults():
    def run(stride, size=128, grid=1):
        buffer = np.zeros(size, np.float32)
        program = ptx_machine.parse(_ADD_ONE.format(stride=stride))
        ptx_machine.Machine(program, [buffer.view(np.uint8)], {0}).run(grid)
        return buffer

    np.testing.assert_array_equal(run(4), 1)
    for stride, size, grid, fault in (
        (4, 127, 1, "past the end"),
        (2, 128, 1, "misaligned"),
        (0, 128, 1, "two threads of a block"),
        (4, 128, 2, "two blocks"),
    ):
        with pytest.raises(ptx_machine.MachineError, match=fault):
            run(stride, size, grid)


def test_many_tables_in_one_launch():
    """Dims, dtypes and optimizers differ; every table's jobs are thread blocks of the same kernels."""
    shapes = (SHAPES[4], SHAPES[5], SHAPES[7])
    optimizers = (OPTIMIZERS[3], OPTIMIZERS[5], OPTIMIZERS[0])
    cases = [reference.make_case(s, np.random.default_rng(s.dim), kind="power law", past=True) for s in shapes]
    requests = [
        Request(source=_jax(c.table), indices=_jax(c.ids), offsets=_jax(c.offsets), weights=_jax(c.weights),
                config=CONFIG)
        for c in cases
    ]  # fmt: skip
    with aot.ptx_machine_launches() as modules:
        sums = gather_reduce_many(requests)
    assert len(modules) == 4  # three levels of pieces, then short segments beside long ones
    for got, case in zip(sums, cases, strict=True):
        np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)
    slots = [_slots(o, c.table) for o, c in zip(optimizers, cases, strict=True)]
    with aot.ptx_machine_launches() as modules:
        updated = casted_update_many(
            [update_request(*each, config=CONFIG) for each in zip(optimizers, cases, slots, strict=True)]
        )
    assert len(modules) == 4
    for got, optimizer, case, of_table in zip(updated, optimizers, cases, slots, strict=True):
        rtol = 1e-5 if case.shape.dtype == "float32" else 2**-7
        _assert_close(got, _expected(optimizer, case, of_table), rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("dim", [16, 64])
def test_long_segments_found_by_the_lanes_of_a_row(dim, monkeypatch):
    """As where there are many runs: every lane looks at another run, and long segments are visited one by one."""
    for home in (jrec.pallas.gather_reduce, jrec.pallas.casted_update):
        monkeypatch.setattr(home, "runs_a_block", lambda runs, tile: 2 * tile.lanes)
    case_shape = reference.Shape(rows=17, dim=dim, bags=30, capacity=83)
    case = reference.make_case(case_shape, np.random.default_rng(dim), kind="power law", past=True)
    with aot.ptx_machine_launches() as modules:
        got = gather_reduce(_jax(case.table), _jax(case.ids), _jax(case.offsets), config=CONFIG)
    assert "gather_reduce_long" in modules[-1]
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)
    optimizer = OPTIMIZERS[3]
    slots = _slots(optimizer, case.table)
    with aot.ptx_machine_launches():
        got = _fused(optimizer, case, slots, config=CONFIG)
    _assert_close(got, _expected(optimizer, case, slots))
