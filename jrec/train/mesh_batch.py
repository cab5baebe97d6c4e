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
from jrec.data.regroup import gathered
from jrec.host.local import local_ids
from jrec.ops.layout import EmbeddingLayout
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
    """A batch and its parts.

    Attributes:
      batch: as the loader made it.
      parts: of some devices, in their order.
    """

    batch: Batch
    parts: tuple[Part, ...]


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
        self.layout, self.devices, self._first, self._count = layout, tuple(devices), first, count
        self._casts = {s.name for s in layout.members if cast or s.tier == "planned"}
        self._routers = routers(layout, plan)

    def __call__(self, batch: Batch) -> Dealt:
        """The batch, and a part for each of the devices.

        Raises:
          ValueError: if the devices cannot share the examples equally.
        """
        size, rest = divmod(len(batch.labels), self._count)
        if rest:
            raise ValueError(f"{len(batch.labels)} examples cannot be shared equally by {self._count} devices")
        parts = []
        for device in self.devices:
            begin = (device - self._first) * size
            part = gathered(self.layout, [(batch, begin, begin + size)])
            parts.append(routed_part(self.layout, part, self._routers, device, self._casts))
        return Dealt(batch=batch, parts=tuple(parts))


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
