"""A small model, its batches and its plans, for tests of ``jrec.distribute`` in one process and in several."""

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from mesh_plans import MIDDLE

import jrec
from jrec import nn, ops
from jrec.run.placement.plan import default_plan, overlaid
from jrec.sharding.pieces import HOST, REPLICATED

ROWS = {"user": 300, "item": 40, "tag": 90}
STEPS = 6


def layout_of(*, tiers=(), planned=False, rows=ROWS):
    tables = [jrec.TableConfig(name=n, rows=r, dim=8, tier=dict(tiers).get(n, "sharded")) for n, r in rows.items()]
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


def mesh_of(devices):
    return jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])


def three_tiers(devices, layout):
    """A plan with hot rows everywhere and a tail in host memory."""
    plan = default_plan(layout.with_plan(), devices)
    plan = overlaid(plan, {"user": np.array([[100, 300]]), "tag": np.array([[50, 90]])}, HOST)
    return overlaid(plan, {"user": np.array([[0, 5]]), "item": np.array([[0, 40]])}, REPLICATED)


def tables_apart(layout):
    """A plan whose first and last of four devices keep all rows, and compute nothing."""
    plan = default_plan(layout.with_plan(), 2)
    owner = np.array([0, 3])[plan.owner].astype(np.int16)
    path = np.repeat(np.arange(4, dtype=np.int16)[:, None], 4, axis=1)
    apart = {"owner": owner, "path": path, "way": owner.astype(np.int32), "computes": MIDDLE}
    return dataclasses.replace(plan, devices=4, **apart)
