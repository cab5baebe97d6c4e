"""The time-series layer of TBSM (Ishkhanov et al. 2020): which steps of a history matter to the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.nn.mlp import MLP

Inner = Literal["dot", "indefinite", "definite"]
TopWith = Literal["context", "products"]
_EPSILON = 1e-12


class TimeSeriesLayer(nnx.Module):
    """One head: a context vector from the steps of a history, weighted by an MLP over their products with the target.

    The products are ``z_i' w`` (inner "dot"), ``z_i' A w`` ("indefinite") or ``z_i' A'A w`` ("definite"), with a square
    matrix of parameters A. An MLP of ``steps`` inputs, ``mlp`` hidden layers with ReLU and ``steps`` sigmoid outputs
    turns them into weights. Its inputs are places in time, the latest step last: a shorter history has zeros before it.

    Args:
      width: The vectors' width.
      steps: The longest history, in steps.
      mlp: Widths of the hidden layers.
      inner: The inner product.
      dtype: The dtype of the computation; parameters are float32.
      rngs: Its ``params`` stream initializes the parameters.
    """

    def __init__(self, width: int, steps: int, mlp: Sequence[int], *, inner: Inner, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.inner: Inner = inner
        self.dtype = dtype
        start = jax.nn.initializers.normal(width**-0.5)
        self.matrix = None if inner == "dot" else nnx.Param(start(rngs.params(), (width, width), jnp.float32))
        self.mlp = MLP((steps, *mlp, steps), activate_last=False, dtype=dtype, rngs=rngs)

    def __call__(self, target: jax.Array, history: jax.Array, place: jax.Array) -> jax.Array:
        """The context, (batch, width); see ``attend``."""
        return self.attend(target, history, place)[0]

    def attend(self, target: jax.Array, history: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The context, and the products that its weights are made of.

        Args:
          target: (batch, width).
          history: (batch, steps, width), in any order.
          place: (batch, steps, steps) of the vectors' dtype, 1 where a step of the history takes a place in time; all 0
            for padding, which then contributes nothing.

        Returns:
          (batch, width), the context, and (batch, steps), the products by place in time, 0 where there is no step.
        """
        products = jnp.einsum("bld,bd->bl", history, self._transformed(target))
        products = jnp.einsum("bl,blq->bq", products, place)
        weights = jax.nn.sigmoid(self.mlp(products))
        return jnp.einsum("bl,bld->bd", jnp.einsum("bq,blq->bl", weights, place), history), products

    def _transformed(self, target: jax.Array) -> jax.Array:
        """The vectors that the steps are multiplied with, (batch, width): the target under the inner product."""
        if self.matrix is None:
            return target
        matrix = self.matrix[...].astype(self.dtype)
        moved = jnp.einsum("de,be->bd", matrix, target)
        return jnp.einsum("ed,be->bd", matrix, moved) if self.inner == "definite" else moved


def places(present: jax.Array) -> jax.Array:
    """The places of histories' steps in time: the last step has the last place, whatever the history's length.

    Args:
      present: (batch, steps) bool, which positions hold a step, in order of time.

    Returns:
      (batch, steps) int32, from 0 to steps - 1; any number up to ``steps`` at positions without a step.
    """
    following = jnp.flip(jnp.cumsum(jnp.flip(present, axis=1), axis=1, dtype=jnp.int32), axis=1)
    return present.shape[1] - following


def on_sphere(vectors: jax.Array) -> jax.Array:
    """Vectors of length 1, (..., width); zeros stay zeros, and their gradient is finite."""
    squares = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1, keepdims=True)
    return (vectors.astype(jnp.float32) * jax.lax.rsqrt(jnp.maximum(squares, _EPSILON**2))).astype(vectors.dtype)
