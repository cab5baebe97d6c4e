"""Tables in host memory and on the device whose rows change at random, to be saved and restored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrec import ops
from jrec.checkpoint import Checkpoints, DeviceRows, HostRows
from jrec.host import HostTable
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

TIERS = ("device", "host")


def layout_of(tier, rows, dim, bound=None):
    """Two stacks, one of bfloat16, of tables of so many rows each."""
    configs = [
        TableConfig(name=f"{dtype}{r}", rows=r, dim=dim, dtype=dtype, tier=tier, initial_bound=bound)
        for dtype in ("float32", "bfloat16")
        for r in rows
    ]
    return EmbeddingLayout.build(configs, [FeatureConfig(name=c.name, table=c.name) for c in configs])


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
            at = np.unique(rng.integers(0, table.rows, rows)).astype(np.int32)
            values, slots = table.fetch(at)
            values = rng.normal(size=values.shape).astype(values.dtype)
            table.store(at, values, {n: rng.normal(size=s.shape).astype(np.float32) for n, s in slots.items()})

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


@functools.partial(jax.jit, donate_argnums=0)
def _set(array, at, values):
    """In place, as a step's donated tables: what was read before must have been read."""
    return array.at[at].set(values, mode="drop")


def make(tier, *args, **kwargs):
    """Tables of a tier."""
    return {"device": Device, "host": Host}[tier](*args, **kwargs)


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
