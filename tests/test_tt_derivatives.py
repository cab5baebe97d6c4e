"""Derivatives of tensor-train bags, of any order, equal those taken id by id."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrec.ops.tt import TTShape, tt_embedding_bag, tt_init

SHAPE = TTShape.search(60, 8, ranks=3)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "native"])


@pytest.fixture(scope="module")
def case():
    """(cores, padded ids, their weights)."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-1, SHAPE.rows, (8, 4)), jnp.int32)
    return tt_init(SHAPE, jax.random.key(0), variance=1.0), ids, jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)


def loss(cores, ids, weights=None, **options):
    return jnp.sum(jnp.sin(tt_embedding_bag(cores, SHAPE, ids, weights=weights, **options)))


def naive(cores, ids, weights=None):
    return loss(cores, ids, weights, contraction="naive", implementation="xla")


def squares(gradients):
    return sum(jnp.sum(gradient**2) for gradient in gradients)


def close(got, want, *, rtol=2e-4, atol=2e-5):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=atol), got, want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("contraction", [pytest.param(None, marks=pytest.mark.slow), "sample"])
def test_first_and_second_order_in_both_directions(case, implementation, contraction):
    cores, ids, weights = case

    def ours(cores, weights):
        return loss(cores, ids, weights, implementation=implementation, contraction=contraction)

    def theirs(cores, weights):
        return naive(cores, ids, weights)

    changes = jax.tree.map(jnp.cos, (cores, weights))
    derivatives = {
        "gradients": lambda f: jax.grad(f, (0, 1))(cores, weights),
        "tangent": lambda f: jax.jvp(f, (cores, weights), changes)[1],
        "Hessian times a change": lambda f: jax.jvp(jax.grad(f, (0, 1)), (cores, weights), changes)[1],
        "gradient of a gradient": lambda f: jax.grad(lambda c: sum(jnp.sum(g**2) for g in jax.grad(f)(c, weights)))(
            cores
        ),
    }
    for derive in derivatives.values():
        got, want = jax.jit(derive, static_argnums=0)(ours), jax.jit(derive, static_argnums=0)(theirs)
        close(got, want, rtol=1e-3, atol=1e-3)


def test_ragged_bags_of_16_bit_cores(case):
    cores, ids, weights = case
    cores = tuple(core.astype(jnp.bfloat16) for core in cores)
    offsets = jnp.asarray([0, 3, 3, 20, 32], jnp.int32)

    def ours(cores, weights, **options):
        pooled = tt_embedding_bag(cores, SHAPE, ids.reshape(-1), offsets, weights=weights, combiner="mean", **options)
        return jnp.sum(jnp.sin(pooled))

    got = jax.jit(jax.grad(ours, (0, 1)))(cores, weights.reshape(-1) ** 2)
    want = jax.grad(lambda *args: ours(*args, contraction="naive"), (0, 1))(cores, weights.reshape(-1) ** 2)
    assert [g.dtype for g in got[0]] == ["bfloat16"] * SHAPE.num_cores
    close(jax.tree.map(np.float32, got), jax.tree.map(np.float32, want), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("floats", "bags"), [(30, 7), (42, 9), (54, 10)])  # pieces of 5, 7 and 9 entries
def test_entries_of_two_windows_are_summed_once(case, floats, bags):
    """XLA's backward pass on CPUs goes over pieces, of which the last begins among the entries of the one before."""
    # As many entries as there is room for; and shapes of no other test, whose traced pieces JAX would take again.
    cores, ids = case[0], jnp.arange(4 * bags, dtype=jnp.int32).reshape(bags, 4)
    with mock.patch("jrec.ops.tt.products._PIECE_FLOATS", floats):
        got = jax.jit(jax.grad(lambda cores: loss(cores, ids, implementation="xla", contraction="unique")))(cores)
    close(got, jax.grad(naive)(cores, ids))
