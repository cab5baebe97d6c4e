"""How do I train a sequence model (as SASRec) on a history of items? Unpooled lookups, causal attention, next items.

python examples/sequence_model.py
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

ITEMS, LENGTH, DIM, BATCH = 200, 10, 32, 128


class SequenceModel(nnx.Module):
    """One block of causal self-attention over the history; every position scores its next item against another one."""

    def __init__(self, layout: jrec.EmbeddingLayout, *, rngs: nnx.Rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)])
        self.hidden = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.back = nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> dict[str, jax.Array]:
        """(batch, LENGTH) scores of each next item and of another item, and where there is one."""
        del dense
        items = self.embeddings.features(activations, bags)  # (batch, LENGTH, DIM) by feature
        present = self.embeddings.masks(bags)["history"]  # (batch, LENGTH) bool
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & present[:, None, None, :]
        x = items["history"] + self.positions[...]
        x = x + self.attention(self.norms[0](x), mask=causal)
        x = x + self.back(jax.nn.relu(self.hidden(self.norms[1](x))))
        scores = {name: jnp.sum(x * items[name], axis=2) for name in ("next", "other")}
        return {**scores, "present": present}


def next_item_loss(outputs: dict[str, jax.Array], batch: jrec.Batch) -> jax.Array:
    """Log loss of the next item against another one, over all positions with an item."""
    weights = outputs["present"] * batch.mask[:, None]
    losses = jax.nn.softplus(-outputs["next"]) + jax.nn.softplus(outputs["other"])
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)


def histories(count: int, seed: int) -> dict[str, np.ndarray]:
    """Users who go on from item i to i + 1 or i + 7 most times; -1 fills short histories."""
    rng = np.random.default_rng(seed)
    items = np.empty((count, LENGTH + 1), np.int64)
    items[:, 0] = rng.integers(0, ITEMS, count)
    for place in range(1, LENGTH + 1):
        onward = (items[:, place - 1] + rng.choice([1, 7], count)) % ITEMS
        items[:, place] = np.where(rng.random(count) < 0.9, onward, rng.integers(0, ITEMS, count))
    absent = np.arange(LENGTH) >= rng.integers(3, LENGTH + 1, count)[:, None]
    columns = {"history": items[:, :-1], "next": items[:, 1:], "other": rng.integers(0, ITEMS, (count, LENGTH))}
    return {name: np.where(absent, -1, column) for name, column in columns.items()}


def main(steps: int = 400) -> dict[str, float]:
    """Trains; returns how often the next item scores higher than another one, on later histories (0.5 by chance)."""
    table = jrec.TableConfig(name="item", rows=ITEMS, dim=DIM)
    features = [
        jrec.FeatureConfig(name=name, table="item", max_length=LENGTH, pooling="none")
        for name in ("history", "next", "other")
    ]
    layout = jrec.EmbeddingLayout.build([table], features)
    model = SequenceModel(layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.Adam(learning_rate=5e-3)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows)

    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=next_item_loss)
        for batch in run.feed((histories(BATCH, seed) for seed in range(steps)), label=None):
            loss, _ = step(batch)
            if run.steps % 100 == 0:
                print(f"step {run.steps}: loss {float(loss):.3f}")
        outputs = run.predict(histories(1_000, steps))

    higher = outputs["next"] > outputs["other"]
    return {"next above another": float(higher[outputs["present"]].mean())}


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
