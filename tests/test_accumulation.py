"""Loops of one's own: ``SparseOptimizer.update``, and several micro-batches in one step of all parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grids import some_of

import jrec
from jrec import nn, ops
from jrec.data import pack_batch

ROWS = {"user": 40, "tag": 30, "word": 64}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
accumulated, step = nnx.jit(nn.accumulated_step), nnx.jit(nn.train_step)  # once: each has a cache of its own


def layout_of():
    shape = jrec.TTShape.search(ROWS["word"], 8, ranks=4)
    tables = [
        jrec.TableConfig(name="user", rows=ROWS["user"], dim=8),
        jrec.TableConfig(name="tag", rows=ROWS["tag"], dim=8, group="ragged"),
        jrec.TableConfig(name="word", rows=ROWS["word"], dim=8, tier="tt", tt_shape=shape),
    ]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="tags", table="tag", max_length=4, pooling="mean"),
        jrec.FeatureConfig(name="words", table="word", max_length=3),
    ]
    return jrec.EmbeddingLayout.build(tables, features)


LAYOUT = layout_of()


def modules(*, dense=None, unique_capacities=None, **options):
    config = nn.DLRMConfig(num_dense=1, bottom_mlp=(8,), top_mlp=(1,))
    model = nn.DLRM(config, LAYOUT, unique_capacities=unique_capacities, rngs=nnx.Rngs(1))
    dense = optax.sgd(0.1, momentum=0.9) if dense is None else dense
    return model, nn.SparseOptimizer(model, dense=dense, embedding=ops.Adam(learning_rate=0.05), **options)


def columns(seed, size):
    rng = np.random.default_rng(seed)

    def lists(rows, most):
        found = rng.integers(0, rows, (size, most))
        return np.where(np.arange(most) < rng.integers(0, most + 1, (size, 1)), found, -1)

    return {
        "label": rng.integers(0, 2, size).astype(np.float32),
        "price": rng.normal(size=size).astype(np.float32),
        "user": rng.integers(0, ROWS["user"], size),
        "tags": lists(ROWS["tag"], 4),
        "words": lists(ROWS["word"], 3),
    }


def batches(seed, sizes, room=8):
    """Micro-batches of these many examples, and one batch of all of them."""
    parts = [columns([seed, n], size) for n, size in enumerate(sizes)]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    packed = [pack_batch(LAYOUT, part, dense=["price"], batch_size=room) for part in parts]
    return packed, pack_batch(LAYOUT, whole, dense=["price"])


def leaves(model, optimizer):
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(nnx.state((model, optimizer)))}


def agree(found, expected):
    one, other = leaves(*found), leaves(*expected)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], err_msg=name, **CLOSE)


@pytest.mark.parametrize("limit", some_of([None, 0.3], 0.3))
def test_micro_batches_take_the_step_of_one_batch(limit):
    found, expected = modules(max_global_norm=limit), modules(max_global_norm=limit)
    for seed in range(4):
        parts, whole = batches(seed, [8, 5, 7])
        loss, logits = accumulated(*found, parts)
        np.testing.assert_allclose(loss, step(*expected, whole)[0], **CLOSE)
        assert [array.shape for array in logits] == [(8,)] * 3
    agree(found, expected)
    assert int(found[1].step) == 4


@nnx.jit(static_argnames="scale")
def own_step(model, optimizer, batch, scale=1.0):
    """A loop of one's own with a loss scale."""
    activations, residuals = model.embeddings.lookup(batch.bags)

    def loss(model, activations):
        return scale * nn.binary_cross_entropy(model.logits(batch.dense, activations, batch.bags), batch)

    arguments = (nnx.DiffState(0, nnx.Param), 1)
    dense, rows = nnx.grad(loss, argnums=arguments)(model, activations)
    optimizer.update(model, residuals, dense, rows, gradient_scale=1 / scale)


@pytest.mark.parametrize("limit", some_of([None, 0.3], 0.3))
def test_a_loop_of_ones_own_with_a_loss_scale_is_the_train_step(limit):
    found, expected = modules(max_global_norm=limit), modules(max_global_norm=limit)
    for seed in range(3):
        _, whole = batches(seed, [8, 8])
        own_step(*found, whole, scale=1024.0)
        step(*expected, whole)
    agree(found, expected)


def test_learning_rates_count_the_steps_of_all_micro_batches():
    found = modules()
    schedule = ops.SGD(learning_rate=lambda step: jnp.where(step < 2, jnp.float32(0), jnp.float32(1)))
    model = found[0]
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.0), embedding=schedule)
    before = model.embeddings.arrays()["d8_float32"]
    before, moved = np.asarray(before), []
    for seed in range(3):
        parts, _ = batches(seed, [8, 8])
        accumulated(model, optimizer, parts)
        moved.append(bool((np.asarray(model.embeddings.arrays()["d8_float32"]) != before).any()))
    assert moved == [False, False, True]


def test_multi_steps_is_refused():
    for dense in (
        optax.MultiSteps(optax.sgd(0.1), 4),
        optax.chain(optax.identity(), optax.MultiSteps(optax.sgd(1), 2)),
    ):
        with pytest.raises(ValueError, match=r"dense is optax\.MultiSteps.*accumulated_step"):
            modules(dense=dense.gradient_transformation() if isinstance(dense, optax.MultiSteps) else dense)


def test_bags_and_gradients_that_do_not_go_together_are_refused():
    model, optimizer = modules()
    parts, _ = batches(0, [8])
    with pytest.raises(ValueError, match="bags of 1 micro-batches, but gradients of 0"):
        optimizer.update_accumulated(model, [parts[0].bags], {}, [])
    with pytest.raises(ValueError, match="there are no micro-batches"):
        nn.accumulated_step(model, optimizer, [])


def test_all_rows_of_micro_batches_fit_where_those_of_each_fit():
    """A bound on the unique rows of a batch (``unique_capacities``) holds for a micro-batch, not for all together."""
    room = {"d8_float32": 8}  # as many as a micro-batch reads at most; three of them read more
    found, expected = modules(unique_capacities=room), modules()
    parts, whole = batches(5, [8, 8, 8])
    assert len(np.unique(np.concatenate([part.bags["d8_float32"].ids for part in parts]))) > 8
    loss, _ = accumulated(*found, parts)
    np.testing.assert_allclose(loss, step(*expected, whole)[0], **CLOSE)
    agree(found, expected)
