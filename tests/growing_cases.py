"""A small model whose tables grow, its batches and a plan, for tests in one process and in several."""

import numpy as np
import optax
from distribute_cases import DENSE as DENSE
from flax import nnx

import jrec
from jrec import nn, ops
from jrec.data import GrowingVocabulary, Growth
from jrec.run.placement.plan import default_plan, overlaid
from jrec.sharding.pieces import HOST, REPLICATED

ROWS = {"user": 30, "item": 40, "tag": 25}
STEPS = 12


def layout_of(*, tier="sharded", planned=False, dtype="float32"):
    tables = [jrec.TableConfig(name=n, rows=r, dim=8, tier=tier, dtype=dtype) for n, r in ROWS.items()]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="tags", table="tag", max_length=4, pooling="mean"),
        jrec.FeatureConfig(name="seen", table="tag"),
    ]
    return jrec.EmbeddingLayout.build(tables, features, planned=planned)


def modules(layout, row=None):
    config = nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1))
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    row = row or ops.Adagrad(learning_rate=0.1, initial_accumulator=0.5)
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=row)


def growing():
    return {
        "user": GrowingVocabulary(Growth(capacity=ROWS["user"], admit_after=2, evict="lru")),
        "tag": GrowingVocabulary(Growth(capacity=ROWS["tag"], evict="lfu")),
    }


def columns(step, size=16):
    """Users are texts, tags numbers, more of both than there are rows; some come later. Items do not grow."""
    rng = np.random.default_rng(step)
    tags = [(rng.zipf(1.2, n) % 70 + step).tolist() for n in rng.integers(0, 5, size)]
    return {
        "label": rng.integers(0, 2, size).astype(np.float32),
        "price": rng.normal(size=size).astype(np.float32),
        "age": rng.normal(size=size).astype(np.float32),
        "user": [f"user number {n + step}" for n in rng.zipf(1.2, size) % 90],
        "item": rng.integers(0, ROWS["item"], size),
        "tags": tags,
        "seen": rng.integers(0, 60, size),
    }


def three_tiers(devices, layout):
    plan = default_plan(layout.with_plan(), devices)
    plan = overlaid(plan, {"user": np.array([[10, 30]]), "tag": np.array([[12, 25]])}, HOST)
    return overlaid(plan, {"user": np.array([[0, 5]]), "item": np.array([[0, 40]])}, REPLICATED)
