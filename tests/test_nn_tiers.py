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
COMPRESSED = ("item", "tag")


def layout_of(*, compressed=COMPRESSED, dtype="float32", pooling="sum"):
    """``item`` is read by a one-hot and by a multi-hot feature; ``tag`` by a weighted one."""

    def table(name, rows):
        shape = TTShape.search(rows, 8, ranks=5) if name in compressed else None
        tier = "tt" if shape else "device"
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
        if stack.tier == "tt":
            rows[stack.tables[0].name] = tt_to_dense(model.embeddings.tt[stack.name].arrays(), stack.tt_shape)
        else:
            whole = model.embeddings.arrays()[stack.name]
            rows |= {t.name: whole[b : b + t.rows] for t, b in zip(stack.tables, stack.bases, strict=True)}
    (stack,) = layout.members
    twin.embeddings.set_arrays({stack.name: jnp.concatenate([jnp.asarray(rows[t.name]) for t in stack.tables])})
    return twin


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_compressed_tables_is_the_model_of_the_tables_they_stand_for(dtype, pooling):
    layout, plain = layout_of(dtype=dtype, pooling=pooling), layout_of(compressed=(), pooling=pooling)
    assert layout.order == plain.order
    model = dlrm(layout)
    twin = twin_of_plain_tables(model, plain)
    batch, plain_batch = batch_of(layout), batch_of(plain)
    activations, _ = model.embeddings.lookup(batch.bags)
    features = model.embeddings.features(activations, batch.bags)
    plain_activations, _ = twin.embeddings.lookup(plain_batch.bags)
    for name, wanted in twin.embeddings.features(plain_activations, plain_batch.bags).items():
        np.testing.assert_allclose(features[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(model(batch), twin(plain_batch), rtol=1e-4, atol=1e-5)
    losses = []
    for one, its_batch in ((model, batch), (twin, plain_batch)):
        optimizer = SparseOptimizer(one, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
        losses.append(float(nnx.jit(train_step)(one, optimizer, its_batch)[0]))
    np.testing.assert_allclose(*losses, rtol=1e-5)


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


@pytest.mark.parametrize(
    ("row_optimizer", "reference"),
    [(ops.SGD(learning_rate=0.5), optax.sgd(0.5)), (ops.Adagrad(learning_rate=0.05), optax.adagrad(0.05))],
    ids=["sgd", "adagrad"],
)
def test_steps_on_cores_equal_autodiff_through_the_collection_and_optax(row_optimizer, reference):
    layout = layout_of()
    model = dlrm(layout)
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.0), embedding=row_optimizer)
    stacks = {name: stack for name, stack in layout.stacks.items() if stack.tier == "tt"}
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
        others = {n: a for n, a in model.embeddings.lookup(batch.bags)[0].items() if n not in stacks}
        updates, state = reference.update(gradients_of(cores, others, batch), state, cores)
        cores = optax.apply_updates(cores, updates)
        step(model, optimizer, batch)
    for name in stacks:
        for got, wanted in zip(model.embeddings.tt[name].arrays(), cores[name], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_cores_may_have_an_optimizer_of_their_own_and_are_no_parameters_of_the_dense_one():
    layout = layout_of()
    model = dlrm(layout)
    before = jax.tree.map(np.asarray, (model.embeddings.arrays(), nnx.state(model, TTCore)))
    optimizer = SparseOptimizer(
        model, dense=optax.sgd(0.0), embedding=ops.SGD(learning_rate=0.0), cores=ops.Adagrad(learning_rate=0.1)
    )
    assert set(optimizer.slots["tt_item"]) == {"core0_sum", "core1_sum", "core2_sum"}
    assert not optimizer.slots["d8_float32"]
    nnx.jit(train_step)(model, optimizer, batch_of(layout))
    np.testing.assert_array_equal(model.embeddings.arrays()["d8_float32"], before[0]["d8_float32"])
    for old, new in zip(jax.tree.leaves(before[1]), jax.tree.leaves(nnx.state(model, TTCore)), strict=True):
        assert np.any(old != new)
    assert all("tt" not in path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)))


def test_donated_cores_are_updated_in_place_and_nothing_is_as_large_as_the_table_they_stand_for():
    shape = TTShape.search(1_000_000, 8, ranks=8)
    layout = jrec.EmbeddingLayout.build(
        [
            jrec.TableConfig(name="big", rows=1_000_000, dim=8, tier="tt", tt_shape=shape),
            jrec.TableConfig(name="small", rows=20, dim=8),
        ],
        [jrec.FeatureConfig(name=n, table=n, fixed_length=True) for n in ("big", "small")],
    )
    model = dlrm(layout)
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.Adagrad(learning_rate=0.1))
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, _ = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    bags = {name: jrec.Bags(ids=jnp.zeros((BATCH, 1), jnp.int32)) for name in layout.stacks}
    batch = jrec.Batch(dense=jnp.zeros((BATCH, 5)), labels=jnp.zeros(BATCH), mask=jnp.ones(BATCH), bags=bags)
    memory = step.lower(state, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 4 * shape.num_parameters
    assert memory.temp_size_in_bytes < 1_000_000 * 8 * 4 / 10


def test_bfloat16_cores_are_rounded_stochastically_by_seed_and_step():
    layout = layout_of(dtype="bfloat16")

    def run(seed, steps=12):
        model = dlrm(layout)
        optimizer = SparseOptimizer(
            model, dense=optax.sgd(0.0), embedding=ops.SGD(learning_rate=2.0**-10), rounding_seed=seed
        )
        step, batch = nnx.jit(train_step), batch_of(layout)
        for _ in range(steps):
            step(model, optimizer, batch)
        return [np.asarray(c, np.float32) for s in model.embeddings.tt.values() for c in s.arrays()]

    first, again, other, nearest, start = run(1), run(1), run(2), run(None), run(None, steps=0)
    moved = [sum(int(np.sum(a != b)) for a, b in zip(start, cores, strict=True)) for cores in (first, nearest)]
    assert moved[0] > 2 * moved[1]  # updates far below the last bit survive
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(np.any(a != b) for a, b in zip(first, other, strict=True))


def test_cores_start_by_table_name_whatever_else_there_is():
    alone = jrec.EmbeddingLayout.build(
        [t for s in layout_of().members for t in s.tables if t.name == "tag"],
        [jrec.FeatureConfig(name="tags", table="tag")],
    )
    for a, b in zip(
        EmbeddingCollection(alone, rngs=nnx.Rngs(3)).tt["tt_tag"].arrays(),
        dlrm(layout_of()).embeddings.tt["tt_tag"].arrays(),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_refusals():
    model = dlrm(layout_of())
    batch = batch_of(layout_of())
    with pytest.raises(ValueError, match="there are no bags for"):
        model.embeddings.lookup({n: b for n, b in batch.bags.items() if n != "tt_tag"})
    with pytest.raises(ValueError, match="the names must agree"):
        model.embeddings.lookup({n: b for n, b in batch.bags.items() if n != "d8_float32"})
    host = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="t", rows=9, dim=8, tier="host")], [jrec.FeatureConfig(name="f", table="t")]
    )
    with pytest.raises(ValueError, match="host_d8_float32 are of tier 'host'"):
        EmbeddingCollection(host, rngs=nnx.Rngs(0))
