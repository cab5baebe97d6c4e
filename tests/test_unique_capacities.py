"""Callers bound the unique rows of a step, and learn of rows that did not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jrec.nn
from jrec import ops
from jrec.batch import Batch
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

OPTIMIZER = ops.SGD(learning_rate=1.0)
IDS = np.array([[5, 2], [2, 9], [9, -1]], np.int32)  # unique: 2, 5, 9


def _step(capacity, implementation="xla"):
    tables, bags = {"t": jnp.zeros((10, 4))}, {"t": ops.Bags(ids=jnp.asarray(IDS))}
    capacities = None if capacity is None else {"t": capacity}
    activations, residuals = ops.lookup(tables, bags, unique_capacities=capacities, implementation=implementation)
    gradients = {"t": jnp.ones_like(activations["t"])}
    new, _ = ops.apply_gradients(OPTIMIZER, tables, {"t": {}}, residuals, gradients, implementation=implementation)
    return new["t"], residuals


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_rows_that_fit_are_updated_and_the_others_are_counted(implementation):
    whole, residuals = _step(None, implementation)
    assert residuals["t"].cast.rows.shape == (6,)
    for capacity, left_out in ((6, 0), (3, 0), (2, 1), (0, 3)):
        table, residuals = _step(capacity, implementation)
        assert residuals["t"].cast.rows.shape == (capacity,)
        assert int(ops.rows_left_out(residuals)["t"]) == left_out
        fitting = [2, 5, 9][:capacity]
        want = np.zeros((10, 4), np.float32)
        want[fitting] = whole[np.array(fitting, int)]
        np.testing.assert_array_equal(table, want)


def test_a_capacity_of_no_table_is_refused():
    tables, bags = {"t": jnp.zeros((10, 4))}, {"t": ops.Bags(ids=jnp.asarray(IDS))}
    with pytest.raises(ValueError, match=r"unique_capacities name \['u'\], but the tables are \['t'\]"):
        ops.lookup(tables, bags, unique_capacities={"u": 3})


def _model(capacities):
    tables = [TableConfig(name="small", rows=3, dim=4), TableConfig(name="large", rows=100, dim=4)]
    features = [FeatureConfig(name=t.name, table=t.name) for t in tables]
    layout = EmbeddingLayout.build(tables, features)
    config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,), interaction="concat")
    model = jrec.nn.DLRM(config, layout, unique_capacities=capacities, rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=OPTIMIZER)
    return model, optimizer


def _batch(size):
    ids = jnp.concatenate([jnp.arange(size) % 3, 3 + jnp.arange(size)]).astype(jnp.int32)
    ones = jnp.ones(size)
    return Batch(dense=jnp.zeros((size, 0)), bags={"d4_float32": ops.Bags(ids=ids[:, None])}, labels=ones, mask=ones)


def test_a_model_has_room_for_what_its_layout_can_touch():
    model, optimizer = _model(None)
    _, residuals = model.embeddings.lookup(_batch(8).bags)
    assert residuals["d4_float32"].cast.rows.shape == (3 + 8,)
    assert int(model.embeddings.rows_left_out(residuals)) == 0
    loss, _ = jrec.nn.train_step(model, optimizer, _batch(8))
    assert np.isfinite(loss)


def test_the_loss_is_nan_where_rows_did_not_fit():
    for capacity, fits in ((11, True), (10, False), (1000, True)):
        model, optimizer = _model({"d4_float32": capacity})
        loss, logits = nnx.jit(jrec.nn.train_step)(model, optimizer, _batch(8))
        assert np.isfinite(loss) == fits
        assert np.isfinite(logits).all()
        _, residuals = jax.jit(model.embeddings.lookup)(_batch(8).bags)
        assert residuals["d4_float32"].cast.rows.shape == (min(11, capacity),)


def test_bags_longer_than_the_layouts_have_room_for_all_their_rows():
    model, _ = _model(None)
    long = ops.Bags(ids=jnp.arange(4 * 20, dtype=jnp.int32).reshape(4, 20))
    _, residuals = model.embeddings.lookup({"d4_float32": long})
    assert residuals["d4_float32"].cast.rows.shape == (80,)
    assert int(model.embeddings.rows_left_out(residuals)) == 0


def test_capacities_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"unique_capacities names 'large', but the layout's stacks are \['d4_fl"):
        _model({"large": 5})
    with pytest.raises(ValueError, match=r"unique_capacities\['d4_float32'\] is 0; give room for one row"):
        _model({"d4_float32": 0})
