"""How do I train on several devices by a plan? Count the accesses, plan, and give the plan to ``distribute``.

python examples/multi_device.py    (on a machine with one CPU it makes four devices of it)
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX starts; for CPUs only

import pathlib
import tempfile

import jax
import numpy as np
import optax
from flax import nnx

import jrec

USERS, ITEMS, BATCH = 5_000, 2_000, 256


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    """Clicks; some rows are read far more often than others."""
    rng = np.random.default_rng(seed)
    user, item = rng.zipf(1.2, count) % USERS, rng.zipf(1.2, count) % ITEMS
    label = (rng.random(count) < np.where(item % 3 == 0, 0.8, 0.2)).astype(np.float32)
    return {"label": label, "user": user, "item": item}


def main(steps: int = 100) -> dict[str, float]:
    """Trains on four devices and on one; returns the rows of each tier, and how far the losses differ."""
    tables = [jrec.TableConfig(name=name, rows=rows, dim=16) for name, rows in (("user", USERS), ("item", ITEMS))]
    features = [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    layout = jrec.EmbeddingLayout.build(tables, features)
    rows = jrec.ops.Adagrad(learning_rate=0.1)

    def modules() -> tuple[jrec.nn.DLRM, jrec.nn.SparseOptimizer]:
        config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(16, 1), interaction="concat")
        model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
        return model, jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)

    devices = min(4, jax.device_count())
    mesh = jax.make_mesh((devices,), ("devices",), devices=jax.devices()[:devices])
    log = examples(100_000, seed=0)
    counts = {table.name: np.bincount(log[table.name], minlength=table.rows) for table in tables}
    plan = jrec.sharding.plan(
        layout,
        counts=counts,
        examples=len(log["label"]),
        hardware="h200x8",  # or a TOML file that describes your machine: `jrec plan --help`
        devices=devices,
        batch_size=BATCH,
        optimizer=rows,
        memory=100_000,  # bytes a device, so little that the rarest rows stay in host memory
    )

    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in {"planned": {"mesh": mesh, "plan": plan}, "one device": {}}.items():
            with jrec.distribute(*modules(), **options) as run:
                step = run.compile()
                losses[name] = [float(step(b)[0]) for b in run.feed(examples(BATCH, n + 1) for n in range(steps))]
                run.save(pathlib.Path(folder) / name)
        with jrec.distribute(*modules()) as run:  # a checkpoint goes on anywhere
            run.restore(pathlib.Path(folder) / "planned")
            print(f"restored on one device at step {run.steps}: row 7 of users begins {run.rows('user', [7])[0, :3]}")
    return {
        **{f"{tier} rows": plan.rows_in(tier) for tier in ("replicated", "sharded", "host")},
        "first loss": losses["planned"][0],
        "last losses": float(np.mean(losses["planned"][-10:])),
        "largest difference from one device": float(np.abs(np.subtract(*losses.values())).max()),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.6g}")
