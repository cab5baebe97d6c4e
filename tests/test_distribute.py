"""``jrec.distribute``: one loop over any placement, against the plain step on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import nn, ops
from jrec.data import pack_batch
from jrec.errors import ConfigError
from jrec.run.mesh_plan import dealt, overlaid
from jrec.run.options import HostOptions
from jrec.sharding.pieces import HOST, REPLICATED

pytestmark = pytest.mark.usefixtures("quick_compilation")

CLOSE = {"rtol": 2e-4, "atol": 2e-6}
ROWS = {"user": 300, "item": 40, "tag": 90}
STEPS = 6


def layout_of(*, tiers=(), planned=False):
    tables = [jrec.TableConfig(name=n, rows=r, dim=8, tier=dict(tiers).get(n, "sharded")) for n, r in ROWS.items()]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="tags", table="tag", max_length=4, pooling="mean"),
    ]
    return jrec.EmbeddingLayout.build(tables, features, planned=planned)


def modules(layout, *, tables=None):
    config = nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1))
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    row = ops.Adagrad(learning_rate=0.1)
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=row, tables=tables or {})


def columns(step, size=16):
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 5, size)
    tags = [rng.integers(0, ROWS["tag"], n).tolist() for n in lengths]
    padded = np.array([[*t, *[-1] * (4 - len(t))] for t in tags])
    return {
        "label": rng.integers(0, 2, size).astype(np.float32),
        "price": rng.normal(size=size).astype(np.float32),
        "age": rng.normal(size=size).astype(np.float32),
        "user": (rng.zipf(1.3, size) % ROWS["user"]).astype(np.int64),
        "item": rng.integers(0, ROWS["item"], size),
        "tags": padded,
    }


DENSE = ("price", "age")


@functools.cache
def plain():
    """Losses, tables and dense parameters of the plain step on one device."""
    layout = layout_of()
    model, optimizer = modules(layout)
    step, losses = nnx.jit(nn.train_step), []
    for number in range(STEPS):
        batch = pack_batch(layout, columns(number), dense=DENSE)
        losses.append(float(step(model, optimizer, batch)[0]))
    stack = layout.members[0]
    rows = np.asarray(model.embeddings.arrays()[stack.name])
    tables = {t.name: rows[base : base + t.rows] for t, base in zip(stack.tables, stack.bases, strict=True)}
    return losses, tables, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def mesh_of(devices):
    return jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])


def three_tiers(devices, layout):
    """A plan with hot rows everywhere and a tail in host memory."""
    plan = dealt(layout.with_plan(), devices)
    plan = overlaid(plan, {"user": np.array([[100, 300]]), "tag": np.array([[50, 90]])}, HOST)
    return overlaid(plan, {"user": np.array([[0, 5]]), "item": np.array([[0, 40]])}, REPLICATED)


def placed(name):
    """A run in one of the placements."""
    if name == "device":
        return jrec.distribute(*modules(layout_of()))
    if name in ("host", "host-pipeline"):
        host = HostOptions(pipeline="on" if name == "host-pipeline" else "auto")
        return jrec.distribute(*modules(layout_of(tiers=[("user", "host")])), host=host)
    if name == "mesh":
        return jrec.distribute(*modules(layout_of()), mesh=mesh_of(4))
    if name == "mesh-planned":  # the model never holds a row
        return jrec.distribute(*modules(layout_of(planned=True)), mesh=mesh_of(4))
    devices = 1 if name == "plan-one" else 4
    mesh = None if devices == 1 else mesh_of(devices)
    return jrec.distribute(*modules(layout_of()), mesh=mesh, plan=three_tiers(devices, layout_of()))


PLACEMENTS = ("device", "host", "host-pipeline", "mesh", "mesh-planned", "plan-one", "plan-four")


def follows(run, losses, *, exact=False):
    limits = {"rtol": 0, "atol": 0} if exact else CLOSE
    expected, tables, dense = plain()
    np.testing.assert_allclose(losses, expected[-len(losses) :], **limits)
    for name, rows in tables.items():
        np.testing.assert_allclose(run.table(name), rows, err_msg=name, **limits)
    model, _ = run.modules()
    for leaf, other in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), dense, strict=True):
        np.testing.assert_allclose(np.asarray(leaf), other, **limits)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_trains_predicts_and_goes_on_like_the_plain_step(name, tmp_path):
    losses, half = [], STEPS // 2
    with placed(name) as run:
        first = run.predict(columns(99), dense=DENSE, batch_size=8)
        step = run.compile()
        feed = run.feed((columns(n) for n in range(half)), dense=DENSE)
        losses += [float(step(batch)[0]) for batch in feed]
        run.save(tmp_path / "c", meta={"feed": feed.position()})
    with placed(name) as run:
        meta = run.restore(tmp_path / "c")
        assert (run.steps, meta["feed"]["batches"]) == (half, half)
        step = run.compile()
        for batch in run.feed((columns(n) for n in range(half, STEPS)), dense=DENSE, workers=0):
            loss, outputs = step(batch)
            losses.append(float(loss))
            np.testing.assert_array_equal(np.asarray(outputs.labels), batch.batch.labels)
        assert run.steps == STEPS
        follows(run, losses)
        assert first.shape == (16,)
        assert np.abs(run.predict(columns(99), dense=DENSE) - first).max() > 1e-3
