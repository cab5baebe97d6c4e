"""A running AUC for the progress bar: two histograms on the devices, constant memory, exactly restorable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

_LIMIT = 16.0  # logits beyond are counted at the ends: sigmoid(16) is 1 - 1e-7
_LEAST = 1e-9  # what decays below it is none, ahead of denormal numbers, on which arithmetic is slow


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningAuc:
    """AUC of the recent past, from histograms of the logits of positives and negatives: ``jrec.run.step.Metrics``.

    Binning is monotone, so pairs in different bins are ranked rightly, and a pair in one bin counts half: the value is
    off the exact AUC by at most ``error_bound()``, half the share of pairs that fall in one bin: with the default bins,
    0.004 logits wide, at most 0.0006 where the logits of either class are normal with a standard deviation of 1. With
    ``decay`` below 1, examples of ``k`` steps ago weigh ``decay**k``.

    The state depends only on the sequence of updates, so a run that restores it continues bit-identically.

    Attributes:
      histograms: (2, bins) float32 of negatives and positives; on a mesh (devices, 2, bins), of each one's examples.
      decay: The factor of a step.
      task: The task that is counted, of examples with several labels of which it is the first; "" for one label.
    """

    histograms: jax.Array
    decay: float = dataclasses.field(default=0.99, metadata={"static": True})
    task: str = dataclasses.field(default="", metadata={"static": True})

    @staticmethod
    def empty(*, bins: int = 8192, decay: float = 0.99, devices: int | None = None, task: str = "") -> RunningAuc:
        """Without examples.

        Args:
          bins: The bins of a histogram.
          decay: See the class.
          devices: The mesh's devices; None for one without a mesh.
          task: See the class.

        Raises:
          ValueError: If there would be no bins, or ``decay`` is not above 0 and up to 1.
        """
        if bins < 1 or not 0 < decay <= 1:
            raise ValueError(f"a running AUC needs {bins=} of at least 1 and {decay=} above 0 and up to 1")
        shape = (2, bins) if devices is None else (devices, 2, bins)
        histograms: Any = np.zeros(shape, np.float32)
        return RunningAuc(histograms=histograms, decay=decay, task=task)

    def updated(self, logits: Any, labels: ArrayLike, mask: ArrayLike) -> RunningAuc:
        """With a step's examples: (examples,) float logits, labels of 0 and 1, weights, 0 for padding.

        Logits may be (examples, members), whose means count. Of a task they are a dictionary by task, and
        labels below 0 are unknown.

        NaN logits are left out: they make the loss NaN, which ends a run.
        """
        if self.task:
            logits, mask = logits[self.task], jnp.where(jnp.asarray(labels) >= 0, jnp.asarray(mask, jnp.float32), 0)
        bins, z = self.histograms.shape[1], jnp.asarray(logits, jnp.float32)
        z = jnp.mean(z, axis=1) if z.ndim > 1 else z
        scaled = (jnp.clip(z, -_LIMIT, _LIMIT) + _LIMIT) * (bins / (2 * _LIMIT))
        which = jnp.minimum(scaled.astype(jnp.int32), bins - 1)
        weights = jnp.where(jnp.isnan(z), 0, jnp.asarray(mask, jnp.float32))
        positive = (jnp.asarray(labels, jnp.float32) != 0).astype(jnp.int32)
        counts = jnp.zeros((2, bins), jnp.float32).at[positive, which].add(weights)
        decayed = self.histograms if self.decay == 1 else self.histograms * jnp.float32(self.decay)
        return dataclasses.replace(self, histograms=jnp.where(decayed < _LEAST, 0, decayed) + counts)

    def value(self) -> float | None:
        """The running AUC, or None before both classes were seen. Several processes call it together."""
        negatives, positives = self._whole()
        pairs = negatives.sum() * positives.sum()
        below = np.cumsum(negatives) - negatives
        return float(np.sum(positives * (below + negatives / 2)) / pairs) if pairs > 0 else None

    def error_bound(self) -> float | None:
        """How far ``value()`` can be from the AUC of the same examples and weights, or None where that is None."""
        negatives, positives = self._whole()
        pairs = negatives.sum() * positives.sum()
        return float(np.sum(positives * negatives) / 2 / pairs) if pairs > 0 else None

    def state(self) -> dict[str, np.ndarray]:
        """What updates change: {"histograms": (devices, 2, bins) float32}. Several processes call it together."""
        return {"histograms": self._by_device()}

    def restored(self, state: Mapping[str, ArrayLike]) -> RunningAuc:
        """As a ``state()`` says, bit for bit on as many devices; another number of them counts on with the sum.

        Raises:
          ValueError: If it has another shape or dtype.
        """
        stored, own = np.asarray(state["histograms"]), self._by_device()
        if stored.dtype == np.uint32 and stored.shape == (2, 2 * own.shape[2]):  # of earlier versions: float64's bits
            stored = stored.view(np.float64).astype(np.float32)[None]
        if stored.dtype != np.float32 or stored.shape[1:] != own.shape[1:]:
            raise ValueError(
                f"the stored running AUC is {stored.dtype} of shape {stored.shape}, but this one is float32 of"
                f" {own.shape}"
            )
        if len(stored) != len(own):
            stored = np.concatenate([stored.sum(0, keepdims=True), np.zeros_like(own[1:])])
        return dataclasses.replace(self, histograms=stored.reshape(self.histograms.shape))

    def _whole(self) -> np.ndarray:
        return self._by_device().astype(np.float64).sum(0)

    def _by_device(self) -> np.ndarray:
        histograms = self.histograms
        if isinstance(histograms, jax.Array) and not histograms.is_fully_addressable:
            histograms = multihost_utils.process_allgather(histograms, tiled=True)
        return np.asarray(histograms).reshape(-1, *self.histograms.shape[-2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoRunningAuc:
    """Stands for ``RunningAuc`` of a model without logits of labels: counts nothing, and leaves nothing to be read."""

    def updated(self, logits: Any, labels: ArrayLike, mask: ArrayLike) -> NoRunningAuc:
        """Itself."""
        del logits, labels, mask
        return self

    def value(self) -> None:
        """None."""

    def state(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def restored(self, state: Mapping[str, ArrayLike]) -> NoRunningAuc:
        """Itself."""
        del state
        return self
