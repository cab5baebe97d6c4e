"""The row update and casted update kernels in interpret mode against float64 NumPy: tables and slots."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from pallas_interpreter import race_free
from update_cases import (
    COMMON,
    CONFIG,
    OPTIMIZERS,
    SCALE,
    SHAPE,
    STEP,
    _assert_close,
    _case,
    _expected,
    _fused,
    _slots,
    update_request,
)

from jrec import ops
from jrec.ops import storage
from jrec.pallas.casted_update import casted_update, casted_update_many
from jrec.pallas.interpret import interpreted
from jrec.pallas.row_update import row_update
from jrec.pallas.rules import rule_of


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(o, id=type(o).__name__, marks=() if o.slots.get("sum") == "row" else pytest.mark.slow)
        for o in OPTIMIZERS
    ],
)
def test_casted_update(optimizer):
    case = _case()
    slots = _slots(optimizer, case.table)
    with race_free():
        got = _fused(optimizer, case, slots)
    _assert_close(got, _expected(optimizer, case, slots))
    untouched = np.setdiff1d(np.arange(case.shape.rows), list(reference.row_gradients(case)))
    assert untouched.size
    np.testing.assert_array_equal(got[0][untouched], case.table[untouched])
    for name, slot in slots.items():
        np.testing.assert_array_equal(got[1][name][untouched], slot[untouched])


@pytest.mark.parametrize("dim", [4, 20])
def test_bfloat16_gradients_of_bags_are_summed_as_float32_ones(dim):
    case = _case(dataclasses.replace(SHAPE, dim=dim))
    request = update_request(OPTIMIZERS[3], case, _slots(OPTIMIZERS[3], case.table))
    narrow = request.bag_gradients.astype(jnp.bfloat16)
    with race_free():
        got = casted_update(dataclasses.replace(request, bag_gradients=narrow))
        want = casted_update(dataclasses.replace(request, bag_gradients=narrow.astype(jnp.float32)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[3], OPTIMIZERS[5]], ids=lambda o: type(o).__name__)
def test_row_update(optimizer):
    case = _case(dataclasses.replace(SHAPE, dim=33))
    slots = _slots(optimizer, case.table)
    gradients = reference.row_gradients(case)
    rows = np.full(30, case.shape.rows, np.int32)
    rows[: len(gradients)] = sorted(gradients)
    dense = np.full((30, 33), np.nan, np.float32)  # the gradients of padding are never read
    dense[: len(gradients)] = [gradients[r] for r in sorted(gradients)]
    with race_free():
        got = row_update(
            optimizer, jnp.asarray(case.table), slots, rows, dense, jnp.int32(STEP), jnp.float32(SCALE), config=CONFIG
        )
    _assert_close(got, _expected(optimizer, case, slots))


@pytest.mark.parametrize("kind", [pytest.param("identical", marks=pytest.mark.slow), "all padding"])
def test_casted_update_of_one_row_few_rows_and_none(kind):
    shape = reference.Shape(rows=5, dim=4, bags=40, length=2)
    case = _case(shape, kind)
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1)
    slots = _slots(optimizer, case.table)
    with interpreted():
        got = _fused(optimizer, case, slots)
        again = _fused(optimizer, case, slots, config=dataclasses.replace(CONFIG, prefetch=False))
    _assert_close(got, _expected(optimizer, case, slots), rtol=2e-5)
    np.testing.assert_array_equal(got[0], again[0])


@pytest.mark.parametrize(("dtype", "numbered", "in_pieces"), [
    ("bfloat16", True, False),
    pytest.param("bfloat16", False, True, marks=pytest.mark.slow),
    pytest.param("float16", True, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_stochastic_rounding_stores_the_bits_of_the_xla_implementation(dtype, numbered, in_pieces):
    optimizer = ops.SGD(learning_rate=0.125)
    case = _case(dataclasses.replace(SHAPE, dtype=dtype, weighted=False))
    # Gradients on a coarse grid, so that sums are exact and both sides round the same numbers.
    case = dataclasses.replace(case, bag_gradients=np.round(case.bag_gradients * 64) / 64)
    key = jax.random.key_data(jax.random.key(1))
    cast = ops.tensor_cast(jnp.asarray(case.ids), num_rows=case.shape.rows, implementation="xla")
    table, gradients = jnp.asarray(case.table), jnp.asarray(case.bag_gradients)
    numbers = jnp.arange(cast.rows.size, dtype=jnp.int32) * -77_777_777 if numbered else None

    def updated(implementation, **options):
        return ops.casted_update(optimizer, table, {}, cast, gradients, implementation=implementation, **options)[0]

    with interpreted():
        if in_pieces:  # of which some rows have several
            request = update_request(optimizer, case, {}, key=key)
            request = dataclasses.replace(request, rounding_rows=numbers, gradient_scale=jnp.float32(1))
            got = casted_update(request)[0]
        else:
            got = updated("pallas", rounding_key=key, rounding_rows=numbers)
    want = updated("xla", rounding_key=key, rounding_rows=numbers)
    np.testing.assert_array_equal(got, want)
    others = [updated("xla"), *([] if numbers is None else [updated("xla", rounding_key=key)])]
    assert all(np.any(np.asarray(want) != np.asarray(other)) for other in others)


def test_many_tables_in_the_launches_of_one():
    """Dims, dtypes and optimizers differ; each table gets the bits that it gets alone."""
    shapes = (
        reference.Shape(rows=9, dim=4, bags=12, length=1),
        reference.Shape(rows=5, dim=8, bags=6, capacity=20, dtype="bfloat16"),
    )
    optimizers = (OPTIMIZERS[3], OPTIMIZERS[0])
    cases = [_case(shape) for shape in shapes]
    slots = [_slots(o, c.table) for o, c in zip(optimizers, cases, strict=True)]
    with race_free():
        requests = [update_request(*each) for each in zip(optimizers, cases, slots, strict=True)]
        together = casted_update_many(requests)
        alone = [casted_update(request) for request in requests]
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    for got, optimizer, case, of_table in zip(together, optimizers, cases, slots, strict=True):
        close = {"rtol": 1e-5, "atol": 1e-5} if case.shape.dtype == "float32" else {"rtol": 2**-7, "atol": 1e-4}
        _assert_close(got, _expected(optimizer, case, of_table), **close)


def test_nothing_to_update():
    table, none = jnp.ones((3, 4)), jnp.zeros(0, jnp.int32)
    optimizer = ops.SGD(learning_rate=1.0)
    got = row_update(optimizer, table, {}, none, jnp.zeros((0, 4)), jnp.int32(0), jnp.float32(1))
    assert got[0] is table


class Foreign(ops.RowOptimizer):
    """One of no name, with a slot of either shape, whose step is given in terms."""

    slots = types.MappingProxyType({"sum": "row", "trace": "element"})

    def slot_terms(self, gradients, math):
        return {"sum": (None, math.row_mean(gradients * gradients)), "trace": (0.5, gradients)}

    def row_change(self, gradients, slots, math):
        return math.spread(math.learning_rate * math.rsqrt(slots["sum"] + 1)) * slots["trace"]


def test_kernels_run_any_step_that_is_given_in_terms():
    optimizer, case = Foreign(**COMMON), _case()
    slots, table = _slots(optimizer, case.table), jnp.asarray(case.table)
    cast = ops.tensor_cast(
        jnp.asarray(case.ids), None if case.offsets is None else jnp.asarray(case.offsets), num_rows=SHAPE.rows
    )
    want = ops.casted_update(
        optimizer, table, slots, cast, case.bag_gradients, weights=case.weights, step=STEP, gradient_scale=SCALE
    )
    with interpreted():
        got = _fused(optimizer, case, slots)
    assert float(jnp.abs(want[0] - table).max()) > 0.01
    _assert_close(got, jax.tree.map(lambda x: np.asarray(x, np.float64), want))


def test_a_step_of_another_form_is_refused():
    class Whole(ops.SGD):
        def step_rows(self, rows, gradients, slots, math):
            return rows, slots

    with pytest.raises(NotImplementedError, match="Whole has a step_rows of its own, which runs in no Pallas kernel"):
        rule_of(Whole(learning_rate=1.0), 4)


def test_too_long_rows_are_refused():
    with pytest.raises(NotImplementedError, match="dims from 1 to 1024, not 1025"):
        ops.row_update(
            ops.SGD(learning_rate=1.0),
            jnp.ones((3, 1025)),
            {},
            jnp.arange(1),
            jnp.ones((1, 1025)),
            implementation="pallas",
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS[3:4], ids=lambda o: type(o).__name__)
def test_padded_storage_changes_nothing(optimizer):
    """Rows of 3 bfloat16 (6 bytes) stored as 8: the same table, slots and sums, and zeros behind every row."""
    case = _case(dataclasses.replace(SHAPE, dim=3, dtype="bfloat16", weighted=False))
    gradients = reference.row_gradients(case)
    rows = jnp.asarray(sorted(gradients), jnp.int32)
    dense = jnp.asarray([gradients[r] for r in sorted(gradients)], jnp.float32)
    table = jnp.asarray(case.table)
    slots = _slots(optimizer, table)
    padded = storage.pad(table)
    assert padded.shape == (17, 8)
    step = functools.partial(row_update, optimizer, config=CONFIG, dim=3)
    with interpreted():
        want, want_slots = step(table, slots, rows, dense, jnp.int32(STEP), jnp.float32(SCALE))
        wide = jnp.pad(dense, ((0, 0), (0, 5)))
        got, got_slots = step(padded, slots, rows, wide, jnp.int32(STEP), jnp.float32(SCALE))
    np.testing.assert_array_equal(storage.strip(got, 3), want)
    np.testing.assert_array_equal(got[:, 3:], 0)
    np.testing.assert_allclose(got_slots["sum"], want_slots["sum"], rtol=1e-6)


@pytest.mark.parametrize(("dim", "itemsize", "padded"), [(1, 4, 4), (4, 4, 4), (6, 4, 8), (20, 2, 24), (64, 2, 64)])
def test_padded_dims(dim, itemsize, padded):
    assert storage.padded_dim(dim, itemsize) == padded
