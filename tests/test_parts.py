"""Tables whose frequent rows are whole and whose others are in cores: lookups and gradients are the whole table's."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec import ops
from jrec.data.packing import OnBadId, pack_batch
from jrec.data.schema import DatasetError
from jrec.nn import EmbeddingCollection
from jrec.nn.embeddings import init_stack
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.row_init import init_rows_at
from jrec.ops.tt import TTShape
from jrec.run.placement.monitor import PlanMonitor
from jrec.sharding.plans import empty_plan

ROWS, WHOLE, DIM, BATCH = 60, 11, 8, 12
SHAPE = TTShape.search(ROWS - WHOLE, DIM, ranks=3)
HEAD = TableConfig(name="item", rows=WHOLE, dim=DIM, of_rows=ROWS)
TAIL = TableConfig(name="item", rows=ROWS - WHOLE, dim=DIM, tier="tt", tt_shape=SHAPE, first_row=WHOLE, of_rows=ROWS)
SITE = TableConfig(name="site", rows=7, dim=DIM)
FEATURES = {
    "one-hot": [
        FeatureConfig(name="site", table="site", fixed_length=True),
        FeatureConfig(name="item", table="item", fixed_length=True),
        FeatureConfig(name="other", table="item", fixed_length=True),
    ],
    "padded": [
        FeatureConfig(name="site", table="site", fixed_length=True, max_length=3),
        FeatureConfig(name="item", table="item", fixed_length=True, max_length=3, pooling="mean", weighted=True),
    ],
    "ragged": [
        FeatureConfig(name="site", table="site", max_length=2),
        FeatureConfig(name="sum", table="item", max_length=4, weighted=True),
        FeatureConfig(name="mean", table="item", max_length=3, pooling="mean"),
        FeatureConfig(name="root", table="item", max_length=3, pooling="sqrtn", weighted=True),
        FeatureConfig(name="max", table="item", max_length=3, pooling="max"),
        FeatureConfig(name="none", table="item", max_length=2, pooling="none"),
        FeatureConfig(name="last", table="site", max_length=2, pooling="max"),
    ],
}


@functools.cache
def layout_of(form):
    return EmbeddingLayout.build([SITE, HEAD, TAIL], FEATURES[form])


def columns_of(form, seed, rows=None):
    """Ids (BATCH, length) with -1 behind the last, and weights; by feature. Bags of some examples are empty."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {"label": np.zeros(BATCH, np.float32)}
    for feature in FEATURES[form]:
        length = feature.max_length
        low, high = (rows or (0, ROWS)) if feature.table == "item" else (0, 7)
        ids = rng.integers(low, high, (BATCH, length))
        if not feature.fixed_length:
            ids[np.arange(length) >= rng.integers(0, length + 1, BATCH)[:, None]] = -1
        found[feature.name] = ids
        if feature.weighted:
            found[f"{feature.name}:weight"] = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    return found


def reference(form, tables, columns):
    """Activations by feature of whole tables, in plain jnp."""
    out = {}
    for feature in FEATURES[form]:
        ids = jnp.asarray(columns[feature.name])
        rows = tables[feature.table][jnp.maximum(ids, 0)]
        present = ids >= 0
        count = jnp.maximum(jnp.sum(present, axis=1), 1).astype(jnp.float32)
        weights = jnp.asarray(columns.get(f"{feature.name}:weight", np.ones(ids.shape, np.float32)))
        power = {"mean": 1.0, "sqrtn": 0.5}.get(feature.pooling, 0.0)
        weights = jnp.where(present, weights / (count**power)[:, None], 0)
        if feature.pooling == "max":
            highest = jnp.max(jnp.where(present[..., None], rows, -jnp.inf), axis=1)
            out[feature.name] = jnp.where(jnp.any(present, axis=1)[:, None], highest, 0)
        else:
            each = rows * weights[..., None]
            out[feature.name] = each if feature.pooling == "none" else jnp.sum(each, axis=1)
    return out


def collection(form):
    return EmbeddingCollection(layout_of(form), rngs=nnx.Rngs(params=2))


def whole_tables(form, stacks, cores):
    layout = layout_of(form)
    stack = layout.stacks[f"d{DIM}_float32"]
    found = {t.name: stacks[base : base + t.rows] for t, base in zip(stack.tables, stack.bases, strict=True)}
    tail = jnp.einsum("iajb,kblc,mcnd->ikmjln", *cores).reshape(-1, DIM)[: ROWS - WHOLE]
    return found | {"item": jnp.concatenate([found["item"], tail])}


def coefficients(form, seed):
    rng = np.random.default_rng(seed)
    return {
        f.name: rng.normal(size=(BATCH, f.max_length, DIM) if f.pooling == "none" else (BATCH, DIM)).astype(np.float32)
        for f in FEATURES[form]
    }


def loss_of(found, factors):
    return sum(jnp.sum(found[name] * factors[name]) for name in factors)


@functools.cache
def compiled(form, cast):
    """Features, their vectors and a step of SGD at rate 1, which takes the gradients themselves away."""
    graph, initial = nnx.split(collection(form))
    optimizer = ops.SGD(learning_rate=1.0)

    @jax.jit
    def step(state, batch, factors):
        embeddings = nnx.merge(graph, state)
        activations, residuals = embeddings.lookup(batch.bags)
        masks = embeddings.masks(batch.bags)

        def loss(activations):
            found = embeddings.features(activations, batch.bags)
            return loss_of(found, factors), found

        gradients, found = jax.grad(loss, has_aux=True)(activations)
        vectors = jnp.concatenate(embeddings.vectors(activations, batch.bags), axis=1)
        slots = embeddings.init_slots(optimizer)
        embeddings.apply_gradients(optimizer, slots, residuals, gradients)
        return found, masks, vectors, nnx.state(embeddings)

    return graph, initial, step


@functools.cache
def expecting(form):
    """What plain jnp makes of whole tables: activations, and the gradients of rows and cores."""

    @jax.jit
    def run(stack, cores, columns, factors):
        def loss(stack, cores):
            found = reference(form, whole_tables(form, stack, cores), columns)
            return loss_of(found, factors), found

        gradients, found = jax.grad(loss, argnums=(0, 1), has_aux=True)(stack, cores)
        return found, gradients

    return run


@pytest.mark.parametrize(("form", "cast"), [("one-hot", "none"), ("padded", "host"), ("ragged", "host")])
@pytest.mark.parametrize("rows", [None, (0, WHOLE), (WHOLE, ROWS)])
def test_lookups_and_gradients_are_those_of_the_whole_table(form, cast, rows):
    """Also where a batch reads one of the parts alone."""
    check(form, cast, 0, rows)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_lookups_and_gradients_of_random_bags(seed):
    check("ragged", "host", seed, None)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cast"), [("one-hot", "host"), ("padded", "none"), ("ragged", "none")])
def test_casts_of_the_host_and_the_device_give_the_same(form, cast):
    for seed in range(3):
        check(form, cast, seed, None)


def check(form, cast, seed, rows):
    graph, initial, step = compiled(form, cast)
    columns, factors = columns_of(form, seed, rows), coefficients(form, seed)
    batch = pack_batch(layout_of(form), columns, cast=cast)
    found, masks, vectors, state = step(initial, batch, factors)
    before, after = nnx.merge(graph, initial), nnx.merge(graph, state)
    stack, cores = before.arrays()[f"d{DIM}_float32"], before.tt["tt_item"].arrays()
    expected, (of_stack, of_cores) = expecting(form)(stack, cores, columns, factors)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask, columns[name] >= 0)
    every = [expected[name].reshape(BATCH, -1, DIM) for name in layout_of(form).order]
    np.testing.assert_allclose(vectors, np.concatenate(every, axis=1), atol=1e-6)
    np.testing.assert_allclose(stack - after.arrays()[f"d{DIM}_float32"], of_stack, rtol=1e-4, atol=1e-5)
    for core, new, gradient in zip(cores, after.tt["tt_item"].arrays(), of_cores, strict=True):
        np.testing.assert_allclose(core - new, gradient, rtol=1e-4, atol=1e-5)


def test_the_whole_rows_start_as_those_of_the_whole_table():
    whole = EmbeddingLayout.build(
        [SITE, TableConfig(name="item", rows=ROWS, dim=DIM)],
        [FeatureConfig(name=n, table=n) for n in ("site", "item")],
    )
    key = nnx.Rngs(params=2).params()
    (stack,), split = whole.members, layout_of("ragged").stacks[f"d{DIM}_float32"]
    rows = np.asarray(init_stack(stack, key))
    np.testing.assert_array_equal(init_stack(split, key), rows[: 7 + WHOLE])
    some = jnp.array([0, 7, 17, 9], jnp.int32)
    np.testing.assert_array_equal(init_rows_at(split.tables, split.bases, key, some), rows[np.asarray(some)])


@pytest.mark.parametrize("form", FEATURES)
def test_renumbered_rows_and_bad_ids_are_those_of_the_whole_table(form):
    """What is checked, clipped or renumbered is the id; which part has its row comes after."""
    columns = columns_of(form, 3)
    order = np.random.default_rng(0).permutation(ROWS).astype(np.uint32)
    of_items = [f.name for f in FEATURES[form] if f.table == "item"]
    renumbered = columns | {n: np.where(columns[n] >= 0, order[columns[n]].astype(int), -1) for n in of_items}
    got, wanted = (
        pack_batch(layout_of(form), *given, orders=orders)
        for given, orders in (((columns,), {"item": order}), ((renumbered,), None))
    )
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    name = of_items[0]
    columns[name][0, 0] = ROWS
    with pytest.raises(DatasetError, match=f"id {ROWS} of feature '{name}' in example 0 .* which has {ROWS} rows"):
        pack_batch(layout_of(form), columns)
    policies: dict[OnBadId, int] = {"clip": ROWS - 1, "oov": 3}
    for policy, row in policies.items():
        given = pack_batch(layout_of(form), columns, on_bad_id=policy, oov_rows={"item": 3, "site": 0})
        repaired = {**columns, name: np.where(columns[name] == ROWS, row, columns[name])}
        jax.tree.map(np.testing.assert_array_equal, given, pack_batch(layout_of(form), repaired))


def test_a_batch_has_every_id_in_one_part():
    columns = columns_of("ragged", 5)
    batch = pack_batch(layout_of("ragged"), columns)
    real = sum(int(np.sum(columns[f.name] >= 0)) for f in FEATURES["ragged"])
    lookups = {name: int(np.asarray(bags.offsets)[-1]) for name, bags in batch.bags.items()}
    assert sum(lookups.values()) == real
    for name, bags in batch.bags.items():
        assert np.all(bags.ids[lookups[name] :] == -1)
        assert np.all(np.asarray(bags.weights)[lookups[name] :] == 0)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([HEAD], "of which rows 0 to 11 are one; give exactly one other"),
        ([TAIL], "of which rows 11 to 60 are one; give exactly one other"),
        ([HEAD, dataclasses.replace(HEAD, rows=49)], "do not make its 60 rows"),
        ([dataclasses.replace(HEAD, rows=10), TAIL], "do not make its 60 rows"),
        ([dataclasses.replace(HEAD, dim=4), TAIL], "11 x 4 of tier 'sharded' and"),
        ([dataclasses.replace(HEAD, of_rows=None), TAIL], "give exactly one other"),
        ([dataclasses.replace(HEAD, of_rows=61), TAIL], "give exactly one other"),
    ],
)
def test_parts_that_do_not_make_a_table_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingLayout.build(tables, [FeatureConfig(name="item", table="item")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 10, "first_row": 5}, "begins at row 5; say of how many rows it is a part"),
        ({"rows": 10, "of_rows": 10}, "rows 0 to 10 of 10; of a table in parts"),
        ({"rows": 10, "of_rows": 9}, "rows 0 to 10 of 9"),
        ({"rows": 5, "first_row": 5, "of_rows": 10}, "part of tier 'sharded' with rows 5 to 10 of 10"),
        ({"rows": 49, "tier": "tt", "tt_shape": SHAPE, "of_rows": 60}, "tier 'tt' with rows 0 to 49 of 60"),
        ({"rows": 49, "tier": "tt", "tt_shape": SHAPE, "first_row": 5, "of_rows": 60}, "rows 5 to 54 of 60"),
    ],
)
def test_a_part_is_the_first_rows_whole_or_all_others_in_cores(options, message):
    with pytest.raises(ValueError, match=message):
        TableConfig(name="item", dim=DIM, **options)


def test_the_monitor_of_a_plan_counts_rows_of_whole_tables_and_examples_without_padding():
    rows, columns = {"item": ROWS, "site": 7}, columns_of("ragged", 3)
    whole: Any = types.SimpleNamespace(
        dataset=None, tables=[types.SimpleNamespace(name=name, rows=count) for name, count in rows.items()]
    )
    monitor = PlanMonitor(layout_of("ragged"), empty_plan(1), whole)
    monitor.observe(pack_batch(layout_of("ragged"), columns, batch_size=BATCH + 4))
    found = monitor._monitor.profile(smooth=False)
    assert found.examples == BATCH
    for name, count in rows.items():
        ids = np.concatenate([columns[f.name].reshape(-1) for f in FEATURES["ragged"] if f.table == name])
        np.testing.assert_array_equal(found.table(name).dense(), np.bincount(ids[ids >= 0], minlength=count))
