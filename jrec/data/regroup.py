"""Examples of packed batches, packed anew: parts of a batch, or parts of several as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.batch import Batch
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def gathered(layout: EmbeddingLayout, pieces: Sequence[tuple[Batch, int, int]]) -> Batch:
    """Some examples of some batches, as one batch.

    Args:
      layout: The batches' layout.
      pieces: (batch of NumPy arrays, first example, last + 1); casts are left behind.
    """
    batches = [(batch, slice(begin, stop)) for batch, begin, stop in pieces]
    return Batch(
        dense=_joined([np.asarray(b.dense)[s] for b, s in batches]),
        labels=_joined([np.asarray(b.labels)[s] for b, s in batches]),
        mask=_joined([np.asarray(b.mask)[s] for b, s in batches]),
        bags={
            stack.name: (_padded_bags if stack.padded_length is not None else _ragged_bags)(stack, pieces)
            for stack in layout.members
        },
        extras={
            name: _joined([np.asarray(batch.extras[name])[s] for batch, s in batches]) for name in batches[0][0].extras
        },
    )


def blank(layout: EmbeddingLayout, like: Batch, examples: int) -> Batch:
    """``examples`` examples that do not count: masked, and without a lookup.

    Args:
      layout: The batches' layout.
      like: A batch of NumPy arrays, whose columns and dtypes it gets.
      examples: How many examples.
    """
    bags = {}
    for stack in layout.members:
        bags_like, capacity = like.bags[stack.name], stack.capacity(examples)
        count = stack.num_bags(examples)
        shape = (capacity,) if stack.padded_length is None else (count, stack.padded_length)
        made: Any = (
            np.full(shape, -1, stack.address_dtype),
            np.zeros(count + 1, np.int32) if stack.padded_length is None else None,
            None if bags_like.weights is None else np.zeros(shape, np.float32),
        )
        bags[stack.name] = Bags(ids=made[0], offsets=made[1], weights=made[2])
    return Batch(
        dense=_zeros(like.dense, examples),
        labels=_zeros(like.labels, examples),
        mask=_zeros(like.mask, examples),
        bags=bags,
        extras={name: _zeros(array, examples) for name, array in like.extras.items()},
    )


def _zeros(like: ArrayLike, examples: int) -> Any:
    return np.zeros((examples, *np.shape(like)[1:]), np.asarray(like).dtype)


def _padded_bags(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Bags:
    ids, weights = [], []
    for bags, low, high in _runs(stack, pieces):
        ids.append(np.asarray(bags.ids)[low:high])
        if bags.weights is not None:
            weights.append(np.asarray(bags.weights)[low:high])
    return Bags(ids=_joined(ids), weights=_joined(weights) if weights else None)


def _ragged_bags(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Bags:
    capacity = stack.capacity(sum(stop - begin for _, begin, stop in pieces))
    ids, weights, ends, position = np.full(capacity, -1, stack.address_dtype), None, [np.zeros(1, np.int32)], 0
    for bags, low, high in _runs(stack, pieces):
        offsets = np.asarray(bags.offsets)
        begin, stop = int(offsets[low]), int(offsets[high])
        to = slice(position, position + stop - begin)
        ids[to] = np.asarray(bags.ids)[begin:stop]
        if bags.weights is not None:
            weights = np.zeros(capacity, np.float32) if weights is None else weights
            weights[to] = np.asarray(bags.weights)[begin:stop]
        ends.append(offsets[low + 1 : high + 1] + np.int32(position - begin))
        position = to.stop
    made: Any = (ids, _joined(ends), weights)
    return Bags(ids=made[0], offsets=made[1], weights=made[2])


def _runs(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Iterator[tuple[Bags, int, int]]:
    """(bags, first bag, last + 1) of the pieces, feature by feature."""
    # Bags lie feature by feature: so each piece is visited once for each of them.
    for feature in stack.features:
        each = feature.config.bags_per_example
        for batch, begin, stop in pieces:
            first = feature.first_bag * len(batch.labels)
            yield batch.bags[stack.name], first + begin * each, first + stop * each


def _joined(arrays: Sequence[np.ndarray]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
