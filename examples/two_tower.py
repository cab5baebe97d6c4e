"""How do I train a two-tower retrieval model with an in-batch softmax, and how well does it find items among all?

python examples/two_tower.py
"""

from collections.abc import Iterator

import numpy as np
import optax
from flax import nnx

import jrec

USERS, ITEMS, TASTES, BATCH = 2_000, 400, 8, 256


def pairs(count: int, seed: int) -> dict[str, np.ndarray]:
    """Users with an item of their taste each."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, USERS, count)
    item = rng.zipf(1.3, count) % (ITEMS // TASTES) * TASTES + user % TASTES
    return {"user": user, "item": item}


def main(steps: int = 300) -> dict[str, float]:
    """Trains; returns the recall in 20 of later pairs: of the nearest items, and of the most frequent ones."""
    tables = [
        jrec.TableConfig(name="user", rows=USERS, dim=16),
        jrec.TableConfig(name="item", rows=ITEMS, dim=16),
    ]
    features = [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    layout = jrec.EmbeddingLayout.build(tables, features)
    towers = jrec.nn.TwoTowerConfig(user=("user",), item=("item",), user_mlp=(16,), item_mlp=(16,))
    model = jrec.nn.TwoTower(layout, towers, rngs=nnx.Rngs(0))
    # Each user's own item against all items of the whole batch; frequent ones count less (log-Q correction).
    loss_of = jrec.nn.two_tower_loss("item", log_q="log_frequency", temperature=0.1)
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(1e-3), embedding=rows)

    log = pairs(steps * BATCH, seed=0)
    frequency = np.bincount(log["item"], minlength=ITEMS) / len(log["item"])

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for begin in range(0, steps * BATCH, BATCH):
            batch = {name: column[begin : begin + BATCH] for name, column in log.items()}
            yield batch | {"log_frequency": np.log(frequency[batch["item"]]).astype(np.float32)}

    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=loss_of)
        for batch in run.feed(batches(), label=None, extras=["item", "log_frequency"]):
            loss, _ = step(batch)
            if run.steps % 100 == 0:
                print(f"step {run.steps}: loss {float(loss):.3f}")
        later = pairs(2_000, seed=1)
        user = run.predict(later)["user"]
        items = run.predict({"user": np.zeros(ITEMS, np.int32), "item": np.arange(ITEMS)})["item"]

    found = jrec.nn.ranking_metrics(jrec.nn.ranks(user, items, later["item"]), at=[20])
    frequent = np.argsort(-frequency)[:20]
    return {
        "recall in 20": found["hr@20"],
        "of the most frequent": float(np.mean(np.isin(later["item"], frequent))),
    }


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
