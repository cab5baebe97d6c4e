"""Outputs and gradients of the embedding bag against float64 NumPy."""

import doctest
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings

from jrec import ops
from jrec.ops import embedding_bag as public

IMPLEMENTATIONS = ("xla", "native")
S = reference.SHAPES
COMBINERS = {
    "sum": (S[0], S[2], S[3], S[7], S[11]),
    "mean": (S[4], S[8], S[12]),
    "sqrtn": (S[5], S[9], S[13]),
    "max": (S[1], S[2], S[6], S[10], S[12]),
}


@functools.partial(jax.jit, static_argnames=("combiner", "implementation"))
def _with_gradients(table, weights, ids, offsets, bag_gradients, *, combiner, implementation):
    def bag(table, weights):
        return ops.embedding_bag(table, ids, offsets, weights=weights, combiner=combiner, implementation=implementation)

    out, pullback = jax.vjp(bag, table, weights)
    return out, *pullback(bag_gradients)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("combiner", COMBINERS)
def test_output_and_gradients_equal_reference(combiner, implementation):
    @given(case=reference.cases(COMBINERS[combiner]))
    @settings(max_examples=30)
    def check(case):
        out, table_gradient, weight_gradient = _with_gradients(
            case.table, case.weights, case.ids, case.offsets, case.bag_gradients,
            combiner=combiner, implementation=implementation,
        )  # fmt: skip
        want, want_table, want_weights = reference.embedding_bag(case, combiner)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)
        assert table_gradient.dtype == case.table.dtype
        eps = reference.EPSILON[case.shape.dtype]
        np.testing.assert_allclose(
            np.asarray(table_gradient, np.float64), want_table, rtol=1e-4 + eps, atol=reference.slack(case) + eps
        )
        if case.weights is not None:
            np.testing.assert_allclose(weight_gradient, want_weights, rtol=1e-4, atol=1e-4)

    check()


def test_docstring_example():
    found = doctest.DocTestFinder().find(public, "embedding_bag", globs={"embedding_bag": public})
    assert sum(len(test.examples) for test in found) >= 4
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("combiner", ["sum", "max"])
def test_an_id_past_the_table_raises_or_is_nan_under_jit(combiner, implementation):
    table, ids = jnp.ones((3, 2)), jnp.array([[0, 1], [2, 3]], jnp.int32)
    with pytest.raises(ValueError, match=r"ids\[1, 1\] is 3, but the table has 3 rows"):
        ops.embedding_bag(table, ids, combiner=combiner, implementation=implementation)
    got = jax.jit(functools.partial(ops.embedding_bag, combiner=combiner, implementation=implementation))(table, ids)
    assert np.all(np.isfinite(got[0]))
    assert np.all(np.isnan(got[1]))


def test_unknown_combiner():
    with pytest.raises(ValueError, match="combiner 'min' is unknown"):
        ops.embedding_bag(jnp.ones((3, 2)), jnp.zeros((1, 1), jnp.int32), combiner="min")


def test_max_obeys_the_named_implementation():
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        ops.embedding_bag(jnp.ones((3, 2)), jnp.zeros((1, 1), jnp.int32), combiner="max", implementation="fast")


def test_max_of_infinite_rows_is_infinite():
    table = jnp.array([[-jnp.inf, 1.0], [jnp.inf, 2.0]])
    got = ops.embedding_bag(table, jnp.array([[0, -1], [1, 0]], jnp.int32), combiner="max", implementation="xla")
    np.testing.assert_array_equal(got, [[-jnp.inf, 1.0], [jnp.inf, 2.0]])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize(
    ("ids", "offsets"), [([2, 1, 2], [0, 2, 2, 3]), ([], [0, 0]), ([], [0]), ([1], [0]), ([1], [0, 0])]
)
def test_ragged_bags_of_numpy_and_without_ids(combiner, implementation, ids, offsets):
    """NumPy's arrays as they are, outside jit; no bags, no ids, and ids behind the last bag."""
    table, ids, offsets = jnp.arange(6.0).reshape(3, 2), np.array(ids, np.int32), np.array(offsets, np.int32)
    pool = {"sum": np.sum, "mean": np.mean, "max": np.max}.get(
        combiner, lambda rows, axis: rows.sum(0) / len(rows) ** 0.5
    )
    bags = [np.asarray(table)[ids[low:high]] for low, high in itertools.pairwise(offsets)]
    expected = np.array([pool(rows, axis=0) if len(rows) else np.zeros(2) for rows in bags]).reshape(len(bags), 2)

    def pooled(table, weights=None):
        return ops.embedding_bag(table, ids, offsets, weights=weights, combiner=combiner, implementation=implementation)

    for call in (pooled, jax.jit(pooled)):
        np.testing.assert_allclose(call(table), expected, rtol=1e-6)
    changes = jax.grad(lambda *arrays: pooled(*arrays).sum(), argnums=(0, 1))(table, jnp.ones(ids.shape))
    moved = sum((rows.shape[0] for rows in bags), 0) if combiner == "sum" else sum(len(rows) > 0 for rows in bags)
    if combiner != "sqrtn":
        assert float(changes[0].sum()) == pytest.approx(2 * moved)
    assert changes[1].shape == ids.shape
