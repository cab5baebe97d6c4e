"""Cross network of DCN-v2 (Wang et al. 2021, arXiv 2008.13535): explicit products of features, a degree a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

_GLOROT = nnx.initializers.glorot_normal()


class CrossNetwork(nnx.Module):
    """Layers ``x_(l+1) = x_0 * (W_l x_l + b_l) + x_l``, elementwise in ``*`` (DCN-v2, Equation 1).

    Of a rank above 0, ``W_l`` is ``U_l V_l^T`` of two (width, rank) matrices (Equation 2), which need fewer
    multiplications where the rank is below half of the width. After ``l`` layers the output has all products of up to
    ``l + 1`` inputs. Stacked: an MLP reads the output.

    Weights start as Glorot normal, biases as zeros.

    Args:
      width: Elements of the input and the output.
      layers: Cross layers; at least 1.
      rank: The rank of the weight matrices, at most ``width``; 0 for full matrices.
      dtype: The dtype of the computation; parameters stay float32.
      rngs: Its ``params`` stream initializes everything.

    Raises:
      ValueError: On fewer layers than one, or a rank below 0 or above the width.

    Example:
      >>> cross = jrec.nn.CrossNetwork(24, layers=2, rank=4, rngs=nnx.Rngs(0))
      >>> cross(jnp.ones((8, 24))).shape
      (8, 24)
    """

    def __init__(self, width: int, *, layers: int = 3, rank: int = 0, dtype: DTypeLike = "float32", rngs: nnx.Rngs):
        if layers < 1:
            raise ValueError(f"cross_layers is {layers}; a cross network has at least one")
        if not 0 <= rank <= width:
            raise ValueError(
                f"cross_rank is {rank}, but the interaction is {width} wide; choose a rank from 1 to {width}, or 0 for"
                " full matrices"
            )

        def linear(fan_in: int, fan_out: int, *, bias: bool) -> nnx.Linear:
            return nnx.Linear(
                fan_in,
                fan_out,
                use_bias=bias,
                kernel_init=_GLOROT,
                dtype=dtype,
                param_dtype=jnp.float32,
                rngs=rngs,
            )

        self.down = nnx.List(linear(width, rank, bias=False) for _ in range(layers if rank else 0))
        self.layers = nnx.List(linear(rank or width, width, bias=True) for _ in range(layers))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(batch, width) to (batch, width), in the dtype of the computation."""
        x0 = x = inputs.astype(self.layers[0].dtype)
        for number, layer in enumerate(self.layers):
            crossed = layer(self.down[number](x) if self.down else x)
            x = x0 * crossed + x
        return x
