"""What programs of ops hold, their donated buffers and repeated runs; ``test_transforms`` has JAX's transformations."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jrec import ops

IMPLEMENTATIONS = ("xla", "native", None)
OPTIMIZER = ops.Adam(learning_rate=0.1)
ROWS, DIM, BAGS, LENGTH = 60, 12, 32, 5


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def table(rng):
    return jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32)


@pytest.fixture
def ids(rng):
    return jnp.asarray(rng.integers(-1, ROWS, (BAGS, LENGTH)), jnp.int32)


def _ops(implementation):
    """Functions of (table, ids, bag gradients), each one op."""

    def cast(ids):
        return ops.tensor_cast(ids, num_rows=ROWS, implementation=implementation)

    def update(table, ids, gradients):
        slots = OPTIMIZER.init(table)
        return ops.casted_update(OPTIMIZER, table, slots, cast(ids), gradients, implementation=implementation)

    def row_update(table, ids, gradients):
        n = gradients.shape[0]
        rows = jnp.arange(n, dtype=jnp.int32) + ids[0, 0] * 0
        return ops.row_update(OPTIMIZER, table, OPTIMIZER.init(table), rows, gradients, implementation=implementation)

    return {
        "gather_reduce": lambda table, ids, _: ops.gather_reduce(table, ids, implementation=implementation),
        "tensor_cast": lambda table, ids, _: cast(ids),
        "embedding_bag": lambda table, ids, _: ops.embedding_bag(
            table, ids, combiner="mean", implementation=implementation
        ),
        "casted_update": update,
        "row_update": row_update,
    }


OPS = tuple(_ops("xla"))


def _assert_close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def _bags(ids, ragged):
    """Padded bags, or ragged ones of the same ids, which begin at equal distances."""
    if not ragged:
        return ops.Bags(ids=ids)
    return ops.Bags(ids=ids.reshape(-1), offsets=jnp.arange(0, ids.size + 1, ids.shape[1], dtype=jnp.int32))


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_and_updates_in_shard_map_without_its_checks(implementation, ragged, rng):
    """Tables of each device, in both ways: gradients of whole tables, and updates in place."""

    def step(table, ids):
        bags = _bags(ids, ragged)

        def loss(table):
            options = {"combiner": "mean", "implementation": implementation}
            return jnp.sum(jnp.sin(ops.embedding_bag(table, bags.ids, bags.offsets, **options)))

        activations, residuals = ops.lookup({"t": table}, {"t": bags}, implementation=implementation)
        slots = ops.init_slots(OPTIMIZER, {"t": table})
        arguments = OPTIMIZER, {"t": table}, slots, residuals, activations
        return jax.grad(loss)(table), ops.apply_gradients(*arguments, implementation=implementation)

    tables = jnp.asarray(rng.normal(size=(4 * ROWS, DIM)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, ROWS, (4 * BAGS, LENGTH)), jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    run = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    got = jax.jit(run)(tables, ids)
    want = [step(t, i) for t, i in zip(tables.reshape(4, ROWS, DIM), ids.reshape(4, BAGS, LENGTH), strict=True)]
    _assert_close(got, jax.tree.map(lambda *parts: jnp.concatenate(parts), *want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_two_runs_are_bit_equal(op, implementation, table, ids, rng):
    gradients = jnp.asarray(rng.normal(size=(BAGS, DIM)), jnp.float32)
    run = jax.jit(_ops(implementation)[op])
    first, second = run(table, ids, gradients), run(table, ids, gradients)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def _train_step(optimizer, implementation):
    def step(tables, slots, bags, step):
        activations, residuals = ops.lookup(tables, bags, implementation=implementation)
        gradients = jax.tree.map(lambda a: 2 * a, activations)
        return ops.apply_gradients(
            optimizer, tables, slots, residuals, gradients, step=step, implementation=implementation
        )

    return jax.jit(step, donate_argnums=(0, 1))


def _big(rng, optimizer, rows=200_000, dim=16):
    tables = {"t": jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32)}
    bags = {"t": ops.Bags(ids=jnp.asarray(rng.integers(0, rows, (64, 3)), jnp.int32))}
    return tables, ops.init_slots(optimizer, tables), bags, jnp.int32(0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", [ops.SGD(learning_rate=0.1), ops.RowWiseAdagrad(learning_rate=0.1), OPTIMIZER])
def test_a_step_holds_nothing_of_the_tables_size(optimizer, implementation, rng):
    arguments = _big(rng, optimizer)
    compiled = _train_step(optimizer, implementation).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    state = sum(x.nbytes for x in jax.tree.leaves(arguments[:2]))
    assert memory.alias_size_in_bytes == state
    assert memory.temp_size_in_bytes < 200_000 * 4  # a byte array of a quarter of a slot's rows would show
    assert not re.search(r"= f32\[200000(,16)?\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_tables_are_updated_where_they_lie(implementation, rng):
    tables, slots, bags, step = _big(rng, OPTIMIZER)
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((tables, slots))}
    new = jax.block_until_ready(_train_step(OPTIMIZER, implementation)(tables, slots, bags, step))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)} == before
    assert tables["t"].is_deleted()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_donation_the_old_tables_stay(implementation, table, ids, rng):
    gradients = jnp.asarray(rng.normal(size=(BAGS, DIM)), jnp.float32)
    old = np.array(table)
    new, _ = jax.jit(_ops(implementation)["casted_update"])(table, ids, gradients)
    np.testing.assert_array_equal(table, old)
    assert np.any(np.asarray(new) != old)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lookup_takes_the_casts_of_the_loader(implementation, table, ids):
    cast = ops.tensor_cast(ids, num_rows=ROWS, implementation="xla")
    _, residuals = ops.lookup({"t": table}, {"t": ops.Bags(ids=ids, cast=cast)}, implementation=implementation)
    assert all(map(operator.is_, jax.tree.leaves(residuals["t"].cast), jax.tree.leaves(cast)))


def test_names_must_agree(table, ids):
    with pytest.raises(ValueError, match=r"bags are named \['u'\], but the tables are \['t'\]"):
        ops.lookup({"t": table}, {"u": ops.Bags(ids=ids)})


def test_scan_over_steps_equals_single_steps(table, ids):
    step = _train_step(OPTIMIZER, "native")
    bags = {"t": ops.Bags(ids=ids)}
    tables = {"t": jnp.array(table)}
    slots = ops.init_slots(OPTIMIZER, tables)

    def body(carry, i):
        return step(*carry, bags, i), None

    (scanned, _), _ = jax.jit(functools.partial(jax.lax.scan, body))((tables, slots), jnp.arange(4, dtype=jnp.int32))
    for i in range(4):
        tables, slots = step(tables, slots, bags, jnp.int32(i))
    _assert_close(scanned["t"], tables["t"])
