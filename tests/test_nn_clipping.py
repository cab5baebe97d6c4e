"""A step that clips by the norm of all gradients: what optax makes of dense gradients of every table and core."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import ops
from jrec.data import pack_batch
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, TTOptions, binary_cross_entropy, train_step
from jrec.nn.step import train_step_on
from jrec.ops.tt import TTCacheConfig, tt_embedding_bag

ROWS, BATCH, RATE = {"user": 9, "tag": 6, "still": 5, "item": 200}, 16, 0.5
DENSE = [f"x{i}" for i in range(3)]


def layout_of():
    """Rows of two stacks, one of them frozen, and cores; ids repeat in bags and between them."""
    own = {
        "still": {"group": "still", "dtype": "bfloat16"},
        "item": {"tier": "tt", "tt_shape": ops.TTShape.search(ROWS["item"], 8, ranks=4)},
    }
    tables = [jrec.TableConfig(name=name, rows=rows, dim=8, **own.get(name, {})) for name, rows in ROWS.items()]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="tag", table="tag", max_length=4, weighted=True),
        jrec.FeatureConfig(name="still", table="still"),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="seen", table="item", max_length=3, pooling="max"),
    ]
    return jrec.EmbeddingLayout.build(tables, features)


def batch_of(layout, seed):
    """Ids of few rows; some bags are empty and the last examples padding."""
    rng, count = np.random.default_rng(seed), BATCH - 3
    columns = {"label": rng.integers(0, 2, count), **{x: rng.normal(size=count).astype(np.float32) for x in DENSE}}
    for feature, _ in layout.features:
        ids = np.minimum(rng.zipf(1.4, (count, feature.max_length)), ROWS[feature.table]) - 1
        if feature.max_length > 1:
            ids[np.arange(feature.max_length) >= rng.integers(0, feature.max_length + 1, count)[:, None]] = -1
        columns[feature.name] = ids
        columns[f"{feature.name}:weight"] = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    return jax.tree.map(jnp.asarray, pack_batch(layout, columns, dense=DENSE, batch_size=BATCH))


def model_of(layout, **options):
    config = DLRMConfig(num_dense=len(DENSE), bottom_mlp=(8,), top_mlp=(8, 1))
    return DLRM(config, layout, rngs=nnx.Rngs(1), **options)


def optimizer_of(model, limit, **options):
    options = {"embedding": ops.SGD(learning_rate=RATE), "tables": {"still": None}, **options}
    return SparseOptimizer(model, dense=optax.sgd(RATE), max_global_norm=limit, **options)


def stepped(model, limit, batch, **options):
    """The model's arrays after a step on a copy of it."""
    model = nnx.clone(model)
    nnx.jit(train_step)(model, optimizer_of(model, limit, **options), batch)
    return nnx.state(model)


@pytest.mark.parametrize(("limit", "implementation"), [(0.05, "xla"), (0.05, "native"), (100.0, "native")])
def test_a_step_is_that_of_optax_on_dense_gradients(limit, implementation):
    layout = layout_of()
    model = model_of(layout, implementation=implementation)
    batch = batch_of(layout, 0)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    whole, cores = model.embeddings.arrays(), {n: stack.arrays() for n, stack in model.embeddings.tt.items()}

    def loss(params, whole, cores):
        found = {}
        for name, of in batch.bags.items():
            how = {"weights": of.weights, "implementation": "xla"}
            if name in cores:
                shape = layout.stacks[name].tt_shape
                found[name] = tt_embedding_bag(cores[name], shape, of.ids, of.offsets, **how)
            else:
                found[name] = ops.embedding_bag(whole[name], of.ids, of.offsets, **how)
        return binary_cross_entropy(nnx.merge(graph, params, rest).logits(batch.dense, found, batch.bags), batch)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, whole, cores)
    frozen = [name for name in whole if name.endswith("still")]
    assert any(jnp.any(gradients[1][name] != 0) for name in frozen)
    trained = (gradients[0], {name: g for name, g in gradients[1].items() if name not in frozen}, gradients[2])
    assert 0.05 < optax.tree.norm(trained) / 2 < 100
    old = (params, {name: whole[name] for name in trained[1]}, cores)
    transform = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(RATE))
    want = optax.apply_updates(old, transform.update(trained, transform.init(old))[0])
    new = stepped(model, limit, batch)
    norms = [
        nnx.jit(lambda m, o: train_step_on(m, o, {}, batch).gradient_norm)(nnx.clone(model), optimizer_of(model, most))
        for most in (limit, None)
    ]
    np.testing.assert_allclose(norms[0], optax.tree.norm(trained), rtol=1e-5)
    assert norms[1] is None
    embeddings = nnx.merge(nnx.graphdef(model), new).embeddings
    got = (
        nnx.filter_state(new, nnx.Param),
        {name: embeddings.arrays()[name] for name in trained[1]},
        {name: stack.arrays() for name, stack in embeddings.tt.items()},
    )
    for g, w, o in zip(*map(jax.tree.leaves, (got, want, old)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(w, o)
    for name in frozen:
        np.testing.assert_array_equal(embeddings.arrays()[name], whole[name])
    if limit == 100:
        for g, w in zip(*map(jax.tree.leaves, (new, stepped(model, None, batch))), strict=True):
            np.testing.assert_array_equal(g, w)


def test_cached_rows_and_cores_are_clipped_together():
    """Steps are proportional to the scale, and the norm of a step under SGD is that of the gradients."""
    layout, cache = layout_of(), TTCacheConfig(cache_rows=4, tracked_rows=40, warmup_steps=2, refresh_every=1000)
    model = model_of(layout, tt=TTOptions(caches={"item": cache}))
    optimizer = optimizer_of(model, None)
    step = nnx.jit(train_step)
    for seed in range(2):
        step(model, optimizer, batch_of(layout, seed))
    cached = model.embeddings.tt["tt_item"].cached
    assert np.unique(cached["ids"][...]).size == 4

    def moved(limit):
        """Changes of all arrays but the choice of cached rows, by the batch after which no other is chosen."""
        later, of = nnx.clone(model), nnx.clone(optimizer)
        of.max_global_norm = limit
        step(later, of, batch_of(layout, 1))
        np.testing.assert_array_equal(later.embeddings.tt["tt_item"].cached["ids"][...], cached["ids"][...])
        floats = [x for x in jax.tree.leaves(nnx.state(later)) if x.dtype == jnp.float32]
        before = [x for x in jax.tree.leaves(nnx.state(model)) if x.dtype == jnp.float32]
        return [
            (np.asarray(x, np.float64) - np.asarray(y, np.float64)) / RATE for x, y in zip(floats, before, strict=True)
        ]

    full = moved(None)
    norm = np.sqrt(sum(np.sum(change**2) for change in full))
    assert sum(bool(np.any(change)) for change in full) == len(full)
    for change, unclipped in zip(moved(norm / 4), full, strict=True):
        np.testing.assert_allclose(change, unclipped / 4, rtol=1e-4, atol=1e-6)


def test_a_limit_must_be_above_zero():
    model = model_of(layout_of())
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_global_norm is {limit}, but must be above 0"):
            optimizer_of(model, limit)
