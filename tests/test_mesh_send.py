"""Bags pooled by the owners of their rows equal those of one device, and so do the rows after a step."""

import dataclasses

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_cases import OPTIMIZERS, REPLICATED, SHARDED

from jrec.mesh.communication import only_on
from jrec.mesh.exchange import Links
from jrec.mesh.retrieve import retrieve
from jrec.mesh.route import AXIS, MeshRows, SendRoute, local_view
from jrec.mesh.send import Sent
from jrec.mesh.step import StepOptions
from jrec.mesh.update import RowGradients
from jrec.ops import SGD
from jrec.ops.gather_reduce import gather_reduce
from jrec.ops.row_update import casted_gather_reduce, casted_update
from jrec.ops.tensor_cast import tensor_cast

DEVICES, ROWS, BAGS, LENGTH, DIM = 4, 40, 6, 5, 4
LOOKUPS = BAGS * LENGTH


@dataclasses.dataclass
class Case:
    placed: mesh_cases.Placed
    ids: np.ndarray  # (DEVICES, BAGS, LENGTH), -1 for padding
    weights: np.ndarray
    table: np.ndarray
    slots: dict
    route: object
    local: np.ndarray  # ids of unique rows that are not sent, (DEVICES, BAGS, LENGTH)
    sends: object


def make_case(seed, optimizer, *, dtype="float32", owners=DEVICES, readers=range(DEVICES), tiers=(SHARDED, REPLICATED)):
    rng = np.random.default_rng(seed)
    placed = mesh_cases.random_placement(rng, ROWS, owners, tiers=tiers)
    placed = dataclasses.replace(placed, devices=DEVICES)
    ids = np.minimum(rng.zipf(1.3, (DEVICES, BAGS, LENGTH)) - 1, ROWS - 1)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[[d for d in range(DEVICES) if d not in readers]] = -1
    weights = rng.integers(1, 4, ids.shape).astype(np.float32)
    uniques, sends, local = [], [], np.full(ids.shape, -1, np.int32)
    for device in range(DEVICES):
        real = ids[device] >= 0
        sent = real & (placed.tier[ids[device]] == SHARDED) & (placed.owner[ids[device]] != device)
        uniques.append(np.unique(ids[device][real & ~sent]))
        local[device][real & ~sent] = np.searchsorted(uniques[-1], ids[device][real & ~sent])
        bag, rows = np.nonzero(sent)[0], ids[device][sent]
        sends.append(send_route(bag, rows, weights[device][sent], placed))
    table = np.asarray(jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32).astype(dtype))
    slots = {name: np.abs(rng.normal(size=np.shape(s))).astype(np.float32) for name, s in optimizer.init(table).items()}
    route = mesh_cases.routes(placed, uniques, LOOKUPS)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sends)
    return Case(placed, ids, weights, table, slots, dataclasses.replace(route, remote=None), local, stacked)


def send_route(bag, rows, weights, placed):
    """The route of lookups, bag by bag, that are sent to the rows' owners."""
    lines = {name: np.zeros((DEVICES, LOOKUPS), np.int32) for name in ("rows", "addresses")}
    lines["rows"][:] = -1
    lines["weights"] = np.zeros((DEVICES, LOOKUPS), np.float32)
    starts, at = np.empty((DEVICES, BAGS), np.int32), np.full((DEVICES, BAGS), BAGS, np.int32)
    for owner in range(DEVICES):
        here = placed.owner[rows] == owner
        for name, values in (("rows", placed.offset[rows]), ("addresses", rows), ("weights", weights)):
            lines[name][owner, : here.sum()] = values[here]
        bags, first = np.unique(bag[here], return_index=True)
        starts[owner] = here.sum()
        starts[owner, : bags.size], at[owner, : bags.size] = first, bags
    return SendRoute(starts=starts, at=at, num_bags=BAGS, **lines)


def on_mesh(case, optimizer, gradient_of, *, key=None, kind="padded"):
    """Pooled bags (DEVICES, BAGS, DIM), and the arrays after a step."""
    specs = MeshRows.specs(optimizer, host=True)

    def body(rows, route, sends, local, weights, key):
        route, sends, local, weights = local_view((route, sends, local, weights))
        options = StepOptions(step=3, rounding_key=key)
        sent = Sent.open(sends, links=Links(kind=kind))
        found = retrieve(rows, route, None)
        pooled = gather_reduce(found, local, weights=weights) + sent.pooled(rows.sharded)
        gradients = gradient_of(pooled)
        cast = tensor_cast(local, num_rows=route.capacity, unique_capacity=route.capacity)
        summed = casted_gather_reduce(cast, gradients, weights)
        numbers = jnp.where(cast.rows < route.capacity, cast.rows, route.capacity)
        of_rows = jnp.zeros((route.capacity, DIM), jnp.float32).at[numbers].set(summed, mode="drop")
        bags = {"sent": sent, "bag_gradients": gradients}
        step = RowGradients(rows=rows, route=route, exchange=None, gradients=of_rows, options=options, **bags).step
        return pooled[None], step(optimizer, options)

    over, mesh = P(AXIS), mesh_cases.mesh(DEVICES)
    spec = (specs, over, over, over, over, P())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(over, specs), check_vma=False)
    rows = mesh_cases.mesh_rows(case.placed, case.table, case.slots)
    arguments = (rows, case.route, case.sends, case.local, case.weights, key)
    return jax.jit(mapped, donate_argnums=0)(*mesh_cases.put(arguments, spec, mesh))


def on_one_device(case, optimizer, gradient_of, *, key=None):
    ids = jnp.asarray(case.ids.reshape(-1, LENGTH), jnp.int32)
    weights = jnp.asarray(case.weights.reshape(-1, LENGTH))
    pooled = gather_reduce(jnp.asarray(case.table), ids, weights=weights)
    cast = tensor_cast(ids, num_rows=ROWS)
    slots = {name: jnp.asarray(slot) for name, slot in case.slots.items()}
    new = casted_update(
        optimizer, jnp.asarray(case.table), slots, cast, gradient_of(pooled), weights=weights, step=3, rounding_key=key
    )
    return pooled, *new


def compare(case, got, want, *, exact=False):
    pooled, rows = got
    np.testing.assert_allclose(pooled.reshape(-1, DIM), want[0], rtol=1e-5, atol=1e-5)
    pairs = {"table": (case.placed.gather(rows.sharded, rows.replicated), want[1])}
    for name, slot in want[2].items():
        pairs[name] = (case.placed.gather(rows.sharded_slots[name], rows.replicated_slots[name]), slot)
    for name, (mine, theirs) in pairs.items():
        if exact:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        else:
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "adam" else pytest.mark.slow) for n in OPTIMIZERS])
def test_equals_one_device(name):
    optimizer = OPTIMIZERS[name]
    case = make_case(len(name), optimizer)
    compare(case, on_mesh(case, optimizer, jnp.tanh), on_one_device(case, optimizer, jnp.tanh))


def test_ragged_sums_and_gradients_arrive_where_padded_ones_do():
    """Devices send and serve different numbers of bags, so that sizes of one direction are wrong in the other."""
    optimizer = OPTIMIZERS["adagrad"]
    case = make_case(11, optimizer, owners=3)
    want = on_mesh(case, optimizer, jnp.tanh)
    with mesh_cases.ragged_on_cpu():
        got = on_mesh(case, optimizer, jnp.tanh, kind="ragged")
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_line_full_of_lookups_has_as_many_bags_for_its_owner_as_for_its_sender():
    """Padding bags begin behind its last lookup, where nothing is; a ragged exchange needs one size on both sides."""

    def body(rows, starts, at):
        sent = Sent.open(SendRoute(rows=rows, starts=starts, at=at, num_bags=BAGS))
        return sent.sends, sent.answers

    lookups, bags = 2, 3
    rows = np.full((DEVICES * DEVICES, lookups), -1, np.int32)
    starts, at = np.zeros((DEVICES * DEVICES, bags), np.int32), np.full((DEVICES * DEVICES, bags), BAGS, np.int32)
    rows[1], starts[1], at[1, :1] = [0, 7], [0, 2, 2], [4]  # what device 0 sends to device 1: a full line of one bag
    rows[2, :1], starts[2], at[2, :1] = [3], [0, 1, 1], [4]
    mapped = jax.shard_map(body, mesh=mesh_cases.mesh(DEVICES), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    sends, answers = (np.reshape(counts, (DEVICES, DEVICES)) for counts in jax.jit(mapped)(rows, starts, at))
    assert sends.tolist() == [[0, 1, 1, 0], *[[0] * DEVICES] * 3]
    np.testing.assert_array_equal(answers, sends.T)


@pytest.mark.slow
def test_rows_of_16_bits_are_rounded_alike():
    """Gradients of integers have exact sums: equal to the bit."""
    optimizer, key = SGD(learning_rate=0.3), jax.random.key_data(jax.random.key(1))
    case = make_case(1, optimizer, dtype="bfloat16")
    case.table = (np.round(case.table.astype(np.float32) * 8) / 8).astype(case.table.dtype)

    def signs(pooled):
        return jnp.round(jnp.clip(pooled, -2, 2))

    compare(case, on_mesh(case, optimizer, signs, key=key), on_one_device(case, optimizer, signs, key=key), exact=True)


def test_memory_centric():
    """Devices 0 and 1 keep all rows and run no dense model; 2 and 3 have the examples and no rows."""
    optimizer, computes = OPTIMIZERS["adagrad"], (False, False, True, True)
    case = make_case(7, optimizer, owners=2, readers=range(2, 4), tiers=(SHARDED,))

    def model(pooled):
        return jax.grad(lambda x: jnp.sum(jnp.cosh(x)))(pooled) + jnp.float32(1)  # not zero where there is no lookup

    got = on_mesh(case, optimizer, lambda pooled: only_on(computes, model, pooled))
    compare(case, got, on_one_device(case, optimizer, model))


def test_work_on_some_devices_gives_zeros_on_others():
    def body(x):
        return only_on((True, False, False, True), lambda x: {"y": x + jnp.float32(1)}, x)["y"]

    run = jax.shard_map(body, mesh=mesh_cases.mesh(4), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(4, dtype=jnp.float32)), [1, 0, 0, 4])
