"""Batches of a run with a plan, cut into the devices' parts, where no row lies in host memory."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader
from jrec.train.feed import Ready
from jrec.train.mesh_arrays import Shapes, agreed, described, on_mesh, stacked
from jrec.train.mesh_setup import FIRST_BATCHES, MeshSetup, several
from jrec.train.report.logs import log_growth
from jrec.train.step import HostRows, Seen


class MeshFeed:
    """A loader's batches on a mesh; see ``Feed``.

    Several processes agree on the static sizes of every batch, from host to host, while the step before is taken.

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
        self._step = 0

    def next(self) -> Ready:
        """The next batch, ready for its step; see ``Feed``."""
        setup = self._setup
        if self._shapes is None:
            self._shapes = self._settled()
        self._step += 1
        dealt: Any = next(self._loader)
        grown = self._shapes.fit(dealt, setup.local, setup.peers)
        if grown and jax.process_index() == 0:
            log_growth(self._folder, self._step, described(grown))
        return Ready(batch=dealt.batch, prepared=on_mesh(stacked(dealt.parts, setup.local, self._shapes), setup.mesh))

    def stepped(self, ready: Ready, host: HostRows, results: Seen) -> Batch:
        """Takes back a batch after its step; see ``Feed``."""
        del host
        return dataclasses.replace(ready.batch, labels=results.labels, mask=results.mask) if several() else ready.batch

    def settle(self) -> None:
        """No row is in host memory."""

    def position(self) -> Any:
        """The position in the batches after the last step, JSON."""
        return self._loader.state()

    def restore(self, position: Any) -> None:
        """Goes to a ``position()``; before the first batch."""
        self._loader.restore(position)

    def sections(self, seconds: float) -> dict[str, Any]:
        """The feed's sections of the report; see ``Feed``."""
        del seconds
        return self._setup.decided_forms(self._loader)

    def close(self) -> None:
        """Ends threads: no more batches."""
        self._loader.close()

    def _settled(self) -> Shapes:
        """Sizes to begin with, from the run's next batches; all processes agree."""
        setup, loader = self._setup, self._loader
        setup.decide_forms(loader)
        shapes = setup.shapes(setup.config.data.batch_size)
        numbers = range(loader.position, min(loader.position + FIRST_BATCHES, self._total))
        batches: Any = map(loader.batch, numbers)
        shapes.settle(agreed(shapes.most(batches, setup.local), setup.peers))
        return shapes
