"""Random placements of a stack on a mesh, routes of random batches, and what a single device makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrec import ops
from jrec.mesh.exchange import Exchange, Links
from jrec.mesh.retrieve import retrieve
from jrec.mesh.route import AXIS, GatherMap, MeshRows, Route, local_view
from jrec.mesh.step import StepOptions
from jrec.mesh.update import RowGradients
from jrec.ops.row_update import casted_update
from jrec.ops.tensor_cast import tensor_cast

OPTIMIZERS = {
    "sgd": ops.SGD(learning_rate=0.5),
    "momentum": ops.Momentum(learning_rate=0.5, nesterov=True),
    "adagrad": ops.Adagrad(learning_rate=0.5),
    "rowwise_adagrad": ops.RowWiseAdagrad(learning_rate=0.5, weight_decay=0.01),
    "rmsprop": ops.RMSProp(learning_rate=0.5),
    "adam": ops.Adam(learning_rate=0.5, max_row_norm=2.0),
}
SHARDED, REPLICATED, HOST = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Where each of T rows lies.

    Attributes:
      tier: (T,) SHARDED, REPLICATED or HOST.
      owner: (T,), the device of rows that are sharded or in host memory.
      offset: (T,), in the array of its tier and owner.
      devices: N.
    """

    tier: np.ndarray
    owner: np.ndarray
    offset: np.ndarray
    devices: int

    @property
    def shard_rows(self) -> int:
        """S, with a row of padding."""
        return int(max(self.offset[self.tier == SHARDED], default=0)) + 2

    @property
    def host_rows(self) -> int:
        """K, with a row of padding."""
        return int(max(self.offset[self.tier == HOST], default=0)) + 2

    @property
    def replicated_rows(self) -> int:
        """H, with a row of padding."""
        return int((self.tier == REPLICATED).sum()) + 1

    def spread(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An array by row of the stack as those of shards, (N * S, ...), replicas and host."""
        counts = (self.devices * self.shard_rows, self.replicated_rows, self.devices * self.host_rows)
        made = tuple(np.full((count, *array.shape[1:]), 77, array.dtype) for count in counts)
        for tier, out in enumerate(made):
            out[self.lines(tier)] = array[self.tier == tier]
        return made

    def lines(self, tier: int) -> np.ndarray:
        """Where the rows of a tier are in its array, of all devices."""
        mine, of_device = self.tier == tier, (self.shard_rows, 0, self.host_rows)[tier]
        return self.owner[mine] * of_device + self.offset[mine]

    def gather(self, *arrays: np.ndarray) -> np.ndarray:
        """The inverse of ``spread``."""
        out = np.zeros((self.tier.size, *arrays[0].shape[1:]), arrays[0].dtype)
        for tier, array in enumerate(arrays):
            out[self.tier == tier] = np.asarray(array)[self.lines(tier)]
        return out


def random_placement(rng: np.random.Generator, rows: int, devices: int, *, tiers: tuple[int, ...]) -> Placed:
    """Rows in random order in every array."""
    tier, owner = rng.choice(tiers, rows), rng.integers(devices, size=rows)
    offset, groups = np.zeros(rows, np.int64), tier * devices + np.where(tier == REPLICATED, 0, owner)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        offset[members] = rng.permutation(members.size)
    return Placed(tier=tier, owner=owner, offset=offset, devices=devices)


def routes(placed: Placed, uniques: list[np.ndarray], capacity: int, *, room: int = 1) -> Route:
    """The routes of all devices, stacked, with ``room`` places of padding more than needed in every tier."""
    devices = placed.devices
    own, replicated, remote = [], [], []
    kept = np.isin(placed.tier, (SHARDED, HOST))
    offset = placed.offset + np.where(placed.tier == HOST, placed.shard_rows, 0)
    for device, rows in enumerate(uniques):
        places, tier = np.arange(rows.size), placed.tier[rows]
        mine = kept[rows] & (placed.owner[rows] == device)
        own.append((offset[rows][mine], places[mine]))
        replicated.append((placed.offset[rows][tier == REPLICATED], places[tier == REPLICATED]))
        for other in range(devices):
            asked = kept[rows] & (placed.owner[rows] == other) & (other != device)
            remote.append((offset[rows][asked], places[asked]))
    pad = functools.partial(_padded, capacity=capacity, room=room)
    past = placed.shard_rows + placed.host_rows
    lines = pad(remote, past)
    addresses = np.zeros((devices, capacity), np.int32)
    for line, rows in zip(addresses, uniques, strict=True):
        line[: rows.size] = rows
    return Route(
        capacity=capacity,
        replicated=pad(replicated, placed.replicated_rows),
        own=pad(own, past),
        remote=jax.tree.map(lambda a: a.reshape(devices, devices, -1), lines),
        addresses=jnp.asarray(addresses),
    )


def _padded(found: list[tuple[np.ndarray, np.ndarray]], rows: int, *, capacity: int, room: int) -> GatherMap:
    size = max(1, max(r.size for r, _ in found) + room)
    out = np.full((2, len(found), size), np.array([rows, capacity])[:, None, None], np.int32)
    for line, pair in enumerate(found):
        out[0, line, : pair[0].size], out[1, line, : pair[1].size] = pair
    return GatherMap(rows=jnp.asarray(out[0]), at=jnp.asarray(out[1]))


def mesh(devices: int) -> jax.sharding.Mesh:
    """Of virtual CPU devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def put(tree, specs, on: jax.sharding.Mesh):
    """Arrays on the mesh; ``specs`` a prefix of ``tree``."""
    shardings = jax.tree.map(lambda s: NamedSharding(on, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return jax.device_put(tree, shardings)


def mesh_rows(placed: Placed, table: np.ndarray, slots: dict[str, np.ndarray]) -> MeshRows:
    """The arrays of a stack, spread."""
    spread = {name: placed.spread(slot) for name, slot in slots.items()}
    sharded, replicated, host = placed.spread(table)
    return MeshRows(
        sharded=jnp.asarray(sharded),
        replicated=jnp.asarray(replicated),
        sharded_slots={name: jnp.asarray(of[0]) for name, of in spread.items()},
        replicated_slots={name: jnp.asarray(of[1]) for name, of in spread.items()},
        host=jnp.asarray(host),
        host_slots={name: jnp.asarray(of[2]) for name, of in spread.items()},
    )


def retrieved(rows: MeshRows, route: Route, *, kind="padded") -> jax.Array:
    """(N, U, dim): what every device retrieves."""
    devices = route.own.rows.shape[0]
    rows = dataclasses.replace(rows, sharded_slots={}, replicated_slots={}, host_slots={})
    run = retrieve_program(devices, kind=kind)
    return run(*put((rows, route), (MeshRows.specs(None, host=True), PartitionSpec(AXIS)), mesh(devices)))


def retrieve_program(devices, *, kind="padded"):
    """The jitted lookup of (rows, route) without slots."""

    def body(rows, route):
        route = local_view(route)
        return retrieve(rows, route, Exchange.open(route.remote, shard_rows=rows.shard_rows, links=Links(kind=kind)))[
            None
        ]

    over = PartitionSpec(AXIS)
    spec = (MeshRows.specs(None, host=True), over)
    return jax.jit(jax.shard_map(body, mesh=mesh(devices), in_specs=spec, out_specs=over, check_vma=False))


def update_program(optimizer, devices, *, kind="padded", stack=None, **how):
    """The jitted step of (rows, route, gradients, step, key), which donates the rows."""
    specs = MeshRows.specs(optimizer, host=True)

    def body(rows, route, gradients, step, key):
        route, gradients = local_view((route, gradients))
        exchange = Exchange.open(route.remote, shard_rows=rows.shard_rows, links=Links(kind=kind))
        options = StepOptions(step=step, rounding_key=key, stack=stack)
        given = {"rows": rows, "route": route, "exchange": exchange, "gradients": gradients, "options": options}
        return RowGradients(**given, **how).step(optimizer, options)

    spec = (specs, PartitionSpec(AXIS), PartitionSpec(AXIS), PartitionSpec(), PartitionSpec())
    mapped = jax.shard_map(body, mesh=mesh(devices), in_specs=spec, out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def updated(optimizer, rows: MeshRows, route: Route, gradients, *, key=None, step=3, **how) -> MeshRows:
    """The arrays after one step by (N, U, dim) gradients."""
    devices = route.own.rows.shape[0]
    over, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = (MeshRows.specs(optimizer, host=True), over, over, everywhere, everywhere)
    arguments = put((rows, route, gradients, jnp.int32(step), key), specs, mesh(devices))
    return update_program(optimizer, devices, **how)(*arguments)


def single(optimizer, table, slots, uniques: list[np.ndarray], gradients, *, key=None, step=3):
    """The step of one device that holds the whole stack, by the same gradients in the order of the devices."""
    ids = np.concatenate(uniques).astype(np.int32)[:, None]
    flat = np.concatenate([g[: u.size] for g, u in zip(np.asarray(gradients), uniques, strict=True)])
    cast = tensor_cast(jnp.asarray(ids), num_rows=table.shape[0])
    slots = {name: jnp.asarray(slot) for name, slot in slots.items()}
    return casted_update(optimizer, jnp.asarray(table), slots, cast, jnp.asarray(flat), step=step, rounding_key=key)


def _emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """``jax.lax.ragged_all_to_all`` as documented, which XLA lacks on CPUs: everything to everybody, then choose."""
    everybody = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    me, places = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0], dtype=jnp.int32)
    for device in range(input_offsets.shape[0]):
        sent, begins, sizes, lands = (a[device] for a in everybody)
        inside = (places >= lands[me]) & (places < lands[me] + sizes[me])
        of = sent[jnp.clip(begins[me] + places - lands[me], 0, sent.shape[0] - 1)]
        output = jnp.where(inside.reshape(-1, *[1] * (of.ndim - 1)), of, output)
    announced = everybody[2][:, me]
    return jnp.where(jnp.all(announced == recv_sizes), output, jnp.nan)  # the sender's and receiver's sizes must agree


@contextlib.contextmanager
def ragged_on_cpu():
    with mock.patch.object(jax.lax, "ragged_all_to_all", _emulated):
        yield
