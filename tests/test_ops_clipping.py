"""Clipping by a norm over dense parameters and tables, without a gradient of a table's size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from jrec import ops

LIMIT, RATE = 0.5, 0.1
ROWS = {"a": 40, "b": 7}


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize("kind", reference.ID_KINDS)
def test_the_norm_is_that_of_summed_row_gradients(kind, implementation):
    rng = np.random.default_rng(0)
    shapes = {"a": reference.SHAPES[2], "b": reference.SHAPES[8], "c": reference.SHAPES[11]}
    cases = {name: reference.make_case(shape, rng, kind=kind, past=True) for name, shape in shapes.items()}
    tables = {name: jnp.asarray(case.table) for name, case in cases.items()}
    bags = {name: ops.Bags(ids=case.ids, offsets=case.offsets, weights=case.weights) for name, case in cases.items()}
    gradients = {name: jnp.asarray(case.bag_gradients) for name, case in cases.items()}
    squares = {name: sum(np.sum(g**2) for g in reference.row_gradients(case).values()) for name, case in cases.items()}

    @jax.jit
    def norms(tables, bags, gradients):
        _, residuals = ops.lookup(tables, bags, implementation=implementation)
        some = {name: gradients[name] for name in "ac"}
        of_all = ops.squared_gradient_norm(residuals, gradients, implementation=implementation)
        return residuals, of_all, ops.squared_gradient_norm(residuals, some)

    residuals, got, without = norms(tables, bags, gradients)
    np.testing.assert_allclose(got, sum(squares.values()), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(without, squares["a"] + squares["c"], rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match=r"gradients are named \['z'\], but residuals only \['a', 'b', 'c'\]"):
        ops.squared_gradient_norm(residuals, {"z": gradients["a"]})


@pytest.mark.parametrize("limit", [LIMIT, 1e6])
def test_clipped_steps_equal_optax_on_dense_tables(limit):
    rng = np.random.default_rng(1)
    tables = {name: jnp.asarray(rng.normal(size=(rows, 4)), jnp.float32) for name, rows in ROWS.items()}
    weights = jnp.asarray(rng.normal(size=8), jnp.float32)
    ids = {name: jnp.asarray(rng.integers(0, rows, (16, 5)), jnp.int32) for name, rows in ROWS.items()}
    bags = {name: ops.Bags(ids=of) for name, of in ids.items()}

    def loss(weights, activations):
        return jnp.sum(jnp.square(jnp.concatenate([activations["a"], activations["b"]], axis=1) @ weights))

    def dense_loss(params):
        weights, tables = params
        return loss(weights, {name: ops.embedding_bag(tables[name], ids[name]) for name in ROWS})

    optimizer = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(RATE))
    params = weights, tables
    slopes = jax.grad(dense_loss)(params)
    want = optax.apply_updates(params, optimizer.update(slopes, optimizer.init(params))[0])

    @jax.jit
    def step(weights, tables):
        activations, residuals = ops.lookup(tables, bags)
        slope, gradients = jax.grad(loss, argnums=(0, 1))(weights, activations)
        squares = ops.squared_gradient_norm(residuals, gradients) + jnp.sum(jnp.square(slope))
        scale = jnp.minimum(1.0, limit * jax.lax.rsqrt(squares))
        sgd = ops.SGD(learning_rate=RATE)
        new, _ = ops.apply_gradients(sgd, tables, {"a": {}, "b": {}}, residuals, gradients, gradient_scale=scale)
        return weights - RATE * scale * slope, new

    got = step(weights, tables)
    assert optax.tree.norm(slopes) > LIMIT
    assert not np.allclose(want[0], weights)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)
