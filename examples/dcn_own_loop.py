"""How do I write model and loop myself? DCN-v2 with micro-batches, bfloat16 and a loss scale, under plain jax.jit.

python examples/dcn_own_loop.py
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

USERS, ITEMS, DIM, MICRO, MICRO_BATCHES, LOSS_SCALE = 200, 60, 16, 64, 4, 1024.0


class DCN(nnx.Module):
    """Deep and cross network, version 2: two cross layers of low rank, then an MLP; computed in bfloat16."""

    def __init__(self, layout: jrec.EmbeddingLayout, num_dense: int, *, rngs: nnx.Rngs):
        self.embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        width = num_dense + sum(dim for _, dim in layout.features)
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)  # parameters stay float32
        self.cross = jrec.nn.CrossNetwork(width, layers=2, rank=8, dtype=jnp.bfloat16, rngs=rngs)
        self.hidden, self.out = linear(width, 32), linear(32, 1)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, jrec.Bags]
    ) -> jax.Array:
        """(batch,) float32."""
        features = self.embeddings.features(activations, bags)
        x = self.cross(jnp.concatenate([dense, *features.values()], axis=1))
        return self.out(jax.nn.relu(self.hidden(x)))[:, 0].astype(jnp.float32)


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    """Clicks that depend on the pair of user and item, and on a float."""
    rng = np.random.default_rng(seed)
    user, item, price = rng.integers(0, USERS, count), rng.integers(0, ITEMS, count), rng.normal(size=count)
    liking = np.where(user % 3 == item % 3, 2.0, -1.0) - price
    label = (rng.logistic(size=count) < liking).astype(np.float32)
    return {"label": label, "user": user, "item": item, "price": price}


def main(steps: int = 250) -> dict[str, float]:
    """Trains; returns log losses (nats an example) of later clicks: the model's, and a constant's."""
    tables = [
        jrec.TableConfig(name="user", rows=USERS, dim=DIM),
        jrec.TableConfig(name="item", rows=ITEMS, dim=DIM),
    ]
    features = [jrec.FeatureConfig(name=table.name, table=table.name) for table in tables]
    layout = jrec.EmbeddingLayout.build(tables, features)
    model = DCN(layout, 1, rngs=nnx.Rngs(0))
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(5e-3), embedding=rows, max_global_norm=10.0)
    pack = functools.partial(jrec.data.pack_batch, layout, dense=["price"])
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)  # donated, so that tables are updated in place
    def step(state: Any, batches: list[jrec.Batch]) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        losses, dense_sum, gradients = [], None, []
        for batch in batches:
            activations, _ = model.embeddings.lookup(batch.bags)

            def loss(model: DCN, activations: Mapping[str, jax.Array], batch: jrec.Batch = batch) -> jax.Array:
                logits = model.logits(batch.dense, activations, batch.bags)
                return LOSS_SCALE * jrec.nn.binary_cross_entropy(logits, batch)

            wanted = (nnx.DiffState(0, nnx.Param), 1)
            value, (dense, of_rows) = nnx.value_and_grad(loss, argnums=wanted)(model, activations)
            dense_sum = dense if dense_sum is None else jax.tree.map(jnp.add, dense_sum, dense)
            losses.append(value)
            gradients.append(of_rows)
        bags = [batch.bags for batch in batches]
        scale = 1 / (LOSS_SCALE * len(batches))  # the mean over the micro-batches, without the loss scale
        optimizer.update_accumulated(model, bags, dense_sum, gradients, gradient_scale=scale)
        return nnx.state((model, optimizer)), jnp.mean(jnp.stack(losses)) / LOSS_SCALE

    for number in range(steps):
        batches = [pack(examples(MICRO, number * MICRO_BATCHES + n)) for n in range(MICRO_BATCHES)]
        state, loss = step(state, batches)
        if (number + 1) % 50 == 0:
            print(f"step {number + 1}: log loss {float(loss):.3f}")

    later = examples(4_000, seed=10**6)
    model, _ = nnx.merge(graph, state)
    batch = pack(later)
    activations, _ = model.embeddings.lookup(batch.bags)
    logits = np.asarray(model.logits(jnp.asarray(batch.dense), activations, batch.bags))
    clicked, rate = later["label"] > 0, later["label"].mean()
    return {
        "model": float(np.mean(np.logaddexp(0, np.where(clicked, -logits, logits)))),
        "constant": float(-np.mean(np.where(clicked, np.log(rate), np.log(1 - rate)))),
    }


if __name__ == "__main__":
    print({name: round(value, 3) for name, value in main().items()})
