"""TBSM against float64 NumPy: logits and gradients, histories of any length, padding, shared tables, and a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec import ops
from jrec.nn import TBSM, SparseOptimizer, TBSMConfig, train_step
from jrec.nn.tbsm import on_sphere, places

ROWS = {"user": 9, "item": 40, "category": 6}
HISTORIES = (("item", "items"), ("category", "categories"))
STEPS, DIM = 5, 4
STACK = "d4_float32"
LENGTHS = (0, 1, 3, 5, 5, 2)
SMALL = TBSMConfig(histories=HISTORIES, bottom_mlp=(DIM,), tower_mlp=(6, 5), attention_mlp=(7,), top_mlp=(8, 1))


def layout_of(steps=STEPS, dim=DIM, tiers=None):
    tiers = tiers or {}
    shape = {t: jrec.TTShape.search(ROWS[t], dim, ranks=2) for t, tier in tiers.items() if tier == "tt"}
    tables = [
        jrec.TableConfig(name=n, rows=r, dim=dim, tier=tiers.get(n, "sharded"), tt_shape=shape.get(n))
        for n, r in ROWS.items()
    ]
    lists = {"items": "item", "categories": "category"}
    return jrec.EmbeddingLayout.build(
        tables,
        [
            *(jrec.FeatureConfig(name=n, table=n, fixed_length=True) for n in ROWS),
            *(jrec.FeatureConfig(name=n, table=t, max_length=steps, pooling="none") for n, t in lists.items()),
        ],
    )


def ids_of(rng, lengths=LENGTHS):
    """Ids by feature, a list an example; users, items and categories, one an example, and histories."""
    n = len(lengths)
    one = {name: [[int(i)] for i in rng.integers(0, rows, n)] for name, rows in ROWS.items()}
    many = {
        name: [rng.integers(0, ROWS[table], length).tolist() for length in lengths]
        for name, table in (("items", "item"), ("categories", "category"))
    }
    return one | many


def batch_of(layout, ids, *, dense=0, seed=0):
    rng = np.random.default_rng(seed)
    n = len(ids["user"])
    bags = {}
    for name, stack in layout.stacks.items():
        lists = []
        for feature in stack.features:
            for example in ids[feature.config.name]:
                rows = [i + feature.base for i in example]
                lists += [[r] for r in rows] + [[]] * (feature.config.bags_per_example - len(rows))
        offsets = np.cumsum([0, *map(len, lists)])
        flat = np.full(stack.capacity(n), -1)
        flat[: offsets[-1]] = [i for one in lists for i in one]
        bags[name] = jrec.Bags(ids=jnp.asarray(flat, jnp.int32), offsets=jnp.asarray(offsets, jnp.int32))
    return jrec.Batch(
        dense=jnp.asarray(rng.normal(size=(n, dense)), jnp.float32),
        labels=jnp.asarray(rng.integers(0, 2, n), jnp.float32),
        mask=jnp.ones(n, jnp.float32),
        bags=bags,
    )


def numbers_of(model):
    """The dense parameters by path, float64."""
    return {path: np.asarray(x[...], np.float64) for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def mlp_reference(numbers, place, x, *, activate_last):
    depth = sum(path[: len(place)] == place for path in numbers) // 2
    for i in range(depth):
        x = x @ numbers[*place, "layers", i, "kernel"] + numbers[*place, "layers", i, "bias"]
        x = np.maximum(x, 0) if activate_last or i + 1 < depth else x
    return x


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(model, numbers, tables, ids, dense):
    """The whole model, an example and a step at a time, as the paper tells it: histories are read from their end."""
    config, steps = model.config, model.steps
    (stack,) = model.embeddings.layout.members
    base = {f.config.name: f.base for f in stack.features}
    rows = {name: [tables[np.asarray(i, int) + base[name]] for i in of] for name, of in ids.items()}
    mlp = functools.partial(mlp_reference, numbers)

    def tower(place, example, vectors):
        inputs = np.concatenate([[place / (steps + 1)], dense[example]])
        z = [mlp(("bottom",), inputs, activate_last=True), *vectors]
        if config.interaction == "dot":
            z = [z[0], np.asarray([z[i] @ z[j] for i in range(len(z)) for j in range(i)])]
        out = mlp(("tower",), np.concatenate(z), activate_last=True)
        return out / max(np.sqrt(out @ out), 1e-12)

    def head(h, target, history):
        a = np.eye(len(target)) if config.inner == "dot" else numbers["attention", h, "matrix"]
        scores = np.zeros(steps)
        begin = steps - len(history)
        scores[begin:] = [z @ (a.T @ a if config.inner == "definite" else a) @ target for z in history]
        weights = sigmoid(mlp(("attention", h, "mlp"), scores, activate_last=False))
        context = sum((w * z for w, z in zip(weights[begin:], history, strict=True)), np.zeros(len(target)))
        inputs = [context, target, *([scores] if config.top_with == "products" else [])]
        return mlp(("top", h), np.concatenate(inputs), activate_last=False)[0]

    logits = []
    for e, (user, items, categories) in enumerate(zip(rows["user"], rows["items"], rows["categories"], strict=True)):
        target = tower(steps, e, [user[0], rows["item"][e][0], rows["category"][e][0]])
        begin = steps - len(items)
        history = [tower(begin + p, e, [user[0], i, c]) for p, (i, c) in enumerate(zip(items, categories, strict=True))]
        heads = [head(h, target, history) for h in range(config.heads)]
        joint = config.heads > 1
        logits.append(mlp(("joint",), sigmoid(np.array(heads)), activate_last=False)[0] if joint else heads[0])
    return np.array(logits)


def made(config=SMALL, layout=None):
    """A model with random parameters that are cheap to make: compiling JAX's generators takes longer than a test."""
    abstract = nnx.eval_shape(lambda: TBSM(config, layout or layout_of(), rngs=nnx.Rngs(3)))
    graph, state = nnx.split(abstract)
    rng = np.random.default_rng(3)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype), state))


@nnx.jit
def forward(model, batch):
    return model(batch)


@nnx.jit
def activations_of(model, batch):
    return model.embeddings.lookup(batch.bags)[0]


OTHER = {"inner": "indefinite", "interaction": "concat", "bottom_mlp": (3,), "num_dense": 3, "heads": 2}
OTHER |= {"top_with": "products"}


@pytest.mark.parametrize(
    "change",
    [{}, OTHER, pytest.param({"inner": "dot", "heads": 3}, marks=pytest.mark.slow)],
    ids=["published", "other", "dot"],
)
def test_logits_are_those_of_the_reference(change):
    config = dataclasses.replace(SMALL, **change)
    model, ids = made(config), ids_of(np.random.default_rng(1))
    batch = batch_of(layout_of(), ids, dense=config.num_dense)
    tables = np.asarray(model.embeddings.arrays()[STACK], np.float64)
    expected = reference(model, numbers_of(model), tables, ids, np.asarray(batch.dense, np.float64))
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(forward(model, batch), expected, rtol=2e-5, atol=2e-6)


def test_gradients_of_rows_and_parameters_are_those_of_differences_of_the_reference():
    model, ids = made(), ids_of(np.random.default_rng(5))
    batch = batch_of(layout_of(), ids)
    activations = activations_of(model, batch)
    numbers, tables = numbers_of(model), np.asarray(model.embeddings.arrays()[STACK], np.float64)

    @nnx.jit
    def objective(model, activations):
        return jnp.sum(model.logits(batch.dense, activations, batch.bags))

    of_model, of_bags = nnx.grad(objective, argnums=(nnx.DiffState(0, nnx.Param), 1))(model, activations)
    bags = batch.bags[STACK]
    of_rows = np.zeros(tables.shape)
    for bag, (begin, end) in enumerate(zip(bags.offsets[:-1], bags.offsets[1:], strict=True)):
        of_rows[np.asarray(bags.ids[begin:end])] += np.asarray(of_bags[STACK][bag])
    gradients = dict(nnx.to_flat_state(of_model)) | {"rows": of_rows}
    values = {**numbers, "rows": tables}

    def total(values):
        dense = np.zeros((len(ids["user"]), 0))
        return reference(model, values, values["rows"], ids, dense).sum()

    rng = np.random.default_rng(2)
    for path, gradient in gradients.items():
        flat = np.asarray(gradient[...]).reshape(-1)
        assert np.isfinite(flat).all()
        for at in {int(np.argmax(np.abs(flat))), *map(int, rng.integers(0, len(flat), 3))}:
            nudge = np.zeros(values[path].size)
            nudge[at] = 1e-6
            up, down = (total(values | {path: values[path] + s * nudge.reshape(values[path].shape)}) for s in (1, -1))
            assert (up - down) / 2e-6 == pytest.approx(flat[at], rel=2e-3, abs=2e-5), path


def test_what_is_padding_never_changes_a_logit_and_gets_no_gradient():
    model, ids = made(), ids_of(np.random.default_rng(6))
    batch = batch_of(layout_of(), ids)
    activations = activations_of(model, batch)
    bags = batch.bags[STACK]
    empty = np.asarray(bags.offsets[1:] == bags.offsets[:-1])
    assert empty.sum() == 2 * (len(LENGTHS) * STEPS - sum(LENGTHS))

    @jax.jit
    def logits(rows):
        return model.logits(batch.dense, {STACK: rows}, batch.bags)

    rows = activations[STACK]
    noise = jnp.asarray(np.random.default_rng(0).normal(size=rows.shape) * 100, jnp.float32)
    np.testing.assert_array_equal(logits(jnp.where(empty[:, None], noise, rows)), logits(rows))
    slope = jax.jit(jax.grad(lambda rows: jnp.sum(logits(rows))))
    gradient = np.asarray(slope(rows))
    assert not gradient[empty].any()
    assert np.abs(gradient[~empty]).sum() > 0
    assert np.isfinite(np.asarray(slope(jnp.zeros_like(rows)))).all()


@pytest.mark.parametrize("length", [0, 1, 20])
def test_histories_of_any_length_are_right_in_a_longer_layout(length):
    """Of 20 steps, as published: other examples of the batch, and room that a history leaves, make no difference."""
    config = TBSMConfig(histories=HISTORIES)
    layout = layout_of(steps=20, dim=16)
    model, ids = made(config, layout), ids_of(np.random.default_rng(length), (length, 20, 0))
    tables = np.asarray(model.embeddings.arrays()["d16_float32"], np.float64)
    found = np.asarray(forward(model, batch_of(layout, ids)))
    expected = reference(model, numbers_of(model), tables, ids, np.zeros((3, 0)))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    turned = {name: of[::-1] for name, of in ids.items()}
    np.testing.assert_allclose(np.asarray(forward(model, batch_of(layout, turned)))[::-1], found, rtol=1e-5)
    backwards = ids | {name: [of[::-1] for of in ids[name]] for name in ("items", "categories")}
    changed = np.abs(np.asarray(forward(model, batch_of(layout, backwards))) - found) > 1e-6
    assert changed.tolist() == [length > 1, True, False]  # the order of a history matters


def test_published_widths():
    model = made(TBSMConfig(histories=HISTORIES), layout_of(steps=20, dim=16))
    widths = {
        name: [layer.kernel[...].shape for layer in mlp.layers]
        for name, mlp in (
            ("bottom", model.bottom), ("tower", model.tower),
            ("attention", model.attention[0].mlp), ("top", model.top[0]),
        )
    }  # fmt: skip
    assert widths == {
        "bottom": [(1, 16)],
        "tower": [(22, 15), (15, 15)],
        "attention": [(20, 15), (15, 15), (15, 20)],
        "top": [(30, 60), (60, 1)],
    }
    assert model.attention[0].matrix[...].shape == (15, 15)
    assert model.joint is None


def test_places_are_counted_from_the_end():
    present = jnp.asarray([[True, True, False], [False, False, False], [True, True, True]])
    assert places(present).tolist() == [[1, 2, 3], [3, 3, 3], [0, 1, 2]]


def test_vectors_go_onto_the_sphere_and_zeros_stay():
    vectors = jnp.asarray([[3.0, 4.0], [0.0, 0.0], [1e-15, 0.0]])
    found, vjp = jax.vjp(on_sphere, vectors)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0], [1e-3, 0]], rtol=1e-6)
    assert np.isfinite(np.asarray(vjp(jnp.ones((3, 2)))[0])).all()


def test_a_step_updates_the_row_that_target_and_history_share_once_with_both_gradients():
    """One user looks at the item that the history ends with; SGD's step is the sum of both places' gradients."""
    ids = {"user": [[2]], "item": [[7]], "category": [[1]], "items": [[4, 7]], "categories": [[3, 1]]}
    layout = layout_of()
    batch, model = batch_of(layout, ids), made()
    numbers, tables = numbers_of(model), np.asarray(model.embeddings.arrays()[STACK], np.float64)

    def loss(tables):
        logit = reference(model, numbers, tables, ids, np.zeros((1, 0)))[0]
        return np.logaddexp(0, -logit if batch.labels[0] else logit)

    optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.5))
    value, _ = nnx.jit(train_step)(model, optimizer, batch)
    assert float(value) == pytest.approx(loss(tables), rel=1e-5)
    row = layout.members[0].bases[1] + 7
    slope = [(loss(tables + d) - loss(tables - d)) / 2e-6 for d in unit_rows(tables.shape, row)]
    after = np.asarray(model.embeddings.arrays()[STACK], np.float64)
    np.testing.assert_allclose(after[row] - tables[row], -0.5 * np.array(slope), rtol=2e-3, atol=1e-7)
    changed = {int(r) for r in np.flatnonzero((after != tables).any(axis=1))}
    bases = layout.members[0].bases
    assert changed == {bases[0] + 2, bases[1] + 4, bases[1] + 7, bases[2] + 1, bases[2] + 3}


def unit_rows(shape, row):
    for column in range(shape[1]):
        step = np.zeros(shape)
        step[row, column] = 1e-6
        yield step


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_fits_labels_that_depend_on_the_order_of_the_history(dtype):
    """The label is whether the target is the history's last item: no bag of items can tell."""
    rng = np.random.default_rng(0)
    n, layout = 128, layout_of()
    ids = ids_of(rng, [STEPS] * n)
    positive = rng.random(n) < 0.5
    for e in range(n):
        a, b = rng.choice(ROWS["item"], 2, replace=False)
        ids["items"][e] = [int(a), int(b)] * 2 + [int(b)]
        ids["item"][e] = [int(b if positive[e] else a)]
    batch = dataclasses.replace(batch_of(layout, ids), labels=jnp.asarray(positive, jnp.float32))
    model = made(dataclasses.replace(SMALL, compute_dtype=dtype), layout)
    optimizer = SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=ops.Adam(learning_rate=0.02))
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, batch)[0]) for _ in range(300)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.15


@pytest.mark.slow
def test_a_compressed_table_works_with_histories():
    """Items of tier tt are looked up, trained, and masked as those of the device are."""
    layout = layout_of(tiers={"item": "tt"})
    ids = ids_of(np.random.default_rng(9))
    batch, model = batch_of(layout, ids), made(SMALL, layout)
    optimizer = SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=ops.Adam(learning_rate=0.02))
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, batch)[0]) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    activations = activations_of(model, batch)
    found = model.embeddings.masks(batch.bags)["items"].sum(axis=1)
    assert found.tolist() == list(LENGTHS)
    assert all(np.isfinite(np.asarray(a)).all() for a in activations.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": ()}, "histories is empty"),
        ({"histories": (("item", "seen"),)}, "names feature 'seen', but the features are user, item"),
        (
            {"histories": (("category", "items"),)},
            "'category' reads table 'category' and its history 'items'",
        ),
        ({"histories": (("item", "items"),)}, "'categories' has pooling 'none', but is in no histories"),
        ({"histories": (("items", "item"), ("category", "categories"))}, "the history 'item' has pooling 'sum'"),
        ({"histories": (*HISTORIES, ("items", "items"))}, "names a feature twice"),
        ({"top_mlp": (8,)}, "must end in 1"),
        ({"tower_mlp": ()}, "need a layer each"),
        ({"inner": "cosine"}, "inner 'cosine' is unknown; choose dot or indefinite or definite"),
        ({"heads": 0}, "heads is 0"),
        ({"top_with": "scores"}, "top_with 'scores' is unknown; choose context or products"),
        ({"bottom_mlp": (3,)}, r"they are \[3, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        made(TBSMConfig(**{**dataclasses.asdict(SMALL), "histories": HISTORIES, **change}))


def test_histories_of_several_lengths_are_refused():
    features = [f.config for f in layout_of().members[0].features]
    longer = [dataclasses.replace(f, max_length=7) if f.name == "items" else f for f in features]
    layout = jrec.EmbeddingLayout.build(layout_of().members[0].tables, longer)
    with pytest.raises(ValueError, match=r"one max_length, but they have \{'items': 7, 'categories': 5"):
        made(SMALL, layout)
