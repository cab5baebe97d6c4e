"""Batches of a run with a plan, cut into the devices' parts, and brought to the mesh ahead of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jrec.host.pipeline_batch import Prepared
from jrec.mesh.routing import Places
from jrec.run.ahead_feed import AheadFeed, Placed
from jrec.run.batches import Batches
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
        self._places: dict[int, dict[str, Places]] = {}  # by the examples of a batch
        self._peers: Peers | None = None

    def begin(self, loader: Batches) -> None:
        """Decides the modes of lookups, and connects the processes; call it before the loader's first batch is cut."""
        self._setup.decide_modes(loader)
        self._peers = self._setup.peers_of_feed()

    def first_sizes(self, batches: list[PartitionedBatch]) -> None:
        """Makes room for ``headroom`` times what some batches need, in all processes, which call this together."""
        if not batches:
            return
        setup, shapes = self._setup, self._shapes_of(batches[0])
        if setup.device_routed:
            batches = [setup.partitioner(batch.batch) for batch in batches]
        shapes.fix(agreed(shapes.most(batches, setup.local), self._peers))
        self._places[len(batches[0].batch.labels)] = setup.places(shapes)

    def places(self, item: PartitionedBatch) -> dict[str, Places]:
        """Where devices find the rows that they route themselves; sizes are measured once for batches of one size."""
        examples = len(item.batch.labels)
        if examples not in self._places and self._setup.device_routed:
            self.first_sizes([item])
        return self._places.get(examples, {})

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
    """A loader's batches on a mesh, where none of their rows lies in host memory; see ``AheadFeed``.

    Args:
      loader: The training batches, cut by ``setup.training_partitioner``.
      setup: Mesh and plan.
      total: The number of batches that the run takes; None for all.
      steps: How many of them a dispatch takes that begins behind a number of batches.
      on_growth: Called in process 0 with the number of the step and what grew, when sizes grow.
    """

    axis = 1  # behind that of devices

    def __init__(
        self,
        loader: Batches,
        *,
        setup: MeshSetup,
        total: int | None,
        steps: Callable[[int], int],
        on_growth: Callable[[int, Mapping[str, Any]], None] | None = None,
    ):
        super().__init__(loader, total=total, steps=steps)
        self._setup, self._total, self._on_growth = setup, total, on_growth
        self._partitioned = PartitionedBatches(setup)

    def begin(self) -> None:
        """Decides modes and first sizes by the run's next batches."""
        loader = self._loader
        self._partitioned.begin(loader)
        most = FIRST_BATCHES if self._total is None else min(FIRST_BATCHES, self._total - loader.position)
        self._partitioned.first_sizes(loader.upcoming(most))

    def place(self, item: PartitionedBatch) -> Placed:
        """The batch, in parts on the mesh."""
        places = self._partitioned.places(item)
        prepared, growth = self._partitioned.prepared(item)
        return Placed(prepared.batch, dataclasses.replace(self._partitioned.send(prepared.sent), places=places), growth)

    def taken(self, number: int, growth: Growth) -> None:
        """Reports sizes that a batch made grow."""
        if growth and self._on_growth is not None and jax.process_index() == 0:
            self._on_growth(number, described(growth))

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_modes(self._loader)

    def close(self) -> None:
        """Ends the thread; no more batches."""
        self._partitioned.close()  # the thread may wait there
        super().close()
