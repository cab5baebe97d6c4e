"""Models whose tables live in several tiers: the same function as with plain tables, and the same steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import ops
from jrec.nn import DLRM, DLRMConfig, EmbeddingCollection, SparseOptimizer, TTCore, binary_cross_entropy, train_step
from jrec.ops.tt import TTShape, tt_embedding_bag, tt_to_dense

BATCH = 24
ROWS = {"user": 30, "item": 700, "tag": 400, "hour": 24}
COMPRESSED = ("item",)


def layout_of(*, compressed=COMPRESSED, dtype="float32", pooling="sum"):
    """``item`` is read by a one-hot and by a multi-hot feature; ``tag`` by a weighted one."""

    def table(name, rows):
        shape = TTShape.search(rows, 8, ranks=5) if name in compressed else None
        tier = "tt" if shape else "sharded"
        return jrec.TableConfig(
            name=name, rows=rows, dim=8, dtype=dtype if shape else "float32", tier=tier, tt_shape=shape
        )

    feature = jrec.FeatureConfig
    return jrec.EmbeddingLayout.build(
        [table(name, rows) for name, rows in ROWS.items()],
        [
            feature(name="user", table="user", fixed_length=True),
            feature(name="item", table="item", fixed_length=True),
            feature(name="history", table="item", max_length=4, pooling=pooling),
            feature(name="tags", table="tag", max_length=3, weighted=True),
            feature(name="hour", table="hour", fixed_length=True),
        ],
    )


def examples_of(layout, seed):
    """Ids and weights of every feature's examples, drawn alike for every layout."""
    rng = np.random.default_rng(seed)
    configs = {f.config.name: (f.config, f.rows) for s in layout.members for f in s.features}
    examples = {}
    for name in layout.order:
        config, rows = configs[name]
        lengths = np.full(BATCH, 1) if config.max_length == 1 else rng.integers(0, config.max_length + 1, BATCH)
        examples[name] = [(rng.integers(0, rows, n), rng.uniform(0.5, 2, n)) for n in lengths]
    dense, labels = rng.normal(size=(BATCH, 5)), rng.integers(0, 2, BATCH)
    return examples, jnp.asarray(dense, jnp.float32), jnp.asarray(labels, jnp.float32)


def bags_of(stack, examples):
    ids, weights, lengths = [], [], []
    for feature in stack.features:
        config = feature.config
        for identities, given in examples[config.name]:
            if config.unpooled:
                lengths += [int(i < len(identities)) for i in range(config.max_length)]
            else:
                lengths.append(len(identities))
            mean = len(identities) if config.pooling == "mean" else 1
            ids.append(identities + feature.base)
            weights.append((given if config.weighted else np.ones(len(identities))) / mean)
    capacity, ids, weights = stack.capacity(BATCH), np.concatenate(ids), np.concatenate(weights)
    pad = (0, capacity - len(ids))
    return jrec.Bags(
        ids=jnp.asarray(np.pad(ids, pad, constant_values=-1), jnp.int32),
        offsets=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        weights=jnp.asarray(np.pad(weights, pad), jnp.float32) if stack.weighted else None,
    )


def batch_of(layout, seed=0):
    examples, dense, labels = examples_of(layout, seed)
    bags = {name: bags_of(stack, examples) for name, stack in layout.stacks.items()}
    return jrec.Batch(dense=dense, labels=labels, mask=jnp.ones(BATCH), bags=bags)


def dlrm(layout, **options):
    config = DLRMConfig(num_dense=5, bottom_mlp=(16, 8), top_mlp=(16, 1))
    return DLRM(config, layout, rngs=nnx.Rngs(3), **options)


def twin_of_plain_tables(model, layout):
    """A model of device tables with the dense parameters and, decompressed, the rows of ``model``."""
    twin = dlrm(layout)
    nnx.update(twin, nnx.state(model, nnx.Param))
    rows = {}
    for stack in model.embeddings.layout.members:
        if stack.compressed:
            rows[stack.tables[0].name] = tt_to_dense(model.embeddings.tt[stack.name].arrays(), stack.tt_shape)
        else:
            whole = model.embeddings.arrays()[stack.name]
            rows |= {t.name: whole[b : b + t.rows] for t, b in zip(stack.tables, stack.bases, strict=True)}
    (stack,) = layout.members
    twin.embeddings.set_arrays({stack.name: jnp.concatenate([jnp.asarray(rows[t.name]) for t in stack.tables])})
    return twin


@pytest.mark.parametrize(("compressed", "dtype", "pooling"), [("item", "float32", "max"), ("tag", "bfloat16", "mean")])
def test_a_model_with_compressed_tables_is_the_model_of_the_tables_they_stand_for(compressed, dtype, pooling):
    layout = layout_of(compressed=(compressed,), dtype=dtype, pooling=pooling)
    plain = layout_of(compressed=(), pooling=pooling)
    assert layout.order == plain.order
    model = dlrm(layout)

    @nnx.jit
    def outcome(model, batch):
        activations, _ = model.embeddings.lookup(batch.bags)
        logits = model.logits(batch.dense, activations, batch.bags)
        return model.embeddings.features(activations, batch.bags), logits, binary_cross_entropy(logits, batch)

    features, logits, loss = outcome(model, batch_of(layout))
    plain_features, plain_logits, plain_loss = outcome(twin_of_plain_tables(model, plain), batch_of(plain))
    for name, wanted in plain_features.items():
        np.testing.assert_allclose(features[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(logits, plain_logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)


def test_unpooled_features_of_a_compressed_table_come_with_masks():
    shape = TTShape.search(50, 8, ranks=3)
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="items", rows=50, dim=8, tier="tt", tt_shape=shape)],
        [jrec.FeatureConfig(name="seq", table="items", max_length=3, pooling="none")],
    )
    collection = EmbeddingCollection(layout, rngs=nnx.Rngs(0))
    ids, offsets = jnp.asarray([7, 49, 1, -1, -1, -1], jnp.int32), jnp.asarray([0, 1, 2, 2, 3, 3, 3], jnp.int32)
    bags = {"tt_items": jrec.Bags(ids=ids, offsets=offsets)}
    sequence = collection.features(collection.lookup(bags)[0], bags)["seq"]
    table = tt_to_dense(collection.tt["tt_items"].arrays(), shape)
    assert collection.masks(bags)["seq"].tolist() == [[True, True, False], [True, False, False]]
    wanted = np.stack([[table[7], table[49], 0 * table[0]], [table[1], 0 * table[0], 0 * table[0]]])
    np.testing.assert_allclose(sequence, wanted, rtol=1e-5, atol=1e-7)


def test_steps_on_cores_equal_autodiff_through_the_collection_and_optax():
    layout = layout_of()
    model = dlrm(layout)
    rows = ops.Adagrad(learning_rate=0.05, initial_accumulator=0.1, eps=1e-7)
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.0), embedding=rows)
    reference = optax.adagrad(0.05)
    stacks = {name: stack for name, stack in layout.stacks.items() if stack.compressed}
    cores = {name: model.embeddings.tt[name].arrays() for name in stacks}
    state = reference.init(cores)

    @jax.jit
    def gradients_of(cores, others, batch):
        def loss(cores):
            pooled = {
                name: tt_embedding_bag(cores[name], stack.tt_shape, b.ids, b.offsets, weights=b.weights)
                for name, stack in stacks.items()
                for b in (batch.bags[name],)
            }
            return binary_cross_entropy(model.logits(batch.dense, others | pooled, batch.bags), batch)

        return jax.grad(loss)(cores)

    step = nnx.jit(train_step)
    for seed in range(3):
        batch = batch_of(layout, seed)
        others, _ = ops.lookup(model.embeddings.arrays(), {"d8_float32": batch.bags["d8_float32"]})
        updates, state = reference.update(gradients_of(cores, others, batch), state, cores)
        cores = optax.apply_updates(cores, updates)
        step(model, optimizer, batch)
    for name in stacks:
        for got, wanted in zip(model.embeddings.tt[name].arrays(), cores[name], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_donated_cores_are_updated_in_place_by_an_optimizer_of_their_own_and_no_array_is_as_large_as_their_table():
    shape = TTShape.search(1_000_000, 8, ranks=8)
    layout = jrec.EmbeddingLayout.build(
        [
            jrec.TableConfig(name="big", rows=1_000_000, dim=8, tier="tt", tt_shape=shape),
            jrec.TableConfig(name="small", rows=20, dim=8),
        ],
        [jrec.FeatureConfig(name=n, table=n, fixed_length=True) for n in ("big", "small")],
    )
    model = dlrm(layout)
    optimizer = SparseOptimizer(
        model, dense=optax.sgd(0.0), embedding=ops.SGD(learning_rate=0.0), cores=ops.Adagrad(learning_rate=0.1)
    )
    assert set(optimizer.slots["tt_big"]) == {"core0_sum", "core1_sum", "core2_sum"}
    assert not optimizer.slots["d8_float32"]
    graph, state = nnx.split((model, optimizer))
    before = jax.tree.map(np.asarray, nnx.state(model))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, _ = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    bags = {name: jrec.Bags(ids=jnp.zeros((BATCH, 1), jnp.int32)) for name in layout.stacks}
    batch = jrec.Batch(dense=jnp.ones((BATCH, 5)), labels=jnp.zeros(BATCH), mask=jnp.ones(BATCH), bags=bags)
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 4 * shape.num_parameters
    assert memory.temp_size_in_bytes < 1_000_000 * 8 * 4 / 10
    nnx.update((model, optimizer), compiled(state, batch)[0])
    for path, new in nnx.to_flat_state(nnx.state(model)):
        old = dict(nnx.to_flat_state(before))[path]
        assert np.any(new[...] != old[...]) == isinstance(new, TTCore), path
        if isinstance(new, TTCore):  # of the slices, those of row 0 alone
            np.testing.assert_array_equal(new[...][1:], old[...][1:])


def test_bfloat16_cores_are_rounded_stochastically_by_seed_and_step():
    layout = layout_of(dtype="bfloat16")
    batch, step, initial = batch_of(layout), nnx.jit(train_step), dlrm(layout)

    def run(seed, steps=12):
        model = nnx.clone(initial)
        optimizer = SparseOptimizer(
            model, dense=optax.sgd(0.0), embedding=ops.SGD(learning_rate=2.0**-10), rounding_seed=seed
        )
        for _ in range(steps):
            step(model, optimizer, batch)
        return [np.asarray(core, np.float32) for core in model.embeddings.tt["tt_item"].arrays()]

    start, first, again, nearest = run(1, steps=0), run(1), run(1), run(None)
    moved = [sum(int(np.sum(a != b)) for a, b in zip(start, cores, strict=True)) for cores in (first, nearest)]
    assert moved[0] > 2 * moved[1]  # updates far below the last bit survive
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_cores_start_by_table_name_whatever_else_there_is():
    alone = jrec.EmbeddingLayout.build(
        [t for s in layout_of().members for t in s.tables if t.name == "item"],
        [jrec.FeatureConfig(name="item", table="item")],
    )
    for a, b in zip(
        EmbeddingCollection(alone, rngs=nnx.Rngs(3)).tt["tt_item"].arrays(),
        dlrm(layout_of()).embeddings.tt["tt_item"].arrays(),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_refusals():
    model = dlrm(layout_of())
    batch = batch_of(layout_of())
    with pytest.raises(ValueError, match="there are no bags for"):
        model.embeddings.lookup({n: b for n, b in batch.bags.items() if n != "tt_item"})
    with pytest.raises(ValueError, match="there are no bags for stack"):
        model.embeddings.lookup({n: b for n, b in batch.bags.items() if n != "d8_float32"})
