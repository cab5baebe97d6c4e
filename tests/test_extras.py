"""Further arrays of a batch: packed, padded, cut and joined with its examples, and there for a loss to use."""

import dataclasses
import functools

import host_runs
import jax
import jax.numpy as jnp
import mesh_runs
import numpy as np
import optax
import pytest
from flax import nnx
from mesh_plans import MIDDLE, plan_apart

import jrec
from jrec import ops
from jrec.data import pack_batch
from jrec.data.packing import Packer
from jrec.data.packing_columns import join
from jrec.data.regroup import blank, gathered
from jrec.data.schema import DatasetError
from jrec.host.pipeline_batch import WholeBatches
from jrec.run.feeds.partitioned import stacked
from jrec.run.feeds.partitioned_batch import BatchPartitioner

LAYOUT = jrec.EmbeddingLayout.build(
    [jrec.TableConfig(name="user", rows=10, dim=4)], [jrec.FeatureConfig(name="user", table="user")]
)
EXTRAS = {
    "weight": np.array([0.5, 2.0, 1.0]),
    "group": np.array([7, 2**31 - 1, -4]),
    "watched": np.array([[1, 0], [0, 1], [1, 1]], bool),
    "half": jnp.ones((3, 2, 2), jnp.bfloat16),
}
COLUMNS = {"label": [1, 0, 1], "user": [3, 1, 4], "x": [0.5, 1.5, 2.5], **EXTRAS}
pack = functools.partial(pack_batch, dense=["x"], extras=list(EXTRAS))


def equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_extras_are_packed_and_padded():
    batch = pack(LAYOUT, COLUMNS, batch_size=5)
    assert {n: e.dtype.name for n, e in batch.extras.items()} == {
        "weight": "float32",
        "group": "int32",
        "watched": "bool",
        "half": "bfloat16",
    }
    for name, given in EXTRAS.items():
        np.testing.assert_array_equal(batch.extras[name][:3], given)
        assert not batch.extras[name][3:].any()
        assert batch.extras[name].shape == (5, *given.shape[1:])
    assert pack_batch(LAYOUT, COLUMNS).extras == {}
    packer = Packer(LAYOUT, dense=["x"], extras=list(EXTRAS))
    assert set(packer.columns) == set(COLUMNS)
    prepared = packer.prepare(COLUMNS)
    found = packer.pack(join([prepared.take(np.array([2])), prepared.cut(0, 2)]), 4)
    order = np.array([2, 0, 1])
    equal(found, pack(LAYOUT, {name: np.asarray(column)[order] for name, column in COLUMNS.items()}, batch_size=4))


def test_extras_are_cut_and_joined_with_their_examples():
    batch = pack(LAYOUT, COLUMNS)
    piece = gathered(LAYOUT, [(batch, 2, 3), (batch, 0, 1)])
    equal(piece, pack(LAYOUT, {name: np.asarray(column)[[2, 0]] for name, column in COLUMNS.items()}))
    padded = gathered(LAYOUT, [(batch, 0, 3), (blank(LAYOUT, batch, 2), 0, 2)])
    equal(padded, pack(LAYOUT, COLUMNS, batch_size=5))


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (np.array([1, 2**31, 0]), DatasetError, "extra 'weight' is 2147483648 in example 1, which does not fit int32"),
        (np.array([1, 2, 2**64 - 1], np.uint64), DatasetError, "extra 'weight' is 18446744073709551615 in example 2"),
        (["a", "b", "c"], ValueError, r"extra 'weight' must be numbers, \(examples, ...\), but is <U1\[3\]; cast it"),
        (np.float32(1), ValueError, r"extra 'weight' must be numbers, \(examples, ...\), but is float32\[\]"),
        (np.ones(2), ValueError, "columns must be equally long, but have"),
    ],
)
def test_what_is_no_extra(extra, error, message):
    with pytest.raises(error, match=message):
        pack(LAYOUT, COLUMNS | {"weight": extra})
    with pytest.raises(DatasetError, match=r"column\(s\) half are missing"):
        pack(LAYOUT, {name: column for name, column in COLUMNS.items() if name != "half"})


def test_devices_and_host_tables_get_their_examples_extras():
    layout, plan = mesh_runs.layout(tt=False), plan_apart(MIDDLE)
    batch, weight = mesh_runs.batches(layout, 1)[0], np.arange(mesh_runs.EXAMPLES, dtype=np.float32)
    batch = dataclasses.replace(batch, extras={"weight": weight})
    partitioned = BatchPartitioner(layout, plan, devices=range(4), first=0, count=4, cast=True)(batch)
    halves = [part.extras["weight"] for part in partitioned.parts]
    np.testing.assert_array_equal(halves, [weight[:12] * 0, weight[:12], weight[12:], weight[:12] * 0])
    np.testing.assert_array_equal(stacked(partitioned.parts).extras["weight"], halves)
    host = host_runs.layout("host")
    batch = dataclasses.replace(next(host_runs.batches(host))[0], extras={"weight": weight})
    stacks = {stack.name: stack for stack in host.stacks.values()}
    assert WholeBatches(stacks, jnp.asarray).prepare(batch).batch.extras["weight"] is weight


def weighted(logits, batch):
    losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels) * batch.extras["weight"]
    return jnp.sum(losses * batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)


def test_a_loss_uses_extras():
    config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(4,), top_mlp=(1,))
    model = jrec.nn.DLRM(config, LAYOUT, rngs=nnx.Rngs(0))
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=1.0))
    before = np.array(model.embeddings.arrays()["d4_float32"])
    batch = pack_batch(LAYOUT, COLUMNS | {"weight": [1.0, 0.0, 1.0]}, dense=["x"], extras=["weight"], batch_size=4)
    nnx.jit(functools.partial(jrec.nn.train_step, loss=weighted))(model, optimizer, batch)
    changed = (np.array(model.embeddings.arrays()["d4_float32"]) != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 4]


def test_a_column_that_no_batch_has_is_named_with_the_remedy():
    for batch, held in (
        (pack(LAYOUT, COLUMNS), "only " + ", ".join(sorted(EXTRAS))),
        (pack_batch(LAYOUT, COLUMNS), "none"),
    ):
        with pytest.raises(DatasetError, match=rf"no further column 'buy'; there are {held}: .*extras=\['buy'\]"):
            batch.extras["buy"]
        for of in (jax.tree.map(jnp.asarray, batch), dataclasses.replace(batch, extras={"weight": batch.mask})):
            with pytest.raises(DatasetError, match="no further column 'buy'"):
                jax.eval_shape(lambda batch: batch.extras["buy"], of)
        assert batch.extras.get("buy") is None
