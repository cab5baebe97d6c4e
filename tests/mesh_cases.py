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
from jrec.mesh.exchange import Exchange
from jrec.mesh.retrieve import retrieve
from jrec.mesh.route import AXIS, MeshRows, Picks, Route, local_view
from jrec.mesh.step import StepOptions
from jrec.mesh.update import update
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
      owner: (T,), of sharded rows.
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

    def rows_in(self, tier: int) -> int:
        """Of replicated or host rows, with one of padding."""
        return int((self.tier == tier).sum()) + 1

    def spread(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An array by row of the stack as those of shards, (N * S, ...), replicas and host."""
        sharded = np.full((self.devices * self.shard_rows, *array.shape[1:]), 77, array.dtype)
        of = self.tier == SHARDED
        sharded[self.owner[of] * self.shard_rows + self.offset[of]] = array[of]
        others = []
        for tier in (REPLICATED, HOST):
            others.append(np.full((self.rows_in(tier), *array.shape[1:]), 77, array.dtype))
            others[-1][self.offset[self.tier == tier]] = array[self.tier == tier]
        return sharded, *others

    def gather(self, sharded: np.ndarray, replicated: np.ndarray) -> np.ndarray:
        """The inverse of ``spread``, for placements without host rows."""
        rows = np.where(self.tier == SHARDED, self.owner * self.shard_rows + self.offset, 0)
        out = np.asarray(sharded)[rows]
        out[self.tier == REPLICATED] = np.asarray(replicated)[self.offset[self.tier == REPLICATED]]
        return out


def random_placement(rng: np.random.Generator, rows: int, devices: int, *, tiers: tuple[int, ...]) -> Placed:
    """Rows in random order in every array."""
    tier, owner = rng.choice(tiers, rows), rng.integers(devices, size=rows)
    offset = np.zeros(rows, np.int64)
    for group in np.unique(np.where(tier == SHARDED, owner, devices + tier)):
        members = np.flatnonzero(np.where(tier == SHARDED, owner, devices + tier) == group)
        offset[members] = rng.permutation(members.size)
    return Placed(tier=tier, owner=owner, offset=offset, devices=devices)


def routes(
    placed: Placed, uniques: list[np.ndarray], capacity: int, *, room: int = 1, union: int | None = None
) -> Route:
    """The routes of all devices, stacked, with ``room`` places of padding more than needed in every tier."""
    devices = placed.devices
    own, replicated, host, remote = [], [], [], []
    for device, rows in enumerate(uniques):
        places, tier = np.arange(rows.size), placed.tier[rows]
        mine = (tier == SHARDED) & (placed.owner[rows] == device)
        own.append((placed.offset[rows][mine], places[mine]))
        replicated.append((placed.offset[rows][tier == REPLICATED], places[tier == REPLICATED]))
        host.append((placed.offset[rows][tier == HOST], places[tier == HOST]))
        for other in range(devices):
            asked = (tier == SHARDED) & (placed.owner[rows] == other) & (other != device)
            remote.append((placed.offset[rows][asked], places[asked]))
    pad = functools.partial(_padded, capacity=capacity, room=room)
    lines = pad(remote, placed.shard_rows)
    addresses = np.zeros((devices, capacity), np.int32)
    for line, rows in zip(addresses, uniques, strict=True):
        line[: rows.size] = rows
    return Route(
        capacity=capacity,
        replicated=pad(replicated, placed.rows_in(REPLICATED)),
        own=pad(own, placed.shard_rows),
        remote=jax.tree.map(lambda a: a.reshape(devices, devices, -1), lines),
        host=pad(host, placed.rows_in(HOST)),
        addresses=jnp.asarray(addresses),
        union=union,
    )


def _padded(found: list[tuple[np.ndarray, np.ndarray]], rows: int, *, capacity: int, room: int) -> Picks:
    size = max(1, max(r.size for r, _ in found) + room)
    out = np.full((2, len(found), size), np.array([rows, capacity])[:, None, None], np.int32)
    for line, pair in enumerate(found):
        out[0, line, : pair[0].size], out[1, line, : pair[1].size] = pair
    return Picks(rows=jnp.asarray(out[0]), at=jnp.asarray(out[1]))


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
    sharded, replicated, _ = placed.spread(table)
    return MeshRows(
        sharded=jnp.asarray(sharded),
        replicated=jnp.asarray(replicated),
        sharded_slots={name: jnp.asarray(of[0]) for name, of in spread.items()},
        replicated_slots={name: jnp.asarray(of[1]) for name, of in spread.items()},
    )


def retrieved(rows: MeshRows, route: Route, host: np.ndarray, *, kind="padded") -> jax.Array:
    """(N, U, dim): what every device retrieves."""
    on = mesh(route.own.rows.shape[0])
    specs = MeshRows.specs(None)

    def body(rows, route, host):
        route = local_view(route)
        exchange = Exchange.open(route.remote, shard_rows=rows.sharded.shape[0], kind=kind)
        return retrieve(rows, route, exchange, host=host)[None]

    spec = (specs, PartitionSpec(AXIS), PartitionSpec())
    run = jax.jit(jax.shard_map(body, mesh=on, in_specs=spec, out_specs=PartitionSpec(AXIS), check_vma=False))
    return run(*put((dataclasses.replace(rows, sharded_slots={}, replicated_slots={}), route, host), spec, on))


def update_program(optimizer, devices, *, kind="padded", **how):
    """The jitted step of (rows, route, gradients, step, key), which donates the rows."""
    specs = MeshRows.specs(optimizer)

    def body(rows, route, gradients, step, key):
        route, gradients = local_view((route, gradients))
        exchange = Exchange.open(route.remote, shard_rows=rows.sharded.shape[0], kind=kind)
        options = StepOptions(step=step, rounding_key=key)
        return update(optimizer, rows, route, exchange, gradients, options=options, **how)

    spec = (specs, PartitionSpec(AXIS), PartitionSpec(AXIS), PartitionSpec(), PartitionSpec())
    mapped = jax.shard_map(body, mesh=mesh(devices), in_specs=spec, out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def updated(optimizer, rows: MeshRows, route: Route, gradients, *, key=None, step=3, **how) -> MeshRows:
    """The arrays after one step by (N, U, dim) gradients."""
    devices = route.own.rows.shape[0]
    over, everywhere = PartitionSpec(AXIS), PartitionSpec()
    specs = (MeshRows.specs(optimizer), over, over, everywhere, everywhere)
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
