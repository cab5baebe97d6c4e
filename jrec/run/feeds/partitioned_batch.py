"""A batch cut into one part per device, and the rows that it reads from host memory.

All of this runs in the loader's threads, and needs only the batch. Devices find the rows of their parts by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jrec.batch import Batch
from jrec.data.regroup import blank, gathered
from jrec.data.schema import DatasetError
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags
from jrec.run.feeds.hand_packed import check_lengths
from jrec.run.placement.rows import based
from jrec.sharding.contents import host_ranges, replicated_ranges
from jrec.sharding.plans import Plan
from jrec.sharding.stack_ranges import within


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedBatch:
    """A batch and its parts.

    Attributes:
      batch: The batch from the loader.
      parts: The parts of some devices, in their order, NumPy arrays.
      read: (n,) ascending addresses of the rows of host memory that the batch reads, by stack with rows there.
    """

    batch: Batch
    parts: tuple[Batch, ...]
    read: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class BatchPartitioner:
    """Cuts batches into the parts of some of the mesh's devices. Thread-safe; call it in the loader's threads.

    Args:
      layout: The batches' layout.
      plan: Where rows live (``placed_plan``).
      devices: Numbers of the devices whose parts are made.
      first: The number of the first device that shares the batch.
      count: The number of devices that share the batch, from ``first`` on. Those that compute get equal parts, in their
        order; parts of the others are blank.
      cast: Whether tensor-train stacks get their casts here too.
      hot: Whether the batches may read only rows that every device has.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        plan: Plan,
        *,
        devices: Sequence[int],
        first: int,
        count: int,
        cast: bool,
        hot: bool = False,
    ):
        self._layout, self._devices = layout, tuple(devices)
        self._compute_devices = [d for d in plan.compute_devices if first <= d < first + count]
        self._casts = [s for s in layout.members if s.compressed] if cast else []
        self._everywhere = {s.name: replicated_ranges(plan, based(s)) for s in layout.planned_stacks} if hot else {}
        hosts = () if hot else host_stacks(layout, plan)
        self._hosts = {stack.name: host_ranges(plan, based(stack)) for stack in hosts}

    def __call__(self, batch: Batch) -> PartitionedBatch:
        """The batch, and a part for each of the devices.

        Raises:
          ValueError: If the devices cannot share the examples equally, or bags that jrec has not packed hold more ids
            than the layout says.
          DatasetError: If the batch is to be hot, but reads a row that not every device has.
        """
        count = len(self._compute_devices)
        size, rest = divmod(len(batch.labels), count)
        if rest:
            raise ValueError(f"{len(batch.labels)} examples cannot be shared equally by {count} devices")
        for stack in () if batch.packed else self._layout.planned_stacks:
            check_lengths(stack, batch.bags[stack.name], len(batch.labels))
        for name, ranges in self._everywhere.items():
            self._check_hot(self._layout.stacks[name], batch.bags[name], ranges)
        read = {}
        for name, ranges in self._hosts.items():
            # Of the whole batch and not part by part: a row that several parts read is brought once.
            rows = _unique_rows(self._layout.stacks[name], batch.bags[name])
            read[name] = rows[within(rows, ranges)]
        parts = tuple(self._part(batch, device, size) for device in self._devices)
        return PartitionedBatch(batch=batch, parts=parts, read=read)

    def _part(self, batch: Batch, device: int, size: int) -> Batch:
        if device in self._compute_devices:
            begin = self._compute_devices.index(device) * size
            part = gathered(self._layout, [(batch, begin, begin + size)])
        else:
            # It keeps tables only, but takes part in every exchange of the step, with a part that reads nothing.
            part = blank(self._layout, batch, size)
        casts = {stack.name: with_cast(part.bags[stack.name], stack) for stack in self._casts}
        return dataclasses.replace(part, bags={**part.bags, **casts})

    def _check_hot(self, stack: Stack, bags: Bags, everywhere: np.ndarray) -> None:
        rows = _unique_rows(stack, bags)
        elsewhere = rows[~within(rows, everywhere)]
        if elsewhere.size:
            number = int(np.searchsorted(stack.bases, elsewhere[0], side="right")) - 1
            raise DatasetError(
                f"a hot batch reads row {elsewhere[0] - stack.bases[number]} of table {stack.tables[number].name!r},"
                " which the plan does not put on every device; give such examples to a feed without hot=True"
            )


def host_stacks(layout: EmbeddingLayout, plan: Plan) -> tuple[Stack, ...]:
    """The planned stacks with rows in host memory."""
    return tuple(stack for stack in layout.planned_stacks if plan.host_rows(stack.name))


def _unique_rows(stack: Stack, bags: Bags) -> np.ndarray:
    """(n,) ascending rows that bags of NumPy arrays read."""
    cast = with_cast(bags, stack).cast
    assert cast is not None
    return np.asarray(cast.rows)[: int(cast.num_unique)]
