"""A batch cut into one part a device: examples, casts, and the unique rows sorted by the device that keeps them.

All of this runs in the loader's threads. Parts are as long as their rows; ``jrec.train.mesh_arrays`` gives them the
static sizes of the compiled step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrec.batch import Batch
from jrec.data.packing import host_cast
from jrec.host.local import local_ids
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags
from jrec.sharding.plan import Plan
from jrec.sharding.router import Routed, Router
from jrec.train.mesh_plan import planned_stacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One device's part of a batch, NumPy arrays.

    Attributes:
      batch: the examples. Ids of planned stacks number their unique rows, 0 for the least address; their casts' rows
        are addresses still.
      routes: where these rows are read from, by planned stack.
    """

    batch: Batch
    routes: dict[str, Routed]


class Parts:
    """Cuts batches into the parts of some of the mesh's devices. Thread-safe; call it in the loader's threads.

    Args:
      layout: of the batches.
      plan: where rows live (``run_plan``).
      devices: numbers of the devices whose parts are made.
      first: number of the device that the batch's first examples are for.
      count: among how many devices the batch is cut.
      cast: whether stacks that are not planned get their casts here too.
    """

    def __init__(
        self, layout: EmbeddingLayout, plan: Plan, *, devices: Sequence[int], first: int, count: int, cast: bool
    ):
        self.layout, self._devices, self._first, self._count = layout, tuple(devices), first, count
        self._casts = {s.name for s in layout.members if cast or s.tier == "planned"}
        self._routers = routers(layout, plan)

    def __call__(self, batch: Batch) -> tuple[Batch, tuple[Part, ...]]:
        """The batch, and a part for each of the devices.

        Raises:
          ValueError: if the devices cannot share the examples equally.
        """
        size, rest = divmod(len(batch.labels), self._count)
        if rest:
            raise ValueError(f"{len(batch.labels)} examples cannot be shared equally by {self._count} devices")
        parts = []
        for device in self._devices:
            begin = (device - self._first) * size
            part = gathered(self.layout, [(batch, begin, begin + size)])
            parts.append(routed_part(self.layout, part, self._routers, device, self._casts))
        return batch, tuple(parts)


def routers(layout: EmbeddingLayout, plan: Plan) -> dict[str, Router]:
    """By planned stack."""
    return {
        stack.name: Router(plan, [(t.name, base) for t, base in zip(stack.tables, stack.bases, strict=True)])
        for stack in planned_stacks(layout)
    }


def routed_part(
    layout: EmbeddingLayout, batch: Batch, routers: Mapping[str, Router], device: int, casts: set[str]
) -> Part:
    """Casts a device's examples and routes their unique rows.

    Args:
      layout: of the batch.
      batch: NumPy arrays, without casts.
      routers: by planned stack.
      device: whose part it is.
      casts: the stacks to cast.
    """
    bags, routes = dict(batch.bags), {}
    for name, of in batch.bags.items():
        if name not in casts:
            continue
        stack, ids = layout.stacks[name], np.asarray(of.ids)
        cast = host_cast(stack, ids, None if of.offsets is None else np.asarray(of.offsets), len(batch.labels))
        bags[name] = dataclasses.replace(of, cast=cast)
        if name in routers:
            unique = np.asarray(cast.rows)[: int(cast.num_unique)]
            local: Any = local_ids(cast, ids.shape)
            bags[name] = dataclasses.replace(bags[name], ids=local)
            routes[name] = routers[name].route(unique, device)
    return Part(batch=dataclasses.replace(batch, bags=bags), routes=routes)


def gathered(layout: EmbeddingLayout, pieces: Sequence[tuple[Batch, int, int]]) -> Batch:
    """Some examples of some batches, as one batch.

    Args:
      layout: of the batches.
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
    )


def _padded_bags(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Bags:
    ids, weights = [], []
    for of, low, high in _runs(stack, pieces):
        ids.append(np.asarray(of.ids)[low:high])
        if of.weights is not None:
            weights.append(np.asarray(of.weights)[low:high])
    return Bags(ids=_joined(ids), weights=_joined(weights) if weights else None)


def _ragged_bags(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Bags:
    capacity = stack.capacity(sum(stop - begin for _, begin, stop in pieces))
    ids, weights, ends, position = np.full(capacity, -1, np.int32), None, [np.zeros(1, np.int32)], 0
    for of, low, high in _runs(stack, pieces):
        offsets = np.asarray(of.offsets)
        begin, stop = int(offsets[low]), int(offsets[high])
        to = slice(position, position + stop - begin)
        ids[to] = np.asarray(of.ids)[begin:stop]
        if of.weights is not None:
            weights = np.zeros(capacity, np.float32) if weights is None else weights
            weights[to] = np.asarray(of.weights)[begin:stop]
        ends.append(offsets[low + 1 : high + 1] + np.int32(position - begin))
        position = to.stop
    made: Any = (ids, _joined(ends), weights)
    return Bags(ids=made[0], offsets=made[1], weights=made[2])


def _runs(stack: Stack, pieces: Sequence[tuple[Batch, int, int]]) -> Any:
    """(bags, first bag, last + 1) of the pieces, feature by feature."""
    for feature in stack.features:
        each = feature.config.bags_per_example
        for batch, begin, stop in pieces:
            first = feature.first_bag * len(batch.labels)
            yield batch.bags[stack.name], first + begin * each, first + stop * each


def _joined(arrays: Sequence[np.ndarray]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
