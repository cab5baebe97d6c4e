"""Batches of a run with a plan, cut into the devices' parts, where no row lies in host memory."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.train.agreed import agreed
from jrec.train.feed import Ready
from jrec.train.mesh_ahead import BatchesAhead, described
from jrec.train.mesh_arrays import Shapes, on_mesh, stacked
from jrec.train.mesh_batch import Dealt
from jrec.train.mesh_setup import FIRST_BATCHES, MeshSetup, several
from jrec.train.report.logs import log_growth
from jrec.train.step import HostRows, Seen


class MeshFeed:
    """A loader's batches on a mesh; see ``Feed``.

    Args:
      loader: The training batches, cut by ``setup.parts``.
      setup: Mesh and plan.
      total: Steps of the run.
      folder: The run's.
      shapes: Static sizes of the batches; None settles them by the run's next batches.
    """

    def __init__(
        self, loader: Loader, *, setup: MeshSetup, total: int, folder: pathlib.Path, shapes: Shapes | None = None
    ):
        self._loader, self._setup, self._total, self._folder = loader, setup, total, folder
        self._shapes = shapes
        self._ahead: BatchesAhead | None = None  # where several processes train
        self._step = 0

    def next(self) -> Ready:
        """See ``Feed``."""
        if self._shapes is None:
            self._shapes = self._settled()
        if several() and self._ahead is None:
            self._ahead = BatchesAhead(self._loader, self._shapes, self._setup.local, self._total)
        self._step += 1
        dealt, needs = self._next(self._shapes)
        given = dataclasses.replace(stacked(dealt.parts, self._setup.local, self._shapes), needs=needs)
        return Ready(batch=dealt.batch, given=on_mesh(given, self._setup.mesh))

    def stepped(self, ready: Ready, host: HostRows, seen: Seen) -> Batch:
        """See ``Feed``."""
        del host
        if self._ahead is None:
            return ready.batch
        self._ahead.stepped(seen.needs)
        return dataclasses.replace(ready.batch, labels=seen.labels, mask=seen.mask)

    def settle(self) -> None:
        """No row is in host memory."""

    def position(self) -> Any:
        """See ``Feed``."""
        return self._loader.state() if self._ahead is None else self._ahead.position()

    def restore(self, position: Any) -> None:
        """See ``Feed``."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> dict[str, Any]:
        """See ``Feed``."""
        del seconds
        return self._setup.decided_forms(self._loader)

    def close(self) -> None:
        """See ``Feed``."""
        self._loader.close()

    def _next(self, shapes: Shapes) -> tuple[Dealt, Any]:
        """The next batch, which the sizes hold; and, of several processes, what a later one needs here."""
        if self._ahead is None:
            dealt: Any = next(self._loader)
            shapes.fit(dealt, self._setup.local)
            return dealt, None
        dealt, needs, grown = self._ahead.next()
        if grown and jax.process_index() == 0:
            log_growth(self._folder, self._step, described(grown))
        return dealt, needs

    def _settled(self) -> Shapes:
        """Sizes to begin with, from the run's next batches; all processes agree."""
        setup, loader = self._setup, self._loader
        setup.decide_forms(loader)
        shapes = setup.shapes(setup.config.data.batch_size)
        numbers = range(loader.position, min(loader.position + FIRST_BATCHES, self._total))
        batches: Any = map(loader.batch, numbers)
        shapes.settle(agreed(shapes.most(batches, setup.local)))
        return shapes
