"""Batches of a run with a plan, cut into the devices' parts, and brought to the mesh ahead of their steps."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jrec.host.pipeline_batch import Prepared
from jrec.host.stages import Channel, Finished, Monitor, Stage
from jrec.host.timeline import Timeline
from jrec.run.batches import Batches
from jrec.run.feed import LoaderFeed, Ready, remaining
from jrec.run.mesh_arrays import Growth, Shapes, agreed, described, on_mesh, stacked
from jrec.run.mesh_setup import FIRST_BATCHES, MeshSetup
from jrec.run.partitioned_batch import PartitionedBatch
from jrec.run.peers import Peers
from jrec.run.step import HostResults, StepBatch, StepResults


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


class _Made(NamedTuple):
    """A batch for its step, the sizes that it made grow, and the loader's position after it."""

    ready: Ready
    grown: Growth
    position: Any


class MeshFeed(LoaderFeed):
    """A loader's batches on a mesh, where none of their rows lies in host memory; see ``Feed``.

    A thread makes two batches ready: one waits for its step, one for its place.

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
        super().__init__(loader)
        self._setup, self._total, self._on_growth = setup, total, on_growth
        self._partitioned, self._source = PartitionedBatches(setup), remaining(loader, total)
        self._monitor, timeline = Monitor(), Timeline()
        self._ready: Channel[tuple[int, _Made]] = Channel(self._monitor, "ready", 1, timeline)
        self._stage = Stage(
            "prepare",
            take=((number, None) for number in itertools.count(1)).__next__,
            work=self._make,
            give=self._ready.put,
            finish=self._ready.finish,
            fail=self._ready.finish,
            timeline=timeline,
        )
        # Freeing a batch's arrays takes 0.2 to 0.4 ms, which the thread does: it drops a batch some batches later.
        self._recent: collections.deque[_Made] = collections.deque(maxlen=4)
        self._out: _Made | None = None
        self._position: Any = None  # after the last step, once the thread has begun

    def next(self) -> Ready:
        """The next batch, ready for its step; see ``Feed``."""
        if self._position is None:
            self._begin()
        if (made := self._ready.next()) is None:
            raise StopIteration
        number, self._out = made
        if self._out.grown and self._on_growth is not None and jax.process_index() == 0:
            self._on_growth(number, described(self._out.grown))
        return self._out.ready

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Moves the position behind the batch; see ``Feed``."""
        assert self._out is not None
        self._position = self._out.position

    def position(self) -> Any:
        """The position after the last step, JSON; the loader itself is ahead."""
        return super().position() if self._position is None else self._position

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_modes(self._loader)

    def close(self) -> None:
        """Ends the thread; no more batches."""
        # Everything that the thread may wait for ends before it is joined.
        self._monitor.close()
        self._partitioned.close()  # the thread may wait here,
        super().close()  # or here
        if self._position is not None:
            self._stage.join()
        self._recent.clear()

    def _begin(self) -> None:
        """Decides modes and first sizes by the run's next batches, and starts the thread."""
        loader = self._loader
        self._partitioned.begin(loader)
        most = FIRST_BATCHES if self._total is None else min(FIRST_BATCHES, self._total - loader.position)
        self._partitioned.first_sizes(loader.upcoming(most))
        self._position = loader.state()
        self._stage.start()

    def _make(self, number: int, item: None) -> _Made:
        del number, item
        try:
            partitioned, (position, grown) = next(self._source)
        except StopIteration:
            raise Finished from None
        prepared, growth = self._partitioned.prepared(partitioned)
        sent = self._partitioned.send(prepared.sent)
        made = _Made(Ready(batch=prepared.batch, prepared=sent, grown=grown), growth, position)
        self._recent.append(made)
        return made
