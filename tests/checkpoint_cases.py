"""Tables in host memory, on a device and on a mesh whose rows change at random, to be saved and restored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from mesh_plans import scattered
from whole_stacks import whole_stack

from jrec import ops
from jrec.checkpoint import Checkpoints, DeviceRows, HostRows
from jrec.host import HostTable
from jrec.mesh.route import AXIS, MeshRows
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.options import HostOptions
from jrec.run.placement.checkpoint import MeshSource, saved_stack
from jrec.run.placement.host_owners import ALONE
from jrec.run.placement.plan import default_plan
from jrec.run.placement.sharded_tier import load_host_rows, placed_host_table
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED

TIERS = ("device", "host", "mesh")
PLACES = ("device", "host", "mesh-host")


def layout_of(tier, rows, dim, bound=None, *, planned=False):
    """Two stacks, one of bfloat16, of tables of so many rows each."""
    configs = [
        TableConfig(name=f"{dtype}{r}", rows=r, dim=dim, dtype=dtype, tier=tier, initial_bound=bound)
        for dtype in ("float32", "bfloat16")
        for r in rows
    ]
    return EmbeddingLayout.build(configs, [FeatureConfig(name=c.name, table=c.name) for c in configs], planned=planned)


class Host:
    """Tables in host memory."""

    def __init__(self, rows=(900, 40), *, dim=5, seed=7, optimizer=None, folder=None, bound=None):
        optimizer = ops.Adam(learning_rate=0.1) if optimizer is None else optimizer
        key = jax.random.key(seed, impl="threefry2x32")
        options = {"folder": folder, "huge_pages": False}
        stacks = layout_of("host", rows, dim, bound).members
        self.tables = [HostTable(stack, optimizer, key, **options) for stack in stacks]
        self.sources = [HostRows(table) for table in self.tables]

    def write(self, rng, rows=60):
        """Changes random rows of every stack."""
        for table in self.tables:
            _store(rng, table, np.unique(rng.integers(0, table.rows, rows)).astype(np.int32))

    def restore(self, saved):
        """Takes a checkpoint."""
        for source in self.sources:
            source.restore(saved)

    def state(self):
        """Everything, as bytes."""
        found = {}
        for table in self.tables:
            rows, slots = table.fetch(np.arange(table.rows, dtype=np.int32))
            found[table.stack.name] = (rows.tobytes(), {n: s.tobytes() for n, s in slots.items()})
        return found


class Device:
    """Stacks on the device, changed in place as steps do."""

    def __init__(self, rows=(900, 40), *, dim=5, seed=7, optimizer=None, folder=None):
        del folder
        optimizer = ops.Adam(learning_rate=0.1) if optimizer is None else optimizer
        rng, self.stacks = np.random.default_rng(seed), layout_of("sharded", rows, dim).members
        self.arrays = {
            stack.name: {"values": jnp.asarray(rng.normal(size=(stack.rows, dim)), stack.dtype)}
            | {n: jnp.zeros((stack.rows, dim)[: 1 + (s == "element")]) for n, s in optimizer.slots.items()}
            for stack in self.stacks
        }
        self.sources = [DeviceRows(s, optimizer.slots, lambda s=s: self.arrays[s.name]) for s in self.stacks]

    def write(self, rng, rows=60):
        """Changes random rows of every stack."""
        for source in self.sources:
            stack = source.stack
            at = rng.integers(-1, stack.rows, rows).astype(np.int32)
            source.before_step(at)
            at = np.unique(at[at >= 0])
            # In powers of two, so that few programs are compiled; what lies past the rows is dropped.
            room = np.full(1 << at.size.bit_length(), stack.rows, np.int32)
            room[: at.size] = at
            self.arrays[stack.name] = {
                name: _set(array, room, rng.normal(size=(room.size, *array.shape[1:])).astype(array.dtype))
                for name, array in self.arrays[stack.name].items()
            }

    def restore(self, saved):
        """Takes a checkpoint."""
        for stack in self.stacks:
            self.arrays[stack.name] = {
                name: jnp.asarray(saved.read(stack, name, np.arange(stack.rows))) for name in self.arrays[stack.name]
            }

    def state(self):
        """Everything, as bytes."""
        return {
            name: (np.asarray(of["values"]).tobytes(), {n: np.asarray(a).tobytes() for n, a in of.items()})
            for name, of in self.arrays.items()
        }


class Planned:
    """Stacks of 4 devices by a plan that scatters their rows, changed in place as steps do; some in host memory."""

    def __init__(self, rows=(900, 40), *, dim=5, seed=7, optimizer=None, folder=None, host=0.0):
        optimizer, rng = ops.Adam(learning_rate=0.1) if optimizer is None else optimizer, np.random.default_rng(seed)
        self.layout, self.optimizer = layout_of("sharded", rows, dim, planned=True), optimizer
        self.stacks = self.layout.members
        self.plan = scattered(default_plan(self.layout, 4), seed=seed, replicate=0.2, host=host)
        self.mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,))
        key = jax.random.key(seed, impl="threefry2x32")
        options = HostOptions(folder=folder or "")
        self.tables = {
            stack.name: placed_host_table(stack, self.plan, optimizer, key, options, ALONE)
            for stack in (self.stacks if host else ())
        }
        self.rows = {stack.name: saved_stack(Fresh(rng), stack, *self.where) for stack in self.stacks}
        self.on_devices = [MeshSource(s, *self.where, lambda stack=s.name: self.rows[stack]) for s in self.stacks]
        self.sources = [*self.on_devices, *map(HostRows, self.tables.values())]

    @property
    def where(self):
        """What places the rows."""
        return self.plan, self.mesh, self.optimizer

    def write(self, rng, rows=60):
        """Changes random rows of every stack."""
        for source in self.on_devices:
            stack = source.stack
            at = rng.integers(-1, stack.rows, rows).astype(np.int32)
            source.before_step(at)
            at = np.unique(at[at >= 0])
            (tier, lines), arrays = self._lines(stack, at), self.rows[stack.name]
            sharded, replicated = lines[tier == SHARDED], lines[tier == REPLICATED]
            self.rows[stack.name] = MeshRows(
                sharded=_changed(rng, arrays.sharded, sharded),
                replicated=_changed(rng, arrays.replicated, replicated),
                sharded_slots={n: _changed(rng, array, sharded) for n, array in arrays.sharded_slots.items()},
                replicated_slots={n: _changed(rng, array, replicated) for n, array in arrays.replicated_slots.items()},
            )
            if (tier == HOST).any():
                _store(rng, self.tables[stack.name], at[tier == HOST])

    def _lines(self, stack, at):
        """The tier of each row, and its line in the whole array there."""
        bounds, capacity = np.searchsorted(at, [*stack.bases, stack.rows]), self.rows[stack.name].sharded.shape[0] // 4
        located = [
            self.plan.locate(table.name, at[begin:stop] - base)
            for table, base, begin, stop in zip(stack.tables, stack.bases, bounds, bounds[1:], strict=False)
        ]
        tier, owner, offset = (np.concatenate(column) for column in zip(*located, strict=True))
        return tier, np.maximum(owner.astype(np.int64), 0) * capacity + offset

    def restore(self, saved):
        """Takes a checkpoint."""
        for table in self.tables.values():
            load_host_rows(table, self.plan, saved, ALONE)
        self.rows = {stack.name: saved_stack(saved, stack, *self.where) for stack in self.stacks}

    def state(self):
        """Everything, as bytes."""
        found = {}
        for stack in self.stacks:
            values, slots = whole_stack(stack, self.plan, self.rows[stack.name], self.tables.get(stack.name))
            found[stack.name] = (values.tobytes(), {n: a.tobytes() for n, a in {"values": values, **slots}.items()})
        return found


class Fresh:
    """Random values of rows, and zeros of their slots."""

    def __init__(self, rng):
        self._rng = rng

    def read(self, stack, array, addresses):
        """See ``jrec.run.placement.model_rows.RowSource``."""
        if array == "values":
            return self._rng.normal(size=(addresses.size, stack.dim)).astype(stack.dtype)
        return np.zeros((addresses.size, stack.dim), np.float32)


def _store(rng, table, at):
    """Changes rows of a table in host memory."""
    values, slots = table.fetch(at)
    values = rng.normal(size=values.shape).astype(values.dtype)
    table.store(at, values, {n: rng.normal(size=s.shape).astype(np.float32) for n, s in slots.items()})


def _changed(rng, array, at):
    """Changes lines of an array over the mesh."""
    size = next(size for size in (64, 1024, 8192) if at.size <= size)  # few programs to compile
    room = np.full(size, array.shape[0], np.int32)
    room[: at.size] = at
    values = rng.normal(size=(size, *array.shape[1:])).astype(array.dtype)
    return _set_alike(array, room, values, array.sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_alike(array, at, values, sharding):
    return jax.lax.with_sharding_constraint(array.at[at].set(values, mode="drop"), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set(array, at, values):
    """In place, as a step's donated tables: what was read before must have been read."""
    return array.at[at].set(values, mode="drop")


def make(tier, *args, **kwargs):
    """Tables of a tier."""
    made = {"device": Device, "host": Host, "mesh": Planned, "mesh-host": functools.partial(Planned, host=0.3)}
    return made[tier](*args, **kwargs)


def save(checkpoints, tables, step, **kwargs):
    """Writes a checkpoint with a dense array beside the tables."""
    dense = {"w": np.arange(6.0, dtype=np.float32) + step, "n": jnp.int32(step)}
    checkpoints.save(step, arrays=dense, sources=tables.sources, meta={"loader": {"position": step}}, **kwargs)


def restore(folder, tables, step=None, **options):
    """What goes on from a checkpoint."""
    checkpoints = Checkpoints(folder, keep=99, **options)
    saved = checkpoints.open(step)
    assert saved.arrays()["n"] == saved.step
    tables.restore(saved)
    checkpoints.restored(saved)
    return checkpoints


def counts(saved):
    """Rows of each piece, by table."""
    return {name: [piece.count for piece in table.pieces] for name, table in saved.manifest.tables.items()}


def chain_of_three(folder, tier="host"):
    """Checkpoints 1 (full), 2 and 3 (incremental) in several chunks each, and the tables."""
    tables, rng = make(tier), np.random.default_rng(0)
    checkpoints = Checkpoints(folder, keep=9, chunk_bytes=12_000)
    tables.write(rng, rows=600)
    for step in (1, 2, 3):
        tables.write(rng, rows=50)
        save(checkpoints, tables, step)
    assert max(map(len, counts(checkpoints.open()).values())) == 3
    return tables
