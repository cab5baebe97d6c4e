"""Calibration of a model's logits: what a scale and a shift can put right of predicted probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Calibration(nnx.Module):
    """``scale * logits + shift`` in eval mode, and the logits as they are in training (Platt 1999).

    No gradient reaches the two numbers: they are fitted to predictions on examples that the model was not trained on
    (``jrec.Run.calibrate``). Rankings, and so AUC, stay the same.

    Attributes:
      coefficients: (2,) float32, scale and shift; 1 and 0 to begin with.
      deterministic: Whether it applies; ``model.eval()`` sets it, ``model.train()`` unsets it.
    """

    def __init__(self) -> None:
        self.coefficients = nnx.Variable(jnp.array([1.0, 0.0], jnp.float32))
        self.deterministic = False

    def __call__(self, logits: jax.Array) -> jax.Array:
        """Calibrated logits, float32, of logits of any shape."""
        if not self.deterministic:
            return logits
        scale, shift = self.coefficients[...]
        return scale * logits + shift
