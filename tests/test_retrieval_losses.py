"""Losses of retrieval: against float64 NumPy, and the same on any number of devices."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.nn import (
    bpr,
    focal,
    in_batch_softmax,
    masked_mean,
    ranking_metrics,
    ranks,
    sampled_softmax,
    weighted_binary_cross_entropy,
)

USERS, ITEMS, BATCH, STEPS = 60, 40, 24, 5


def batch_of(labels, mask, **extras):
    return jrec.Batch(
        dense=jnp.zeros((len(labels), 0)), labels=jnp.asarray(labels, jnp.float32), mask=jnp.asarray(mask, jnp.float32),
        bags={}, extras={name: jnp.asarray(values, jnp.float32) for name, values in extras.items()},
    )  # fmt: skip


@pytest.mark.parametrize("corrected", [False, True])
def test_sampled_softmax(corrected):
    rng = np.random.default_rng(0)
    queries, positives = rng.normal(size=(2, 7, 5)).astype(np.float32)
    negatives = rng.normal(size=(11, 5)).astype(np.float32)
    positive_ids, negative_ids = rng.integers(0, 6, 7), rng.integers(-1, 6, 11)  # many accidental hits
    log_q = np.log(rng.uniform(0.1, 1, 18)).astype(np.float32)
    correction = {"positive_log_q": log_q[:7], "negative_log_q": log_q[7:]} if corrected else {}
    got = sampled_softmax(
        queries, positives, negatives, positive_ids=positive_ids, negative_ids=negative_ids, temperature=0.5,
        **{name: jnp.asarray(values) for name, values in correction.items()},
    )  # fmt: skip
    for i, query in enumerate(queries.astype(np.float64)):
        own = query @ positives[i] / 0.5 - corrected * log_q[i]
        count = (negative_ids != positive_ids[i]) & (negative_ids >= 0)
        others = (negatives @ query / 0.5 - corrected * log_q[7:])[count]
        np.testing.assert_allclose(got[i], np.log(np.exp(own) + np.exp(others).sum()) - own, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="or neither"):
        sampled_softmax(
            queries, positives, negatives, positive_ids=positive_ids, negative_ids=negative_ids,
            positive_log_q=jnp.zeros(7),
        )  # fmt: skip


def test_negatives_of_each_query_are_its_own():
    rng = np.random.default_rng(0)
    queries, positives = rng.normal(size=(2, 7, 5)).astype(np.float32)
    negatives, ids = rng.normal(size=(7, 11, 5)).astype(np.float32), rng.integers(0, 6, 7)
    log_q, own_log_q = (np.log(rng.uniform(0.1, 1, shape)).astype(np.float32) for shape in ((7, 11), 7))
    negative_ids = rng.integers(-1, 6, (7, 11))
    got = sampled_softmax(
        queries, positives, negatives, positive_ids=ids, negative_ids=negative_ids, temperature=0.5,
        positive_log_q=jnp.asarray(own_log_q), negative_log_q=jnp.asarray(log_q),
    )  # fmt: skip
    for i in range(7):
        shared = sampled_softmax(
            queries[i : i + 1], positives[i : i + 1], negatives[i], positive_ids=ids[i : i + 1],
            negative_ids=negative_ids[i], temperature=0.5, positive_log_q=jnp.asarray(own_log_q[i : i + 1]),
            negative_log_q=jnp.asarray(log_q[i]),
        )  # fmt: skip
        np.testing.assert_allclose(got[i], shared[0], rtol=1e-5, atol=1e-6)


def test_a_query_without_negatives_has_no_loss_and_no_gradient():
    one = jnp.ones((1, 3))

    def loss(query):
        ids = jnp.zeros(1, jnp.int32)
        return sampled_softmax(query, one, one, positive_ids=ids, negative_ids=ids)[0]

    value, gradient = jax.value_and_grad(loss)(one)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_pairs_focal_and_weights():
    np.testing.assert_allclose(bpr(jnp.array([2.0, 0.0]), jnp.array([1.0, 1.0])), np.log1p(np.exp([-1.0, 1.0])))
    logits, labels, mask = np.array([0.3, -1.0, 2.0, 9.0]), np.array([1, 0, 0, 1]), np.array([1, 1, 1, 0])
    probability = np.where(labels, 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(logits)))
    cross_entropy = -np.log(probability)
    want = np.mean((np.where(labels, 0.25, 0.75) * (1 - probability) ** 2 * cross_entropy)[:3])
    given = jnp.asarray(logits, jnp.float32)
    assert float(focal(positive_share=0.25)(given, batch_of(labels, mask))) == pytest.approx(want, rel=1e-5)
    assert float(focal(gamma=0)(given, batch_of(labels, mask))) == pytest.approx(cross_entropy[:3].mean(), rel=1e-5)
    weight = np.array([2.0, 0.5, 1.0, 3.0])
    got = weighted_binary_cross_entropy("weight")(given, batch_of(labels, mask, weight=weight))
    assert float(got) == pytest.approx((weight * cross_entropy)[:3].mean(), rel=1e-5)
    with pytest.raises(ValueError, match="must not be negative"):
        focal(gamma=-1.0)
    assert float(masked_mean(jnp.arange(3.0), jnp.array([1, 0, 1]))) == 1


class TwoTower(nnx.Module):
    def __init__(self, layout: jrec.EmbeddingLayout, *, rngs: nnx.Rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.user, self.item = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> tuple[jax.Array, jax.Array]:
        features = self.embeddings.features(activations, bags)
        return self.user(features["user"]), self.item(features["item"])


def in_batch(vectors: tuple[jax.Array, jax.Array], batch: jrec.Batch) -> jax.Array:
    ids, log_q = batch.extras["item_id"], batch.extras["log_q"]
    losses = in_batch_softmax(*vectors, ids=ids, mask=batch.mask, log_q=log_q, temperature=0.2)
    return masked_mean(losses, batch.mask)


def pairs(seed, count=BATCH):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, USERS, count)
    item = (user + rng.integers(0, 3, count)) % ITEMS
    log_q = np.log(0.5 / (1 + item)).astype(np.float32)
    return {"user": user, "item": item, "item_id": item, "log_q": log_q}


def trained(devices):
    tables = [jrec.TableConfig(name=name, rows=rows, dim=8) for name, rows in [("user", USERS), ("item", ITEMS)]]
    layout = jrec.EmbeddingLayout.build(
        tables, [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    )
    model = TwoTower(layout, rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=jrec.ops.Adagrad(learning_rate=0.1))
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        step = run.compile(loss=in_batch)
        feed = run.feed(
            (pairs(seed, BATCH - 3 * (seed == 2)) for seed in range(STEPS)), label=None, batch_size=BATCH,
            extras=["item_id", "log_q"],
        )  # fmt: skip
        losses = [float(step(batch)[0]) for batch in feed]
        user, _ = run.predict(pairs(99, 40))
        _, items = run.predict({"user": np.zeros(ITEMS, int), "item": np.arange(ITEMS)})
        found = ranking_metrics(ranks(user, items, pairs(99, 40)["item"], mesh=mesh), at=(5,))
        return losses, found, {name: run.table(name) for name in ("user", "item")}


def test_a_two_tower_model_is_the_same_on_any_number_of_devices():
    losses, found, tables = trained(1)
    assert losses[-1] < losses[0]
    for devices in (2, 4):
        other_losses, other_found, other_tables = trained(devices)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        assert other_found == pytest.approx(found, abs=1e-5)
        for name, rows in tables.items():
            np.testing.assert_allclose(other_tables[name], rows, rtol=1e-4, atol=1e-5)
