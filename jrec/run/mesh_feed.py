"""Batches of a run with a plan, cut into the devices' parts, and brought to the mesh ahead of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrec.host.pipeline_batch import Prepared
from jrec.host.stages import Finished
from jrec.run.ahead_feed import AheadFeed, Made
from jrec.run.batches import Batches
from jrec.run.feed import Ready
from jrec.run.mesh_arrays import Growth, Shapes, agreed, described, on_mesh, stacked
from jrec.run.mesh_setup import FIRST_BATCHES, MeshSetup
from jrec.run.partitioned_batch import PartitionedBatch
from jrec.run.peers import Peers
from jrec.run.step import StepBatch


class PartitionedBatches:
    """Batches cut into the devices' parts, made ready for the mesh in the order of their steps, by one thread.

    Of several processes each prepares its own parts, and they agree on rows (``jrec.run.host_owners``) and sizes here,
    batch by batch, ahead of the steps.

    Args:
      setup: Mesh and plan.
    """

    def __init__(self, setup: MeshSetup):
        self._setup = setup
        self._shapes: dict[int, Shapes] = {}
        self._peers: Peers | None = None

    def begin(self, loader: Batches) -> None:
        """Decides the modes of lookups, and connects the processes; call it before the loader's first batch is cut."""
        self._setup.decide_modes(loader)
        self._peers = self._setup.peers_of_feed()

    def first_sizes(self, batches: list[PartitionedBatch]) -> None:
        """Makes room for ``headroom`` times what some batches need, in all processes, which call this together."""
        if batches:
            shapes = self._shapes_of(batches[0])
            shapes.fix(agreed(shapes.most(batches, self._setup.local), self._peers))

    def prepared(self, item: PartitionedBatch) -> tuple[Prepared, Growth]:
        """What ``prepare`` returns, and the sizes that grew, so that the batch's step is compiled anew."""
        setup = self._setup
        partitioned, shapes = setup.partitioner.placed_by_all(item, self._peers), self._shapes_of(item)
        grown = shapes.fit(partitioned, setup.local, self._peers)
        sent = stacked(partitioned.parts, setup.local, shapes)
        return Prepared(batch=partitioned.batch, sent=sent, rows=shapes.host_rows_read(partitioned)), grown

    def prepare(self, item: PartitionedBatch) -> Prepared:
        """See ``jrec.host.pipeline_batch.Preparation``; what is sent is a ``StepBatch``."""
        return self.prepared(item)[0]

    def send(self, sent: StepBatch) -> StepBatch:
        """The prepared batch on the mesh; see ``Preparation``."""
        return on_mesh(sent, self._setup.mesh)

    def close(self) -> None:
        """Ends the exchanges, even while the thread waits in one."""
        if self._peers is not None:
            self._peers.close()

    def _shapes_of(self, item: PartitionedBatch) -> Shapes:
        examples = len(item.batch.labels)
        if examples not in self._shapes:
            self._shapes[examples] = self._setup.shapes(examples * jax.process_count())
        return self._shapes[examples]


class MeshFeed(AheadFeed):
    """A loader's batches on a mesh, where none of their rows lies in host memory; see ``Feed``.

    Args:
      loader: The training batches, cut by ``setup.partitioner``.
      setup: Mesh and plan.
      total: The number of batches that the run takes; None for all.
      on_growth: Called in process 0 with the number of the step and what grew, when sizes grow.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        setup: MeshSetup,
        total: int | None,
        on_growth: Callable[[int, Mapping[str, Any]], None] | None = None,
    ):
        super().__init__(loader, total=total)
        self._setup, self._total, self._on_growth = setup, total, on_growth
        self._partitioned = PartitionedBatches(setup)

    def begin(self) -> None:
        """Decides modes and first sizes by the run's next batches."""
        loader = self._loader
        self._partitioned.begin(loader)
        most = FIRST_BATCHES if self._total is None else min(FIRST_BATCHES, self._total - loader.position)
        self._partitioned.first_sizes(loader.upcoming(most))

    def make(self) -> Made:
        """The next batch, in parts on the mesh."""
        try:
            partitioned, (position, grown) = next(self.source)
        except StopIteration:
            raise Finished from None
        prepared, growth = self._partitioned.prepared(partitioned)
        ready = Ready(batches=(prepared.batch,), prepared=self._partitioned.send(prepared.sent), grown=grown)
        return Made(ready, position, growth)

    def taken(self, number: int, made: Made) -> None:
        """Reports sizes that the batch made grow."""
        if made.growth and self._on_growth is not None and jax.process_index() == 0:
            self._on_growth(number, described(made.growth))

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_modes(self._loader)

    def close(self) -> None:
        """Ends the thread; no more batches."""
        self._partitioned.close()  # the thread may wait there
        super().close()
