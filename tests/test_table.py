"""``jrec.Table``: row gradients by JAX's own transformations, equal to the dense gradient."""

import copy
import dataclasses
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jrec
from jrec import Bags, RowGradients, Table, embedding_bag
from jrec.ops import TableSpec, row_step
from jrec.row_optimizers import ROW_OPTIMIZERS

ROWS, DIM = 37, 4
IDS = jnp.array([[5, 7, 5], [0, -1, 36]], jnp.int32)


@pytest.fixture(scope="module")
def rows():
    return jax.random.normal(jax.random.key(0), (ROWS, DIM))


def loss_of(table, ids=IDS):
    return jnp.sum(jnp.sin(embedding_bag(table, ids)) ** 2)


def dense_gradient(function, rows):
    return np.asarray(jax.grad(function)(rows))


def check(gradients, expected, **options):
    assert isinstance(gradients, RowGradients)
    np.testing.assert_allclose(gradients.array(), expected, rtol=1e-6, atol=1e-6, **options)


@pytest.mark.parametrize("implementation", ["xla", "native", None])
@pytest.mark.parametrize("capacity", [None, 6])
@pytest.mark.parametrize("jitted", [False, True])
def test_grad_is_the_dense_gradient(rows, implementation, capacity, jitted):
    table = Table(rows, capacity=capacity, implementation=implementation)
    gradient = jax.value_and_grad(loss_of)
    value, gradients = (jax.jit(gradient) if jitted else gradient)(table)
    assert value == pytest.approx(float(loss_of(rows)), rel=1e-6)
    check(gradients, dense_gradient(loss_of, rows))
    numbers, values = gradients.rows()
    found = np.asarray(numbers)[np.asarray(numbers) < ROWS]
    assert found.tolist() == [0, 5, 7, 36]
    assert values.shape == (len(numbers), DIM)


FORMS = {
    "one id a bag": (jnp.array([3, 3, -1, 9]), {}),
    "weighted": (IDS, {"weights": jnp.array([[0.5, 2.0, -1.0], [1.0, 3.0, 0.25]])}),
    "ragged": (jnp.array([4, 4, 1, 2, 99]), {"offsets": jnp.array([0, 0, 3, 4])}),
    "ragged, weighted": (
        jnp.array([4, 4, 1, 2]),
        {"offsets": jnp.array([0, 3, 3, 4]), "weights": jnp.array([1.0, 2.0, 3.0, 0.5])},
    ),
    "of several features": (jnp.array([[[1, 2], [2, 3]], [[4, -1], [1, 1]]]), {}),
    "no bags": (jnp.zeros((0, 3), jnp.int32), {}),
    "no ids": (jnp.zeros((2, 0), jnp.int32), {}),
}


COMBINERS = ("sum", "mean", "sqrtn", "max")


@pytest.mark.parametrize(  # every form with and without a capacity, every combiner, too
    ("form", "combiner", "capacity"),
    [(form, combiner, (None, 8)[(f + c) % 2]) for f, form in enumerate(FORMS) for c, combiner in enumerate(COMBINERS)],
)
def test_every_form_of_bags(rows, form, combiner, capacity):
    ids, options = FORMS[form]

    def loss(table):
        return jnp.sum(jnp.cos(embedding_bag(table, ids, combiner=combiner, **options)))

    both = jax.jit(lambda *tables: [jax.value_and_grad(loss)(table) for table in tables])  # one program, not seven
    (value, gradients), (expected, of_rows) = both(Table(rows, capacity=capacity), rows)
    assert float(value) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
    check(gradients, np.asarray(of_rows))


def test_bags_bring_their_cast(rows):
    cast = jrec.tensor_cast(IDS, num_rows=ROWS)
    plain = jax.grad(loss_of)(Table(rows))
    given = jax.grad(loss_of)(Table(rows), Bags(ids=IDS, cast=cast))
    ((bags, _),) = given.parts
    np.testing.assert_array_equal(bags.cast.rows, cast.rows)
    np.testing.assert_array_equal(given.array(), plain.array())
    with pytest.raises(ValueError, match="which have offsets and weights themselves"):
        embedding_bag(Table(rows), Bags(ids=IDS), weights=jnp.ones(IDS.shape))
    with pytest.raises(ValueError, match=r"a jrec\.Table has its own"):
        embedding_bag(Table(rows), IDS, implementation="xla")


def test_weights_have_gradients(rows):
    weights = jnp.array([[0.5, 2.0, -1.0], [1.0, 3.0, 0.25]])

    def loss(table, weights):
        return jnp.sum(jnp.sin(embedding_bag(table, IDS, weights=weights)))

    expected = jax.grad(loss, argnums=(0, 1))(rows, weights)
    for function in (jax.grad(loss, argnums=(0, 1)), jax.jit(jax.grad(loss, argnums=(0, 1)))):
        of_table, of_weights = function(Table(rows), weights)
        check(of_table, expected[0])
        np.testing.assert_allclose(of_weights, expected[1], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss, argnums=1)(Table(rows), weights), expected[1], rtol=1e-6)


def test_what_lies_outside_of_bags_stays_outside_when_lookups_are_joined(rows):
    def loss(table):  # one after the other, so that each has a neighbour whose bag it could end in
        first = embedding_bag(table, jnp.array([1, 2, 30, 31]), jnp.array([0, 1, 2]))
        second = embedding_bag(table, jnp.array([4, 5, 6]), jnp.array([0, 2]))
        return jnp.sum(first**2) + jnp.sum(second**3)

    gradients = jax.jit(jax.grad(loss))(Table(rows))
    check(gradients, dense_gradient(loss, rows))
    numbers = np.asarray(gradients.rows()[0])
    assert numbers[numbers < ROWS].tolist() == [1, 2, 4, 5]


def test_tables_are_copied_and_pickled(rows):
    table = Table(rows, capacity=5, implementation="xla")
    for same in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert jax.typeof(same) == jax.typeof(table)
        np.testing.assert_array_equal(same.array, rows)
    check(copy.deepcopy(jax.grad(loss_of)(Table(rows))), dense_gradient(loss_of, rows))


@pytest.mark.parametrize("capacity", [None, 16])
def test_several_lookups_add_up(rows, capacity):
    def loss(table):
        bags = embedding_bag(table, jnp.array([1, 2, 3]), jnp.array([0, 2, 3]), weights=jnp.array([1.0, 2.0, 3.0]))
        return loss_of(table) + jnp.sum(jnp.tanh(embedding_bag(table, jnp.array([7, 7])))) + jnp.sum(bags**2)

    def of_one_form(table):
        weighted = embedding_bag(table, IDS[::-1], weights=jnp.full(IDS.shape, 0.5))
        return loss_of(table) + jnp.sum(weighted**2)

    table = Table(rows, capacity=capacity)
    for function in (loss, of_one_form):
        check(jax.grad(function)(table), dense_gradient(function, rows))
        check(jax.jit(jax.grad(function))(table), dense_gradient(function, rows))


@pytest.mark.parametrize("capacity", [None, ROWS])
def test_tied_weights(rows, capacity):
    def loss(table):
        array = table.array if hasattr(table, "array") else table
        vectors = embedding_bag(table, jnp.array([1, 4]))
        return jnp.sum(jax.nn.logsumexp(vectors @ array.T, axis=1))

    check(jax.grad(loss)(Table(rows, capacity=capacity)), dense_gradient(loss, rows))


def test_all_rows_need_a_capacity_of_all(rows):
    with pytest.raises(ValueError, match="has all 37 rows, but the table's capacity is 5"):
        jax.grad(lambda table: jnp.sum(table.array**2))(Table(rows, capacity=5))


def test_a_table_that_is_not_read_has_no_gradient(rows):
    check(jax.grad(lambda table: 0.0 * table.shape[0])(Table(rows)), np.zeros((ROWS, DIM)))
    check(jax.jit(jax.grad(lambda table: 0.0))(Table(rows, capacity=3)), np.zeros((ROWS, DIM)))


def test_more_rows_than_the_capacity_are_nan(rows):
    gradients = jax.jit(jax.grad(loss_of))(Table(rows, capacity=3))
    assert np.isnan(gradients.rows()[1][:3]).all()
    check(jax.jit(jax.grad(loss_of))(Table(rows, capacity=4)), dense_gradient(loss_of, rows))


# JAX's transformations

VECTORS = jnp.array([5, 7, 5], jnp.int32)


def scanned(table):
    return jax.lax.scan(lambda total, one: (total + loss_of(table, one[None]), None), 0.0, VECTORS)[0]


def mapped(table):
    return jnp.sum(jax.vmap(lambda one: jnp.sin(embedding_bag(table, one[None])))(VECTORS) ** 2)


def rematerialized(table):
    return jax.checkpoint(lambda vectors: jnp.sum(jnp.sin(vectors) ** 2))(embedding_bag(table, VECTORS))


def nested(table):
    return jax.jit(loss_of)(table, VECTORS)


FUNCTIONS = {
    "scan": scanned,
    "vmap": mapped,
    "remat of what follows": rematerialized,
    "jit inside": nested,
    "cond on what was looked up": lambda table: jax.lax.cond(
        True, lambda v: jnp.sum(v**2), jnp.sum, embedding_bag(table, VECTORS)
    ),
    "custom_vjp after it": lambda table: _doubled(jnp.sum(embedding_bag(table, VECTORS) ** 3)),
}


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("capacity", [None, 8])
def test_transformations(rows, name, jitted, capacity):
    function = FUNCTIONS[name]
    gradient = jax.grad(function)
    table = Table(rows, capacity=capacity)
    if name == "scan" and capacity is None:
        with pytest.raises(ValueError, match=r"looked up in a loop, a jrec\.Table needs a capacity"):
            gradient(table)
        return
    check((jax.jit(gradient) if jitted else gradient)(table), dense_gradient(function, rows))


def test_vmap_over_ragged_bags(rows):
    ids = jnp.array([[1, 2, 3, 30], [4, 4, 5, 6]])
    offsets = jnp.array([[0, 1, 3], [0, 4, 4]])

    def loss(table, ids, offsets):
        return jnp.sum(jnp.sin(embedding_bag(table, ids, offsets, combiner="mean")), axis=1)

    def total(table):
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0, 0))(table, ids, offsets) ** 2)

    def one_by_one(rows):
        return sum(jnp.sum(loss(rows, *each) ** 2) for each in zip(ids, offsets, strict=True))

    check(jax.grad(total)(Table(rows)), dense_gradient(one_by_one, rows))


@pytest.mark.parametrize("capacity", [None, ROWS])
def test_tables_are_made_in_traced_functions(rows, capacity):
    def loss(rows):
        return loss_of(Table(rows, capacity=capacity))

    expected = jax.grad(loss_of)(rows)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(rows), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jvp(loss, (rows,), (expected,))[1], np.sum(expected**2), rtol=1e-5)
    check(jax.jit(lambda rows: jax.grad(loss_of)(Table(rows)))(rows), expected)
    made = jax.jit(Table)(rows)
    assert isinstance(made, Table)
    np.testing.assert_array_equal(made.array, rows)
    moved = jax.jvp(lambda rows: Table(rows).array, (rows,), (expected,))[1]
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


def test_jvp(rows):
    direction = jax.grad(loss_of)(Table(rows))
    value, change = jax.jvp(loss_of, (Table(rows),), (direction,))
    expected = jax.jvp(loss_of, (rows,), (direction.array(),))
    np.testing.assert_allclose((value, change), expected, rtol=1e-5)
    others = jax.grad(loss_of)(Table(rows), jnp.array([[7, 8]]))  # of rows most of which are not looked up
    np.testing.assert_allclose(
        jax.jvp(loss_of, (Table(rows),), (others,))[1], jax.jvp(loss_of, (rows,), (others.array(),))[1], rtol=1e-5
    )
    weights = jnp.ones(IDS.shape)
    moved = jax.jvp(lambda w: embedding_bag(Table(rows), IDS, weights=w), (weights,), (2 * weights,))
    np.testing.assert_allclose(moved[1], 2 * embedding_bag(rows, IDS), rtol=1e-6)


def test_linearize_and_shapes(rows):
    table = Table(rows)
    direction = jax.grad(loss_of)(table)
    _, change = jax.linearize(loss_of, table)
    np.testing.assert_allclose(change(direction), direction.squared_norm(), rtol=1e-5)
    assert jax.eval_shape(loss_of, table).shape == ()
    assert "RowGradients[37,4] of 6 lookups" in str(jax.make_jaxpr(jax.grad(loss_of))(table))
    assert float(jax.lax.fori_loop(0, 3, lambda i, total: total + loss_of(table), 0.0)) == pytest.approx(
        3 * float(loss_of(rows)), rel=1e-6
    )


def conditional(table):
    return jax.lax.cond(True, loss_of, lambda table: 0.0, table)


# What the documentation names: where JAX learns one of these, its line goes there and here.
UNSUPPORTED = {
    "checkpoint": (lambda table: jax.grad(jax.checkpoint(loss_of))(table), Exception, ""),
    "grad of cond": (lambda table: jax.jit(jax.grad(conditional))(table), Exception, ""),
    "device_put": (jax.device_put, NotImplementedError, "does not yet support"),
    "second derivative": (
        lambda table: jax.grad(lambda table: jax.grad(loss_of)(table).squared_norm())(table),
        NotImplementedError,
        "a second derivative by a jrec.Table",
    ),
    "a gradient each": (
        lambda table: jax.vmap(lambda one: jax.grad(loss_of)(table, one[None]))(IDS),
        NotImplementedError,
        "jax.vmap of the gradient of a jrec.Table",
    ),
    "grad of shard_map": (
        lambda table: jax.jit(jax.grad(lambda table: _sharded(table)))(table),
        NotImplementedError,
        "take the gradient inside of it",
    ),
}


def _sharded(table):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(loss_of, mesh=mesh, in_specs=(TableSpec(),), out_specs=P(), check_vma=False)(table)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_raises(rows, name):
    function, error, text = UNSUPPORTED[name]
    with pytest.raises(error, match=re.escape(text) or None):
        function(Table(rows))
    assert float(jax.jit(conditional)(Table(rows))) == pytest.approx(float(loss_of(rows)), rel=1e-6)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("capacity", [None, 12])
def test_shard_map(rows, mesh, capacity):
    ids = jnp.array([[1, 2], [2, 3], [3, 36], [-1, 1]])
    optimizer = jrec.ops.SGD(learning_rate=0.5)

    def step(table, ids):
        value, gradients = jax.value_and_grad(loss_of)(table, ids)
        table, _ = row_step(optimizer, table, {}, gradients.summed_over("d"))
        return table, jax.lax.psum(value, "d")

    specs = {"in_specs": (TableSpec(), P("d")), "out_specs": (TableSpec(), P()), "check_vma": False}
    table, value = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(Table(rows, capacity=capacity), ids)
    expected, gradient = jax.value_and_grad(loss_of)(rows, ids)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(table.array, rows - 0.5 * gradient, rtol=1e-5, atol=1e-6)


# Arithmetic


def test_row_gradients_are_a_vector_space(rows):
    first, second = (jax.grad(loss_of)(Table(rows), ids) for ids in (IDS, jnp.array([[7, 8]])))
    expected = [np.asarray(one.array()) for one in (first, second)]
    check(first + second, expected[0] + expected[1])
    check(3 * first, 3 * expected[0])
    check(np.float32(3) * first, 3 * expected[0])
    check(first / 2, expected[0] / 2)
    check(-first, -expected[0])
    check(jax.jit(lambda a, b: (a + b) * 2.0)(first, second), 2 * (expected[0] + expected[1]))
    for add in (lambda a, b: sum([a, b]), optax.tree.add, jax.jit(optax.tree.add)):
        check(add(first, second), expected[0] + expected[1])
    with pytest.raises(TypeError, match=r"RowGradients\[.*\] of 6 lookups is added to row gradients of its table, not"):
        1 + first
    assert float((first + second).squared_norm()) == pytest.approx(float(np.sum((expected[0] + expected[1]) ** 2)))
    with pytest.raises(TypeError, match="of the same table"):
        first + jax.grad(loss_of)(Table(rows[:, :2]))
    with pytest.raises(TypeError, match="single number"):
        first * jnp.ones(3)
    with pytest.raises(TypeError, match="has no arithmetic"):
        Table(rows) * 2
    with pytest.raises(TypeError, match="has no arithmetic"):
        jax.jit(lambda table: 2 * table)(Table(rows))
    with pytest.raises(TypeError, match=r"RowGradients\[.*\] of 6 lookups is no array; its rows\(\) are arrays"):
        np.asarray(first)


def test_a_table_among_arrays(rows):
    """What programs do with the leaves of parameters, and where they go on as with an array."""
    table = Table(rows)
    np.testing.assert_array_equal(np.asarray(table), np.asarray(rows))
    assert np.asarray(Table(rows.astype(jnp.bfloat16))).dtype == jnp.bfloat16
    assert (table.size, table.nbytes, np.array(table).flags.writeable) == (rows.size, rows.nbytes, True)
    assert sum(leaf.size for leaf in jax.tree.leaves({"table": table, "w": jnp.ones(3)})) == rows.size + 3
    assert jax.jit(lambda table: jnp.zeros(table.size))(table).shape == (rows.size,)
    for pick in (lambda table: table[IDS], lambda table: table[0]):
        for call in (pick, jax.jit(pick), jax.grad(lambda table, pick=pick: pick(table).sum())):
            with pytest.raises(TypeError, match=r"no rows to pick.*look ids up by jrec\.embedding_bag\(table, ids\)"):
                call(table)
    for multiply in (lambda table: table @ rows[0], lambda table: rows @ table):
        for call in (multiply, jax.jit(multiply)):
            with pytest.raises(TypeError, match=r"has no arithmetic.*table\.array is the array"):
                call(table)


def test_programs_of_other_sizes_are_not_taken(rows):
    dense = jax.jit(lambda gradients: gradients.array())
    for ids in (IDS, IDS[:1], jnp.concatenate([IDS, IDS])):
        expected = jax.grad(loss_of)(rows, ids)
        np.testing.assert_allclose(dense(jax.grad(loss_of)(Table(rows), ids)), expected, atol=1e-6)


# Steps

OPTIMIZERS = [
    jrec.ops.SGD(learning_rate=0.1),
    jrec.ops.Momentum(learning_rate=0.1),
    jrec.ops.Adagrad(learning_rate=0.1),
    jrec.ops.RowWiseAdagrad(learning_rate=0.1),
    jrec.ops.RMSProp(learning_rate=0.01),
    jrec.ops.Adam(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    jrec.ops.RowWiseRMSProp(learning_rate=0.01),
    jrec.ops.RowWiseAdam(learning_rate=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_a_step_has_the_bits_of_two_phases(rows, optimizer, implementation):
    draw = np.random.default_rng(0)
    batches = [jnp.asarray(draw.integers(-1, ROWS, (5, 3)), jnp.int32) for _ in range(6)]
    target = jnp.ones(DIM)

    @jax.jit
    def citizens(table, slots, ids, number):
        gradients = jax.grad(lambda table: jnp.mean((embedding_bag(table, ids) @ target - 1.0) ** 2))(table)
        return row_step(optimizer, table, slots, gradients, step=number)

    @jax.jit
    def two_phases(rows, slots, ids, number):
        activations, residuals = jrec.lookup({"t": rows}, {"t": Bags(ids=ids)}, implementation=implementation)
        gradients = jax.grad(lambda a: jnp.mean((a @ target - 1.0) ** 2))(activations["t"])
        options = {"step": number, "implementation": implementation}
        tables, slots = jrec.apply_gradients(
            optimizer, {"t": rows}, {"t": slots}, residuals, {"t": gradients}, **options
        )
        return tables["t"], slots["t"]

    table, own = Table(rows, implementation=implementation), optimizer.init(rows)
    plain, other = rows, optimizer.init(rows)
    for number, ids in enumerate(batches):
        table, own = citizens(table, own, ids, jnp.int32(number))
        plain, other = two_phases(plain, other, ids, jnp.int32(number))
    np.testing.assert_array_equal(table.array, plain)
    for name, slot in other.items():
        np.testing.assert_array_equal(own[name], slot)


def test_a_donated_step_has_no_other_array_of_the_tables_size():
    rows, dim = 100_003, 4
    optimizer = jrec.ops.RowWiseAdagrad(learning_rate=0.1)

    def step(table, slots, ids):
        gradients = jax.grad(lambda table: jnp.sum(embedding_bag(table, ids) ** 2))(table)
        return row_step(optimizer, table, slots, gradients)

    array = jnp.zeros((rows, dim))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(Table(array), optimizer.init(array), IDS).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= rows * (dim + 1) * 4
    assert memory.temp_size_in_bytes < 10_000
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and str(rows) in line]


def test_a_step_refuses_what_does_not_belong_together(rows):
    table, optimizer = Table(rows), jrec.ops.Adagrad(learning_rate=0.1)
    gradients = jax.grad(loss_of)(table)
    with pytest.raises(ValueError, match="keeps slots"):
        row_step(optimizer, table, {}, gradients)
    with pytest.raises(ValueError, match=r"must be a jrec\.Table"):
        row_step(optimizer, rows, optimizer.init(rows), gradients)
    with pytest.raises(ValueError, match=r"must be the jrec\.RowGradients"):
        row_step(optimizer, Table(rows[1:]), optimizer.init(rows[1:]), gradients)
    with pytest.raises(ValueError, match="capacity is 0"):
        Table(rows, capacity=0)
    with pytest.raises(ValueError, match="rows must be"):
        Table(jnp.zeros(3))


# optax


def params_of(rows):
    return {"table": Table(rows), "w": jnp.linspace(0.5, 1.0, DIM)}


def loss_of_params(params, ids=IDS):
    return jnp.mean((embedding_bag(params["table"], ids) @ params["w"] - 1.0) ** 2)


def test_optax_steps_tables_and_arrays(rows):
    tx = optax.chain(
        jrec.optax.clip_by_global_norm(0.05),
        jrec.optax.partition(rows=jrec.optax.adagrad(0.1), dense=optax.sgd(1e-2)),
    )
    dense = optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.partition(
            {"rows": optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-14), "dense": optax.sgd(1e-2)},
            {"table": "rows", "w": "dense"},
        ),
    )

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_of_params)(params), state, params)
        return jrec.optax.apply_updates(params, updates), state

    params, plain = params_of(rows), {**params_of(rows), "table": rows}
    state, of_plain = tx.init(params), dense.init(plain)
    for _ in range(4):
        params, state = step(params, state)
        updates, of_plain = dense.update(jax.grad(loss_of_params)(plain), of_plain, plain)
        plain = optax.apply_updates(plain, updates)
    np.testing.assert_allclose(params["table"].array, plain["table"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-5)


@pytest.mark.parametrize("name", [kind.name for kind in OPTIMIZERS])
def test_named_optimizers(rows, name):
    tx = getattr(jrec.optax, name)(0.1)
    table = Table(rows)
    state = tx.init(table)
    gradients = jax.grad(loss_of)(table)
    updates, state = tx.update(gradients, state, table)
    optimizer = ROW_OPTIMIZERS[name](learning_rate=0.1)
    expected, slots = row_step(optimizer, table, optimizer.init(rows), gradients)
    np.testing.assert_array_equal(jrec.optax.apply_updates(table, updates).array, expected.array)
    assert int(state.count) == 1
    for slot, values in slots.items():
        np.testing.assert_array_equal(state.slots[slot], values)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (jrec.optax.RowOptions, ["sgd"]),
        (jrec.optax.MomentumOptions, ["momentum"]),
        (jrec.optax.AdagradOptions, ["adagrad", "rowwise_adagrad"]),
        (jrec.optax.RMSPropOptions, ["rmsprop", "rowwise_rmsprop"]),
        (jrec.optax.AdamOptions, ["adam", "rowwise_adam"]),
    ],
)
def test_options_are_the_hyperparameters_of_their_optimizers(options, names):
    for name in names:
        fields = {field.name for field in dataclasses.fields(ROW_OPTIMIZERS[name])}
        assert fields - {"learning_rate"} == options.__optional_keys__
        assert (
            f"Unpack[{options.__name__}]"
            == inspect.signature(getattr(jrec.optax, name)).parameters["options"].annotation
        )


def test_bfloat16_rows_are_rounded_stochastically(rows):
    table = Table(jnp.ones((ROWS, DIM), jnp.bfloat16))
    tx = jrec.optax.sgd(2.0**-10, rounding_seed=7)
    state, gradient = tx.init(table), jax.grad(lambda table: -jnp.sum(embedding_bag(table, jnp.arange(ROWS))))
    for _ in range(4):
        updates, state = tx.update(gradient(table), state, table)
        table = jrec.optax.apply_updates(table, updates)
    values = np.asarray(table.array, np.float32)
    assert 1 < values.mean() < 1 + 2.0**-6
    assert len(np.unique(values)) > 1


def test_learning_rates_that_optax_injects(rows):
    """They are tracers in a jitted step, and may be set between steps."""

    @optax.inject_hyperparams
    def injected(rate):
        return jrec.optax.partition(rows=jrec.optax.adagrad(rate), dense=optax.sgd(0.1))

    def steps(tx, params, set_rate=lambda state, rate: None):
        state = tx.init(params)
        step = jax.jit(lambda params, state: tx.update(jax.grad(lambda p: loss_of(p["t"]))(params), state, params))
        for rate in (0.5, 0.25):
            set_rate(state, rate)
            updates, state = step(params, state)
            params = jrec.optax.apply_updates(params, updates)
        return np.asarray(params["t"])

    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5})
    plain = jrec.optax.partition(rows=jrec.optax.adagrad(schedule), dense=optax.sgd(0.1))
    expected, params = steps(plain, {"t": Table(rows), "w": jnp.ones(2)}), {"t": Table(rows), "w": jnp.ones(2)}
    found = steps(injected(rate=1.0), params, lambda state, rate: state.hyperparams.update(rate=jnp.float32(rate)))
    np.testing.assert_array_equal(found, expected)


def test_frozen_tables_stay(rows):
    params = params_of(rows)
    tx = jrec.optax.partition(rows=jrec.optax.frozen(), dense=optax.sgd(0.1))
    updates, _ = tx.update(jax.grad(loss_of_params)(params), tx.init(params), params)
    after = jrec.optax.apply_updates(params, updates)
    np.testing.assert_array_equal(after["table"].array, rows)
    assert not np.array_equal(after["w"], params["w"])


def test_optax_on_tables_is_refused(rows):
    params = params_of(rows)
    with pytest.raises(TypeError, match=r"params\['w'\] is .* give both kinds of parameters to jrec.optax.partition"):
        jrec.optax.sgd(0.1).init(params)
    tx = jrec.optax.partition(rows=jrec.optax.sgd(0.1), dense=optax.sgd(0.1))
    gradients = jax.grad(loss_of_params)(params)
    with pytest.raises(ValueError, match=r"update\(gradients, state, params\)"):
        tx.update(gradients, tx.init(params))
    with pytest.raises(TypeError, match=r"no jrec\.RowGradients"):
        jrec.optax.sgd(0.1).update(rows, jrec.optax.sgd(0.1).init(params["table"]), params["table"])
    decayed = optax.chain(optax.add_decayed_weights(0.1), tx)
    with pytest.raises(TypeError, match="weight_decay of their own"):
        decayed.update(gradients, decayed.init(params), params)
    for unfit in (optax.scale_by_adam(), optax.ema(0.9), optax.clip_by_global_norm(1.0)):
        remedy = "in jrec.optax"
        with pytest.raises(TypeError, match=re.escape(remedy)), jax.numpy_dtype_promotion("standard"):
            unfit.update(gradients, unfit.init(params), params)
        with pytest.raises(TypeError, match=re.escape(remedy)), jax.numpy_dtype_promotion("standard"):
            jax.jit(unfit.update)(gradients, unfit.init(params), params)
    with pytest.raises(TypeError, match=r"the optimizers of tables are in jrec\.optax"):
        gradients["table"] + rows


# Flax


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = jrec.nn.Embed(ROWS, DIM, rngs=rngs)
        self.linear = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids):
        return self.linear(jnp.mean(self.embed(ids), axis=1))[:, 0]


class Plain(Model):
    def __init__(self, rngs):
        self.embed = nnx.Embed(ROWS, DIM, rngs=rngs)
        self.linear = nnx.Linear(DIM, 1, rngs=rngs)


def test_flax_modules_train_as_with_nnx_embed():
    ids = jnp.array([[5, 7, 5], [0, 1, 36]])
    model, plain = Model(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    optimizer = jrec.nn.Optimizer(
        model, jrec.optax.partition(rows=jrec.optax.sgd(0.1), dense=optax.sgd(0.1)), wrt=nnx.Param
    )
    other = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)

    def loss(model):
        return jnp.mean((model(ids) - 1.0) ** 2)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    for _ in range(4):
        value = step(model, optimizer)
        expected, gradients = nnx.value_and_grad(loss)(plain)
        other.update(plain, gradients)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(model.embed.embedding.get_value().array, plain.embed.embedding[...], rtol=1e-5)
    np.testing.assert_allclose(model.linear.kernel[...], plain.linear.kernel[...], rtol=1e-5)
    assert int(optimizer.step[...]) == 4
    np.testing.assert_allclose(
        model.embed.attend(jnp.ones((2, DIM))), plain.embed.attend(jnp.ones((2, DIM))), rtol=1e-5
    )


def test_embedding_bag_layer():
    layer = jrec.nn.EmbeddingBag(ROWS, DIM, combiner="mean", rngs=nnx.Rngs(0))
    rows = layer.embedding.get_value().array
    weights = jnp.ones(IDS.shape) * 2
    np.testing.assert_array_equal(
        layer(IDS, weights=weights), embedding_bag(rows, IDS, weights=weights, combiner="mean")
    )
    gradients = nnx.grad(lambda layer: jnp.sum(layer(IDS) ** 2))(layer)
    expected = jax.grad(lambda rows: jnp.sum(embedding_bag(rows, IDS, combiner="mean") ** 2))(rows)
    check(gradients.embedding.get_value(), expected)
    with pytest.raises(ValueError, match="combiner 'product' is unknown"):
        jrec.nn.EmbeddingBag(ROWS, DIM, combiner="product", rngs=nnx.Rngs(0))
