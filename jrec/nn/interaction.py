"""Feature interaction: how pooled embeddings meet the bottom MLP's output (DLRM, Naumov et al. 2019, section 2.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.sizes import all_static

_WHOLE_BYTES, _CHUNK_BYTES = 64 << 20, 4 << 20
"""On a CPU, products of all pairs that are larger than the first are made by the second. 500 features of 2,048 examples
have 2 GiB of products, whose pages the system would hand out anew for every step; chunks stay in caches."""


@jax.custom_vjp
def dot_interaction(vectors: jax.Array) -> jax.Array:
    """Dot products of all pairs of feature vectors: the strict lower triangle of ``vectors @ vectors.T``, row by row.

    Args:
      vectors: (batch, features, dim) float.

    Returns:
      (batch, features * (features - 1) // 2), of the same dtype.
    """
    return _by_chunks(_triangle, vectors)


def _forward(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dot_interaction(vectors), vectors


def _backward(vectors: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (_by_chunks(_gradient, vectors, gradient),)


dot_interaction.defvjp(_forward, _backward)


def _triangle(vectors: jax.Array) -> jax.Array:
    num_features = vectors.shape[1]
    products = jnp.einsum("bfd,bgd->bfg", vectors, vectors)
    flat = products.reshape(vectors.shape[0], num_features * num_features)
    return jnp.take(flat, _lower_triangle(num_features), axis=1, mode="clip")


def _gradient(vectors: jax.Array, gradient: jax.Array) -> jax.Array:
    # Autodiff would scatter the triangle; gathering the symmetric square is several times faster.
    num_features = vectors.shape[1]
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    square = jnp.take(padded, _square_from_triangle(num_features), axis=1, mode="clip")
    square = square.reshape(vectors.shape[0], num_features, num_features)
    return jnp.einsum("bfg,bgd->bfd", square, vectors)


def _by_chunks(function: Callable[..., jax.Array], vectors: jax.Array, *rest: jax.Array) -> jax.Array:
    """``function`` of all examples, which must not depend on each other; the same bits."""
    batch, num_features = vectors.shape[:2]
    each = num_features**2 * vectors.dtype.itemsize
    if not all_static(vectors) or batch * each <= _WHOLE_BYTES:
        return function(vectors, *rest)

    def chunked(*arrays: jax.Array) -> jax.Array:
        def one(arrays: tuple[jax.Array, ...]) -> jax.Array:
            return function(*(array[None] for array in arrays))[0]

        return jax.lax.map(one, arrays, batch_size=max(1, _CHUNK_BYTES // each))

    return jax.lax.platform_dependent(vectors, *rest, cpu=chunked, default=function)


def concat_interaction(vectors: jax.Array) -> jax.Array:
    """Feature vectors side by side: (batch, features, dim) to (batch, features * dim)."""
    return vectors.reshape(vectors.shape[0], -1)


def fm_interaction(vectors: jax.Array) -> jax.Array:
    """Sum of the dot products of all pairs of feature vectors: the second-order term of a factorization machine.

    Computed as half of ``|sum of vectors|^2 - sum of |vector|^2`` (Rendle 2010, Lemma 3.1), in memory linear in the
    features; in float32, since the two nearly cancel.

    Args:
      vectors: (batch, features, dim) float.

    Returns:
      (batch,) float32.

    Example:
      >>> fm_interaction(jnp.asarray([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))  # 1*3 + 2*4 + 1*5 + 2*6 + 3*5 + 4*6
      Array([67.], dtype=float32)
    """
    vectors = vectors.astype(jnp.float32)
    total = jnp.sum(vectors, axis=1)
    return jnp.sum(total * total - jnp.sum(vectors * vectors, axis=1), axis=1) / 2


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
