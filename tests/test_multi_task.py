"""Heads of several tasks against float64 NumPy, missing labels, and the same losses on any number of devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.data.packing import pack_batch
from jrec.nn import MultiTaskConfig, MultiTaskHeads, multi_task_loss

TASKS = ("click", "purchase", "like")
WEIGHTS = {"click": 1.0, "purchase": 0.5, "like": 0.0}
ROWS, BATCH, STEPS = {"user": 60, "item": 40}, 32, 6


def numpy_mlp(mlp, x, *, activate_last):
    for number, layer in enumerate(mlp.layers):
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        if activate_last or number + 1 < len(mlp.layers):
            x = np.maximum(x, 0)
    return x


def numpy_heads(heads, x):
    experts = np.stack([numpy_mlp(expert, x, activate_last=True) for expert in heads.experts])  # (experts, batch, dim)
    out = {}
    for number, (task, tower) in enumerate(zip(heads.config.tasks, heads.towers, strict=True)):
        weights = np.ones((len(x), len(experts)))
        if heads.gates is not None:
            own = np.asarray(heads.gates.kernel[...], np.float64).reshape(x.shape[1], len(heads.config.tasks), -1)
            weights = np.exp(x @ own[:, number])
        weights = weights / weights.sum(1, keepdims=True)
        read = np.einsum("be,ebd->bd", weights, experts)
        out[task] = numpy_mlp(tower, read, activate_last=False)[:, 0]
    return out


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("tower", [(), (7, 5)])
def test_heads_are_those_of_numpy(experts, tower):
    config = MultiTaskConfig(tasks=TASKS, experts=experts, expert_mlp=(9, 6), tower_mlp=tower)
    heads = MultiTaskHeads(5, config, rngs=nnx.Rngs(0))
    if experts > 1:
        heads.gates.kernel[...] = jax.random.normal(jax.random.key(1), heads.gates.kernel.shape)
    x = np.random.default_rng(0).normal(size=(11, 5))
    want = numpy_heads(heads, x)
    found = heads(jnp.asarray(x, jnp.float32))
    assert list(found) == list(TASKS)
    for task, logits in found.items():
        np.testing.assert_allclose(logits, want[task], rtol=2e-5, atol=2e-6)


def test_gates_begin_alike_and_learn():
    heads = MultiTaskHeads(5, MultiTaskConfig(tasks=TASKS[:2], experts=3), rngs=nnx.Rngs(0))
    assert not np.any(heads.gates.kernel[...])
    gradient = nnx.grad(lambda heads: jnp.sum(heads(jnp.ones((2, 5)))["click"]))(heads)
    by_task = gradient["gates"]["kernel"][...].reshape(5, 2, 3)
    assert np.any(by_task[:, 0])
    assert not np.any(by_task[:, 1])  # the other task has no part in the sum


def batch_of(labels, mask):
    extras = {task: jnp.asarray(values) for task, values in labels.items()}
    count = len(mask)
    return jrec.Batch(
        dense=jnp.zeros((count, 0)),
        bags={},
        labels=jnp.zeros(count),
        mask=jnp.asarray(mask, jnp.float32),
        extras=extras,
    )


def test_the_loss_leaves_missing_labels_and_padding_out():
    rng = np.random.default_rng(1)
    logits = {task: rng.normal(size=8) for task in TASKS}
    labels = {task: rng.integers(-1, 2, 8) for task in TASKS}
    labels["purchase"] = np.array([-1, 1, -1, 0, 0, 1, -1, 1])
    mask = np.array([1, 1, 1, 1, 1, 1, 0, 0])
    want = 0.0
    for task, weight in WEIGHTS.items():
        there = (labels[task] >= 0) & (mask > 0)
        z, y = logits[task][there], labels[task][there]
        want += weight * np.mean(np.logaddexp(0, z) - y * z)
    found = multi_task_loss(WEIGHTS)(
        {t: jnp.asarray(z, jnp.float32) for t, z in logits.items()}, batch_of(labels, mask)
    )
    assert float(found) == pytest.approx(want, rel=1e-5)
    none = {task: -np.ones(8, int) for task in TASKS}
    zeros = {task: jnp.zeros(8) for task in TASKS}
    assert float(multi_task_loss(WEIGHTS)(zeros, batch_of(none, mask))) == 0


def test_members_have_heads_of_their_own_and_predict_by_their_mean():
    """Each member is a model of its own: its part of the rows, its layers, gates and towers."""
    heads = MultiTaskConfig(tasks=TASKS, experts=3, expert_mlp=(9,), tower_mlp=(5,))
    config = jrec.nn.DLRMConfig(num_dense=2, bottom_mlp=(6, 4), top_mlp=(), members=2, multi_task=heads)
    alone = dataclasses.replace(config, members=1)

    def made(config, seed):
        layout = jrec.EmbeddingLayout.build(
            [jrec.TableConfig(name=name, rows=rows, dim=4 * config.members) for name, rows in ROWS.items()],
            [jrec.FeatureConfig(name=name, table=name) for name in ROWS],
        )
        return jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(seed))

    model, members = made(config, 0), [made(alone, 1 + number) for number in range(2)]
    model.top.gates.kernel[...] = jax.random.normal(jax.random.key(1), model.top.gates.kernel.shape)
    for number, member in enumerate(members):
        for part in ("bottom", "top"):
            whole = nnx.state(getattr(model, part), nnx.Param)
            nnx.update(getattr(member, part), jax.tree.map(lambda x, number=number: x[number], whole))
        (rows,) = model.embeddings.arrays().values()  # of one stack, both tables
        (name,) = member.embeddings.arrays()
        member.embeddings.set_arrays({name: rows[:, 4 * number : 4 * number + 4]})
    rng = np.random.default_rng(2)
    labels = {task: rng.integers(-1, 2, BATCH) for task in TASKS}
    ids = {name: rng.integers(0, rows, BATCH) for name, rows in ROWS.items()}
    columns = {**ids, "a": rng.normal(size=BATCH), "b": rng.normal(size=BATCH), **labels}

    def packed(model):
        options = {"dense": ["a", "b"], "label": None, "extras": list(TASKS)}
        return jax.tree.map(jnp.asarray, pack_batch(model.embeddings.layout, columns, **options))

    batch = packed(model)
    outputs, own = model(batch), [member(packed(member)) for member in members]
    loss = multi_task_loss(WEIGHTS)
    for task in TASKS:
        assert outputs[task].shape == (BATCH, 2)
        np.testing.assert_allclose(outputs[task], np.stack([each[task] for each in own], axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss(outputs, batch), np.mean([loss(each, batch) for each in own]), rtol=1e-5)
    slopes, alike = jax.grad(loss)(outputs, batch), [jax.grad(loss)(each, batch) for each in own]
    for task in TASKS:
        np.testing.assert_allclose(slopes[task], np.stack([s[task] for s in alike], axis=1), rtol=1e-5, atol=1e-8)
    model.eval()
    for task, logits in model(batch).items():
        np.testing.assert_allclose(logits, np.mean([each[task] for each in own], axis=0), rtol=1e-5, atol=1e-6)


class Model(nnx.Module):
    def __init__(self, layout, experts, *, rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        config = MultiTaskConfig(tasks=TASKS, experts=experts, expert_mlp=(12,), tower_mlp=(6,))
        self.heads = MultiTaskHeads(17, config, rngs=rngs)

    def logits(self, dense, activations, bags):
        rows = self.embeddings.features(activations, bags)
        return self.heads(jnp.concatenate([dense, rows["user"], rows["item"]], axis=1))


def columns(seed, count=BATCH):
    rng = np.random.default_rng(seed)
    found = {name: rng.integers(0, rows, count) for name, rows in ROWS.items()}
    click = (found["user"] + found["item"]) % 3 == 0
    purchase = np.where(click, found["item"] % 2, -1)  # known where there was a click: not alike on all devices
    return {**found, "price": rng.random(count, np.float32), "click": click.astype(np.int32),
            "purchase": purchase, "like": -np.ones(count, int)}  # fmt: skip


def with_a_number(columns):
    """The columns, in which "like" is a number that is known where there was a click."""
    return {**columns, "like": np.where(columns["click"] == 1, columns["item"] / 4, np.nan).astype(np.float32)}


def trained(devices, experts, numeric, micro_batches=1):
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=name, rows=rows, dim=8) for name, rows in ROWS.items()],
        [jrec.FeatureConfig(name=name, table=name) for name in ROWS],
    )
    model = Model(layout, experts, rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.3))
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        weights, own = ({**WEIGHTS, "like": 1.0}, {"like": jrec.nn.huber()}) if numeric else (WEIGHTS, None)
        step = run.compile(loss=multi_task_loss(weights, number_losses=own), micro_batches=micro_batches)
        read = (columns(seed, BATCH - 3 * (seed == 2)) for seed in range(STEPS))
        feed = run.feed(
            map(with_a_number, read) if numeric else read, label=None, dense=["price"],
            batch_size=BATCH, extras=list(TASKS),
        )  # fmt: skip
        losses = [float(step(batch)[0]) for batch in feed]
        wanted = {name: columns(99)[name] for name in (*ROWS, "price")}
        return losses, run.predict(wanted, dense=["price"]), {name: run.table(name) for name in ROWS}


@pytest.mark.parametrize(("experts", "numeric"), [(1, True), (3, False)])
def test_a_model_is_the_same_on_any_number_of_devices_and_in_slices(experts, numeric):
    losses, scores, tables = trained(1, experts, numeric)
    assert losses[-1] < losses[0]
    for devices, slices in ((2, 1), (4, 1), (1, 4), (2, 2)):  # each knows other numbers of labels than the whole
        other_losses, other_scores, other_tables = trained(devices, experts, numeric, slices)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        for task in TASKS:
            np.testing.assert_allclose(other_scores[task], scores[task], rtol=1e-4, atol=1e-5)
        for name, rows in tables.items():
            np.testing.assert_allclose(other_tables[name], rows, rtol=1e-4, atol=1e-5)


def test_an_exported_model_answers_by_task(tmp_path):
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=name, rows=rows, dim=8) for name, rows in ROWS.items()],
        [jrec.FeatureConfig(name=name, table=name) for name in ROWS],
    )
    model = Model(layout, 3, rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    wanted = {name: columns(7)[name] for name in (*ROWS, "price")}
    with jrec.distribute(model, optimizer) as run:
        want = run.predict(wanted, dense=["price"])
        run.export(tmp_path / "model", dense=["price"])
    found = jrec.serving.load(tmp_path / "model").logits(wanted)
    assert found.keys() == want.keys() == set(TASKS)
    for task in TASKS:
        np.testing.assert_allclose(found[task], want[task], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"tasks=\['a', 'a'\] must be names"):
        MultiTaskConfig(tasks=("a", "a"))
    with pytest.raises(ValueError, match="experts=0 must be at least 1"):
        MultiTaskConfig(tasks=("a",), experts=0)
    with pytest.raises(ValueError, match="must have a number of at least 0"):
        multi_task_loss({"a": -1.0})
    with pytest.raises(ValueError, match="no logits of task 'b', only of a"):
        multi_task_loss({"b": 1.0})({"a": jnp.zeros(2)}, batch_of({"b": np.zeros(2)}, [1, 1]))
