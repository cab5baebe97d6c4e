"""Optimizer steps of every implementation against float64 NumPy and against optax on dense tables."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings

from jrec import ops
from jrec.ops.row_update import casted_gather_reduce
from jrec.row_optimizers import ROW_OPTIMIZERS

IMPLEMENTATIONS = ("xla", "native")
S = reference.SHAPES
SCHEDULE = optax.cosine_decay_schedule(0.3, 10)
# Adam and RMSProp divide a gradient by its own size: where terms cancel, their rounding errors decide the sign of a
# whole step unless epsilon is well above them.
CASES = {
    "sgd": (ops.SGD(learning_rate=0.5), (S[0], S[2], S[9])),
    "sgd decayed": (ops.SGD(learning_rate=SCHEDULE, weight_decay=0.1), (S[3], S[8])),
    "momentum": (ops.Momentum(learning_rate=0.1, max_row_norm=1.0), (S[1], S[12])),
    "nesterov": (ops.Momentum(learning_rate=0.1, nesterov=True), (S[4], S[7])),
    "adagrad": (ops.Adagrad(learning_rate=0.2, weight_decay=0.01), (S[6], S[10])),
    "row-wise adagrad": (ops.RowWiseAdagrad(learning_rate=0.2, max_row_norm=2.0), (S[2], S[11], S[13])),
    "rmsprop": (ops.RMSProp(learning_rate=0.05, decay=0.8, eps=1e-3), (S[4], S[8])),
    "adam": (ops.Adam(learning_rate=SCHEDULE, eps=1e-3, weight_decay=0.02, max_row_norm=3.0), (S[3], S[5], S[12])),
    "row-wise rmsprop": (ops.RowWiseRMSProp(learning_rate=0.05, decay=0.8, eps=1e-3), (S[4], S[11])),
    "row-wise adam": (ops.RowWiseAdam(learning_rate=SCHEDULE, eps=1e-3, weight_decay=0.02), (S[3], S[8], S[13])),
    "exact momentum": (ops.ExactMomentum(learning_rate=0.1, nesterov=True, max_row_norm=1.0), (S[1], S[7])),
    "exact rmsprop": (ops.ExactRMSProp(learning_rate=0.05, decay=0.8, eps=1e-3), (S[4], S[8])),
    "exact adam": (ops.ExactAdam(learning_rate=SCHEDULE, eps=1e-3, max_row_norm=3.0), (S[3], S[5], S[12])),
    "exact adamw": (ops.ExactAdamW(learning_rate=0.1, eps=1e-3, weight_decay=0.02), (S[8], S[13])),
}
STEPS = 3


def test_every_row_optimizer_has_a_case():
    assert {type(optimizer) for optimizer, _ in CASES.values()} == set(ROW_OPTIMIZERS.values())


@functools.partial(jax.jit, static_argnames=("optimizer", "num_rows", "form", "implementation"))
def _step(table, slots, ids, offsets, weights, bag_gradients, step, *, optimizer, num_rows, form, implementation):
    cast = ops.tensor_cast(ids, offsets, num_rows=num_rows, implementation="native")
    options = {"step": step, "gradient_scale": 0.5, "implementation": implementation}
    if form == "casted":
        return ops.casted_update(optimizer, table, slots, cast, bag_gradients, weights=weights, **options)
    gradients = casted_gather_reduce(cast, bag_gradients, weights, implementation=implementation)
    return ops.row_update(optimizer, table, slots, cast.rows, gradients, **options)


def _reference_step(optimizer, case, table, slots, step):
    """New float64 table, rounded to its dtype, and slots."""
    table, slots = table.copy(), {name: slot.copy() for name, slot in slots.items()}
    reference.step_rows(optimizer, table, slots, reference.row_gradients(case), step=step, scale=0.5)
    return table, slots


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, implementation):
    optimizer, shapes = CASES[name]

    @given(case=reference.cases(shapes, past=True))
    @settings(max_examples=40)
    def check(case):
        form = "row_update" if case.shape == shapes[-1] else "casted"  # one program for each shape
        eps, slack = reference.EPSILON[case.shape.dtype], reference.slack(case)
        touched = np.zeros(case.shape.rows, bool)
        touched[list(reference.row_gradients(case))] = True
        table, slots = jnp.asarray(case.table), optimizer.init(jnp.asarray(case.table))
        want, want_slots = case.table.copy(), {n: np.asarray(slot, np.float64) for n, slot in slots.items()}
        first, first_slots = table, slots
        for step in range(STEPS if case.shape.dtype == "float32" else 1):
            want, want_slots = _reference_step(optimizer, case, want, want_slots, step)
            table, slots = _step(
                table, slots, case.ids, case.offsets, case.weights, case.bag_gradients, step,
                optimizer=optimizer, num_rows=case.shape.rows, form=form, implementation=implementation,
            )  # fmt: skip
        exact = want.astype(np.float64)
        np.testing.assert_allclose(np.asarray(table, np.float64), exact, rtol=2e-4 + eps, atol=slack + eps)
        for slot, values in want_slots.items():
            np.testing.assert_allclose(slots[slot], values, rtol=2e-4, atol=slack, err_msg=slot)
            np.testing.assert_array_equal(np.asarray(slots[slot])[~touched], np.asarray(first_slots[slot])[~touched])
        np.testing.assert_array_equal(
            np.asarray(table)[~touched].view(np.uint8), np.asarray(first)[~touched].view(np.uint8)
        )

    check()


DENSE = {
    "sgd": (ops.SGD(learning_rate=0.3), optax.sgd(0.3)),
    "scheduled sgd": (ops.SGD(learning_rate=SCHEDULE), optax.sgd(SCHEDULE)),
    "momentum": (ops.Momentum(learning_rate=0.1, momentum=0.8), optax.sgd(0.1, momentum=0.8)),
    "nesterov": (ops.Momentum(learning_rate=0.1, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adagrad": (ops.Adagrad(learning_rate=SCHEDULE, initial_accumulator=0.1, eps=1e-7), optax.adagrad(SCHEDULE)),
    "rmsprop": (ops.RMSProp(learning_rate=0.05, eps=1e-8), optax.rmsprop(0.05)),
    "adam": (ops.Adam(learning_rate=SCHEDULE), optax.adam(SCHEDULE)),
    "decayed adam": (
        ops.Adam(learning_rate=0.1, weight_decay=0.2),
        optax.chain(optax.add_decayed_weights(0.2), optax.adam(0.1)),
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", DENSE)
def test_equals_dense_optax_where_every_row_is_touched(name, implementation):
    optimizer, dense = DENSE[name]
    rng = np.random.default_rng(1)
    rows, dim = 40, 24
    table = jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32)
    expected, slots = table, optimizer.init(table)
    state = dense.init(expected)
    for step in range(5):
        gradients = jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax is not written for strict promotion
            updates, state = dense.update(gradients, state, expected)
        expected = optax.apply_updates(expected, updates)
        order = rng.permutation(rows).astype(np.int32)
        cast = ops.tensor_cast(jnp.asarray(order[:, None]), num_rows=rows, implementation="xla")
        table, slots = ops.casted_update(
            optimizer, table, slots, cast, gradients[order], step=step, implementation=implementation
        )
        np.testing.assert_allclose(table, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_row_wise_adagrad_keeps_the_mean_square_of_each_row(implementation):
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1, initial_accumulator=0.0)
    table = jnp.zeros((3, 4))
    gradients = jnp.array([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    rows = jnp.array([1, 2], jnp.int32)
    new, slots = ops.row_update(optimizer, table, optimizer.init(table), rows, gradients, implementation=implementation)
    np.testing.assert_allclose(slots["sum"], [0.0, 7.5, 0.0])
    np.testing.assert_allclose(new[1], -0.1 * np.arange(1, 5) / np.sqrt(7.5), rtol=1e-6)
    np.testing.assert_array_equal(new[2], np.zeros(4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_tables_round_to_nearest_even(implementation, dtype):
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    rng = np.random.default_rng(0)
    old = rng.normal(size=(64, 64)).astype(numpy_dtype)
    gradients = rng.normal(size=old.shape).astype(np.float32)
    gradients[0] = np.float32(2.0**-9 if dtype == "bfloat16" else 2.0**-12) * np.arange(64)  # many exact ties
    old[0] = 1.0
    new, _ = ops.row_update(
        ops.SGD(learning_rate=1.0), jnp.asarray(old), {}, jnp.arange(64, dtype=jnp.int32), jnp.asarray(gradients),
        implementation=implementation,
    )  # fmt: skip
    want = (old.astype(np.float32) - gradients).astype(numpy_dtype)
    np.testing.assert_array_equal(np.asarray(new), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_gradients_of_bags_give_the_bits_of_the_same_float32_ones(implementation):
    rng = np.random.default_rng(3)
    table, optimizer = jnp.asarray(rng.normal(size=(30, 12)), jnp.float32), ops.RowWiseAdagrad(learning_rate=0.1)
    cast = ops.tensor_cast(jnp.asarray(rng.integers(0, 30, (20, 5)), jnp.int32), num_rows=30, implementation="xla")
    narrow = jnp.asarray(rng.normal(size=(20, 12)), jnp.bfloat16)
    update = functools.partial(
        ops.casted_update, optimizer, table, optimizer.init(table), cast, implementation=implementation
    )
    (rows, slots), (wide_rows, wide_slots) = update(narrow), update(narrow.astype(jnp.float32))
    np.testing.assert_array_equal(rows, wide_rows)
    np.testing.assert_array_equal(slots["sum"], wide_slots["sum"])
    squares = ops.squared_gradient_norm({"": ops.Residuals(cast=cast)}, {"": narrow}, implementation=implementation)
    rounded = np.asarray(narrow, np.float64)
    sums = np.zeros((30, 12))
    real = np.asarray(cast.num_unique)
    for row, low, high in zip(cast.rows[:real], cast.offsets[:real], cast.offsets[1 : real + 1], strict=True):
        sums[row] = rounded[np.asarray(cast.sources[low:high])].sum(0)
    np.testing.assert_allclose(squares, np.square(sums).sum(), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_change_nothing(implementation):
    table = jnp.arange(6.0).reshape(3, 2)
    rows = jnp.array([1, 3, 3, 3], jnp.int32)
    new, _ = ops.row_update(
        ops.SGD(learning_rate=1.0), table, {}, rows, jnp.ones((4, 2)), implementation=implementation
    )
    np.testing.assert_array_equal(new, [[0.0, 1.0], [1.0, 2.0], [4.0, 5.0]])


def test_padding_that_int32_cannot_number_is_refused():
    """It would wrap around to rows of the table; nothing is computed here."""
    from jrec.ops.row_update_xla import distinct

    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert jax.eval_shape(lambda rows: distinct(rows, 2**31 - 8), rows).shape == (8,)
    too_many = "a table of 2,147,483,641 rows cannot be updated at 8 rows at once"
    with pytest.raises(ValueError, match=too_many):
        jax.eval_shape(lambda rows: distinct(rows, 2**31 - 7), rows)

    def dense_gradient(table, ids):
        return jax.grad(lambda table: jnp.sum(ops.embedding_bag(table, ids)))(table)

    table = jax.ShapeDtypeStruct((2**31 - 7, 1), jnp.float32)
    with pytest.raises(ValueError, match=too_many):
        jax.eval_shape(dense_gradient, table, jax.ShapeDtypeStruct((8, 1), jnp.int32))


def test_a_foreign_optimizer_runs_by_its_own_step_and_native_refuses_it():
    class Mine(ops.SGD):
        def step_rows(self, rows, gradients, slots, math):
            return rows + math.learning_rate * gradients, slots

    update = functools.partial(
        ops.row_update, Mine(learning_rate=2.0), jnp.ones((3, 2)), {}, jnp.zeros(1, jnp.int32), jnp.ones((1, 2))
    )
    np.testing.assert_array_equal(update()[0], [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]])
    with pytest.raises(NotImplementedError, match="no native implementation"):
        update(implementation="native")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradients": jnp.ones((1, 3))}, "gradients must be float32 of shape"),
        ({"gradients": jnp.ones((2, 2))}, "gradients must be float32 of shape"),
        ({"rows": jnp.zeros((1, 1), jnp.int32)}, "rows must be"),
        ({"slots": {}}, "keeps slots"),
        ({"slots": {"sum": jnp.ones((3, 2))}}, "slot 'sum' must be float32 of shape"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {
        "optimizer": ops.RowWiseAdagrad(learning_rate=0.1),
        "table": jnp.ones((3, 2)),
        "slots": {"sum": jnp.ones(3)},
        "rows": jnp.zeros(1, jnp.int32),
        "gradients": jnp.ones((1, 2)),
    }
    with pytest.raises(ValueError, match=message):
        ops.row_update(**(arguments | change))
