import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import ops
from jrec.nn import EmbeddingCollection, SparseOptimizer, TTEmbed, TTEmbeddingBag, TTOptions
from jrec.ops.tt import TTShape, tt_embedding_bag, tt_rows, tt_to_dense

SHAPE = TTShape.search(1000, 8, ranks=6)


def test_module_is_the_op_on_its_parameters():
    bag = TTEmbeddingBag(SHAPE, combiner="mean", rngs=nnx.Rngs(0))
    ids = jnp.array([[3, 999], [5, -1], [-1, -1]], jnp.int32)
    out = bag(ids)
    np.testing.assert_array_equal(out, tt_embedding_bag(bag.arrays(), SHAPE, ids, combiner="mean"))
    rows = tt_rows(bag.arrays(), SHAPE, [3, 999, 5])
    np.testing.assert_allclose(out, [rows[:2].mean(0), rows[2], np.zeros(8)], rtol=1e-5, atol=1e-7)
    highest = TTEmbeddingBag(SHAPE, combiner="max", cores=bag.arrays())(ids)
    np.testing.assert_allclose(highest, [rows[:2].max(0), rows[2], np.zeros(8)], rtol=1e-5, atol=1e-7)
    parameters = jax.tree.leaves(nnx.state(bag, nnx.Param))
    assert sum(p.size for p in parameters) == SHAPE.num_parameters


def test_any_optax_optimizer_trains_it_towards_a_table():
    rng = np.random.default_rng(0)
    target = jnp.asarray(tt_to_dense(TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(1)).arrays(), SHAPE) * 30)
    bag = TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        optimizer = nnx.Optimizer(bag, optax.adam(0.02), wrt=nnx.Param)

        @nnx.jit
        def step(bag, optimizer, ids):
            def loss(bag):
                return jnp.mean(jnp.square(bag(ids) - target[ids[:, 0]])) / jnp.mean(jnp.square(target))

            value, gradients = nnx.value_and_grad(loss)(bag)
            optimizer.update(bag, gradients)
            return value

        losses = [
            float(step(bag, optimizer, jnp.asarray(rng.integers(0, 1000, (256, 1)), jnp.int32))) for _ in range(150)
        ]
    assert losses[-1] < 0.5 * losses[0]


def test_from_table_reproduces_it():
    table = tt_to_dense(TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(1)).arrays(), SHAPE)
    bag = TTEmbeddingBag.from_table(table, SHAPE.with_ranks(1), relative_error=1e-3)
    assert bag.shape.ranks == (6, 6)
    out = bag(jnp.arange(1000, dtype=jnp.int32)[:, None])
    assert np.linalg.norm(out - table) <= 1.1e-3 * np.linalg.norm(table)


def test_cores_that_are_larger_than_their_table_are_warned_of():
    table = np.random.default_rng(0).normal(size=(SHAPE.rows, SHAPE.dim))
    shape = SHAPE.with_ranks(SHAPE.max_ranks)
    with pytest.warns(
        UserWarning, match=rf"have {shape.num_parameters:,} elements, but the table {table.size:,}: lower"
    ):
        TTEmbeddingBag.from_table(table, shape)


def test_bfloat16_and_refusals():
    bag = TTEmbeddingBag(SHAPE, dtype="bfloat16", rngs=nnx.Rngs(0))
    assert {core.dtype.name for core in bag.arrays()} == {"bfloat16"}
    assert bag(jnp.zeros((2, 1), jnp.int32)).dtype == jnp.float32
    with pytest.raises(ValueError, match="needs rngs"):
        TTEmbeddingBag(SHAPE)
    with pytest.raises(ValueError, match="the cores have shapes"):
        TTEmbeddingBag(SHAPE, cores=bag.arrays()[:2])


class Bigrams(nnx.Module):
    """Logits of the next token, whose embedding may be of either kind."""

    def __init__(self, embed, rngs):
        self.embed, self.mix = embed, nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens):
        vectors = self.embed(tokens)
        return self.embed.attend(self.mix(vectors.reshape(*tokens.shape[:-1], 16)))


@pytest.mark.parametrize("kind", [TTEmbed, nnx.Embed])
def test_a_flax_model_trains_with_either_embedding(kind):
    rngs, rng = nnx.Rngs(0), np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):
        model = Bigrams(kind(num_embeddings=50, features=8, param_dtype=jnp.float32, rngs=rngs), rngs)
        optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
        graph = nnx.graphdef(model)

        @jax.jit
        def gradients(state, tokens, following):
            def loss(state):
                logits = nnx.merge(graph, state)(tokens)
                return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

            return jax.value_and_grad(loss)(state)

        losses = []
        for _ in range(60):
            tokens = jnp.asarray(rng.integers(0, 50, (64, 2)))
            value, slopes = gradients(nnx.state(model), tokens, (tokens[:, 0] * 7 + 3) % 50)
            optimizer.update(model, slopes)
            losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_products_are_those_of_the_table(dtype):
    embed = TTEmbed(999, 8, ranks=6, param_dtype=dtype, rngs=nnx.Rngs(0))
    plain = nnx.Embed(999, 8, dtype=dtype, rngs=nnx.Rngs(0))
    table = tt_to_dense(embed.arrays(), embed.shape)
    plain.embedding[...] = jnp.asarray(table)
    assert table.std() == pytest.approx(np.array(nnx.Embed(999, 8, rngs=nnx.Rngs(1)).embedding[...]).std(), rel=0.3)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    rng = np.random.default_rng(0)
    for shape in ((), (2, 3), (2, 0)):
        ids = jnp.asarray(rng.integers(0, 999, shape), jnp.int16)
        rows, wanted = embed(ids), plain(ids)
        assert (rows.shape, rows.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(rows.astype(float), wanted.astype(float), **tolerance)
        query = jnp.asarray(rng.normal(size=(*shape, 8)), dtype)
        logits, wanted = embed.attend(query), plain.attend(query)
        assert (logits.shape, logits.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(logits.astype(float), wanted.astype(float), **tolerance)
    np.testing.assert_array_equal(embed(jnp.array([-1, 3])), embed(jnp.array([3, 3])).at[0].set(0))
    np.testing.assert_allclose(embed.bag(jnp.array([[3, 4]]), combiner="mean")[0], table[3:5].mean(0), rtol=1e-2)
    assert TTEmbed(99, 8, dtype="bfloat16", rngs=nnx.Rngs(0))(jnp.array([1])).dtype == jnp.bfloat16


def test_shapes_of_an_embedding():
    assert TTEmbed(100, 16, rngs=nnx.Rngs(0)).shape.ranks == (8, 20)  # of 4 x 5 x 5 rows and 2 x 2 x 4
    assert TTEmbed(1000, 8, ranks=[3, 4], num_cores=3, rngs=nnx.Rngs(0)).shape.ranks == (3, 4)
    bag = TTEmbeddingBag(SHAPE, rngs=nnx.Rngs(1))
    embed = TTEmbed(1000, 8, shape=SHAPE, cores=bag.arrays())
    np.testing.assert_array_equal(embed(jnp.array([3, 999])), bag(jnp.array([3, 999])))
    with pytest.raises(ValueError, match="a TTEmbed needs rngs"):
        TTEmbed(100, 16)
    with pytest.raises(ValueError, match=r"ranks\[0\] is 99, but \d+ already represents every table"):
        TTEmbed(100, 16, ranks=[99, 4], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the shape is of 1,000 rows of 8, but the table has num_embeddings=999 and"):
        TTEmbed(999, 8, shape=SHAPE, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"query must be \(..., 8\), but is float32\[2, 7\]"):
        embed.attend(jnp.ones((2, 7)))
    with pytest.raises(ValueError, match=r"ids\[0\] is 1000, but the table has 1000 rows"):
        embed(jnp.array([[1000]]))


@pytest.mark.parametrize("contraction", [None, "unique", "sample"])
def test_a_collection_computes_lookups_by_the_contraction_it_was_given(contraction, monkeypatch):
    """EL-Rec's sample-level reuse is reached from a model, too, and trains the same."""
    asked = []

    def lookup(*given, contraction=None, **named):
        asked.append(contraction)
        return ops.tt_lookup(*given, contraction=contraction, **named)

    monkeypatch.setattr(jrec.tiers.cores, "tt_lookup", lookup)
    table = jrec.TableConfig(name="item", rows=SHAPE.rows, dim=8, tier="tt", tt_shape=SHAPE)
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="item", table="item", max_length=3)])
    config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,))

    def trained(options):
        model = jrec.nn.DLRM(config, layout, tt=options, rngs=nnx.Rngs(0))
        optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
        ids = np.arange(24).reshape(8, 3) % SHAPE.rows
        batch = jrec.data.pack_batch(layout, {"item": ids, "label": np.arange(8) % 2}, batch_size=8)
        for _ in range(2):
            nnx.jit(jrec.nn.train_step)(model, optimizer, batch)
        return next(iter(model.embeddings.tt.values())).arrays()

    found = trained(TTOptions(contraction=contraction))
    assert set(asked) == {contraction}
    for core, other in zip(found, trained(TTOptions(contraction="dense")), strict=True):
        np.testing.assert_allclose(core, other, rtol=1e-5, atol=1e-7)


def test_hits_of_a_cache_are_counted():
    tables = [
        jrec.TableConfig(name="item", rows=SHAPE.rows, dim=8, tier="tt", tt_shape=SHAPE),
        jrec.TableConfig(name="plain", rows=SHAPE.rows, dim=8, tier="tt", tt_shape=SHAPE),
    ]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=t.name, table=t.name) for t in tables])
    config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,))
    caches = {"item": ops.TTCacheConfig(cache_rows=8, warmup_steps=1, refresh_every=1)}
    model = jrec.nn.DLRM(config, layout, tt=TTOptions(caches=caches), rngs=nnx.Rngs(0))
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    assert model.embeddings.cache_hits(optimizer.slots) == {"item": (0, 0)}
    assert model.embeddings.cache_hits(optimizer.slots)["item"].rate is None
    step, wanted, rng = nnx.jit(jrec.nn.train_step), np.zeros(2, int), np.random.default_rng(0)
    for _ in range(4):
        ids = np.minimum(rng.zipf(1.5, 40) - 1, SHAPE.rows - 1)
        batch = jrec.data.pack_batch(layout, {"item": ids, "plain": ids, "label": ids % 2}, batch_size=50)
        (stack,) = (s for s in layout.tt_stacks if s.tables[0].name == "item")
        cached = np.asarray(model.embeddings.tt[stack.name].cached["ids"][...])
        wanted += np.isin(ids, cached).sum(), ids.size
        step(model, optimizer, batch)
    hits = model.embeddings.cache_hits(optimizer.slots)["item"]
    assert hits == tuple(wanted)
    assert 0 < hits.rate == hits.hits / hits.lookups < 1
    collection = EmbeddingCollection(layout, tt=TTOptions(caches=caches), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no hits are counted: the slots lack hits, lookups; give the table a cache"):
        collection.cache_hits({stack.name: {}})
