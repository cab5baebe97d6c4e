"""Dense features as several inputs each, by boundaries: a linear layer then learns a curve in place of a slope."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Boundaries = tuple[tuple[float, ...], ...]
"""At least two ascending numbers for each dense feature, such as quantiles; none for a feature that stays as it is."""


def encoded_width(boundaries: Boundaries, num_dense: int) -> int:
    """How many inputs ``piecewise_linear`` makes of ``num_dense`` dense features."""
    return sum(max(1, len(own) - 1) for own in boundaries) if boundaries else num_dense


def check_boundaries(boundaries: Boundaries, num_dense: int) -> None:
    """Refuses boundaries that ``piecewise_linear`` cannot take.

    Raises:
      ValueError: If their number of features is another, or the numbers of one feature do not ascend.
    """
    if boundaries and len(boundaries) != num_dense:
        raise ValueError(f"dense_boundaries are of {len(boundaries)} features, but num_dense is {num_dense}")
    for own in boundaries:
        if own and (len(own) < 2 or any(not low < high for low, high in itertools.pairwise(own))):
            raise ValueError(f"dense_boundaries {list(own)} must be at least two numbers in ascending order")


def piecewise_linear(dense: jax.Array, boundaries: Boundaries) -> jax.Array:
    """Piecewise linear encoding (Gorishniy et al., "On Embeddings for Numerical Features", 2022, section 3.2).

    Between two neighbouring boundaries there is one input: 0 below both, 1 above both, and linear between them.

    Args:
      dense: (batch, num_dense) float32.
      boundaries: By feature; () leaves all features as they are.

    Returns:
      (batch, ``encoded_width``) float32.
    """
    if not boundaries:
        return dense
    places, low, high, bounded = [], [], [], []
    for feature, own in enumerate(boundaries):
        pairs: Sequence[tuple[float, float]] = list(itertools.pairwise(own)) or [(0.0, 1.0)]
        places += [feature] * len(pairs)
        low += [pair[0] for pair in pairs]
        high += [pair[1] for pair in pairs]
        bounded += [bool(own)] * len(pairs)
    lows, highs = (np.asarray([ends], np.float64) for ends in (low, high))
    scaled = (dense[:, np.asarray(places)] - lows.astype(np.float32)) / (highs - lows).astype(np.float32)
    return jnp.where(np.asarray([bounded]), jnp.clip(scaled, 0, 1), scaled)
