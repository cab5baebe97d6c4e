"""A running AUC for the progress bar: two histograms, constant memory, exactly restorable."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike

from jrec.errors import DivergedError


class RunningAuc:
    """AUC of the recent past, from histograms of the logits of positives and negatives.

    Binning is monotone, so pairs in different bins are ranked rightly, and a pair in one bin counts half: the value is
    off the exact AUC by at most ``error_bound()``, half the share of pairs that fall in one bin: with the default bins,
    0.004 logits wide, at most 0.0006 where the logits of either class are normal with a standard deviation of 1. With
    ``decay`` below 1, examples of ``k`` updates ago weigh ``decay**k``.

    The state depends only on the sequence of updates, so a run that restores it continues bit-identically.
    """

    LIMIT = 16.0  # logits beyond are counted at the ends: sigmoid(16) is 1 - 1e-7

    def __init__(self, bins: int = 8192, decay: float = 0.99):
        if bins < 1 or not 0 < decay <= 1:
            raise ValueError(f"a running AUC needs {bins=} of at least 1 and {decay=} above 0 and up to 1")
        self._decay = decay
        self._histograms = np.zeros((2, bins))  # negatives, positives

    def update(self, logits: ArrayLike, labels: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Adds a batch: (batch,) float logits, labels of 0 and 1, and 0 in ``mask`` for padding.

        Raises:
          DivergedError: If a logit is NaN.
        """
        bins = self._histograms.shape[1]
        z, truth = np.asarray(logits, np.float32), np.asarray(labels) != 0
        if mask is not None:
            keep = np.asarray(mask) != 0
            z, truth = z[keep], truth[keep]
        if np.isnan(z).any():
            raise DivergedError(f"{np.isnan(z).sum():,} of {z.size:,} logits are NaN: training has diverged")
        scaled = (np.clip(z, -self.LIMIT, self.LIMIT) + np.float32(self.LIMIT)) * np.float32(bins / (2 * self.LIMIT))
        which = np.minimum(scaled.astype(np.int64), bins - 1) + bins * truth
        if self._decay < 1:
            self._histograms *= self._decay
            self._histograms[self._histograms < 1e-9] = 0  # ahead of denormal numbers, on which arithmetic is slow
        self._histograms += np.bincount(which, minlength=2 * bins).reshape(2, bins)

    def value(self) -> float | None:
        """The running AUC, or None before both classes were seen."""
        negatives, positives = self._histograms
        pairs = negatives.sum() * positives.sum()
        below = np.cumsum(negatives) - negatives
        return float(np.sum(positives * (below + negatives / 2)) / pairs) if pairs > 0 else None

    def error_bound(self) -> float | None:
        """How far ``value()`` can be from the AUC of the same examples and weights, or None where that is None."""
        negatives, positives = self._histograms
        pairs = negatives.sum() * positives.sum()
        return float(np.sum(positives * negatives) / 2 / pairs) if pairs > 0 else None

    def state(self) -> dict[str, np.ndarray]:
        """A copy of everything that updates change: {"histograms": (2, 2 * bins) uint32}.

        These are the bits of float64 counts, which JAX without 64-bit types would round on their way to a checkpoint.
        """
        return {"histograms": self._histograms.copy().view(np.uint32)}

    def restore(self, state: Mapping[str, ArrayLike]) -> None:
        """Continues from a ``state()``.

        Raises:
          ValueError: If it has another shape or dtype.
        """
        bits = np.array(state["histograms"])
        expected = (2, 2 * self._histograms.shape[1])
        if bits.shape != expected or bits.dtype != np.uint32:
            raise ValueError(
                f"the stored running AUC is {bits.dtype} of shape {bits.shape}, but this one is uint32 of {expected}"
            )
        self._histograms = bits.view(np.float64)
