"""How do I train HSTU or SASRec on histories of items, and find the next item among all of them?

python examples/sequence_model.py
"""

import numpy as np
import optax
from flax import nnx

import jrec

ITEMS, LENGTH, DIM, SAMPLED, BATCH = 200, 10, 32, 4, 128


def histories(count: int, seed: int) -> dict[str, np.ndarray]:
    """Users who go on from item i to i + 1 or i + 7 most times; -1 fills short histories."""
    rng = np.random.default_rng(seed)
    items = np.empty((count, LENGTH + 1), np.int64)
    items[:, 0] = rng.integers(0, ITEMS, count)
    for place in range(1, LENGTH + 1):
        onward = (items[:, place - 1] + rng.choice([1, 7], count)) % ITEMS
        items[:, place] = np.where(rng.random(count) < 0.9, onward, rng.integers(0, ITEMS, count))
    length = rng.integers(3, LENGTH + 1, count)
    absent = np.arange(LENGTH) >= length[:, None]
    columns = {"history": np.where(absent, -1, items[:, :-1]), "next": np.where(absent, -1, items[:, 1:])}
    return {**columns, "sampled": rng.integers(0, ITEMS, (count, SAMPLED)), "last": items[np.arange(count), length]}


def main(steps: int = 400) -> dict[str, float]:
    """Trains; returns how often the item that comes next is among the two that score highest (0.01 by chance)."""
    layout = jrec.nn.next_item_layout(ITEMS, dim=DIM, length=LENGTH, sampled=SAMPLED)
    config = jrec.nn.SequenceConfig(kind="hstu", blocks=2, dropout=0.1)  # or "sasrec"
    model = jrec.nn.NextItem(layout, config, rngs=nnx.Rngs(0, dropout=1))
    rows = jrec.ops.Adam(learning_rate=5e-3)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows)

    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=jrec.nn.next_item_loss())
        batches = (histories(BATCH, seed) for seed in range(steps))
        for batch in run.feed(batches, label=None, extras=["next", "sampled"]):
            loss, _ = step(batch)
            if run.steps % 100 == 0:
                print(f"step {run.steps}: loss {float(loss):.3f}")
        later = histories(1_000, steps)
        users, items = run.predict(later)["user"], run.table("item")

    items = items / np.linalg.norm(items, axis=1, keepdims=True)
    found = jrec.nn.ranking_metrics(jrec.nn.ranks(users, items, later["last"]), at=[2])
    _, best = jrec.nn.top_k(users[:3], items, k=2)
    for history, numbers in zip(later["history"], best, strict=False):
        print(f"after {history[history >= 0].tolist()}: {numbers.tolist()}")
    return {"next among the two best": found["hr@2"]}


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
