"""How do I put a tensor train in the place of ``nnx.Embed`` in a Flax model I have? One line; optax trains the cores.

python examples/tt_in_flax.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

WORDS, DIM, LENGTH, BATCH = 100_000, 32, 8, 128


class Classifier(nnx.Module):
    """Tells the topic of a text from its words; ``embed`` is any module from word numbers to vectors."""

    def __init__(self, embed: nnx.Module, *, rngs: nnx.Rngs):
        self.embed = embed
        self.out = nnx.Linear(DIM, 2, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        """(batch, 2) logits of (batch, LENGTH) words."""
        return self.out(jnp.mean(self.embed(words), axis=1))


def texts(count: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Words of which those below 1,000 tell the topic, and topics."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, 2, count)
    telling = 2 * rng.integers(0, 500, (count, LENGTH)) + topic[:, None]
    words = np.where(rng.random((count, LENGTH)) < 0.4, telling, rng.integers(1_000, WORDS, (count, LENGTH)))
    return jnp.asarray(words, jnp.int32), jnp.asarray(topic, jnp.int32)


@nnx.jit
def step(model: Classifier, optimizer: nnx.Optimizer, words: jax.Array, topic: jax.Array) -> jax.Array:
    """An ordinary step of Flax: the cores are ``nnx.Param``, as the table of ``nnx.Embed`` is."""

    def loss(model: Classifier) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(words), topic))

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def trained(embed: Any, rngs: nnx.Rngs, steps: int) -> dict[str, float]:
    """Parameters of the embedding, and the accuracy on later texts."""
    model = Classifier(embed, rngs=rngs)
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    for number in range(steps):
        step(model, optimizer, *texts(BATCH, number))
    words, topic = texts(2_000, steps)
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(embed, nnx.Param)))
    accuracy = np.mean(np.asarray(model(words)).argmax(axis=1) == topic)
    return {"parameters": size, "accuracy": float(accuracy)}


def main(steps: int = 150) -> dict[str, dict[str, float]]:
    """Trains the model with both; returns the size of each embedding and the accuracy that it reaches."""
    rngs = nnx.Rngs(0)
    return {
        "nnx.Embed": trained(nnx.Embed(WORDS, DIM, rngs=rngs), rngs, steps),
        "jrec.nn.TTEmbed": trained(jrec.nn.TTEmbed(WORDS, DIM, ranks=16, rngs=rngs), rngs, steps),
    }


if __name__ == "__main__":
    for name, figures in main().items():
        print(f"{name}: {figures['parameters']:,} parameters, accuracy {figures['accuracy']:.3f}")
