"""Feature interaction: how pooled embeddings meet the bottom MLP's output (DLRM, Naumov et al. 2019, section 2.1)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_vjp
def dot_interaction(vectors: jax.Array) -> jax.Array:
    """Dot products of all pairs of feature vectors: the strict lower triangle of ``vectors @ vectors.T``, row by row.

    Args:
      vectors: (batch, features, dim) float.

    Returns:
      (batch, features * (features - 1) // 2), of the same dtype.
    """
    num_features = vectors.shape[1]
    products = jnp.einsum("bfd,bgd->bfg", vectors, vectors)
    flat = products.reshape(vectors.shape[0], num_features * num_features)
    return jnp.take(flat, _lower_triangle(num_features), axis=1, mode="clip")


def _forward(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dot_interaction(vectors), vectors


def _backward(vectors: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    # Autodiff would scatter the triangle; gathering the symmetric square is several times faster.
    num_features = vectors.shape[1]
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    square = jnp.take(padded, _square_from_triangle(num_features), axis=1, mode="clip")
    square = square.reshape(vectors.shape[0], num_features, num_features)
    return (jnp.einsum("bfg,bgd->bfd", square, vectors),)


dot_interaction.defvjp(_forward, _backward)


def concat_interaction(vectors: jax.Array) -> jax.Array:
    """Feature vectors side by side: (batch, features, dim) to (batch, features * dim)."""
    return vectors.reshape(vectors.shape[0], -1)


@functools.cache
def _lower_triangle(num_features: int) -> np.ndarray:
    rows, columns = np.tril_indices(num_features, -1)
    return (rows * num_features + columns).astype(np.int32)


@functools.cache
def _square_from_triangle(num_features: int) -> np.ndarray:
    """For each (f, g) the place of its product in the triangle; the diagonal points one past it, at a zero."""
    rows, columns = np.tril_indices(num_features, -1)
    square = np.full((num_features, num_features), len(rows), np.int32)
    square[rows, columns] = square[columns, rows] = np.arange(len(rows), dtype=np.int32)
    return square.reshape(-1)
