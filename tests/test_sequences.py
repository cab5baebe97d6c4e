"""Sequential recommenders: layers against float64 NumPy, causality, padding, and training on any number of devices."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.data.schema import DatasetError
from jrec.nn import (
    NextItem,
    SequenceConfig,
    SequenceEncoder,
    next_item_layout,
    next_item_loss,
    ranking_metrics,
    ranks,
    sequences,
)
from jrec.nn.sequences import HSTUBlock, SASRecBlock, View, unit

KINDS = ("hstu", "sasrec")
SLOW = pytest.mark.slow
ITEMS, DIM, LENGTH, BATCH, EACH = 50, 8, 6, 16, 8


def histories(count, seed):
    """Users who go on from item i to i + 1 or i + 3; -1 behind the end of a history, some of which are empty."""
    rng = np.random.default_rng(seed)
    items = (rng.integers(0, ITEMS, (count, 1)) + np.cumsum(rng.choice([1, 3], (count, LENGTH + 1)), axis=1)) % ITEMS
    absent = np.arange(LENGTH) >= rng.integers(0, LENGTH + 1, count)[:, None]
    columns = {"history": np.where(absent, -1, items[:, :-1]), "next": np.where(absent, -1, items[:, 1:])}
    return {**columns, "sampled": rng.integers(0, ITEMS, (count, 4))}


def encoder(kind, **options):
    config = SequenceConfig(kind=kind, dropout=0.0, **options)
    return SequenceEncoder(DIM, LENGTH, config, rngs=nnx.Rngs(0))


def inputs(seed=1, batch=3):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(batch, LENGTH, DIM)).astype(np.float32)
    present = np.arange(LENGTH) < np.array([LENGTH, 4, 0])[:batch, None]
    return rows, present, np.cumsum(rng.integers(0, 10_000, (batch, LENGTH)), axis=1).astype(np.int32)


def normed(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def view_of(allowed, passed=None):
    """All positions, asked at once."""
    return View(jnp.arange(LENGTH)[None], jnp.asarray(allowed), None if passed is None else jnp.asarray(passed))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(("normalize", "larger"), [("maximum", 30), ("length", 3)])
def test_a_layer_of_hstu_is_the_papers(normalize, larger):
    """With kernels so large that no term is small, but not so large that the norm leaves nothing of the divisor."""
    config = SequenceConfig(heads=2, dropout=0.0, normalize=normalize)
    block = HSTUBlock(DIM, LENGTH, config, rngs=nnx.Rngs(0))
    block.split.kernel[...] *= larger
    x, present, times = inputs()
    allowed = np.tril(np.ones((LENGTH, LENGTH), bool)) & present[:, None, :]
    gap = np.maximum(np.abs(times[:, :, None] - times[:, None, :]), 1)
    passed = (np.log(gap) / 0.301).astype(np.int32)
    got, _ = block(jnp.asarray(x), view_of(allowed, passed))
    u, v, q, k = np.split(
        silu(normed(x.astype(np.float64)) @ np.asarray(block.split.kernel)).reshape(3, LENGTH, 2, 16), 4, 3
    )
    place = np.arange(LENGTH)
    bias = np.asarray(block.position_bias)[place[None, :] - place[:, None] + LENGTH - 1]
    bias = bias + np.asarray(block.time_bias)[passed]
    items = LENGTH if normalize == "maximum" else np.maximum(present.sum(axis=1), 1)[:, None, None, None]
    weights = silu(np.einsum("bihd,bjhd->bhij", q, k) + bias[:, None]) / items * allowed[:, None]
    gathered = normed(np.einsum("bhij,bjhd->bihd", weights, v).reshape(3, LENGTH, DIM))
    want = x + (u.reshape(3, LENGTH, DIM) * gathered) @ np.asarray(block.out.kernel) + np.asarray(block.out.bias)
    np.testing.assert_allclose(got[:2], want[:2], rtol=2e-4, atol=2e-4)  # the third gathers nothing: 0 over its spread


def test_times_are_bucketed_as_the_papers_code_does():
    """By log(seconds) / 0.301 of the authors' repository: trained biases have these places."""
    seconds = np.array([0, 1, 2, 60, 3_600, 86_400, 31_536_000, 2**31 - 1], np.int32)
    found = sequences._buckets(seconds[None], np.zeros((1, 1), np.int32))
    assert found.tolist() == [[[0, 0, 2, 13, 27, 37, 57, 71]]]
    assert sequences._buckets(np.array([[1e30]], np.float32), np.zeros((1, 1), np.float32)).tolist() == [[[127]]]


def test_a_layer_of_sasrec_is_the_papers():
    block = SASRecBlock(DIM, LENGTH, SequenceConfig(kind="sasrec", heads=2, dropout=0.0), rngs=nnx.Rngs(0))
    x, present, _ = inputs(batch=2)
    allowed = np.tril(np.ones((LENGTH, LENGTH), bool)) & present[:, None, :]
    got, _ = block(jnp.asarray(x), view_of(allowed))

    def through(layer, x):
        return x @ np.asarray(layer.kernel, np.float64) + np.asarray(layer.bias)

    query = normed(x.astype(np.float64))
    q, k, v = (through(layer, of).reshape(2, LENGTH, 2, 4) for layer, of in
               ((block.query, query), (block.key, x), (block.value, x)))  # fmt: skip
    scores = np.where(allowed[:, None], np.einsum("bihd,bjhd->bhij", q, k) / 2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    between = normed(query + through(block.out, np.einsum("bhij,bjhd->bihd", weights, v).reshape(2, LENGTH, DIM)))
    want = between + through(block.back, np.maximum(through(block.hidden, between), 0))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_comes_later_and_no_padding_changes_a_position(kind):
    model = encoder(kind, heads=2, blocks=2)
    rows, present, times = inputs()
    found = np.asarray(model(rows, present, times))
    for place in range(LENGTH):
        other = rows.copy()
        other[:, place] = np.random.default_rng(place).normal(size=(3, DIM))
        changed = np.abs(np.asarray(model(other, present, times)) - found).max(axis=2) > 0
        assert not changed[:2, :place].any()
        # As a query padding changes its own position only; as a key it changes nothing.
        assert changed[0, place:].all()
        assert not changed[1, max(place, 4) + 1 :].any() or place < 4


def aged(count, seed):
    """Histories, and how many seconds before now each item was, 0 behind the end."""
    columns = histories(count, seed)
    gaps = np.random.default_rng(seed).integers(1, 10**6, (count, LENGTH))
    ages = np.cumsum(gaps[:, ::-1], axis=1)[:, ::-1] / 4
    return {**columns, "age": np.where(columns["history"] < 0, 0, ages)}


def test_an_item_is_asked_for_at_its_own_moment():
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=4)
    model = NextItem(layout, SequenceConfig(dropout=0.0), rngs=nnx.Rngs(0))
    for block in model.encoder.blocks:
        block.time_bias[...] *= 100  # so that it counts
    columns = aged(20, 0)
    batch = jrec.data.pack_batch(layout, columns, dense=["age"], label=None, extras=["next", "sampled"])
    activations, _ = model.embeddings.lookup(batch.bags)
    found = model.logits(batch.dense, activations, batch.bags)["positions"]
    rows, present = model.embeddings.features(activations, batch.bags)["history"], columns["history"] >= 0
    ages = columns["age"].astype(np.float32)
    asked = np.concatenate([ages[:, 1:], np.zeros((20, 1), np.float32)], axis=1)
    for k, length in enumerate(present.sum(axis=1)):
        asked[k, max(length - 1, 0) :] = 0
    vectors = model.encoder(rows, present, -ages, -asked)
    want = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-6)
    np.testing.assert_allclose(np.where(present[..., None], found, 0), np.where(present[..., None], want, 0), atol=1e-5)
    without = model.logits(batch.dense[:, :0], activations, batch.bags)["positions"]
    assert np.abs(np.asarray(found - without))[present].max() > 0.01
    with pytest.raises(ValueError, match=f"reads the ages of the {LENGTH} items of 'history'"):
        model.logits(batch.dense[:, :2], activations, batch.bags)


def test_ages_are_trained_on_exported_and_served(tmp_path):
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=4)
    model = NextItem(layout, SequenceConfig(), rngs=nnx.Rngs(0))
    before = [np.array(block.time_bias[...]) for block in model.encoder.blocks]
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    columns = aged(9, 0)
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=next_item_loss())
        for batch in run.feed([columns], dense=["age"], label=None, extras=["next", "sampled"]):
            step(batch)
        run.export(tmp_path / "export", dense={"age": LENGTH})
        want = run.predict(columns, dense=["age"])["user"]
        trained_model, _ = run.modules()
    for block, was in zip(trained_model.encoder.blocks, before, strict=True):
        assert (np.asarray(block.time_bias[...]) != was).any()
    served = jrec.serving.load(tmp_path / "export")
    assert served.raw_columns == ("age", "history")
    request = {"history": columns["history"], "age": columns["age"]}
    np.testing.assert_allclose(served.logits(request)["user"], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=rf"'age' is \[9, 2\], but the model takes \[9, {LENGTH}\]"):
        served.logits({**request, "age": columns["age"][:, :2]})
    bad = np.where(np.arange(LENGTH) == 3, np.inf, columns["age"])
    with pytest.raises(ValueError, match=r"dense feature 'age\[3\]' is inf in example 0"):
        served.logits({**request, "age": bad})


def test_vectors_of_length_one_have_the_gradients_of_a_quotient_and_zeros_have_none():
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    vectors[1] = 0
    ahead = np.arange(12, dtype=np.float32).reshape(3, 4)
    gradient = jax.grad(lambda x: jnp.sum(unit(x) * ahead))(vectors)
    length = np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-30)
    along = vectors / length
    expected = (ahead - along * np.sum(along * ahead, axis=1, keepdims=True)) / length
    expected[1] = 0
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_history_has_finite_gradients_and_no_vector(kind):
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=2)
    model = NextItem(layout, SequenceConfig(kind=kind, dropout=0.0), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    empty = {"history": np.full((2, LENGTH), -1), "next": np.full((2, LENGTH), -1), "sampled": np.zeros((2, 2), int)}
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=next_item_loss())
        for batch in run.feed([empty], label=None, extras=["next", "sampled"]):
            assert float(step(batch)[0]) == 0
        np.testing.assert_array_equal(run.predict(empty)["user"], 0)
        assert np.isfinite(run.table("item")).all()


def with_negatives(negatives, columns, seed):
    """A full batch, with the items that positions are told from in place of four an example."""
    missing = BATCH - len(columns["history"])
    filled = {n: np.pad(c, ((0, missing), (0, 0)), constant_values=-(n != "age")) for n, c in columns.items()}
    if negatives == "all":
        every = np.random.default_rng(seed).permutation(ITEMS)
        every = np.pad(every, (0, -ITEMS % BATCH), constant_values=-1)
        filled["sampled"] = every.reshape(BATCH, -1)[::-1]  # the examples of weight 0 have some, too
    elif negatives == "position":
        filled["sampled"] = np.random.default_rng(seed).integers(0, ITEMS, (BATCH, EACH * LENGTH))
    else:
        return columns | {"weight": np.ones(BATCH - missing)}
    return filled | {"weight": np.arange(BATCH) < BATCH - missing}


SAMPLED = {"batch": 4, "position": EACH * LENGTH, "all": -(-ITEMS // BATCH)}


@pytest.mark.parametrize("negatives", SAMPLED)
def test_each_positions_item_is_told_from_its_negatives(negatives):
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=SAMPLED[negatives])
    model = NextItem(layout, SequenceConfig(dropout=0.0), rngs=nnx.Rngs(0))
    columns = with_negatives(negatives, histories(BATCH - 3, 0), 0)
    batch = jrec.data.pack_batch(
        layout, columns, label=None, weight="weight", extras=["next", "sampled"], batch_size=BATCH
    )
    activations, _ = model.embeddings.lookup(batch.bags)
    outputs = model.logits(batch.dense, activations, batch.bags)
    (rows,) = (np.asarray(stack, np.float64) for stack in model.embeddings.arrays().values())
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    losses = []
    for k, place in np.argwhere(columns["next"] >= 0):
        target, drawn = columns["next"][k, place], columns["sampled"]
        if negatives == "position":
            drawn = drawn[k].reshape(LENGTH, -1)[place]
        drawn = drawn[(drawn >= 0) & (drawn != target)]
        scores = rows[[target, *drawn]] @ np.asarray(outputs["positions"][k, place], np.float64) / 0.2
        losses.append(np.log(np.exp(scores).sum()) - scores[0])
    loss = next_item_loss(temperature=0.2, negatives=negatives)(outputs, batch)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)
    if negatives == "position":
        cut = {name: outputs[name][:, :5] for name in ("positions", "next", "counts")}
        with pytest.raises(ValueError, match="48 sampled items, no multiple of its 5 positions"):
            next_item_loss(negatives="position")({**outputs, **cut}, batch)


@functools.cache
def trained(kind, devices, steps, negatives="batch", tier="sharded"):
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=SAMPLED[negatives])
    if tier != "sharded":
        tables = [dataclasses.replace(table, tier=tier) for table in layout.tables]
        layout = jrec.EmbeddingLayout.build(tables, [config for config, _ in layout.features])
    model = NextItem(layout, SequenceConfig(kind=kind, dropout=0.0), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=jrec.ops.Adagrad(learning_rate=0.1))
    mesh = None if devices == 1 else jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        step = run.compile(loss=next_item_loss(negatives=negatives))
        dense = ["age"] if kind == "hstu" else []
        feed = run.feed(
            (with_negatives(negatives, aged(BATCH - 3 * (seed == 2), seed), seed) for seed in range(steps)),
            dense=dense, label=None, weight="weight", batch_size=BATCH, extras=["next", "sampled"],
        )  # fmt: skip
        losses = [float(step(batch)[0]) for batch in feed]
        later = aged(200, 999)
        later["sampled"] = np.full((200, 1), -1)
        users = run.predict(later, dense=dense)["user"]
        read = later["history"][:, 0] >= 0
        last = np.sum(later["history"] >= 0, axis=1) - 1
        targets = later["next"][np.arange(200), last]
        rows = run.table("item")
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return losses, ranking_metrics(ranks(users[read], units, targets[read]), at=(2,)), rows


@pytest.mark.parametrize(
    ("kind", "negatives", "devices"),
    [
        *((KINDS[0], "batch", devices) for devices in (2, 4)),
        *((KINDS[0], negatives, 4) for negatives in ("all", "position")),
        *(pytest.param(KINDS[1], "batch", devices, marks=SLOW) for devices in (2, 4)),
    ],
)
def test_the_same_model_is_trained_on_any_number_of_devices(kind, negatives, devices):
    losses, _, rows = trained(kind, 1, 4, negatives)
    other_losses, _, other_rows = trained(kind, devices, 4, negatives)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)
    np.testing.assert_allclose(other_rows, rows, rtol=1e-3, atol=2e-4)


def test_all_items_may_lie_in_host_memory():
    losses, _, rows = trained("hstu", 1, 4, "all")
    other_losses, _, other_rows = trained("hstu", 2, 4, "all", tier="host")
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)
    np.testing.assert_allclose(other_rows, rows, rtol=1e-3, atol=2e-4)


def test_the_pages_snippets():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "sequences.md").read_text()
    all_items, judged = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(all_items, names := {})
    filled = names["with_all_items"](histories(BATCH - 3, 0), ITEMS, BATCH)
    drawn = filled["sampled"].reshape(-1)
    assert drawn[drawn >= 0].tolist() == [*range(ITEMS)]
    assert {len(column) for column in filled.values()} == {BATCH}
    assert ((filled["history"][:, :1] >= 0) <= filled["weight"][:, None]).all()
    assert filled["weight"].sum() == BATCH - 3
    model = NextItem(next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=4), SequenceConfig(), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    columns, targets = histories(30, 0), np.arange(30)
    with jrec.distribute(model, optimizer) as run:
        names = {"jrec": jrec, "run": run, "columns": columns, "targets": targets, "histories": columns["history"]}
        exec(judged, names)
    assert names["numbers"].shape == names["scores"].shape == (30, 10)
    assert not any(np.isin(a, b).any() for a, b in zip(names["numbers"], columns["history"], strict=True))
    assert 0 <= names["found"]["hr@10"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "negatives"), [("hstu", "batch"), ("sasrec", "batch"), ("hstu", "position"), ("hstu", "all")]
)
def test_what_comes_next_is_among_the_two_best(kind, negatives):
    _, found, _ = trained(kind, 1, 600, negatives)
    assert found["hr@2"] > 0.8  # 0.04 by chance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gru"}, "kind 'gru' is unknown; choose 'hstu' or 'sasrec'"),
        ({"blocks": 0}, "blocks=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"normalize": "mean"}, "normalize is 'mean'; choose 'maximum' or 'length'"),
        ({"kind": "sasrec", "normalize": "length"}, "normalize is 'length'; .* which kind 'hstu' alone has"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        SequenceConfig(**change)
    with pytest.raises(ValueError, match="negatives is 'every'; choose one of batch, position, all"):
        next_item_loss(negatives="every")
    with pytest.raises(ValueError, match="no multiple of 3 heads"):
        encoder("hstu", heads=3)
    table = jrec.TableConfig(name="item", rows=3, dim=4)
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="item", table="item")])
    with pytest.raises(ValueError, match="must have the features history, next and sampled"):
        NextItem(layout, SequenceConfig(), rngs=nnx.Rngs(0))


def test_a_request_has_the_history_alone(tmp_path):
    """Of an exported model: what only training reads is not asked for, and later deltas fit."""
    layout = next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=4)
    model = NextItem(layout, SequenceConfig(), rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
    columns = histories(9, 0)
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=next_item_loss())
        run.export(tmp_path / "whole")
        for batch in run.feed([columns], label=None, extras=["next", "sampled"]):
            step(batch)
        run.export(tmp_path / "delta", since=[tmp_path / "whole"])
        want = run.predict(columns)["user"]
    served = jrec.serving.load(tmp_path / "whole", [tmp_path / "delta"])
    assert served.raw_columns == ("history",)
    np.testing.assert_allclose(served.logits({"history": columns["history"]})["user"], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(DatasetError, match="history"):
        served.logits({"next": columns["next"]})
