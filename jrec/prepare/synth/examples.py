"""Examples of a shape before rows are numbered: any of them, in any order, from nothing but their places in the log."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jrec.prepare.synth import kernels
from jrec.prepare.synth.shapes import Shape, SynthFeature

_ORIGINS = {
    "power": kernels.POWER,
    "hour": kernels.HOUR,
    "weekday": kernels.WEEKDAY,
    "parent": kernels.PARENT,
    "history": kernels.HISTORY,
}
NO_WEIGHTS = np.empty(0, np.float32)


def derived_seed(seed: int, *purpose: str) -> np.uint64:
    """A 64-bit seed for one purpose, unrelated to any other purpose's seed."""
    digest = hashlib.sha256("\0".join([str(seed), *purpose]).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Items:
    """A feature's ids in a run of examples, as items: rows numbered by popularity before drift.

    Attributes:
      offsets: (examples + 1,) int64.
      items: (offsets[-1],) uint32.
      weights: float32 of the shape of ``items``, or of size 0.
    """

    offsets: np.ndarray
    items: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """Dense features (n, dense) float32, and the items of every categorical feature by name."""

    numbers: np.ndarray
    dense: np.ndarray
    items: dict[str, Items]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleGenerator:
    """Draws examples of a log of ``total`` examples.

    Attributes:
      shape: What the log is like.
      seed: The seed of all random numbers.
      total: The log's length in examples.
      drift: Whether popularity drifts from day to day.
    """

    shape: Shape
    seed: int
    total: int
    drift: bool = True

    def examples(self, numbers: np.ndarray) -> Examples:
        """The examples at (n,) int64 places of the log."""
        clusters = self._clusters(numbers)
        dense = np.empty((len(numbers), self.shape.dense), np.float32)
        kernels.draw_dense(derived_seed(self.seed, "dense"), numbers, clusters, dense)
        return Examples(numbers=numbers, dense=dense, items=self._items(numbers, clusters, weights=True))

    def items(self, numbers: np.ndarray) -> dict[str, Items]:
        """Only the items, without weights."""
        return self._items(numbers, self._clusters(numbers), weights=False)

    def _clusters(self, numbers: np.ndarray) -> np.ndarray:
        clusters = np.empty(len(numbers), np.int64)
        kernels.draw_clusters(derived_seed(self.seed, "cluster"), numbers, clusters)
        return clusters

    def _items(self, numbers: np.ndarray, clusters: np.ndarray, *, weights: bool) -> dict[str, Items]:
        drawn_items: dict[str, Items] = {}
        for synth in self.shape.features:
            feature = synth.feature
            offsets = self._offsets(numbers, synth, drawn_items)
            items = np.empty(offsets[-1], np.uint32)
            kernels.draw_ids(
                derived_seed(self.seed, "ids", feature.table if synth.origin == "parent" else feature.name),
                numbers,
                offsets,
                _ORIGINS[synth.origin],
                self.shape.rows[feature.table],
                float(self.shape.exponent),
                self.total,
                self.shape.days,
                self.drift,
                clusters,
                drawn_items[synth.parent].items if synth.parent else items,
                items,
            )
            drawn = NO_WEIGHTS
            if feature.weighted and weights:
                drawn = np.empty(len(items), np.float32)
                kernels.draw_weights(derived_seed(self.seed, "weights", feature.name), numbers, offsets, drawn)
            drawn_items[feature.name] = Items(offsets=offsets, items=items, weights=drawn)
        return drawn_items

    def _offsets(self, numbers: np.ndarray, synth: SynthFeature, drawn_items: dict[str, Items]) -> np.ndarray:
        feature = synth.feature
        if feature.fixed_length:
            return np.arange(len(numbers) + 1, dtype=np.int64) * feature.max_length
        if synth.origin == "parent" and synth.parent:
            return drawn_items[synth.parent].offsets
        offsets = np.empty(len(numbers) + 1, np.int64)
        seed = derived_seed(self.seed, "lengths", feature.name)
        kernels.draw_lengths(seed, numbers, feature.max_length, offsets)
        return offsets
