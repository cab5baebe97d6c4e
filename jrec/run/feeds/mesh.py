"""Batches of a run with a plan, cut into the devices' parts, and brought to the mesh ahead of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jrec.batch import Batch
from jrec.json_values import JsonObject
from jrec.run.feeds.ahead import AheadFeed, Placed
from jrec.run.feeds.batches import Batches
from jrec.run.feeds.partitioned import MeshBatches
from jrec.run.feeds.partitioned_batch import PartitionedBatch
from jrec.run.placement.setup import MeshSetup
from jrec.run.step import StepBatch


class MeshFeed(AheadFeed):
    """A loader's batches on a mesh, where none of their rows lies in host memory; see ``AheadFeed``.

    Args:
      loader: The training batches, cut by ``setup.partitioner``.
      setup: Mesh and plan.
      total: The number of batches that the run takes; None for all.
      steps: How many of them a dispatch takes that begins behind a number of batches.
    """

    def __init__(self, loader: Batches, *, setup: MeshSetup, total: int | None, steps: Callable[[int], int]):
        super().__init__(loader, total=total, steps=steps)
        self._setup, self._total = setup, total
        self._batches = MeshBatches(setup)

    def begin(self) -> None:
        """Decides modes and first sizes by the run's next batches."""
        self._batches.begin(self._loader, self._total)

    def place(self, item: PartitionedBatch) -> Placed:
        """The batch, in parts on the mesh."""
        prepared = self._batches.prepare(item)
        return Placed(prepared.batch, self._batches.send(prepared.sent))

    def together(self, batches: Sequence[StepBatch]) -> StepBatch:
        """The batches, stacked behind the axis of devices."""
        if len(batches) == 1:
            return batches[0]
        # ``places`` get no axis of steps: they are the same for all batches of a size.
        return dataclasses.replace(batches[0], batch=_stacked([batch.batch for batch in batches]), steps=len(batches))

    def sections(self, seconds: float) -> JsonObject:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_modes(self._loader)

    def close(self) -> None:
        """Ends the thread; no more batches."""
        self._batches.close()  # the thread may wait there
        super().close()


@jax.jit
def _stacked(batches: Sequence[Batch]) -> Batch:
    """Stacks batches along an axis behind the devices'; on the devices, since a copy there takes the least time."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *batches)
