"""A model that jrec does not ship, as a user writes it: DeepFM with dropout and batch norm, and its factory."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jrec


class DeepFM(nnx.Module):
    """Products of all pairs of vectors, beside an MLP over the vectors and the dense features."""

    def __init__(
        self,
        embeddings: jrec.nn.EmbeddingCollection,
        *,
        num_dense: int,
        hidden: Sequence[int],
        dropout: float,
        batch_norm: bool,
        rngs: nnx.Rngs,
    ):
        self.embeddings = embeddings
        self.tower = Tower(embeddings, num_dense, hidden, dropout, batch_norm, rngs=rngs)

    def logits(self, dense: jax.Array, activations: Mapping[str, Any], bags: Mapping[str, Any]) -> jax.Array:
        """(batch,) float32."""
        vectors = jnp.concatenate(self.embeddings.vectors(activations, bags), axis=1)
        pairs = 0.5 * jnp.sum(jnp.sum(vectors, axis=1) ** 2 - jnp.sum(vectors**2, axis=1), axis=1)
        return pairs + self.tower(dense, activations, bags)


class Tower(nnx.Module):
    """An MLP that reads the vectors by a reference of its own to the embeddings."""

    def __init__(
        self,
        embeddings: jrec.nn.EmbeddingCollection,
        num_dense: int,
        hidden: Sequence[int],
        dropout: float,
        batch_norm: bool,
        *,
        rngs: nnx.Rngs,
    ):
        self.embeddings = embeddings
        layout = embeddings.layout
        widths = [num_dense + sum(feature.vectors * dim for feature, dim in layout.features), *hidden]
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(widths)])
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in hidden] if batch_norm else [])
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.out = nnx.Linear(widths[-1], 1, rngs=rngs)

    def __call__(self, dense: jax.Array, activations: Mapping[str, Any], bags: Mapping[str, Any]) -> jax.Array:
        vectors = self.embeddings.vectors(activations, bags)
        x = jnp.concatenate([dense, *(v.reshape(v.shape[0], v.shape[1] * v.shape[2]) for v in vectors)], axis=1)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = jax.nn.relu(self.norms[number](x) if self.norms else x)
            x = x if self.dropout is None else self.dropout(x)
        return self.out(x)[:, 0]


def make(
    embeddings: jrec.nn.EmbeddingCollection,
    *,
    num_dense: int,
    rngs: nnx.Rngs,
    hidden: Sequence[int] = (16,),
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> DeepFM:
    """The factory: what ``model.factory`` names, with the keys of ``[model.options]``."""
    return DeepFM(embeddings, num_dense=num_dense, hidden=hidden, dropout=dropout, batch_norm=batch_norm, rngs=rngs)


class Tasks(nnx.Module):
    """A linear model of several labels."""

    def __init__(self, embeddings: jrec.nn.EmbeddingCollection, num_dense: int, tasks: Sequence[str], rngs: nnx.Rngs):
        self.embeddings = embeddings
        width = num_dense + sum(feature.vectors * dim for feature, dim in embeddings.layout.features)
        self.heads = nnx.Dict({task: nnx.Linear(width, 1, rngs=rngs) for task in tasks})

    def logits(self, dense: jax.Array, activations: Mapping[str, Any], bags: Mapping[str, Any]) -> dict[str, jax.Array]:
        """By task, (batch,) float32."""
        vectors = self.embeddings.vectors(activations, bags)
        x = jnp.concatenate([dense, *(v.reshape(v.shape[0], v.shape[1] * v.shape[2]) for v in vectors)], axis=1)
        return {task: head(x)[:, 0] for task, head in self.heads.items()}


def several(
    embeddings: jrec.nn.EmbeddingCollection, *, num_dense: int, rngs: nnx.Rngs, tasks: Sequence[str] = ("only",)
) -> nnx.Module:
    """A factory of ``Tasks``."""
    return Tasks(embeddings, num_dense, tasks, rngs)


class Towers(nnx.Module):
    """Sums of the vectors of a user's features, and of an item's."""

    def __init__(self, embeddings: jrec.nn.EmbeddingCollection, user: Sequence[str]):
        self.embeddings, self.user = embeddings, tuple(user)

    def logits(self, dense: jax.Array, activations: Mapping[str, Any], bags: Mapping[str, Any]) -> dict[str, jax.Array]:
        """ "user" and "item", (batch, dim) float32."""
        features = self.embeddings.features(activations, bags)
        vectors = {"user": 0.0, "item": 0.0}
        for name, vector in features.items():
            vectors["user" if name in self.user else "item"] += vector
        return {key: jrec.nn.sequences.unit(vector) for key, vector in vectors.items()}


def towers(
    embeddings: jrec.nn.EmbeddingCollection, *, num_dense: int, rngs: nnx.Rngs, user: Sequence[str] = ()
) -> nnx.Module:
    """A factory of ``Towers``."""
    return Towers(embeddings, user)
