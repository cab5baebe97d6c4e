"""Rows in host memory that are pooled and updated in place: the bits of rows on the device, whatever a batch holds."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from host_runs import STEPS, HostRun, device_snapshots, make_batch

from jrec.batch import Batch
from jrec.host import HostTable
from jrec.nn.embeddings import EmbeddingCollection
from jrec.ops import SGD
from jrec.ops import layout as layouts
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.types import Bags
from jrec.run.feeds.in_place import HostCasts, HostPooling
from jrec.run.step import compile_run
from jrec.tiers.pooled import PooledUpdate

KEY = jax.random.key(7, impl="threefry2x32")


def widened(batch, name):
    """The same batch with int64 ids of one stack."""
    bags = {**batch.bags, name: dataclasses.replace(batch.bags[name], ids=batch.bags[name].ids.astype(np.int64))}
    return dataclasses.replace(batch, bags=bags)


@pytest.mark.parametrize(("rows", "wide"), [("adam", False), ("adam", True), ("rowwise_adagrad", False)])
def test_every_step_has_the_bits_of_the_device(rows, wide, monkeypatch):
    expected = device_snapshots(rows)
    if wide:
        monkeypatch.setattr(layouts, "MAX_ROWS", 300)  # so that table "item", of 300 16-bit rows, has int64 addresses
    run = HostRun(rows, threads=2)
    assert [s.address_dtype.name for s in run.layout.members] == ["int32", "int64" if wide else "int32"]
    for number in range(STEPS):
        batch = make_batch(run.layout, number)
        loss = run.step_in_place(widened(batch, "host_d8_bfloat16") if wide else batch)
        assert loss == expected[number + 1].loss
        assert run.snapshot(loss) == expected[number + 1]


@pytest.mark.parametrize("fixed_length", [False, True], ids=["ragged", "padded"])
def test_a_step_without_addresses_sees_which_positions_hold_ids(fixed_length):
    tables = [TableConfig(name="t", rows=2**31 + 5, dim=2, tier="host")]
    features = [FeatureConfig(name="f", table="t", max_length=3, pooling="none", fixed_length=fixed_length)]
    layout = EmbeddingLayout.build(tables, features)
    lists = [[2**31, 7, 2**31 + 4], [2**31 + 1], []]
    if fixed_length:
        ids, offsets = np.array([[2**31], [7], [2**31 + 4], [2**31 + 1], [-1], [-1], [-(2**40)], [-1], [-1]]), None
    else:
        ids, offsets = np.array([2**31, 7, 2**31 + 4, 2**31 + 1, 0]), np.array([0, 1, 2, 3, 4, 4, 4, 4, 4, 4], np.int32)
    batch = Batch(dense=None, labels=None, mask=None, bags={"host_d2_float32": Bags(ids=ids, offsets=offsets)})
    batch = HostCasts(layout.members)(batch)
    pooling = HostPooling({stack.name: HostTable(stack, SGD(learning_rate=0.1), KEY) for stack in layout.members})
    prepared = pooling.pooled(batch)
    assert all(leaf.dtype != np.int64 for leaf in jax.tree.leaves(prepared))
    masks = EmbeddingCollection(layout, rngs=nnx.Rngs(0)).masks(prepared.batch.bags)
    np.testing.assert_array_equal(masks["f"], [[k < len(row) for k in range(3)] for row in lists])
    sums = np.asarray(prepared.pooled["host_d2_float32"].values).reshape(3, 3, 2)
    np.testing.assert_array_equal((sums != 0).all(axis=2), masks["f"])


def test_only_rows_that_are_trained_take_memory_and_go_to_checkpoints():
    run = HostRun()
    trained, frozen = run.tables["host_d8_float32"], run.tables["host_d8_bfloat16"]
    pooling = HostPooling(run.tables, frozen={"host_d8_bfloat16"})
    batch = HostCasts(run.layout.members)(make_batch(run.layout, 0))
    prepared = pooling.pooled(batch)
    cast = batch.bags["host_d8_float32"].cast
    np.testing.assert_array_equal(trained.made_rows(), cast.rows[: int(cast.num_unique)])
    np.testing.assert_array_equal(trained.dirty_rows(), trained.made_rows())
    assert frozen.num_made == 0
    assert np.asarray(prepared.pooled["host_d8_bfloat16"].values).any()


def test_gradients_without_a_cast_are_refused():
    run = HostRun()
    batch = make_batch(run.layout, 0)
    prepared = run.pooling.pooled(batch)
    updates = {
        name: PooledUpdate(gradients=rows.values, hyperparameters=None) for name, rows in prepared.pooled.items()
    }
    with pytest.raises(ValueError, match="the bags of stack host_d8_float32 have no cast"):
        run.pooling.update(batch, updates)
    limited = dataclasses.replace(prepared, batch=batch)
    model, optimizer = run.run.merge(run.state)
    optimizer.max_global_norm = 1.0
    state, compiled = compile_run(model, optimizer)
    with pytest.raises(ValueError, match="gradients are clipped, which takes a cast"):
        compiled.step_on(state, {}, {}, limited)
