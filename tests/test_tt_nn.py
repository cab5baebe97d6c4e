import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jrec.nn import TTEmbeddingBag
from jrec.ops.tt import TTShape, tt_embedding_bag, tt_rows, tt_to_dense

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = TTShape.search(1000, 8, ranks=6)


def test_module_is_the_op_on_its_parameters():
    bag = TTEmbeddingBag(SHAPE, combiner="mean", rngs=nnx.Rngs(0))
    ids = jnp.array([[3, 999], [5, -1], [-1, -1]], jnp.int32)
    out = bag(ids)
    np.testing.assert_array_equal(out, tt_embedding_bag(bag.arrays(), SHAPE, ids, combiner="mean"))
    rows = tt_rows(bag.arrays(), SHAPE, [3, 999, 5])
    np.testing.assert_allclose(out, [rows[:2].mean(0), rows[2], np.zeros(8)], rtol=1e-5, atol=1e-7)
    highest = TTEmbeddingBag(SHAPE, combiner="max", cores=bag.arrays())(ids)
    np.testing.assert_allclose(highest, [rows[:2].max(0), rows[2], np.zeros(8)], rtol=1e-5, atol=1e-7)
    parameters = jax.tree.leaves(nnx.state(bag, nnx.Param))
    assert sum(p.size for p in parameters) == SHAPE.num_parameters


def test_any_optax_optimizer_trains_it_towards_a_table():
    rng = np.random.default_rng(0)
    target = jnp.asarray(tt_to_dense(TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(1)).arrays(), SHAPE) * 30)
    bag = TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        optimizer = nnx.Optimizer(bag, optax.adam(0.02), wrt=nnx.Param)

        @nnx.jit
        def step(bag, optimizer, ids):
            def loss(bag):
                return jnp.mean(jnp.square(bag(ids) - target[ids[:, 0]])) / jnp.mean(jnp.square(target))

            value, gradients = nnx.value_and_grad(loss)(bag)
            optimizer.update(bag, gradients)
            return value

        losses = [
            float(step(bag, optimizer, jnp.asarray(rng.integers(0, 1000, (256, 1)), jnp.int32))) for _ in range(150)
        ]
    assert losses[-1] < 0.5 * losses[0]


def test_from_table_reproduces_it():
    table = tt_to_dense(TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(1)).arrays(), SHAPE)
    bag = TTEmbeddingBag.from_table(table, SHAPE.with_ranks(1), relative_error=1e-3)
    assert bag.shape.ranks == (6, 6)
    out = bag(jnp.arange(1000, dtype=jnp.int32)[:, None])
    assert np.linalg.norm(out - table) <= 1.1e-3 * np.linalg.norm(table)


def test_cores_that_are_larger_than_their_table_are_warned_of():
    table = np.random.default_rng(0).normal(size=(SHAPE.rows, SHAPE.dim))
    shape = SHAPE.with_ranks(SHAPE.max_ranks)
    with pytest.warns(
        UserWarning, match=rf"have {shape.num_parameters:,} elements, but the table {table.size:,}: lower"
    ):
        TTEmbeddingBag.from_table(table, shape)


def test_bfloat16_and_refusals():
    bag = TTEmbeddingBag(SHAPE, dtype="bfloat16", rngs=nnx.Rngs(0))
    assert {core.dtype.name for core in bag.arrays()} == {"bfloat16"}
    assert bag(jnp.zeros((2, 1), jnp.int32)).dtype == jnp.float32
    with pytest.raises(ValueError, match="needs rngs"):
        TTEmbeddingBag(SHAPE)
    with pytest.raises(ValueError, match="the cores have shapes"):
        TTEmbeddingBag(SHAPE, cores=bag.arrays()[:2])
