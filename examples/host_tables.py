"""How do I train tables that are larger than the device's memory? Keep them in host memory, or in files.

python examples/host_tables.py
"""

import tempfile

import numpy as np
import optax
from flax import nnx

import jrec

USERS, BATCH = 50_000_000, 512  # 50 million rows of 16 float32, with slots: 3.4 GB if all were written


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    """Clicks of 20,000 of the users."""
    rng = np.random.default_rng(seed)
    who, item = rng.integers(0, 20_000, count), rng.integers(0, 100, count)
    label = (rng.random(count) < np.where(who % 2 == item % 2, 0.8, 0.2)).astype(np.float32)
    return {"label": label, "user": who * (USERS // 20_000), "item": item}


def main(steps: int = 200) -> dict[str, float]:
    """Trains; returns losses, and how much of the large table was written (memory comes in pages)."""
    tables = [
        jrec.TableConfig(name="user", rows=USERS, dim=16, tier="host"),
        jrec.TableConfig(name="item", rows=100, dim=16),
    ]
    features = [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    layout = jrec.EmbeddingLayout.build(tables, features)
    config = jrec.nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(32, 1), interaction="dot", dot_with="bottom")
    model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)

    with tempfile.TemporaryDirectory() as folder:
        host = jrec.HostOptions(folder=folder)  # memory-mapped files; without a folder, memory
        with jrec.distribute(model, optimizer, host=host) as run:
            before = run.rows("user", np.arange(5))
            step = run.compile()
            losses = [float(step(batch)[0]) for batch in run.feed(examples(BATCH, seed) for seed in range(steps))]
            made = sum(table.num_made for table in run.host_tables.values())
            whole = sum(table.nbytes for table in run.host_tables.values())  # rows and slots
            unread = run.rows("user", np.arange(1, 5))
    assert np.array_equal(before[1:], unread)  # rows that no example reads keep their first values, and take no memory
    return {
        "first losses": float(np.mean(losses[:10])),
        "last losses": float(np.mean(losses[-10:])),
        "rows": USERS,
        "rows that memory holds": made,
        "megabytes of all rows": whole / 1e6,
        "megabytes of the rows that memory holds": whole / USERS * made / 1e6,
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:,.4g}")
