"""How do I write the whole step myself, under shard_map or pmap? One function, with a sharded and a replicated table.

python examples/own_collectives.py
"""

import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jrec

AXIS, DIM, BATCH, LENGTH = "devices", 16, 256, 4
ROWS = {
    "user": 40_000,
    "item": 100,
}  # users are dealt to the devices, row u to device u % devices; items are everywhere
ROW_RULE = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
DENSE_RULE = optax.adam(0.01)


def bags_of(ids: jax.Array, devices: int) -> dict[str, jrec.Bags]:
    """The lookups of all devices' examples in this device's rows: ids of other devices' rows are -1, none."""
    user, item = ids[:, :LENGTH], ids[:, LENGTH:]
    own = user % devices == jax.lax.axis_index(AXIS)
    return {"user": jrec.Bags(ids=jnp.where(own, user // devices, -1)), "item": jrec.Bags(ids=item)}


def step(weights, state, tables, slots, ids, labels, number, *, devices: int):
    """One step, of this device's examples, rows and copies; what comes back is the loss of the whole batch."""
    everybody = functools.partial(jax.lax.all_gather, axis_name=AXIS, tiled=True)  # ids and gradients are small
    bags = bags_of(everybody(ids), devices)
    sums, residuals = jrec.lookup(tables, bags)
    # A user's bag is the sum of what all devices have of it; each device keeps the bags of its own examples.
    users = jax.lax.psum_scatter(sums["user"], AXIS, scatter_dimension=0, tiled=True)
    mine = jax.lax.dynamic_slice_in_dim(sums["item"], jax.lax.axis_index(AXIS) * len(labels), len(labels))

    def loss(weights, users, items):
        logits = jnp.sum(users * items, axis=1) + jnp.concatenate([users, items], axis=1) @ weights
        return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, labels)) / (devices * len(labels))

    value, (slope, of_users, of_items) = jax.value_and_grad(loss, argnums=(0, 1, 2))(weights, users, mine)
    gradients = {"user": everybody(of_users), "item": everybody(of_items)}
    # Of the sharded table each device changes its own rows; of the replicated one all make the same change.
    tables, slots = jrec.apply_gradients(ROW_RULE, tables, slots, residuals, gradients, step=number)
    value, slope = jax.lax.psum((value, slope), AXIS)
    updates, state = DENSE_RULE.update(slope, state)
    return optax.apply_updates(weights, updates), state, tables, slots, value


def examples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(BATCH, LENGTH + 1) ids, four users and an item, and labels: whether most of them are of the item's kind."""
    rng = np.random.default_rng(seed)
    user, item = rng.zipf(1.2, (BATCH, LENGTH)) % 4_000, rng.integers(0, ROWS["item"], (BATCH, 1))
    likes = np.mean(user % 2 == item % 2, axis=1)
    return np.concatenate([user, item], axis=1).astype(np.int32), (rng.random(BATCH) < likes).astype(np.float32)


def begin(devices: int):
    """Weights, the optimizer's state, tables and slots; row u of the users lies in line u // devices of its device."""
    tables = {name: 0.1 * jax.random.normal(jax.random.key(rows), (rows, DIM)) for name, rows in ROWS.items()}
    tables["user"] = tables["user"].reshape(-1, devices, DIM).swapaxes(0, 1).reshape(-1, DIM)
    weights = jnp.zeros(2 * DIM)
    return weights, DENSE_RULE.init(weights), tables, jrec.init_slots(ROW_RULE, tables)


def by_shard_map(steps: int, devices: int) -> list[float]:
    """The losses of the step under ``jax.shard_map``, jitted and donated."""
    mesh = jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])
    everywhere, dealt = PartitionSpec(), PartitionSpec(AXIS)
    of_tables = {"user": dealt, "item": everywhere}
    carried, batch = (everywhere, everywhere, of_tables, of_tables), (dealt, dealt)
    body = functools.partial(step, devices=devices)
    options = {"in_specs": (*carried, *batch, everywhere), "out_specs": (*carried, everywhere), "check_vma": False}
    run = jax.jit(jax.shard_map(body, mesh=mesh, **options), donate_argnums=(0, 1, 2, 3))
    on_mesh = functools.partial(jax.tree.map, functools.partial(NamedSharding, mesh))
    carry, losses = jax.device_put(begin(devices), on_mesh(carried)), []
    for number in range(steps):
        *carry, value = run(*carry, *jax.device_put(examples(number), on_mesh(batch)), number)
        losses.append(float(value))
    return losses


def by_pmap(steps: int, devices: int) -> list[float]:
    """The same losses under ``jax.pmap``, whose arrays have an axis of devices in front."""
    body = functools.partial(step, devices=devices)
    run = jax.pmap(body, AXIS, in_axes=(*[0] * 6, None), donate_argnums=(0, 1, 2, 3))
    weights, state, tables, slots = begin(devices)
    copied = functools.partial(jax.tree.map, lambda leaf: jnp.broadcast_to(leaf, (devices, *leaf.shape)))
    cut = functools.partial(jax.tree.map, lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]))
    placed = {"user": cut, "item": copied}
    carry = [copied(weights), copied(state), *({n: placed[n](part[n]) for n in part} for part in (tables, slots))]
    losses = []
    for number in range(steps):
        *carry, value = run(*carry, *map(cut, examples(number)), number)
        losses.append(float(value[0]))
    return losses


def main(steps: int = 150, devices: int = 4) -> dict[str, float]:
    """Trains both ways, and on one device."""
    mapped, parallel, alone = by_shard_map(steps, devices), by_pmap(steps, devices), by_shard_map(steps, 1)
    return {
        "first losses": float(np.mean(mapped[:10])),
        "last losses": float(np.mean(mapped[-10:])),
        "largest difference of pmap": float(np.abs(np.subtract(parallel, mapped)).max()),
        "largest difference from one device": float(np.abs(np.subtract(alone, mapped)).max()),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:,.4g}")
