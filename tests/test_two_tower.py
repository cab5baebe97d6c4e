"""Two-tower models: towers and loss against float64 NumPy, and training on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.batch import Batch
from jrec.nn import TwoTower, TwoTowerConfig, ranking_metrics, ranks, two_tower_loss
from jrec.ops.layout import Pooling

USERS, ITEMS, DIM, BATCH = 30, 20, 4, 16
FREQUENCY = np.random.default_rng(5).dirichlet(np.ones(ITEMS))


def layout(pooling: Pooling = "mean"):
    tables = [jrec.TableConfig(name=n, rows=k, dim=DIM) for n, k in (("user", USERS), ("item", ITEMS), ("genre", 5))]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="past", table="item", max_length=3, pooling=pooling),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="genre", table="genre"),
    ]
    return jrec.EmbeddingLayout.build(tables, features)


def towers(**options):
    settings = {"user": ("past", "user"), "item": ("item", "genre"), "user_dense": 1, "item_dense": 2}
    return TwoTowerConfig(**{**settings, "user_mlp": (7, 6), "item_mlp": (6,), **options})


def columns(count, seed):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, USERS, count)
    item = (user + rng.integers(0, 3, count)) % ITEMS
    past = np.where(np.arange(3) < rng.integers(0, 4, count)[:, None], rng.integers(0, ITEMS, (count, 3)), -1)
    dense = {name: rng.normal(size=count).astype(np.float32) for name in ("age", "price", "size")}
    label = rng.integers(0, 2, count).astype(np.float32)
    log_q = np.log(FREQUENCY[item]).astype(np.float32)
    return {"user": user, "item": item, "past": past, "genre": item % 5, **dense, "label": label, "log_q": log_q}


def options(**more):
    return {"dense": ["age", "price", "size"], "extras": ["item", "log_q"], **more}


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def plain_vectors(model, tables, given):
    """Both towers in float64."""

    def through(mlp, x):
        for k, layer in enumerate(mlp.layers):
            x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
            x = np.maximum(x, 0) if k + 1 < len(mlp.layers) else x
        return unit(x)

    past = [np.mean([tables["item"][i] for i in own if i >= 0] or [np.zeros(DIM)], axis=0) for own in given["past"]]
    user = [given["age"][:, None], np.array(past), tables["user"][given["user"]]]
    item = [
        given["price"][:, None],
        given["size"][:, None],
        tables["item"][given["item"]],
        tables["genre"][given["genre"]],
    ]
    return through(model.user.mlp, np.concatenate(user, axis=1)), through(model.item.mlp, np.concatenate(item, axis=1))


def plain_loss(user, item, given, *, by_label, log_q, temperature):
    """The mean over lines of a log loss whose negatives are the other lines with another item."""
    losses = []
    for k in range(len(user)):
        if by_label and not given["label"][k]:
            continue
        scores = item @ user[k] / temperature - (given["log_q"] if log_q else 0)
        others = given["item"] != given["item"][k]
        losses.append(np.log(np.exp(scores[k]) + np.exp(scores[others]).sum()) - scores[k])
    return np.mean(losses)


@pytest.mark.parametrize("by_label", [False, True])
@pytest.mark.parametrize("log_q", ["", "log_q"])
def test_towers_and_loss_are_those_of_the_paper(by_label, log_q):
    model = TwoTower(layout(), towers(), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.0), embedding=jrec.ops.SGD(learning_rate=0.0))
    given = columns(BATCH - 3, 1)
    with jrec.distribute(model, optimizer) as run:
        tables = {name: np.asarray(run.table(name), np.float64) for name in ("user", "item", "genre")}
        want = plain_vectors(run.modules()[0], tables, given)
        found = run.predict(given, dense=["age", "price", "size"])
        np.testing.assert_allclose(found["user"], want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["item"], want[1], rtol=1e-5, atol=1e-6)
        step = run.compile(loss=two_tower_loss("item", log_q=log_q, by_label=by_label, temperature=0.3))
        batch = next(run.feed([given], batch_size=BATCH, **options()))
        loss = plain_loss(*want, given, by_label=by_label, log_q=log_q, temperature=0.3)
        assert float(step(batch)[0]) == pytest.approx(loss, rel=1e-5)


@functools.cache
def trained(devices):
    """Trains a few steps, one of which has a device without lines; returns losses, tables and recall."""
    model = TwoTower(layout(), towers(), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=jrec.ops.Adagrad(learning_rate=0.1))
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        step = run.compile(loss=two_tower_loss("item", log_q="log_q", by_label=True, temperature=0.2))
        feed = run.feed((columns(BATCH - 9 * (seed == 2), seed) for seed in range(6)), batch_size=BATCH, **options())
        losses = [float(step(batch)[0]) for batch in feed]
        later = columns(200, 99)
        vectors = run.predict(later, dense=["age", "price", "size"])
        every = {name: column[:ITEMS] for name, column in later.items()} | {"item": np.arange(ITEMS)}
        items = run.predict(every, dense=["age", "price", "size"])["item"]
        tables = np.concatenate([np.asarray(run.table(name)) for name in ("user", "item", "genre")])
    return losses, tables, ranking_metrics(ranks(vectors["user"], items, later["item"]), at=(5,))


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_tables_and_recall_are_those_of_one_device_on_any_number(devices):
    losses, tables, found = trained(1)
    other_losses, other_tables, other = trained(devices)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(other_tables, tables, atol=1e-5)
    assert other == pytest.approx(found, abs=1e-5)


def test_lines_without_a_positive_have_no_loss_and_finite_gradients():
    loss, ones = two_tower_loss("item", by_label=True), jnp.ones(3)
    batch = Batch(
        dense=jnp.zeros((3, 0)), labels=0 * ones, mask=ones, bags={}, extras={"item": jnp.arange(3, dtype=jnp.int32)}
    )
    value, gradients = jax.value_and_grad(loss)({"user": jnp.eye(3), "item": jnp.eye(3)}, batch)
    assert float(value) == 0
    assert all(np.isfinite(one).all() for one in gradients.values())


def test_the_user_tower_alone_gives_the_same_vectors():
    model = TwoTower(layout(), towers(), rngs=nnx.Rngs(0))
    features = {name: jnp.ones((2, DIM)) for name in ("past", "user", "item", "genre")}
    model.embeddings.features = lambda activations, bags: features
    dense = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    both, alone = model.logits(dense, {}, {}), model.for_users().logits(dense[:, :1], {}, {})
    assert set(alone) == {"user"}
    np.testing.assert_array_equal(alone["user"], both["user"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": ()}, None),
        ({"item": (), "item_dense": 0}, "the item tower reads no feature"),
        ({"item": ("user", "item")}, "feature 'user' is named twice"),
        ({"item_mlp": (5,)}, r"user_mlp is \[7, 6\] and item_mlp \[5\]; both need"),
        ({"user_mlp": ()}, "both need a layer"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)  # fmt: skip
def test_bad_configurations(change, message):
    if message is None:
        assert towers(**change).item_dense == 2
        return
    with pytest.raises(ValueError, match=message):
        towers(**change)


def test_layouts_that_do_not_fit():
    with pytest.raises(ValueError, match="the towers read genre, item, past"):
        TwoTower(layout(), towers(user=("past",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="feature 'past' has pooling 'none'"):
        TwoTower(layout("none"), towers(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="temperature is 0"):
        two_tower_loss("item", temperature=0)
