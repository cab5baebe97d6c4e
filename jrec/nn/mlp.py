"""Multi-layer perceptron with DLRM's initialization."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jrec.nn.batch_norm import BatchNorm


class MLP(nnx.Module):
    """Linear layers with ReLU between; after the last one too where ``activate_last``.

    Weights start as normal(0, sqrt(2 / (fan_in + fan_out))) and biases as normal(0, sqrt(1 / fan_out)), as in the
    reference DLRM. Hidden layers, those that another layer follows, may have BatchNorm before the ReLU, and dropout
    after it.

    Args:
      sizes: Widths, of the input first.
      activate_last: Whether ReLU follows the last layer, too.
      dtype: The dtype of the computation; parameters and statistics are float32.
      dropout: The rate of dropout; 0 has none.
      batch_norm: Whether hidden layers are normalized (``nnx.BatchNorm``).
      rngs: Its ``params`` stream initializes everything; a fork of its ``dropout`` stream, if any, drops.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activate_last: bool,
        dtype: DTypeLike = "float32",
        dropout: float = 0.0,
        batch_norm: bool = False,
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

        norms = [BatchNorm(n, dtype=dtype, param_dtype=jnp.float32, rngs=rngs) for n in sizes[1:-1] if batch_norm]
        drops = [nnx.Dropout(dropout, rngs=rngs) for _ in sizes[1:-1] if dropout]
        self.norms, self.drops = nnx.List(norms) if norms else None, nnx.List(drops) if drops else None

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """(batch, sizes[0]) to (batch, sizes[-1]).

        Args:
          x: The input.
          mask: (batch,) bool, the rows that count in BatchNorm's statistics; None for all.
        """
        counted = None if mask is None else mask[:, None]
        for i, layer in enumerate(self.layers):
            x, hidden = layer(x), i + 1 < len(self.layers)
            if hidden and self.norms is not None:
                x = self.norms[i](x, mask=counted)
            if self.activate_last or hidden:
                x = jax.nn.relu(x)
            if hidden and self.drops is not None:
                x = self.drops[i](x)
        return x


def check_rate(dropout: float) -> None:
    """Raises ValueError unless a rate of dropout is at least 0 and below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, but the rate must be at least 0 and below 1")
