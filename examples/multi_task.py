"""How do I train one model for clicks and purchases? A mixture of experts (MMoE) over shared tables.

python examples/multi_task.py
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

ROWS, BATCH = {"user": 2_000, "item": 500}, 512
TASKS = {"click": 1.0, "purchase": 0.5}  # with the weight of each in the loss


class Model(nnx.Module):
    """Rows of user and item, and the price, read by experts; each task has a gate and a tower."""

    def __init__(self, layout: jrec.EmbeddingLayout, *, rngs: nnx.Rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        config = jrec.nn.MultiTaskConfig(tasks=tuple(TASKS), experts=4, expert_mlp=(64, 32), tower_mlp=(16,))
        self.heads = jrec.nn.MultiTaskHeads(1 + 16 * len(ROWS), config, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> dict[str, jax.Array]:
        """(batch,) logits by task."""
        rows = self.embeddings.features(activations, bags)
        return self.heads(jnp.concatenate([dense, *(rows[name] for name in ROWS)], axis=1))


def log(count: int, seed: int) -> dict[str, np.ndarray]:
    """Examples: who likes what is clicked, and bought if it is cheap; what was not clicked has no purchase, -1."""
    rng, tastes = np.random.default_rng(seed), np.random.default_rng(0)
    user, item = (rng.integers(0, rows, count) for rows in ROWS.values())
    of_user, of_item = (tastes.normal(size=(rows, 2)) for rows in ROWS.values())
    price, liking = rng.random(count, np.float32), np.sum(of_user[user] * of_item[item], axis=1)
    click = rng.random(count) < 1 / (1 + np.exp(1 - 2 * liking))
    purchase = rng.random(count) < 1 / (1 + np.exp(6 * price - 2 - liking))
    labels = {"click": click.astype(np.int32), "purchase": np.where(click, purchase, -1).astype(np.int32)}
    return {"user": user, "item": item, "price": price, **labels}


def batches(columns: dict[str, np.ndarray], epochs: int) -> Iterator[dict[str, np.ndarray]]:
    """The examples in a new order each epoch."""
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        order = rng.permutation(len(columns["user"]))
        for begin in range(0, len(order), BATCH):
            yield {name: column[order[begin : begin + BATCH]] for name, column in columns.items()}


def log_loss(probability: np.ndarray | float, labels: np.ndarray) -> float:
    """In nats, over the examples that have a label."""
    there = labels >= 0
    shown = np.broadcast_to(probability, labels.shape)[there]
    return float(-np.mean(np.where(labels[there] == 1, np.log(shown), np.log1p(-shown))))


def main(epochs: int = 6) -> dict[str, dict[str, float]]:
    """Trains; returns the log loss of later examples by task, of the model and of the task's rate."""
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=name, rows=rows, dim=16) for name, rows in ROWS.items()],
        [jrec.FeatureConfig(name=name, table=name) for name in ROWS],
    )
    model = Model(layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows)
    train, later = log(200_000, 2), log(20_000, 3)
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=jrec.nn.multi_task_loss(TASKS))
        feed = run.feed(batches(train, epochs), label=None, dense=["price"], extras=list(TASKS), batch_size=BATCH)
        for batch in feed:
            loss, _ = step(batch)
            if run.steps % 500 == 0:
                print(f"step {run.steps}: loss {float(loss):.4f}")
        scores = run.predict({name: later[name] for name in (*ROWS, "price")}, dense=["price"], batch_size=BATCH)
    return {
        task: {
            "model": log_loss(1 / (1 + np.exp(-scores[task].astype(np.float64))), later[task]),
            "rate": log_loss(float(np.mean(train[task][train[task] >= 0])), later[task]),
        }
        for task in TASKS
    }


if __name__ == "__main__":
    for task, losses in main().items():
        print(f"{task}: log loss {losses['model']:.4f}, of the rate alone {losses['rate']:.4f}")
