"""One feature looked up alone is what it is in a batch, wherever the collection holds its rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import some_of

import jrec
from jrec import ops
from jrec.data import pack_batch
from jrec.nn import EmbeddingCollection, TTOptions

ROWS, LENGTH, BATCH = 60, 3, 7
SHAPE = ops.TTShape.search(ROWS, 8, ranks=3)


def tables_of(kind):
    whole = {"name": "item", "dim": 8}
    if kind == "parts":
        tail = ops.TTShape.search(ROWS - 20, 8, ranks=3)
        head = jrec.TableConfig(rows=20, of_rows=ROWS, **whole)
        return [head, jrec.TableConfig(rows=tail.rows, tier="tt", tt_shape=tail, first_row=20, of_rows=ROWS, **whole)]
    if kind in ("tt", "cached"):
        return [jrec.TableConfig(rows=ROWS, tier="tt", tt_shape=SHAPE, **whole)]
    return [jrec.TableConfig(rows=ROWS, dtype="bfloat16" if kind == "bfloat16" else "float32", **whole)]


def collection_of(kind, pooling, weighted):
    feature = {"table": "item", "max_length": LENGTH, "pooling": pooling, "weighted": weighted}
    tables = [jrec.TableConfig(name="user", rows=11, dim=8), *tables_of(kind)]
    features = [jrec.FeatureConfig(name="user", table="user"), jrec.FeatureConfig(name="past", **feature)]
    layout = jrec.EmbeddingLayout.build(tables, features)
    caches = {"item": ops.TTCacheConfig(cache_rows=4, warmup_steps=1, refresh_every=1)} if kind == "cached" else {}
    made = EmbeddingCollection(layout, pad_rows=kind == "padded", tt=TTOptions(caches=caches), rngs=nnx.Rngs(0))
    for stack in made.tt.values():
        if kind == "cached":
            stack.cached["ids"][...] = jnp.array([2, 5, 30, ROWS], jnp.int32)
            stack.cached["rows"][...] = jnp.ones((4, 8)) * 7
    return layout, made


CASES = [("whole", pooling) for pooling in ("sum", "mean", "max", "none")]
CASES += [
    ("padded", "mean"),
    ("bfloat16", "sum"),
    ("tt", "max"),
    ("cached", "mean"),
    ("parts", "sum"),
    ("parts", "max"),
]


@pytest.mark.parametrize(("kind", "pooling"), some_of(CASES, *CASES[1:-1]))
def test_a_feature_alone_is_the_feature_in_a_batch(kind, pooling):
    weighted = pooling != "sum"
    layout, collection = collection_of(kind, pooling, weighted)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (BATCH, LENGTH))
    ids[0], ids[1, 1:], ids[2, :2] = -1, -1, [2, 30]
    weights = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    columns = {"user": rng.integers(0, 11, BATCH), "past": ids, "past:weight": weights}
    batch = pack_batch(layout, columns, label=None)
    activations, _ = collection.lookup(batch.bags)
    wanted = collection.features(activations, batch.bags)
    alone = nnx.jit(lambda c, ids, weights: c.lookup_feature("past", ids, weights=weights))
    found = alone(collection, ids.astype(np.int16), weights if weighted else None)
    np.testing.assert_allclose(found, wanted["past"], rtol=1e-5, atol=1e-6)
    for users in (columns["user"], columns["user"][:, None].astype(np.uint8)):
        np.testing.assert_allclose(collection.lookup_feature("user", users), wanted["user"], rtol=1e-6)
    one = collection.lookup_feature("past", ids[:, 0])
    np.testing.assert_allclose(one, collection.lookup_feature("past", ids[:, :1]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "tt", "parts"])
def test_ids_past_the_table_are_never_the_next_tables_rows(kind):
    _, collection = collection_of(kind, "sum", weighted=False)
    for feature, rows in (("user", 11), ("past", ROWS)):
        bad = np.array([1, rows])
        with pytest.raises(ValueError, match=rf"ids\[1\] is {rows}, but the table has {rows} rows; hash or clip"):
            collection.lookup_feature(feature, bad)
        assert jnp.isnan(nnx.jit(lambda c, ids: c.lookup_feature(feature, ids))(collection, bad)[1]).all()  # noqa: B023


def test_rows_elsewhere_are_refused():
    tables = [jrec.TableConfig(name="user", rows=11, dim=8, tier="host"), jrec.TableConfig(name="item", rows=9, dim=8)]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=n, table=n) for n in ("user", "item")])
    collection = EmbeddingCollection(layout, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rows of feature 'user' are in host memory or on several devices, stack"):
        collection.lookup_feature("user", jnp.zeros(3, jnp.int32))
    assert collection.lookup_feature("item", jnp.zeros(3, jnp.int32)).shape == (3, 8)
    with pytest.raises(ValueError, match="there is no feature 'users'; the features are item, user"):
        collection.lookup_feature("users", jnp.zeros(3, jnp.int32))
    planned = jrec.EmbeddingLayout.build(tables[1:], [jrec.FeatureConfig(name="item", table="item")], planned=True)
    with pytest.raises(ValueError, match="rows of feature 'item' are in host memory or on several devices"):
        EmbeddingCollection(planned, rngs=nnx.Rngs(0)).lookup_feature("item", jnp.zeros(3, jnp.int32))
