"""Devices that find rows by themselves: pooled bags and rows after a step are one device's, in however many windows."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from grids import some_of
from jax.sharding import PartitionSpec as P
from mesh_cases import HOST, OPTIMIZERS, REPLICATED, SHARDED

from jrec.mesh.communication import Communication
from jrec.mesh.exchange import Links
from jrec.mesh.route import AXIS, MeshRows, local_view
from jrec.mesh.routing import ON_HOST, AddressMap, HostAddressMap, WindowCapacity
from jrec.mesh.step import StepOptions
from jrec.ops.gather_reduce import gather_reduce, gather_reduce_together
from jrec.ops.row_update import casted_update, casted_update_together
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import Bags
from jrec.tiers.routed_rows import RoutedRows
from jrec.tiers.store import Context

DEVICES, ROWS, BAGS, LENGTH, DIM = 4, 40, 6, 5, 4
ROOMS = {
    "all": WindowCapacity(unique=30, own=30, remote=30, replicated=30, lookups=30, bags=6),
    "some": WindowCapacity(unique=9, own=3, remote=2, replicated=4, lookups=5, bags=3),
    "one": WindowCapacity(unique=1, own=1, remote=1, replicated=1, lookups=1, bags=1),
    "remote is short": WindowCapacity(unique=30, own=30, remote=1, replicated=30, lookups=2, bags=4),
    "few bags are sent": WindowCapacity(unique=30, own=30, remote=30, replicated=30, lookups=30, bags=1),
}


@dataclasses.dataclass
class Case:
    placed: mesh_cases.Placed
    bags: Bags  # of all devices: an axis of devices first
    table: np.ndarray
    slots: dict


def make_case(seed, optimizer, *, dtype="float32", ragged=False, weighted=True, tiers=(SHARDED, REPLICATED, HOST)):
    rng = np.random.default_rng(seed)
    placed = mesh_cases.random_placement(rng, ROWS, DEVICES, tiers=tiers)
    ids = np.minimum(rng.zipf(1.3, (DEVICES, BAGS, LENGTH)) - 1, ROWS - 1).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[2] = -1 if seed % 2 else ids[2]  # a device without examples
    weights = rng.integers(1, 4, ids.shape).astype(np.float32) if weighted else None
    offsets = None
    if ragged:
        lengths = rng.integers(0, LENGTH + 1, (DEVICES, BAGS))
        offsets = np.concatenate([np.zeros((DEVICES, 1), int), np.cumsum(lengths, axis=1)], axis=1).astype(np.int32)
        ids = ids.reshape(DEVICES, -1)
        weights = None if weights is None else weights.reshape(DEVICES, -1)
    table = np.asarray(jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32).astype(dtype))
    slots = {name: np.abs(rng.normal(size=np.shape(s))).astype(np.float32) for name, s in optimizer.init(table).items()}
    return Case(placed, Bags(ids=ids, offsets=offsets, weights=weights), table, slots)


FIRST = {False: 0, True: 2**31 - ROWS // 2}
"""The first row's address: those of wide stacks pass 2^31."""


def places_of(placed, room, sends, *, wide=False):
    """Every row is a range of its own: offsets are in random order."""
    source = np.choose(placed.tier, [placed.owner, DEVICES, DEVICES + ON_HOST])
    address = np.arange(ROWS) + FIRST[wide]
    on_host, host = placed.tier == HOST, None
    if on_host.any():
        highest = 2**32 - 1 if wide else 2**31 - 1
        pads = [(0, 2)]  # padding behind the rows that there are
        arrays = (
            np.pad(address[on_host], pads, constant_values=highest),
            np.pad(placed.owner[on_host], pads),
            np.pad(placed.offset[on_host] + placed.shard_rows, pads),
        )
        there, device, offset = everywhere(arrays)
        host = HostAddressMap(addresses=there, device=device, offset=offset)
    begin, source, shift = everywhere((address, source, placed.offset - address))
    return AddressMap(
        begin=begin, source=source, shift=shift, host=host, rows=ROWS, wide=wide, most=30, room=room,
        fits=room == ROOMS["all"], sends=sends,
    )  # fmt: skip


def everywhere(arrays):
    return [np.tile(np.asarray(array, np.int64).astype(np.int32), (DEVICES, 1)) for array in arrays]


def on_mesh(case, optimizer, room, *, sends=(), key=None, exchange="padded", wide=False):
    """Pooled bags (DEVICES, BAGS, DIM), the arrays after a step, and the sum of squares of all gradients."""
    hosts = bool((case.placed.tier == HOST).any())
    specs = MeshRows.specs(optimizer, host=hosts)

    def body(rows, places, bags, key):
        places, bags = local_view((places, bags))
        options = StepOptions(step=3, rounding_key=key)
        together = Communication(links=Links(kind=exchange))
        context = Context(options=options, optimizer=optimizer, communication=together)
        store = RoutedRows(rows=rows, places=places)
        deferred = store.lookup(bags, context)
        pooled, left = deferred.finish(gather_reduce_together([deferred.call], None)[0])
        update = store.update(left, gradient_of(pooled), context)
        squares = jax.lax.psum(update.squares(), AXIS)
        deferred = update.step(options)
        result = None if deferred.call is None else casted_update_together([deferred.call], None)[0]
        return pooled[None], deferred.finish(result).rows, squares

    over, mesh = P(AXIS), mesh_cases.mesh(DEVICES)
    spec = (specs, over, over, P())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(over, specs, P()), check_vma=False)
    rows = mesh_cases.mesh_rows(case.placed, case.table, case.slots)
    if not hosts:
        rows = dataclasses.replace(rows, host=None, host_slots={})
    arguments = (rows, places_of(case.placed, room, sends, wide=wide), addressed(case, wide), key)
    return jax.jit(mapped, donate_argnums=0)(*mesh_cases.put(arguments, spec, mesh))


def addressed(case, wide):
    """The bags, of addresses in place of rows."""
    ids = np.where(case.bags.ids < 0, -1, case.bags.ids.astype(np.int64) + FIRST[wide]).astype(np.int32)
    return dataclasses.replace(case.bags, ids=ids)


def gradient_of(pooled):
    return jnp.sin(pooled) + 1


def on_one_device(case, optimizer, *, key=None):
    bags, table = case.bags, jnp.asarray(case.table)
    weights = None if bags.weights is None else bags.weights.reshape(-1, *bags.ids.shape[2:])
    ids, offsets = bags.ids.reshape(-1, *bags.ids.shape[2:]), None
    if bags.offsets is not None:  # devices' lookups one behind the other: what no bag reads is a bag of its own
        begin = np.arange(DEVICES)[:, None] * bags.ids.shape[1]
        offsets = np.append((bags.offsets + begin).reshape(-1), bags.ids.size).astype(np.int32)
    pooled = gather_reduce(table, ids, offsets, weights=weights)
    gradients = gradient_of(pooled)
    if offsets is not None:
        ours = (np.arange(offsets.size - 1) + 1) % (BAGS + 1) != 0
        gradients = jnp.where(ours[:, None], gradients, 0)
        read = np.repeat(ours, np.diff(offsets))
        ids = np.where(read, ids, -1)
        pooled = pooled[ours]
    cast = tensor_cast(jnp.asarray(ids), None if offsets is None else jnp.asarray(offsets), num_rows=ROWS)
    slots = {name: jnp.asarray(slot) for name, slot in case.slots.items()}
    new = casted_update(optimizer, table, slots, cast, gradients, weights=weights, step=3, rounding_key=key)
    return pooled.reshape(DEVICES, BAGS, DIM), *new


def compare(case, optimizer, room, *, sends=(), key=None, exchange="padded", wide=False, rtol=1e-5):
    pooled, rows, squares = on_mesh(case, optimizer, room, sends=sends, key=key, exchange=exchange, wide=wide)
    expected, table, slots = on_one_device(case, optimizer, key=key)
    np.testing.assert_allclose(pooled, expected, rtol=rtol, atol=1e-5)
    arrays = (rows.sharded, rows.replicated, case.placed.spread(case.table)[2] if rows.host is None else rows.host)
    found = case.placed.gather(*map(np.asarray, arrays))
    np.testing.assert_allclose(found.astype(np.float32), np.asarray(table, np.float32), rtol=rtol, atol=1e-5)
    for name, slot in slots.items():
        of_host = case.placed.spread(case.slots[name])[2] if rows.host is None else rows.host_slots[name]
        got = case.placed.gather(*map(np.asarray, (rows.sharded_slots[name], rows.replicated_slots[name], of_host)))
        np.testing.assert_allclose(got.reshape(slot.shape), slot, rtol=rtol, atol=1e-5)
    before = case.placed.gather(*case.placed.spread(case.table))
    untouched = ~np.isin(np.arange(ROWS), np.unique(case.bags.ids[case.bags.ids >= 0]))
    np.testing.assert_array_equal(found[untouched], before[untouched])
    return pooled, rows, squares


@pytest.mark.parametrize(
    ("name", "room", "ragged"),
    some_of(
        itertools.product(OPTIMIZERS, ROOMS, (False, True)),
        ("adagrad", "all", False), ("adagrad", "some", True), ("adam", "one", False),
    ),
)  # fmt: skip
def test_windows_are_one_device(name, room, ragged):
    optimizer = OPTIMIZERS[name]
    compare(make_case(1, optimizer, ragged=ragged), optimizer, ROOMS[room])


@pytest.mark.parametrize(
    ("room", "sends", "exchange", "ragged"),
    some_of(
        itertools.product(
            ("all", "some", "few bags are sent"), (((0, 6),), ((1, 2), (4, 6))), ("padded", "ragged"), (False, True)
        ),
        ("all", ((0, 6),), "padded", False), ("some", ((1, 2), (4, 6)), "ragged", True),
        ("few bags are sent", ((0, 6),), "padded", True),
    ),
)  # fmt: skip
def test_sent_lookups_meet_the_others_in_every_window(room, sends, exchange, ragged):
    optimizer = OPTIMIZERS["adagrad"]
    with mesh_cases.ragged_on_cpu():
        case = make_case(1, optimizer, ragged=ragged)
        compare(case, optimizer, ROOMS[room], sends=sends, exchange=exchange)


def routed(case, room, look, *, sends=(), wide=False):
    """What ``look`` finds in each device's routing of its part of the batch, a leading axis of devices before it."""

    def body(places, bags):
        return jax.tree.map(lambda leaf: leaf[None], look(local_view(places).routed(local_view(bags), None)))

    over = P(AXIS)
    mapped = jax.shard_map(body, mesh=mesh_cases.mesh(DEVICES), in_specs=(over, over), out_specs=over, check_vma=False)
    return jax.jit(mapped)(places_of(case.placed, room, sends, wide=wide), addressed(case, wide))


def test_a_window_holds_no_more_replicated_rows_than_it_has_room_for():
    case = make_case(2, OPTIMIZERS["sgd"], tiers=(SHARDED, REPLICATED, REPLICATED))
    room = ROOMS["all"]._replace(replicated=2)

    def look(routing):
        return routing.first().behind[DEVICES], routing.starts[DEVICES + 1] - routing.starts[DEVICES]

    held, read = routed(case, room, look)
    assert read.max() > 2
    assert held.max() <= 2


def test_lookups_beyond_31_bits_are_sent():
    """Where all are sent, there is no room to ask for their rows: those that were taken for padding would be lost."""
    case = make_case(2, OPTIMIZERS["sgd"], tiers=(SHARDED,))
    lines = [
        routed(case, ROOMS["all"], lambda routing: routing.sent.rows, sends=((0, 6),), wide=wide)
        for wide in (False, True)
    ]
    assert (lines[0] >= 0).any()
    np.testing.assert_array_equal(*lines)


@pytest.mark.parametrize("room", ["all", "some"])
@pytest.mark.parametrize("sends", [(), ((1, 2), (4, 6))])
def test_addresses_beyond_31_bits(room, sends):
    optimizer = OPTIMIZERS["adagrad"]
    compare(make_case(1, optimizer, ragged=bool(sends)), optimizer, ROOMS[room], sends=sends, wide=True)


@pytest.mark.parametrize("room", ["all", "one"])
def test_rows_are_rounded_by_their_addresses_in_every_window(room):
    optimizer, key = OPTIMIZERS["adagrad"], jnp.array([1, 2], jnp.uint32)
    compare(make_case(4, optimizer, dtype="bfloat16"), optimizer, ROOMS[room], sends=((0, 3),), key=key, rtol=1e-2)


@pytest.mark.parametrize("room", ["all", "one"])
@pytest.mark.parametrize("tiers", [(SHARDED,), (REPLICATED,)])
def test_rows_of_one_tier(tiers, room):
    optimizer = OPTIMIZERS["adagrad"]
    everywhere = WindowCapacity(unique=ROOMS[room].unique, own=0, remote=0, replicated=ROOMS[room].unique)
    compare(
        make_case(5, optimizer, tiers=tiers, weighted=False),
        optimizer,
        everywhere if tiers == (REPLICATED,) else ROOMS[room],
    )


def test_the_norm_of_gradients_is_of_every_window():
    optimizer = OPTIMIZERS["sgd"]
    case = make_case(7, optimizer)
    whole, windows = (on_mesh(case, optimizer, ROOMS[room])[2] for room in ("all", "some"))
    np.testing.assert_allclose(windows, whole, rtol=1e-5)
    _, table, _ = on_one_device(case, optimizer)
    np.testing.assert_allclose(whole, (((case.table - np.asarray(table)) / 0.5) ** 2).sum(), rtol=1e-4)


def test_the_same_step_has_the_same_bits():
    optimizer = OPTIMIZERS["adam"]
    case = make_case(8, optimizer)
    first, again = (on_mesh(case, optimizer, ROOMS["some"], sends=((0, 2),)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_gradients_travel_once_for_the_norm_and_the_step():
    """Requests, answers and gradients: an exchange each, though ``squares`` and ``step`` both need the last."""
    optimizer, case = OPTIMIZERS["sgd"], make_case(1, OPTIMIZERS["sgd"])
    program = jax.make_jaxpr(lambda: on_mesh(case, optimizer, ROOMS["all"]))()
    assert str(program).count("all_to_all[") == 3
