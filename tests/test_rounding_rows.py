"""Random bits of 16-bit rows follow from the seed, the step, the table and the row, wherever the row lives."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import optax
from flax import nnx

import jrec
from jrec import ops
from jrec.host import HostTable
from jrec.host.pipeline_batch import fetched, localized
from jrec.nn import SparseOptimizer, train_step
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.step import train_step_on
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, Stack, TableConfig
from jrec.ops.rounding_rows import host_rounding_rows, rounding_rows
from jrec.tiers.local_rows import of_batch

ROWS = {"user": 30, "item": 50, "site": 1}
DIM, EXAMPLES, STEPS = 8, 40, 2
# Every element loses the row's number of lookups times a 16th of its last bit: exact sums, in any order.
SGD = ops.SGD(learning_rate=2.0**-12)
KEY = jax.random.key(5)


def layout_of(**tiers: str) -> EmbeddingLayout:
    tables = [TableConfig(name=n, rows=ROWS[n], dim=DIM, dtype="bfloat16", tier=tier) for n, tier in tiers.items()]
    return EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n, fixed_length=True) for n in tiers])


def table_of(stack: Stack, name: str) -> slice:
    [(table, base)] = [(t, b) for t, b in zip(stack.tables, stack.bases, strict=True) if t.name == name]
    return slice(base, base + table.rows)


class Sum(nnx.Module):
    """Its logits are sums of rows, so that every lookup's gradient is one."""

    def __init__(self, layout: EmbeddingLayout):
        self.embeddings = EmbeddingCollection(layout, key=KEY, rngs=nnx.Rngs(0))
        self.unused = nnx.Param(jnp.ones(()))

    def logits(self, dense, activations, bags):
        return sum(jnp.sum(rows.reshape(-1, EXAMPLES, DIM), axis=(0, 2)) for rows in activations.values())


def batch_of(layout: EmbeddingLayout, number: int) -> jrec.Batch:
    bags = {}
    for name, stack in layout.stacks.items():
        ids = [
            f.base + np.random.default_rng([number, f.rows]).integers(0, f.rows, (EXAMPLES, 1)) for f in stack.features
        ]
        bags[name] = ops.Bags(ids=np.concatenate(ids).astype(np.int32))
    empty = np.zeros(EXAMPLES, np.float32)
    return jrec.Batch(dense=empty[:, None], labels=empty, mask=empty + 1, bags=bags)


def trained(layout: EmbeddingLayout, name: str) -> np.ndarray:
    """The rows of a table after some steps."""
    model = Sum(layout)
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.0), embedding=SGD, rounding_seed=7)
    host = {stack.name: HostTable(stack, SGD, KEY) for stack in layout.host_stacks}
    step = nnx.jit(lambda model, optimizer, batch: train_step(model, optimizer, batch, loss=_sum))
    for number in range(STEPS):
        batch = batch_of(layout, number)
        if host:
            _step_with_host_rows(model, optimizer, host, batch)
        else:
            step(model, optimizer, batch)
    [stack] = [stack for stack in layout.members if name in {t.name for t in stack.tables}]
    if stack.name in host:
        return host[stack.name].read(np.arange(stack.rows))[table_of(stack, name)]
    return np.asarray(model.embeddings.arrays()[stack.name])[table_of(stack, name)]


def _sum(logits, batch):
    return jnp.sum(logits)


def _step_with_host_rows(model, optimizer, host, batch):
    stores, bags, rows = {}, dict(batch.bags), {}
    for name, table in host.items():
        bags[name], rows[name], most = localized(bags[name], table.stack)
        values = fetched(table, rows[name], most)
        stores[name], bags[name] = of_batch(jnp.asarray(values.values), values.slots, bags[name])
    outputs = train_step_on(model, optimizer, stores, dataclasses.replace(batch, bags=bags), loss=_sum)
    for name, table in host.items():
        table.store(rows[name], np.asarray(outputs.stores[name].values)[: rows[name].size], {})


def test_a_table_trains_to_the_same_bits_alone_behind_another_and_in_host_memory():
    alone = trained(layout_of(item="sharded"), "item")
    first = Sum(layout_of(item="sharded")).embeddings.arrays()["d8_bfloat16"]
    assert np.mean(alone != np.asarray(first)) > 0.1
    for tiers in (
        {"user": "sharded", "item": "sharded"},
        {"user": "host", "site": "sharded", "item": "host"},
    ):
        np.testing.assert_array_equal(trained(layout_of(**tiers), "item"), alone, err_msg=str(tiers))


def test_host_tables_round_in_place_as_rows_on_the_device_do():
    layout = layout_of(user="host", item="host")
    optimizer = SparseOptimizer(Sum(layout), dense=optax.sgd(0.0), embedding=SGD, rounding_seed=7)
    [stack] = layout.members
    table = HostTable(stack, SGD, KEY)
    for number in range(STEPS):
        optimizer.dense.step[...] = jnp.uint32(number)
        bags = batch_of(layout, number).bags[stack.name]
        gradients, key = np.ones((2 * EXAMPLES, DIM), np.float32), np.asarray(optimizer.rounding_key())
        cast = ops.tensor_cast(jnp.asarray(bags.ids), num_rows=stack.rows)
        table.casted_update(jax.tree.map(np.asarray, cast), gradients, rounding_key=key)
    for name in ("user", "item"):
        on_device = trained(layout_of(site="sharded", **{name: "sharded"}), name)
        np.testing.assert_array_equal(table.read(np.arange(stack.rows))[table_of(stack, name)], on_device)


def test_rows_that_a_plan_spreads_over_devices_round_as_those_of_one_device():
    """Two tables in a stack on four devices and in their host memory, against each alone on one device."""
    rng, key = np.random.default_rng(0), jax.random.key_data(KEY)
    [stack] = layout_of(user="sharded", item="sharded").members
    placed = mesh_cases.random_placement(rng, stack.rows, 4, tiers=(0, 1, 2))
    rows = np.asarray(jnp.asarray(rng.normal(size=(stack.rows, DIM)), jnp.bfloat16))
    uniques = [np.sort(rng.choice(stack.rows, 40, replace=False)) for _ in range(4)]
    gradients = jnp.asarray(rng.integers(1, 4, (4, 40, DIM)), jnp.float32)
    got = mesh_cases.updated(
        SGD,
        mesh_cases.mesh_rows(placed, rows, {}),
        mesh_cases.routes(placed, uniques, 40),
        gradients,
        key=key,
        stack=stack,
    )
    found = placed.gather(got.sharded, got.replicated, got.host)
    for name in ("user", "item"):
        [alone] = layout_of(**{name: "sharded"}).members
        of_table = table_of(stack, name)
        mine = [(unique >= of_table.start) & (unique < of_table.stop) for unique in uniques]
        ids = np.concatenate([unique[m] for unique, m in zip(uniques, mine, strict=True)]) - of_table.start
        cast = ops.tensor_cast(jnp.asarray(ids, jnp.int32)[:, None], num_rows=alone.rows)
        summed = jnp.concatenate([g[m] for g, m in zip(gradients, mine, strict=True)])
        numbers = rounding_rows(alone, cast.rows)
        want, _ = ops.casted_update(
            SGD, jnp.asarray(rows[of_table]), {}, cast, summed, rounding_key=key, rounding_rows=numbers, step=3
        )
        np.testing.assert_array_equal(found[of_table], want)
        assert np.mean(found[of_table] != rows[of_table]) > 0.05


def test_numbers_follow_from_the_table_and_the_row():
    [stack] = layout_of(user="sharded", item="sharded", site="sharded").members
    places = [("site", 0), ("user", 0), ("item", 49), ("user", 29), ("item", 0)]
    addresses = np.array([table_of(stack, name).start + row for name, row in places])
    want = np.array([row + zlib.crc32(name.encode()) for name, row in places]).astype(np.int32)
    np.testing.assert_array_equal(rounding_rows(stack, jnp.asarray(addresses, jnp.int32)), want)
    for kind in (np.int32, np.int64):
        np.testing.assert_array_equal(host_rounding_rows(stack, addresses.astype(kind)), want)


def test_numbers_of_a_table_of_more_than_2_to_the_31_rows_are_modulo_2_to_the_32():
    table = TableConfig(name="wide", rows=2**32 - 2, dim=4, dtype="bfloat16", tier="host")
    [stack] = EmbeddingLayout.build([table], [FeatureConfig(name="wide", table="wide")]).members
    rows = np.array([0, 2**31 - 1, 2**31, 2**32 - 3])
    want = (rows + zlib.crc32(b"wide")).astype(np.int32)
    np.testing.assert_array_equal(host_rounding_rows(stack, rows), want)
    np.testing.assert_array_equal(rounding_rows(stack, jnp.asarray(rows.astype(np.int32))), want)


def test_a_stack_of_one_table_makes_no_array_without_elements():
    """Inside of ``shard_map`` such a constant ends XLA's compiler, and with it the process (jax 0.11)."""
    [stack] = layout_of(user="sharded").members
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    over = jax.sharding.PartitionSpec("devices")
    options = {"mesh": mesh, "in_specs": over, "out_specs": over, "check_vma": False}
    numbers = jax.shard_map(functools.partial(rounding_rows, stack), **options)
    addresses = jnp.arange(8, dtype=jnp.int32)
    assert "[0," not in str(jax.make_jaxpr(numbers)(addresses))
    np.testing.assert_array_equal(jax.jit(numbers)(addresses), host_rounding_rows(stack, np.arange(8)))
