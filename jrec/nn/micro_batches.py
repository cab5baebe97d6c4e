"""A batch's examples in slices of equal size, for the dense model to see one after another."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags


class MicroBatches:
    """Slices of a batch whose rows were looked up together.

    Args:
      layout: The tables.
      batch: The batch, or a device's part of one.
      activations: (num_bags, dim) by stack.
      count: How many slices.

    Attributes:
      slices: What ``jax.lax.scan`` goes over: arrays with an axis of slices in front, for ``of``.

    Raises:
      ConfigError: If slices would have unequal numbers of examples.
    """

    def __init__(self, layout: EmbeddingLayout, batch: Batch, activations: Mapping[str, jax.Array], count: int):
        self._layout, self._batch, self._activations = layout, batch, activations
        self._examples = len(batch.labels)
        if count < 1 or self._examples % count:
            raise ConfigError(
                f"a batch, or a device's part of it, of {self._examples} examples cannot be cut into micro_batches ="
                f" {count} of equal size; give a batch size that is a multiple of the devices times micro_batches"
            )
        self._size = self._examples // count
        self._orders = {name: _orders(stack, self._examples, count) for name, stack in layout.stacks.items()}
        examples = (batch.dense, batch.labels, batch.mask, batch.extras)
        # Examples in their order, so that joined slices are the batch again.
        by_slice = jax.tree.map(lambda array: array.reshape(count, self._size, *array.shape[1:]), examples)
        self.slices: PyTree[jax.Array] = (by_slice, jax.tree.map(jnp.asarray, self._orders))

    def of(self, a_slice: PyTree[jax.Array]) -> tuple[dict[str, jax.Array], Batch]:
        """The activations and the examples of one of the ``slices``; the bags have no casts."""
        (dense, labels, mask, extras), orders = a_slice
        bags = {name: self._bags(self._layout.stacks[name], order) for name, order in orders.items()}
        activations = {name: _taken(self._activations[name], order) for name, order in orders.items()}
        return activations, Batch(dense=dense, labels=labels, mask=mask, bags=bags, extras=extras)

    def joined[T: PyTree](self, of_slices: T) -> T:
        """Arrays of examples, (slices, examples of one, ...), as (batch, ...)."""
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), of_slices)

    def joined_bags(self, of_slices: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Arrays of bags by stack, (slices, bags of one, ...), in the order of the batch's bags."""
        # The orders of all slices are a permutation of the bags; its inverse puts results back.
        places = {name: np.argsort(order.reshape(-1)) for name, order in self._orders.items()}
        return {name: _taken(array.reshape(-1, *array.shape[2:]), places[name]) for name, array in of_slices.items()}

    def _bags(self, stack: Stack, order: jax.Array) -> Bags:
        """The bags of a stack of these numbers, one behind the other."""
        bags = self._batch.bags[stack.name]
        if bags.offsets is None:
            weights = None if bags.weights is None else _taken(bags.weights, order)
            return Bags(ids=_taken(bags.ids, order), weights=weights)
        capacity = bags.capacity
        if capacity <= stack.capacity(self._examples):  # longer bags than the layout's may all be in one slice
            capacity = min(capacity, stack.capacity(self._size))
        begins = _taken(bags.offsets, order)
        lengths = _taken(bags.offsets, order + 1) - begins
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
        number = jnp.arange(capacity, dtype=jnp.int32)
        # The last bag that begins at or before each place: empty bags, which begin where the next one does, are passed
        # over.
        bag = jnp.searchsorted(offsets, number, side="right").astype(jnp.int32) - 1
        # Past the last bag is padding, whatever it reads.
        place = _taken(begins, bag) + number - _taken(offsets, bag)
        weights = None if bags.weights is None else _taken(bags.weights, place)
        return Bags(ids=_taken(bags.ids, place), offsets=offsets, weights=weights)


def _taken(values: jax.Array, at: jax.Array | np.ndarray) -> jax.Array:
    """The values at some places, clipped to those that there are."""
    return values.at[at].get(mode="clip", wrap_negative_indices=False)


def _orders(stack: Stack, examples: int, count: int) -> np.ndarray:
    """The numbers of the bags of each slice of the examples, (count, bags of one) int32; bags are feature-major."""
    blocks, begin = [], 0
    for feature in stack.features:
        stop = begin + feature.config.bags_per_example * examples
        blocks.append(np.arange(begin, stop, dtype=np.int32).reshape(count, -1))
        begin = stop
    return np.concatenate(blocks, axis=1)
