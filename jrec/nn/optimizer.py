"""One optimizer for a model's dense parameters and its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jrec.batch import Batch
from jrec.nn.embeddings import EmbeddingCollection
from jrec.ops.rounding import derived_key
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.types import Bags

Loss = Callable[[jax.Array, Batch], jax.Array]

_ROUNDING = 0x726F756E  # "roun": sets the keys of rounding apart from those of the initial parameters of the same seed


class SparseModel(Protocol):
    """What ``train_step`` asks of a model: an ``EmbeddingCollection``, and logits from what it looked up."""

    embeddings: EmbeddingCollection

    def logits(self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> jax.Array:
        """(batch,) float32."""
        ...


class RowSlot(nnx.Variable):
    """An optimizer slot of an embedding stack, or of a core of one."""


class SparseOptimizer(nnx.Module):
    """``optax`` for a model's dense parameters, a row optimizer for its embedding tables.

    Args:
      model: whose ``nnx.Param`` variables and tables are trained.
      dense: an optax transformation.
      embedding: a row optimizer from ``jrec.ops``.
      cores: the row optimizer of tensor-train cores, to which a slice is a row; None for ``embedding``.
      rounding_seed: updated rows of 16-bit tables and slices of 16-bit cores are rounded stochastically, so that
        updates below half of the last bit survive on average; None rounds to nearest. float32 is not rounded.
    """

    def __init__(
        self,
        model: Any,
        *,
        dense: optax.GradientTransformation,
        embedding: RowOptimizer,
        cores: RowOptimizer | None = None,
        rounding_seed: int | None = None,
    ):
        self.rounding_seed = rounding_seed
        self.dense = nnx.Optimizer(model, dense, wrt=nnx.Param)
        self.embedding = embedding
        self.cores = cores
        slots = model.embeddings.init_slots(embedding, cores=cores)
        self.slots = nnx.Dict(
            {stack: nnx.Dict({name: RowSlot(slot) for name, slot in of.items()}) for stack, of in slots.items()}
        )

    @property
    def step(self) -> jax.Array:
        """() uint32, steps taken."""
        return self.dense.step[...]

    def rounding_key(self) -> jax.Array | None:
        """The key of the next step's rounding, (2,) uint32, or None for round to nearest.

        A function of the seed and the number of the step alone: a resumed run rounds as it would have without a break.
        """
        if self.rounding_seed is None:
            return None
        seed = jax.random.key_data(jax.random.key(self.rounding_seed, impl="threefry2x32"))
        return derived_key(derived_key(seed, _ROUNDING), self.step)


def binary_cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """Mean log loss of the batch's real examples, () float32."""
    losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
    return jnp.sum(losses * batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)
