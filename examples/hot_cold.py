"""How do I train hot and cold batches in turn (FAE)? Hot rows on every device, hot batches that read only these.

python examples/hot_cold.py    (on a machine with one CPU it makes four devices of it)
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX starts; for CPUs only

import time
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

import jrec

USERS, ITEMS, HOT, BATCH = 20_000, 5_000, 300, 256


def log_of(count: int) -> dict[str, np.ndarray]:
    """Clicks in which few users and items make most of the examples."""
    rng = np.random.default_rng(0)
    user, item = rng.zipf(1.4, count) % USERS, rng.zipf(1.4, count) % ITEMS
    label = (rng.random(count) < np.where((user + item) % 2 == 0, 0.8, 0.2)).astype(np.float32)
    return {"label": label, "user": user, "item": item}


def batches(log: dict[str, np.ndarray], chosen: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """Full batches of the chosen examples."""
    for numbers in np.split(chosen[: len(chosen) // BATCH * BATCH], len(chosen) // BATCH):
        yield {name: column[numbers] for name, column in log.items()}


def main(examples: int = 60_000) -> dict[str, float]:
    """Trains one epoch; returns the share of hot examples, losses, and milliseconds of hot and of cold steps."""
    tables = [jrec.TableConfig(name=name, rows=rows, dim=16) for name, rows in (("user", USERS), ("item", ITEMS))]
    features = [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    layout = jrec.EmbeddingLayout.build(tables, features)
    config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(32, 1), interaction="concat")
    model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)

    log = log_of(examples)
    counts = {table.name: np.bincount(log[table.name], minlength=table.rows) for table in tables}
    hot = {name: np.sort(np.argsort(-count)[:HOT]) for name, count in counts.items()}
    is_hot = np.all([np.isin(log[name], rows) for name, rows in hot.items()], axis=0)
    devices = min(4, jax.device_count())
    mesh = jax.make_mesh((devices,), ("devices",), devices=jax.devices()[:devices])

    losses, seconds = [], {True: [], False: []}
    with jrec.distribute(model, optimizer, mesh=mesh, everywhere=hot) as run:
        step = run.compile()
        feeds = {kind: run.feed(batches(log, np.flatnonzero(is_hot == kind)), hot=kind) for kind in (True, False)}
        left = {kind: int(np.sum(is_hot == kind)) // BATCH for kind in feeds}
        while any(left.values()):
            for kind, feed in feeds.items():  # runs of ten batches of a kind, in turn
                for batch in (next(feed) for _ in range(min(10, left[kind]))):
                    begin = time.perf_counter()
                    losses.append(float(step(batch)[0]))
                    seconds[kind].append(time.perf_counter() - begin)
                left[kind] -= min(10, left[kind])
    return {
        "hot examples": float(is_hot.mean()),
        "first losses": float(np.mean(losses[:10])),
        "last losses": float(np.mean(losses[-20:])),
        "milliseconds of a hot step": 1e3 * float(np.median(seconds[True])),
        "milliseconds of a cold step": 1e3 * float(np.median(seconds[False])),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.4g}")
