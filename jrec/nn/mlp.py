"""Multi-layer perceptron with DLRM's initialization."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class MLP(nnx.Module):
    """Linear layers with ReLU between; after the last one too where ``activate_last``.

    Weights start as normal(0, sqrt(2 / (fan_in + fan_out))) and biases as normal(0, sqrt(1 / fan_out)), as in the
    reference DLRM.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activate_last: bool,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
    ):
        if len(sizes) < 2:
            raise ValueError(f"an MLP needs an input and an output size, but sizes are {list(sizes)}")
        self.activate_last = activate_last
        self.layers = nnx.List(
            nnx.Linear(
                fan_in,
                fan_out,
                kernel_init=jax.nn.initializers.normal((2 / (fan_in + fan_out)) ** 0.5),
                bias_init=jax.nn.initializers.normal((1 / fan_out) ** 0.5),
                dtype=dtype,
                param_dtype=jnp.float32,
                rngs=rngs,
            )
            for fan_in, fan_out in itertools.pairwise(sizes)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sizes[0]) to (batch, sizes[-1])."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.activate_last or i + 1 < len(self.layers):
                x = jax.nn.relu(x)
        return x
