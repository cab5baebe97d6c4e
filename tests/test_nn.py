"""NNX modules: interaction, DLRM in every feature form, and the two-phase step against plain autodiff and optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import ops
from jrec.nn import (
    DLRM,
    MLP,
    DLRMConfig,
    SparseOptimizer,
    binary_cross_entropy,
    dot_interaction,
    interaction,
    train_step,
)
from jrec.nn.feature_lookup import masked_max

BATCH = 12


def one_hot_layout(rows=(50, 7, 1), dim=8, dtype="float32"):
    return jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=f"t{i}", rows=r, dim=dim, dtype=dtype) for i, r in enumerate(rows)],
        [jrec.FeatureConfig(name=f"f{i}", table=f"t{i}", fixed_length=True) for i in range(len(rows))],
    )


def one_hot_batch(layout, rng, batch=BATCH, num_dense=5):
    bags = {}
    for name, stack in layout.stacks.items():
        ids = [rng.integers(0, f.rows, batch) + f.base for f in stack.features]
        bags[name] = jrec.Bags(ids=jnp.asarray(np.concatenate(ids)[:, None], jnp.int32))
    return jrec.Batch(
        dense=jnp.asarray(rng.normal(size=(batch, num_dense)), jnp.float32),
        labels=jnp.asarray(rng.integers(0, 2, batch), jnp.float32),
        mask=jnp.asarray(np.arange(batch) < batch - 2, jnp.float32),
        bags=bags,
    )


def dlrm(layout, *, num_dense=5, interaction="dot", implementation=None, bottom=(16, 8)):
    config = DLRMConfig(num_dense=num_dense, bottom_mlp=bottom, top_mlp=(16, 1), interaction=interaction)
    return DLRM(config, layout, implementation=implementation, rngs=nnx.Rngs(3))


@pytest.mark.parametrize("features", [1, 2, 5, 27])
def test_dot_interaction_is_the_strict_lower_triangle_with_its_gradient(features):
    rng = np.random.default_rng(features)
    z = rng.normal(size=(4, features, 6))
    rows, columns = np.tril_indices(features, -1)
    expected = np.einsum("bfd,bgd->bfg", z, z)[:, rows, columns]
    vectors = jnp.asarray(z, jnp.float32)
    np.testing.assert_allclose(dot_interaction(vectors), expected, rtol=1e-5, atol=1e-5)
    cotangent = rng.normal(size=expected.shape)
    square = np.zeros((4, features, features))
    square[:, rows, columns] = cotangent
    wanted = np.einsum("bfg,bgd->bfd", square + square.swapaxes(1, 2), z)
    _, vjp = jax.vjp(dot_interaction, vectors)
    np.testing.assert_allclose(vjp(jnp.asarray(cotangent, jnp.float32))[0], wanted, rtol=1e-4, atol=1e-5)


def test_products_made_by_chunks_are_the_same_bits(monkeypatch):
    vectors = jax.random.normal(jax.random.key(0), (37, 20, 16))
    gradient = jax.random.normal(jax.random.key(1), (37, 190))

    def both():
        return jax.jit(lambda v, g: (jax.vjp(dot_interaction, v)[0], jax.vjp(dot_interaction, v)[1](g)))(
            vectors, gradient
        )

    whole = both()
    monkeypatch.setattr(interaction, "_WHOLE_BYTES", 1 << 14)
    monkeypatch.setattr(interaction, "_CHUNK_BYTES", 1 << 13)
    jax.tree.map(np.testing.assert_array_equal, both(), whole)


def test_masked_max_ignores_absent_positions_and_zeroes_empty_bags():
    rows = jnp.asarray([[[-3.0], [9.0]], [[5.0], [7.0]]])
    present = jnp.asarray([[True, False], [False, False]])
    assert masked_max(rows, present).tolist() == [[-3.0], [0.0]]


def test_mlp_has_relu_between_layers_and_dlrm_initialization():
    mlp = MLP((300, 200, 1), activate_last=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 300)), jnp.float32)
    w = [(np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...])) for layer in mlp.layers]
    hidden = np.maximum(np.asarray(x, np.float64) @ w[0][0] + w[0][1], 0)
    np.testing.assert_allclose(mlp(x), hidden @ w[1][0] + w[1][1], rtol=1e-4, atol=1e-4)
    assert abs(w[0][0].std() / (2 / 500) ** 0.5 - 1) < 0.02
    with pytest.raises(ValueError, match="sizes are"):
        MLP((3,), activate_last=False, rngs=nnx.Rngs(0))


def test_tables_start_uniform_within_one_over_root_rows():
    layout = one_hot_layout(rows=(4000, 100), dim=16)
    table = dlrm(layout, bottom=(16,)).embeddings.arrays()["d16_float32"]
    for part, rows in ((table[:4000], 4000), (table[4000:], 100)):
        bound = rows**-0.5
        assert float(jnp.abs(part).max()) <= bound
        assert abs(float(part.std()) / (bound / 3**0.5) - 1) < 0.05


def reference_loss(model, tables, batch):
    """The model by plain one-hot gathers and autodiff through whole tables."""
    groups = []
    for name, stack in model.embeddings.layout.stacks.items():
        rows = tables[name][batch.bags[name].ids[:, 0]]
        groups.append(rows.reshape(len(stack.features), -1, stack.dim).swapaxes(0, 1))
    bottom = model.bottom(batch.dense)
    vectors = jnp.concatenate([bottom[:, None, :], *groups], axis=1)
    rows, columns = np.tril_indices(vectors.shape[1], -1)
    crossed = jnp.einsum("bfd,bgd->bfg", vectors, vectors)[:, rows, columns]
    logits = model.top(jnp.concatenate([bottom, crossed], axis=1))[:, 0]
    return binary_cross_entropy(logits, batch)


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize(
    ("row_optimizer", "dense"),
    [
        (ops.SGD(learning_rate=0.1), optax.sgd(0.1)),
        (ops.Adagrad(learning_rate=0.1, initial_accumulator=0.1, eps=1e-7), optax.adagrad(0.1)),
    ],
    ids=["sgd", "adagrad"],
)
def test_train_step_equals_autodiff_through_the_tables_and_optax(row_optimizer, dense, implementation):
    rng = np.random.default_rng(1)
    layout = one_hot_layout()
    model = dlrm(layout, implementation=implementation)
    optimizer = SparseOptimizer(model, dense=dense, embedding=row_optimizer)
    reference = nnx.clone(model)
    tables = reference.embeddings.arrays()
    table_state = dense.init(tables)
    reference_optimizer = nnx.Optimizer(reference, dense, wrt=nnx.Param)
    step = nnx.jit(train_step)
    for _ in range(4):
        batch = one_hot_batch(layout, rng)
        grad = nnx.value_and_grad(reference_loss, argnums=(nnx.DiffState(0, nnx.Param), 1))
        expected, (dense_gradients, table_gradients) = grad(reference, tables, batch)
        loss, logits = step(model, optimizer, batch)
        assert logits.shape == (BATCH,)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        updates, table_state = dense.update(table_gradients, table_state, tables)
        tables = optax.apply_updates(tables, updates)
        reference_optimizer.update(reference, dense_gradients)
    for name, table in model.embeddings.arrays().items():
        np.testing.assert_allclose(table, tables[name], rtol=2e-5, atol=1e-6)
    for got, wanted in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(nnx.state(reference, nnx.Param)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-6)
    assert int(optimizer.step) == 4


class SumOfRows(nnx.Module):
    """Logits that are sums of the looked-up rows: under a sum as loss, every row's gradient is one."""

    def __init__(self, implementation):
        self.embeddings = jrec.nn.EmbeddingCollection(
            one_hot_layout(rows=(60,), dtype="bfloat16"), implementation=implementation, rngs=nnx.Rngs(0)
        )
        self.embeddings.set_arrays({"d8_bfloat16": jnp.ones((60, 8), jnp.bfloat16)})
        self.unused = nnx.Param(jnp.ones(()))

    def logits(self, dense, activations, bags):
        return jnp.sum(activations["d8_bfloat16"], axis=1)


class Descent:
    """Steps of a 16th of the last bit of a bfloat16 just below one, on every element of the table."""

    def __init__(self, seed, implementation):
        model = SumOfRows(implementation)
        embedding = ops.SGD(learning_rate=2.0**-12)
        optimizer = SparseOptimizer(model, dense=optax.sgd(0.0), embedding=embedding, rounding_seed=seed)
        self.modules = model, optimizer
        ids = np.random.default_rng(0).permutation(60)[:, None]
        empty = jnp.zeros((60, 0))
        self.batch = jrec.Batch(
            dense=empty, labels=empty, mask=empty, bags={"d8_bfloat16": jrec.Bags(ids=jnp.asarray(ids, jnp.int32))}
        )

    @property
    def table(self):
        return np.asarray(self.modules[0].embeddings.arrays()["d8_bfloat16"], np.float32)

    def run(self, steps):
        step = nnx.jit(functools.partial(train_step, loss=lambda logits, _: jnp.sum(logits)))
        for _ in range(steps):
            step(*self.modules, self.batch)
        return self


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_small_updates_of_a_16_bit_table_survive_on_average_with_a_rounding_seed(implementation):
    np.testing.assert_array_equal(Descent(None, implementation).run(64).table, np.ones((60, 8)))
    descent = Descent(7, implementation).run(64)
    assert np.unique(descent.table).size > 4
    # 64 steps move an element by a binomial number of last bits (2**-8), 4 on average with a deviation of 1.94.
    assert abs((1 - descent.table).mean() * 2**8 - 4) < 5 * 1.94 / 480**0.5


def test_rounding_is_a_function_of_seed_and_step_so_that_a_resumed_run_gives_the_same_bits():
    whole, begun, resumed = (Descent(7, "native") for _ in range(3))
    whole.run(40)
    nnx.update(resumed.modules, jax.tree.map(jnp.copy, nnx.state(begun.run(15).modules)))
    np.testing.assert_array_equal(resumed.run(25).table, whole.table)
    assert np.any(Descent(8, "native").run(40).table != whole.table)
    first, second = Descent(7, "native").modules[1], begun.modules[1]
    assert np.any(np.asarray(first.rounding_key()) != np.asarray(second.rounding_key()))
    second.dense.step[...] = jnp.zeros_like(second.dense.step[...])
    np.testing.assert_array_equal(first.rounding_key(), second.rounding_key())
    assert Descent(None, "native").modules[1].rounding_key() is None


def test_nothing_in_the_step_is_as_large_as_the_tables_and_donated_tables_are_updated_in_place():
    layout = one_hot_layout(rows=(200_000, 300), dim=8)
    model = dlrm(layout)
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.RowWiseAdagrad(learning_rate=0.1))
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, _ = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    batch = one_hot_batch(layout, np.random.default_rng(0))
    memory = step.lower(state, batch).compile().memory_analysis()
    table_bytes = 200_300 * 8 * 4
    assert memory.alias_size_in_bytes >= table_bytes + 200_300 * 4
    assert memory.temp_size_in_bytes < table_bytes / 10


def ragged_layout():
    config = jrec.FeatureConfig
    return jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="items", rows=40, dim=8), jrec.TableConfig(name="tags", rows=9, dim=8)],
        [
            config(name="history", table="items", max_length=4, pooling="max"),
            config(name="item", table="items", fixed_length=True),
            config(name="tags", table="tags", max_length=3, weighted=True),
        ],
    )


def ragged_batch(layout, lists):
    """Bags of (history, item, weighted tags) per example, packed feature-major as the layout says."""
    stack = layout.stacks["d8_float32"]
    ids, weights, lengths = [], [], []
    for feature in stack.features:
        for example in lists[feature.config.name]:
            if feature.config.unpooled:
                padded = [*example, *[None] * (feature.config.max_length - len(example))]
                lengths += [i is not None for i in padded]
            else:
                lengths.append(len(example))
            for entry in example:
                identity, weight = entry if feature.config.weighted else (entry, 1.0)
                ids.append(identity + feature.base)
                weights.append(weight)
    capacity = stack.capacity(len(lists["item"]))
    pad = capacity - len(ids)
    return jrec.Bags(
        ids=jnp.asarray([*ids, *[-7] * pad], jnp.int32),
        offsets=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        weights=jnp.asarray([*weights, *[1.0] * pad], jnp.float32),
    )


def test_max_pooled_and_weighted_multi_hot_features_of_a_shared_table():
    layout = ragged_layout()
    lists = {
        "history": [[3, 5], [], [39, 39, 0, 1]],
        "item": [[3], [0], [39]],
        "tags": [[(1, 0.5), (8, 2.0)], [(0, 1.0)], []],
    }
    bags = {"d8_float32": ragged_batch(layout, lists)}
    model = dlrm(layout)
    activations, _ = model.embeddings.lookup(bags)
    features = model.embeddings.features(activations, bags)
    table = np.asarray(model.embeddings.arrays()["d8_float32"], np.float64)
    items, tags = table[:40], table[40:]
    wanted = [np.max(items[h], axis=0) if h else np.zeros(8) for h in lists["history"]]
    np.testing.assert_allclose(features["history"], wanted, rtol=1e-6)
    np.testing.assert_allclose(features["item"], items[[3, 0, 39]], rtol=1e-6)
    wanted = [sum((w * tags[i] for i, w in example), np.zeros(8)) for example in lists["tags"]]
    np.testing.assert_allclose(features["tags"], wanted, rtol=1e-6)
    dense = jnp.zeros((3, 5), jnp.float32)
    assert model.logits(dense, activations, bags).shape == (3,)


def test_unpooled_sequences_come_with_masks():
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="items", rows=10, dim=4)],
        [jrec.FeatureConfig(name="seq", table="items", max_length=3, pooling="none")],
    )
    collection = jrec.nn.EmbeddingCollection(layout, rngs=nnx.Rngs(0))
    bags = {
        "d4_float32": jrec.Bags(
            ids=jnp.asarray([7, 2, 1, -1, -1, -1], jnp.int32), offsets=jnp.asarray([0, 1, 2, 2, 3, 3, 3], jnp.int32)
        )
    }
    activations, _ = collection.lookup(bags)
    sequence = collection.features(activations, bags)["seq"]
    table = collection.arrays()["d4_float32"]
    assert collection.masks(bags)["seq"].tolist() == [[True, True, False], [True, False, False]]
    np.testing.assert_array_equal(sequence[0, :2], table[jnp.asarray([7, 2])])
    np.testing.assert_array_equal(sequence[1, 0], table[1])
    np.testing.assert_array_equal(sequence[0, 2], np.zeros(4))


@pytest.mark.parametrize("interaction", ["dot", "concat"])
def test_an_unpooled_feature_is_as_many_features_of_one_id(interaction):
    """The same logits and steps, with repeated ids, positions that hold none, and examples that are padding."""
    rng, tables = np.random.default_rng(4), [
        jrec.TableConfig(name="item", rows=9, dim=8),
        jrec.TableConfig(name="tag", rows=5, dim=8),
    ]  # fmt: skip
    feature = functools.partial(jrec.FeatureConfig, table="item")
    shared = feature(name="past", max_length=4), jrec.FeatureConfig(name="tag", table="tag", max_length=2)
    sequence = feature(name="seq", max_length=3, pooling="none", weighted=True)
    apart = [feature(name=f"seq{i}", weighted=True) for i in range(3)]
    layouts = [jrec.EmbeddingLayout.build(tables, [*of, *shared]) for of in ([sequence], apart)]
    models = [dlrm(layout, interaction=interaction) for layout in layouts]
    optimizers = [
        SparseOptimizer(model, dense=optax.sgd(0.3), embedding=ops.Adagrad(learning_rate=0.1)) for model in models
    ]
    step = nnx.jit(train_step)
    for count in (BATCH, BATCH - 3):
        ids, weights = rng.integers(-2, 9, (count, 3)), rng.uniform(0.5, 2, (count, 3)).astype(np.float32)
        ids[0], ids[1] = 4, -1
        ids = np.sort(np.maximum(ids, -1), axis=1)[:, ::-1]  # what is absent comes last
        columns = {"label": rng.integers(0, 2, count), "past": rng.integers(0, 9, (count, 4)), "seq": ids}
        columns |= {"tag": rng.integers(0, 5, (count, 2)), "seq:weight": weights}
        columns |= {f"seq{i}": ids[:, i : i + 1] for i in range(3)}
        columns |= {f"seq{i}:weight": weights[:, i : i + 1] for i in range(3)}
        columns |= {f"x{i}": rng.normal(size=count).astype(np.float32) for i in range(5)}
        outcomes = []
        for layout, model, optimizer in zip(layouts, models, optimizers, strict=True):
            batch = jrec.data.pack_batch(layout, columns, dense=[f"x{i}" for i in range(5)], batch_size=BATCH)
            outcomes.append(step(model, optimizer, batch))
        assert float(outcomes[0][0]) > 0
        for got, wanted in zip(*outcomes, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(*(jax.tree.leaves(nnx.state(model)) for model in models), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_concat_joins_dims_that_dot_cannot_and_no_dense_features_are_fine():
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="a", rows=5, dim=4), jrec.TableConfig(name="b", rows=5, dim=6, dtype="bfloat16")],
        [jrec.FeatureConfig(name=n, table=n, fixed_length=True) for n in "ab"],
    )
    with pytest.raises(ValueError, match=r"needs one dim .*\[4, 6\]"):
        dlrm(layout, num_dense=0)
    model = dlrm(layout, num_dense=0, interaction="concat")
    batch = one_hot_batch(layout, np.random.default_rng(0), num_dense=0)
    assert model(batch).shape == (BATCH,)
    assert model.bottom is None
    optimizer = SparseOptimizer(model, dense=optax.adagrad(1e-1), embedding=ops.Adam(learning_rate=1e-2))
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, batch)[0]) for _ in range(30)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_mlp": (4, 2)}, "must end in 1"),
        ({"bottom_mlp": ()}, "bottom_mlp is empty"),
        ({"interaction": "cross"}, "choose dot, concat, fm or dcn"),
    ],
)
def test_impossible_dlrm_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DLRMConfig(**{"num_dense": 3, "bottom_mlp": (8,), "top_mlp": (1,), **change})


def test_padded_examples_do_not_train():
    rng = np.random.default_rng(5)
    layout = one_hot_layout()
    model = dlrm(layout)
    batch = one_hot_batch(layout, rng)
    flipped = jrec.Batch(
        dense=batch.dense,
        labels=jnp.where(batch.mask > 0, batch.labels, 1 - batch.labels),
        mask=batch.mask,
        bags=batch.bags,
    )
    logits = model(batch)
    assert float(binary_cross_entropy(logits, batch)) == float(binary_cross_entropy(logits, flipped))
