"""Softmax over all rows in blocks: losses and gradients against float64 NumPy, on one device and on several."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jrec
from jrec.mesh.route import AXIS
from jrec.nn import full_softmax, sampled_softmax

SHAPES = [(1, 1, 1, 1), (5, 7, 3, 4), (9, 8, 6, 4), (3, 40, 5, 1_024), (16, 33, 4, 8)]
"""Queries, rows, dim, and rows of a block, which divide the rows or do not."""


def case(n, m, dim, seed=0, dtype=np.float32):
    """Queries, the rows' numbers, some absent, rows, and each query's number, which may be of no row or absent."""
    draw = np.random.default_rng([seed, n, m])
    ids = draw.permutation(2 * m)[:m]
    ids[draw.random(m) < 0.2] = -1
    targets = np.where(draw.random(n) < 0.7, ids[draw.integers(0, m, n)], draw.integers(-1, 2 * m, n))
    queries, positives = draw.normal(size=(2, n, dim)).astype(np.float32)
    return queries, positives, draw.normal(size=(m, dim)).astype(dtype), targets, ids


def reference(queries, positives, rows, targets, ids, temperature, weights):
    """Losses, and the gradients of their weighted sum, by float64."""
    queries, positives, rows = (np.asarray(x, np.float64) for x in (queries, positives, rows))
    own = (queries * positives).sum(1) / temperature
    absent = (ids < 0)[None] | (ids[None] == targets[:, None])
    scores = np.where(absent, -np.inf, queries @ rows.T / temperature)
    every = np.concatenate([own[:, None], scores], axis=1)
    losses = np.log(np.exp(every).sum(1)) - own
    shares = np.exp(every) / np.exp(every).sum(1, keepdims=True) * weights[:, None] / temperature
    of_own = (shares[:, 0] - weights / temperature)[:, None]
    return losses, of_own * positives + shares[:, 1:] @ rows, of_own * queries, shares[:, 1:].T @ queries


def losses_and_gradients(function, arrays, weights):
    """What ``reference`` returns, of a function of queries, positives and rows."""

    def weighted(arrays):
        losses = function(*arrays)
        return jnp.sum(losses * weights), losses

    gradients, losses = jax.jit(jax.grad(weighted, has_aux=True))(arrays)
    return losses, *gradients


@pytest.mark.parametrize(("shape", "dtype"), [*((shape, "float32") for shape in SHAPES), (SHAPES[1], "bfloat16")])
def test_losses_and_gradients_are_those_of_all_scores_at_once(shape, dtype):
    *sizes, block = shape
    queries, positives, rows, targets, ids = case(*sizes, dtype=jnp.dtype(dtype))
    weights = np.random.default_rng(1).normal(size=len(queries)).astype(np.float32)
    want = reference(queries, positives, rows, targets, ids, 0.3, weights)
    softmax = functools.partial(full_softmax, positive_ids=targets, row_ids=ids, temperature=0.3, block=block)
    got = losses_and_gradients(softmax, (queries, positives, jnp.asarray(rows)), jnp.asarray(weights))
    assert [x.dtype for x in got] == [np.float32, np.float32, np.float32, jnp.dtype(dtype)]
    for of, expected in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(of, expected, rtol=1e-4, atol=1e-5)
    rounding = 2**-8 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(np.asarray(got[3], np.float32), want[3], rtol=rounding, atol=1e-5)


def test_losses_and_gradients_are_float32_where_jax_has_64_bits():
    queries, positives, rows, targets, ids = case(5, 7, 3)
    far = np.int64(2**40)  # numbers such as hashes, which 32 bits do not tell apart
    with jax.enable_x64(True):
        softmax = functools.partial(full_softmax, positive_ids=jnp.asarray(targets) * far, row_ids=ids * far, block=4)
        got = losses_and_gradients(softmax, (queries, positives, jnp.asarray(rows)), jnp.ones(5, jnp.float32))
        of_integers = full_softmax(queries, rows[:5], rows, positive_ids=jnp.arange(5))
    assert [x.dtype for x in (*got, of_integers)] == [np.float32] * 5
    for of, expected in zip(got, reference(queries, positives, rows, targets, ids, 1, np.ones(5)), strict=True):
        np.testing.assert_allclose(of, expected, rtol=1e-4, atol=1e-5)


def test_it_is_sampled_softmax_against_every_row():
    queries, positives, rows, targets, ids = case(12, 30, 4)
    got = full_softmax(queries, positives, rows, positive_ids=targets, row_ids=ids, block=7)
    want = sampled_softmax(queries, positives, rows, positive_ids=jnp.asarray(targets), negative_ids=jnp.asarray(ids))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_large_scores_and_a_query_without_negatives():
    one = jnp.ones((2, 3))
    ids = jnp.zeros(2, jnp.int32)
    softmax = functools.partial(full_softmax, positive_ids=ids, row_ids=jnp.array([0, -1]), block=1)
    losses, *gradients = losses_and_gradients(softmax, (one, one, one), jnp.ones(2))
    for array in (losses, *gradients):
        np.testing.assert_array_equal(array, 0)
    far = full_softmax(1e4 * one, -one, one, positive_ids=ids + 9, temperature=0.01, block=1)
    np.testing.assert_allclose(far, 6e6 + np.log(2), rtol=1e-6)


def test_no_pass_holds_all_scores():
    queries, positives, rows, targets, ids = case(50, 1_000, 4)

    def loss(queries, rows):
        return full_softmax(queries, positives, rows, positive_ids=targets, row_ids=ids, block=16).sum()

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(queries, rows))
    shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)]
    assert (50, 16) in shapes
    assert max(map(math.prod, shapes)) == rows.size


@pytest.mark.parametrize(("devices", "check_vma"), [(1, False), (2, True), (4, False), (4, True)])
def test_devices_that_share_the_rows_have_the_losses_of_one(devices, check_vma):
    queries, positives, rows, targets, ids = case(12, 20, 4)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=12).astype(np.float32))
    want = reference(queries, positives, rows, targets, ids, 0.5, np.asarray(weights))
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    softmax = functools.partial(full_softmax, temperature=0.5, block=3)

    def on_devices(row_ids, queries, positives, rows, targets):
        run = jax.shard_map(
            lambda ids, q, p, r, t: softmax(q, p, r, positive_ids=t, row_ids=ids),
            mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS), check_vma=check_vma,
        )  # fmt: skip
        return run(row_ids, queries, positives, rows, targets)

    got = losses_and_gradients(
        lambda q, p, r: on_devices(jnp.asarray(ids), q, p, r, jnp.asarray(targets)), (queries, positives, rows), weights
    )
    for of, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(of, expected, rtol=1e-4, atol=1e-5)

    def numbered(q, p, r, t):
        return softmax(q, p, r, positive_ids=t)

    sharded = jax.shard_map(numbered, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS))
    plain = numbered(queries, positives, rows, targets)
    np.testing.assert_allclose(jax.jit(sharded)(queries, positives, rows, targets), plain, rtol=1e-5, atol=1e-6)


def test_rows_of_a_table_with_row_gradients():
    queries, _, rows, targets, _ = case(12, 20, 4)
    targets = jnp.asarray(np.maximum(targets, 0) % 20)

    def loss(table, softmax):
        return softmax(table).mean()

    def of_table(table):
        return full_softmax(queries, jrec.embedding_bag(table, targets), table.array, positive_ids=targets, block=6)

    def of_array(array):
        scores = queries @ array.T
        return jax.nn.logsumexp(scores, axis=1) - scores[jnp.arange(12), targets]

    got = jax.grad(loss)(jrec.Table(jnp.asarray(rows)), of_table).array()
    np.testing.assert_allclose(got, jax.grad(loss)(jnp.asarray(rows), of_array), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((4, 2), np.float32)}, r"queries \(3, 5\), positives \(3, 5\) and rows \(4, 2\) must be"),
        ({"rows": np.zeros((0, 5), np.float32)}, "the 0 rows must be at least 1"),
        ({"block": 0}, "block=0 and the 4 rows must be at least 1"),
        ({"row_ids": np.zeros(3, np.int32)}, r"positive_ids \(3,\) and row_ids \(3,\) must be integers"),
        ({"positive_ids": np.zeros((3, 1), np.int32)}, r"positive_ids \(3, 1\) and row_ids \(4,\) must be"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    vectors = np.zeros((3, 5), np.float32)
    arguments = {"rows": np.zeros((4, 5), np.float32), "positive_ids": np.zeros(3, np.int32), **change}
    with pytest.raises(ValueError, match=message):
        full_softmax(vectors, vectors, **arguments)
