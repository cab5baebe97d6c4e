"""A window's examples packed together, one kernel a column, so that a batch is cut out of it by one kernel a stack.

Packed batch by batch, every column is a call of its own, and every call gives Python's lock away and waits for it
again: with a feed and several threads that pack, this takes longer than the packing. Here a batch of Kaggle's 26
features is one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrec.batch import Batch
from jrec.data import packing_kernels as kernels
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedWindow:
    """Examples whose features have the same number of ids in every example, without weights.

    Attributes:
      layout: The stacks.
      casts: Whether batches come with their casts.
      labels: (examples,) float32.
      mask: (examples,) float32, their weights.
      dense: (examples, n) float32.
      extras: (examples, ...) each.
      addresses: By stack, (examples * ids of an example,): all examples of a feature, then of the next.
    """

    layout: EmbeddingLayout
    casts: bool
    labels: np.ndarray
    mask: np.ndarray
    dense: np.ndarray
    extras: Mapping[str, np.ndarray]
    addresses: Mapping[str, np.ndarray]


def batch_of(pieces: Sequence[tuple[PackedWindow, int, int]], batch_size: int) -> Batch:
    """What ``Packer.pack`` makes of some examples of some of a packer's windows, bit for bit.

    Args:
      pieces: (window, first example, last + 1), at least one, together at most ``batch_size`` examples.
      batch_size: Static size of the batch.
    """
    first, stacks = pieces[0][0], pieces[0][0].layout.stacks
    examples = sum(stop - begin for _, begin, stop in pieces)

    def joined(of_window: Callable[[PackedWindow], np.ndarray]) -> np.ndarray:
        arrays = [of_window(window)[begin:stop] for window, begin, stop in pieces]
        out = np.empty((batch_size, *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=out[:examples])
        out[examples:] = 0
        return out

    bags = {name: _bags(stack, pieces, examples, batch_size) for name, stack in stacks.items()}
    if first.casts:
        bags = {name: with_cast(of_stack, stacks[name]) for name, of_stack in bags.items()}
    # Batch names the arrays as jax.Array; on the host they are NumPy's.
    arrays: Any = {
        "dense": joined(lambda window: window.dense),
        "labels": joined(lambda window: window.labels),
        "mask": joined(lambda window: window.mask),
        "extras": {name: joined(lambda window, name=name: window.extras[name]) for name in first.extras},
    }
    batch = Batch(bags=bags, **arrays)
    object.__setattr__(batch, "packed", True)
    return batch


def _bags(stack: Stack, pieces: Sequence[tuple[PackedWindow, int, int]], examples: int, batch_size: int) -> Bags:
    ids, widths = np.empty(stack.capacity(batch_size), stack.address_dtype), _widths(stack)
    # Padded bags have places of their own, also of absent examples; ragged ones close up, with padding behind all.
    ragged = stack.padded_length is None
    room, place = examples if ragged else batch_size, 0
    for window, begin, stop in pieces:
        kernels.cut_examples(window.addresses[stack.name], widths, begin, stop, room, place, ids)
        place += stop - begin
    if not ragged:
        kernels.pad_examples(widths, place, room, ids)
        return Bags(ids=ids.reshape(-1, stack.padded_length or 1))  # pyright: ignore[reportArgumentType]
    # Behind all features together: ragged addresses have no places of their own for absent examples.
    ids[examples * int(widths.sum()) :] = -1
    made: Any = (ids, regular_offsets(stack, examples, batch_size))
    return Bags(ids=made[0], offsets=made[1])


def _widths(stack: Stack) -> np.ndarray:
    return np.array([feature.config.max_length for feature in stack.features], np.int64)


def regular_offsets(stack: Stack, examples: int, batch_size: int) -> np.ndarray:
    """Where the bags of a batch end, (bags + 1,) int32, if every example has ``max_length`` ids of every feature."""
    offsets = np.zeros(stack.num_bags(batch_size) + 1, np.int32)
    bag = position = 0
    for feature in stack.features:
        config = feature.config
        bags = batch_size * config.bags_per_example
        position = regular_ends(
            config.max_length, config.unpooled, examples, position, offsets[bag + 1 : bag + bags + 1]
        )
        bag += bags
    return offsets


def regular_ends(length: int, unpooled: bool, examples: int, begin: int, ends: np.ndarray) -> int:
    """Fills ``ends`` for a feature of ``length`` ids in every example from ``begin`` on; returns where they end."""
    each, stop = 1 if unpooled else length, begin + examples * length
    filled = examples * length // each
    ends[:filled] = np.arange(begin + each, stop + 1, each)
    ends[filled:] = stop
    return stop
